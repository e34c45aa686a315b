"""The folder of a model on this machine, and all that can be said against it without loading it. Torch-free. Nothing is
fetched here: that is `python -m vgrout.download`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from vgrout.files import from_json, read_text

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's configuration says; None: it does not, or not in the usual words."""

    window: int | None  # longest prompt + completion, tokens
    blocks: int | None


def model_folder(model: str | Path) -> Path | None:
    """The folder of a local model, or the cached snapshot of a hub id; None: not on this machine. No network."""
    if Path(model).is_dir():
        return Path(model) if (Path(model) / "config.json").is_file() else None
    try:
        config = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:  # neither a folder nor a possible id
        return None
    return Path(config).parent if isinstance(config, str) else None


def require_model(model: str | Path, flag: str = "--model") -> Path:
    """The same folder, whose files look whole.

    Raises:
        ValueError: one line that says what is wrong and what to run: there is no such model here; no configuration,
            tokenizer, chat template or weights in it; or weights that are cut short.
    """
    if (folder := model_folder(model)) is not None:
        _check(folder, model, flag)
        return folder
    if Path(model).is_dir():
        raise ValueError(
            f"{flag} {model}: a folder without config.json; give a Hugging Face model folder, "
            "or run `just download-model` for the benchmark's"
        )
    raise ValueError(
        f"{flag} {model}: not on this machine; run `just download-model {model}` where there is a network, "
        "or give a local folder"
    )


def advice(model: str | Path) -> str:
    """What to do about a model that cannot be used: of one's own folder, or of a download."""
    return "give a whole model folder" if Path(model).is_dir() else f"run `just download-model {model}` again"


def model_facts(folder: Path) -> ModelFacts:
    """Of the model in this folder. Raises ValueError, one line, where its config.json cannot be read."""
    config = from_json(read_text(folder / "config.json"), str(folder / "config.json"))
    config = config.get("text_config") or config if isinstance(config, dict) else {}

    def number(name: str) -> int | None:
        value = config.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return ModelFacts(number("max_position_embeddings"), number("num_hidden_layers"))


def safetensors_head(path: Path, flag: str) -> dict[str, Any]:
    """The head of a safetensors file: tensor → dtype, shape, data_offsets; and `__metadata__`.

    Raises:
        ValueError: one line: it cannot be read, is none, or is cut short.
    """
    try:
        with open(path, "rb") as f:
            size, there = int.from_bytes(f.read(8), "little"), path.stat().st_size
            if there < 8 or size > there - 8:
                raise ValueError("cut short")
            head = from_json(f.read(size), "its head", is_line=True)
            if not isinstance(head, dict):
                raise ValueError("its head is no object")
            end = max((t["data_offsets"][1] for name, t in head.items() if name != "__metadata__"), default=0)
            if 8 + size + end != there:
                raise ValueError(f"cut short: {there} bytes, its head speaks of {8 + size + end}")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"{flag} {path}: not a readable safetensors file ({e})") from None
    return head


def _check(folder: Path, model: str | Path, flag: str) -> None:
    """Raises ValueError, one line, at the first file that is missing or cut short."""

    def wrong(why: str) -> ValueError:
        return ValueError(f"{flag} {model}: {why}; {advice(model)}")

    try:
        model_facts(folder)
        settings = folder / "tokenizer_config.json"
        told = from_json(read_text(settings), str(settings)) if settings.is_file() else {}
    except ValueError as e:
        raise wrong(str(e)) from None
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise wrong(f"no tokenizer in it ({TOKENIZERS[0]})")
    if not (isinstance(told, dict) and told.get("chat_template")) and not any((folder / t).exists() for t in TEMPLATES):
        raise ValueError(f"{flag} {model}: its tokenizer has no chat template; choose an instruct model")
    whole = folder / "model.safetensors"
    if whole.is_file():
        safetensors_head(whole, flag)
    elif (index := folder / "model.safetensors.index.json").is_file():
        shards = from_json(read_text(index), f"{flag} {index}")
        named = shards.get("weight_map", {}) if isinstance(shards, dict) else {}
        if not isinstance(named, dict) or not named:
            raise wrong(f"{index.name} names no file")
        for name in sorted({*map(str, named.values())}):
            if not (folder / name).is_file():
                raise wrong(f"no {name}, which {index.name} names")
            safetensors_head(folder / name, flag)
    elif not any(folder.glob("pytorch_model*.bin*")):
        raise wrong("no weights in it (model.safetensors)")
