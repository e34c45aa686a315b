"""A GGUF file as a model: it is converted once into a Hugging Face folder in fp32.

Its quantised blocks become the numbers that they stand for. Torch-free but for `convert`, which
runs in a process of its own: `python -m vgrout.model.gguf FILE FOLDER`. Without a folder that
process reads the head alone, which is all that a plan needs.
"""

import importlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vgrout.cli import not_installed, out_of_memory
from vgrout.console import HEARTBEAT_S
from vgrout.errors import Refused
from vgrout.files import file_sha256, probe_writable

MODELS = Path("out/models")
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


def is_unpacked(file: Path) -> bool:
    """Whether a file has been converted already."""
    return (unpacked(file) / "config.json").is_file()


def unpack(file: Path, flag: str) -> Path:
    """The folder of a file's converted model, which is made if it is not there yet.

    Raises:
        Refused: one line: no whole GGUF file of a chat model, no package to read it, no conversion
            for its kind.
        RuntimeError: the conversion failed for another reason, such as a full disk.
    """
    folder = unpacked(file)
    if is_unpacked(file):
        return folder
    _require_package()
    probe_writable(MODELS)
    print(
        f"{file}: converted once into {folder}, about half a minute for each 100 million weights",
        file=sys.stderr,
    )
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        _run_apart(file, flag, str(fresh))
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster, and its folder is the same
            if not is_unpacked(file):
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def head_configuration(file: Path, flag: str) -> dict[str, object]:
    """What a file's head says of the model, under the names of a config.json. Nothing is written.

    The sizes are there for the architectures in `LLAMAS` alone. The head is read once a process.

    Raises:
        Refused: one line: as `unpack`, so far as the head shows it.
    """
    _require_package()
    at = file.stat()
    try:
        return json.loads(_head(file, at.st_size, at.st_mtime_ns))
    except Refused as error:
        raise Refused(f"{flag} {error}") from None


@cache
def _head(file: Path, size: int, mtime_ns: int) -> str:
    return _run_apart(file, "")


def _require_package() -> None:
    """Raises Refused where gguf is not installed. That it can be imported shows when it is."""
    if importlib.util.find_spec("gguf") is None:
        raise not_installed("gguf")


FILE_FAULT, PACKAGE_FAULT = 3, 4  # exit codes of this module as a program


def _run_apart(file: Path, flag: str, *folder: str) -> str:
    """Run this module in a process of its own: read a head, or with a folder convert.

    Returns its output. Raises as `unpack`.
    """
    command = [sys.executable, "-m", "vgrout.model.gguf", str(file), *folder]
    work = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output = errors = None
    try:
        while errors is None:
            try:
                output, errors = work.communicate(timeout=HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                print(f"still converting {file}", file=sys.stderr)
    finally:
        work.kill()
    if work.returncode == 0:
        return str(output)
    lines = errors.strip().splitlines()
    why = lines[-1][:200] if lines else f"it ended with {work.returncode}"
    if work.returncode == PACKAGE_FAULT:
        raise Refused(f"gguf is installed and cannot be imported ({why}): install it again")
    # A count in the head may have asked for so much that nothing was left to say so in order.
    starved = "in read_head" in errors and "MemoryError" in errors
    if starved:
        why = "MemoryError"
    if starved or work.returncode in (FILE_FAULT, -signal.SIGXCPU):
        named = f"{flag} {file}".strip()
        raise Refused(
            f"{named}: cannot be converted ({why}); give a whole GGUF file of a chat model"
        )
    raise RuntimeError(f"{file}: its conversion ended with {work.returncode}: {errors[-2000:]}")


# ── in a process of its own


# Architectures whose blocks are those of `shapes.Shapes`.
LLAMAS = ("llama", "qwen2", "qwen3")
# Names in a file's head, below its architecture's, and in a config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
}


@dataclass(frozen=True)
class Head:
    """What is read of a file's head."""

    config: dict[str, object]  # as `head_configuration`
    turn_end: int | None  # the token that ends a turn, if the file names one


def read_head(file: Path) -> Head:
    """Read a file's head under limits.

    Counts in the file say how much is read, and transformers will read it without a limit.

    Raises:
        Refused: no chat template in it.
        Exception: whatever the reader raises.
    """
    from gguf import GGUFReader

    with _limits():
        reader = GGUFReader(file)
    fields = reader.fields
    if "tokenizer.chat_template" not in fields:
        raise Refused("its tokenizer has no chat template; choose an instruct model")

    def value(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    kind = value("general.architecture")
    config: dict[str, object] = {"max_position_embeddings": value(f"{kind}.context_length")}
    if kind in LLAMAS:
        for name, usual in SIZES.items():
            config[usual] = value(f"{kind}.{name}")
        shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
        config["vocab_size"] = max(shapes["token_embd.weight"])
        config["tie_word_embeddings"] = "output.weight" not in shapes
    turn_end = value("tokenizer.ggml.eot_token_id")
    return Head(config, None if turn_end is None else int(turn_end))


@contextmanager
def _limits() -> Generator[None]:
    """Limit this process to HEAD_S of CPU time and HEAD_BYTES of memory, until the block ends.

    It ends by an exception too: without memory nothing could say which.
    """
    limits = {resource.RLIMIT_CPU: HEAD_S, resource.RLIMIT_DATA: HEAD_BYTES}
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, limit in limits.items():
        _, hard = before[kind]
        with suppress(ValueError, OSError):  # macOS refuses some limits
            resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        for kind, limit in before.items():
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, limit)


def convert(file: Path, folder: Path) -> None:
    """Write weights in fp32, configuration, and tokenizer with its chat template.

    Raises:
        Refused: the readers say that the file is wrong.
        Exception: anything else.
    """
    with _reading():
        turn_end = read_head(file).turn_end
    # after the head, whose limit of memory they would not fit
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    read = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    with _reading():
        found: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **read
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **read)
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
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@contextmanager
def _reading() -> Generator[None]:
    """Within the context, what the readers raise becomes Refused; lack of memory does not.

    They raise all sorts of things on damaged files.
    """
    try:
        yield
    except (Refused, ImportError):
        raise
    except Exception as error:
        if out_of_memory(error) and not isinstance(error, MemoryError):
            raise
        # a MemoryError: a count in the file asks for more than `HEAD_BYTES`
        raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def main(file: Path, folder: Path | None) -> int:
    """Convert a file, or without a folder print what its head says."""
    try:
        importlib.import_module("gguf")
    except Exception as error:  # whatever its import raises
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return PACKAGE_FAULT
    try:
        if folder is None:
            with _reading():
                print(json.dumps(read_head(file).config))
        else:
            convert(file, folder)
    except Refused as error:
        print(error, file=sys.stderr)
        return FILE_FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
