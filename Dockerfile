# The README's main command in a container. `docker build -t vgrout .`, then
#   docker run --rm -v "$PWD/out:/app/out" vgrout train mini --intervention=route2
# The same image on a GPU: torch's wheel has CUDA and its attention kernels, the machine its driver (not run on one).
#   docker run --rm --gpus all -v "$PWD/out:/app/out" -v ~/.cache/huggingface:/home/vgrout/.cache/huggingface vgrout train fast --intervention route2
# Inside a container the kernel may refuse namespaces to the sandbox: `docker run … doctor` says what is left.
FROM debian:trixie-slim

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates git python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 vgrout

ENV VIRTUAL_ENV=/opt/venv UV_PROJECT_ENVIRONMENT=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
# A page of wheels that has a torch without CUDA (a default wheel for Linux carries about 3 GB of it); empty: the default.
ARG TORCH=
RUN if [ -n "$TORCH" ]; then export UV_FIND_LINKS="$TORCH"; fi; /opt/uv/bin/uv sync --no-dev --no-cache

USER 10001
WORKDIR /app
ENTRYPOINT ["python", "-m", "vgrout"]
CMD ["train", "mini", "--intervention=route2"]
