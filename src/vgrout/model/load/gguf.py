"""A GGUF file becomes a Hugging Face folder in fp32: `vgrout download gguf FILE`.

Its quantised blocks become the numbers that they stand for.
"""

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vgrout.ground.cli import cannot_import, out_of_memory
from vgrout.ground.errors import Refused


def require_gguf() -> None:
    """Raises Refused, one line, where the package gguf is missing or broken."""
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise cannot_import("gguf", error) from None


def convert(file: Path, folder: Path) -> None:
    """Write weights in fp32, configuration, and tokenizer with its chat template.

    Raises:
        Refused: one line: no whole GGUF file of a chat model, or transformers cannot convert its kind.
    """
    import torch  # takes seconds
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    read = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    with _reading(file):
        fields = GGUFReader(file).fields
        if "tokenizer.chat_template" not in fields:
            raise Refused(f"{file}: its tokenizer has no chat template; choose an instruct model")
        found: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **read
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **read)
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


@contextmanager
def _reading(file: Path) -> Generator[None]:
    """Within the context, whatever the readers raise on a damaged file becomes Refused."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Refused(
            f"{file}: cannot be converted ({why}); give a whole GGUF file of a chat model"
        ) from error
