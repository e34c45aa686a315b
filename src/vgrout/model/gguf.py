"""A GGUF file as a model: it is converted once into a Hugging Face folder in fp32.

Its quantised blocks become the numbers that they stand for. Torch-free but for `convert`, which
runs in a process of its own: `python -m vgrout.model.gguf FILE FOLDER`.
"""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from vgrout.cli import not_installed
from vgrout.errors import Refused
from vgrout.files import file_sha256, probe_writable

MODELS = Path("out/models")
HEARTBEAT_S = 60.0
# Limits of CPU seconds and of memory for reading a file's head: 133 bytes can ask for years.
HEAD_S = 20
HEAD_BYTES = 2**31


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that `model` names; None: it names none.

    It is the file itself, or the only one in a folder that is no Hugging Face folder.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    inside = sorted(path.glob("*.gguf"))
    return inside[0] if len(inside) == 1 else None


def unpacked(file: Path) -> Path:
    """The folder of a file's converted model, whether it is there yet or not.

    Another file has another folder.
    """
    return MODELS / f"{file.stem}-{gguf_sha256(file)[:12]}"


def gguf_sha256(file: Path) -> str:
    """Hex digest of the file's content; the file is read once a process."""
    at = file.stat()
    return _sha256(file, at.st_size, at.st_mtime_ns)


@cache
def _sha256(file: Path, size: int, mtime_ns: int) -> str:
    return file_sha256(file)


def unpack(file: Path, flag: str) -> Path:
    """The folder of a file's converted model, which is made if it is not there yet.

    Raises:
        Refused: one line: no whole GGUF file of a chat model, no package to read it, no conversion
            for its kind.
    """
    folder = unpacked(file)
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise not_installed("gguf")
    probe_writable(MODELS)
    print(
        f"{file}: converted once into {folder}, about half a minute for each 100 million weights",
        file=sys.stderr,
    )
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        why = _convert_apart(file, fresh)
        if why is not None:
            raise Refused(
                f"{flag} {file}: cannot be converted ({why}); "
                "give a whole GGUF file of a chat model"
            )
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster, and its folder is the same
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _convert_apart(file: Path, folder: Path) -> str | None:
    """Run `convert` in a process of its own. Returns why it failed, None where it did not."""
    command = [sys.executable, "-m", "vgrout.model.gguf", str(file), str(folder)]
    work = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    errors: str | None = None
    try:
        while errors is None:
            try:
                _, errors = work.communicate(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                print(f"still converting {file}", file=sys.stderr)
    finally:
        work.kill()
    if work.returncode == 0:
        return None
    lines = errors.strip().splitlines()
    return lines[-1][:200] if lines else f"it ended with {work.returncode}"


def read_head(file: Path) -> int | None:
    """Read a file's head under limits. Returns the token that ends a turn, if the file names one.

    Counts in the file say how much is read, and transformers will read it without a limit.

    Raises:
        Refused: no chat template in it.
        Exception: whatever the reader raises.
    """
    from gguf import GGUFReader

    limits = {resource.RLIMIT_CPU: HEAD_S, resource.RLIMIT_DATA: HEAD_BYTES}
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, limit in limits.items():
        _, hard = before[kind]
        with suppress(ValueError, OSError):  # macOS refuses some limits
            resource.setrlimit(kind, (limit, hard))
    fields = GGUFReader(file).fields
    if "tokenizer.chat_template" not in fields:
        raise Refused("its tokenizer has no chat template; choose an instruct model")
    for kind, limit in before.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, limit)
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    if turn_end is None:
        return None
    return int(turn_end.contents())


def convert(file: Path, folder: Path) -> None:
    """Write weights in fp32, configuration, and tokenizer with its chat template.

    Raises whatever the readers raise.
    """
    turn_end = read_head(file)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    read: Any = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    found: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, output_loading_info=True, **read
    )
    loaded, info = found
    # transformers would go on with random numbers in their place
    missing = sorted(info["missing_keys"])
    if missing:
        raise Refused(f"{len(missing)} weights are missing, first {missing[0]}")
    # What was loaded is marked as quantised and would be saved so. The same weights go into a fresh
    # model.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(config))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    if turn_end is not None:
        text_end = getattr(model.config, "eos_token_id", None)
        eos = {turn_end} if text_end is None else {turn_end, text_end}
        model.generation_config.eos_token_id = sorted(eos)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **read)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Refused as e:
        sys.exit(str(e))
