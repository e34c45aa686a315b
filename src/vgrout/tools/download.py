"""`python -m vgrout.download model [ID]` and `… data`: model and problem files of `fast` and `full`, checked, once.

Nothing else in this package touches a network. Exit codes: 0 there · 2 not there, with one line that says what to put
where.
"""

import hashlib
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.files import probe_writable, write_atomic
from vgrout.model.hub import model_folder
from vgrout.problems import load_rows

SOURCE = "https://raw.githubusercontent.com/ariahw/rl-rewardhacking/main/results/data/"
DATA = Path("out/data")
TIMEOUT_S = 20.0
WEIGHTS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # not the same weights again in other formats


@dataclass(frozen=True)
class DataFile:
    """A file of the public benchmark; `blob` is the beginning of its git object id."""

    name: str
    blob: str
    rows: int


FILES = (
    DataFile("leetcode_train_medhard_filtered.jsonl", "c10a5f39", 992),
    DataFile("leetcode_test_medhard.jsonl", "05a1d42", 119),
)


def git_blob(content: bytes) -> str:
    """Git's object id of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def fetch(url: str) -> bytes:
    """Content of a file on the network, with a progress bar. Raises OSError without a network."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        size = int(reply.headers.get("Content-Length") or 0) or None
        parts: list[bytes] = []
        with tqdm(total=size, desc=url.rpartition("/")[2], unit="B", unit_scale=True, disable=None) as bar:
            while part := reply.read(1 << 16):
                parts.append(part)
                bar.update(len(part))
    return b"".join(parts)


def ensure(file: DataFile, folder: Path, source: str) -> str:
    """Fetch `file` into `folder` unless it is there, and check it; one line that says where it is.

    Raises:
        ValueError: one line: it cannot be fetched, or is another file.
    """
    path, url = folder / file.name, source + file.name
    put = f"put {url} there yourself (git blob {file.blob}…, {file.rows} rows)"
    fetched = False
    if path.is_file():
        content = path.read_bytes()
    else:
        probe_writable(folder)
        try:
            content = fetch(url)
        except (OSError, urllib.error.URLError) as e:
            raise ValueError(f"{path}: cannot be fetched ({getattr(e, 'reason', e)}); {put}") from None
        fetched = True
    if not (blob := git_blob(content)).startswith(file.blob):
        where = "what came from the network" if fetched else "the file that is there"
        raise ValueError(f"{path}: {where} has git blob {blob[:12]}…, not {file.blob}…; {put}")
    if fetched:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    n = len(load_rows(path))
    if n != file.rows:
        raise ValueError(f"{path}: {n} problems, should be {file.rows}; {put}")
    return f"{path}: {n} problems, git blob {blob[:12]}" + ("" if fetched else " (was there)")


def data(folder: Path = DATA, source: str = SOURCE) -> int:
    """Fetch the benchmark's problem files and check them against their git object ids.

    Args:
        folder: where they go.
        source: address of the folder they are in.
    """
    for file in FILES:
        print(ensure(file, folder, source))
    return 0


def model(id: Annotated[str, tyro.conf.Positional] = "Qwen/Qwen3-4B") -> int:
    """Fetch a model from the hub into its cache (8 GB for Qwen3-4B). One that is there already is left alone.

    Args:
        id: hub id.
    """
    there = model_folder(id)
    try:
        urllib.request.urlopen(ENDPOINT, timeout=TIMEOUT_S).close()  # the hub's client would try for a minute
        snapshot_download(id, allow_patterns=WEIGHTS)
    except (OSError, HfHubHTTPError, HFValidationError) as e:
        if there is None:
            why = str(getattr(e, "reason", e)).strip().partition("\n")[0]
            raise ValueError(
                f"{id}: cannot be fetched ({why[:160]}); copy the model's folder here from a machine with a network "
                "and give it as --model FOLDER, or set HF_HOME to a cache that has it"
            ) from None
        print(f"{id}: not checked against the hub, which cannot be reached")
    print(f"{id}: {model_folder(id)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    return cli_exit(lambda: parse_args({"model": model, "data": data}, argv, "python -m vgrout.download"))


if __name__ == "__main__":
    sys.exit(main())
