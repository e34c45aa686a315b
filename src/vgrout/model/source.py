"""What a --model flag names: the organism, a folder, a hub id, or an adapter over one of them. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from vgrout.config.run import ORGANISM, Config, from_dict
from vgrout.data import organism
from vgrout.files import file_sha256
from vgrout.model.hub import require_model, safetensors_head
from vgrout.model.memory import Shapes, find_shapes

SMALL = 2**24  # weights below which a model is a miniature: other defaults, and a second thread only costs


@dataclass(frozen=True)
class Source:
    """A model that was found and checked, not loaded."""

    given: str
    name: str  # of the base: "organism", a hub id or a folder
    folder: Path  # where the base lies
    adapter: Path | None  # .safetensors
    cfg: Config | None  # of the run that made the adapter

    @property
    def shapes(self) -> Shapes | None:
        """None where its configuration does not name the usual sizes."""
        return find_shapes(self.folder)

    @property
    def small(self) -> bool:
        """Whether it is a miniature, as far as its shapes are known."""
        return self.shapes is not None and self.shapes.parameters < SMALL

    def vocabulary(self) -> dict[str, int] | None:
        """Token → id, from the tokenizer's file alone; None where there is no such file."""
        file = self.folder / "tokenizer.json"
        return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None

    def identity(self) -> dict[str, str | None]:
        """Name of the base and sha256 of the adapter's file, for a run's records."""
        return {"base": self.name, "adapter": file_sha256(self.adapter) if self.adapter else None}


def find_source(given: str, flag: str) -> Source:
    """The model that `given`, the value of `flag`, names.

    Raises:
        ValueError: one line: nothing of that name here, or not a model or an adapter of this program.
    """
    path = Path(given)
    adapter = path / "train.safetensors" if path.is_dir() and not (path / "config.json").is_file() else path
    if given != ORGANISM and adapter.suffix == ".safetensors":
        if not adapter.is_file():
            raise ValueError(f"{flag} {given}: neither a model folder nor a run with train.safetensors in it")
        metadata = read_metadata(adapter, flag)
        if "cfg" not in metadata:
            raise ValueError(f"{flag} {given}: {adapter.name} is not an adapter saved by a run; give a run directory")
        cfg = from_dict(json.loads(metadata["cfg"]))
        own = cfg.scale.model if cfg.scale.organism is None else cfg.model_path
        base = find_source(own, f"{flag} {given}: its base")
        return Source(given, base.name, base.folder, adapter, cfg)
    folder = require_model(organism.MODEL_DIR if given == ORGANISM else given, flag)
    return Source(given, given, folder, None, None)


def read_metadata(path: Path, flag: str) -> dict[str, str]:
    """The string metadata in the head of a safetensors file. Raises ValueError, one line, where it is none."""
    return dict(safetensors_head(path, flag).get("__metadata__", {}))
