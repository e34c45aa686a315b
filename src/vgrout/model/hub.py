"""The folder of a model on this machine. Nothing is fetched here: that is `python -m vgrout.download`."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


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
    """The same folder. Raises ValueError, one line that says what to run, where there is none."""
    if (folder := model_folder(model)) is not None:
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
