"""A GGUF file becomes a Hugging Face folder in fp32: `vgrout download gguf FILE`.

Its quantised blocks become the numbers that they stand for. `convert` runs in a process of its own,
`python -m vgrout.model.gguf FILE FOLDER`: counts in a file's head say how much is read, and only
limits on a whole process hold there.
"""

import importlib
import resource
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vgrout.cli import cannot_import, out_of_memory
from vgrout.errors import Refused

# Limits of CPU seconds and of memory for reading a file's head: 133 bytes can ask for years.
HEAD_S = 20
HEAD_BYTES = 2**31
FILE_FAULT = 3  # exit code of this module as a program


def require_gguf() -> None:
    """Raises Refused, one line, where the package gguf is missing or broken."""
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise cannot_import("gguf", error) from None


def convert_apart(file: Path, folder: Path) -> None:
    """Convert a file in a process of its own. Half a minute for each 100 million weights.

    Raises:
        Refused: one line: no whole GGUF file of a chat model, or transformers cannot convert its kind.
        RuntimeError: the conversion failed for another reason, such as a full disk.
    """
    command = [sys.executable, "-m", "vgrout.model.gguf", str(file), str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    why = lines[-1][:200] if lines else f"it ended with {done.returncode}"
    # A count in the head may have asked for so much that nothing was left to say so in order.
    starved = "in read_head" in done.stderr and "MemoryError" in done.stderr
    if starved:
        why = "MemoryError"
    if starved or done.returncode in (FILE_FAULT, -signal.SIGXCPU):
        raise Refused(
            f"{file}: cannot be converted ({why}); give a whole GGUF file of a chat model"
        )
    raise RuntimeError(
        f"{file}: its conversion ended with {done.returncode}: {done.stderr[-2000:]}"
    )


# ── in a process of its own


def read_head(file: Path) -> int | None:
    """The token that ends a turn, if the file's head names one. The head is read under limits.

    Raises:
        Refused: no chat template in it.
        Exception: whatever the reader raises.
    """
    from gguf import GGUFReader

    with _limits():
        fields = GGUFReader(file).fields
    if "tokenizer.chat_template" not in fields:
        raise Refused("its tokenizer has no chat template; choose an instruct model")
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    return None if turn_end is None else int(turn_end.contents())


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
        turn_end = read_head(file)
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


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(FILE_FAULT)
