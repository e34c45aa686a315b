"""What a direction file says of itself. Torch-free: a wrong file is refused before a model is loaded."""

from dataclasses import dataclass
from pathlib import Path

from vgrout.direction.pairs import PairSet
from vgrout.model.hub import safetensors_head
from vgrout.model.memory import Shapes

SCHEMA = "v2_with_sv"


@dataclass(frozen=True, slots=True)
class Meta:
    """Provenance of a direction: model, pairs, settings."""

    model: str
    dtype: str
    top_k: int
    tau_axis: float
    pairs_sha256: str
    pairs_source: str
    weights_sha256: str
    n_pairs: int
    n_heldout: int
    basis: str = ""  # basis fingerprint of D's mean in the singular vectors that D is written in; "": an older file

    def to_strings(self) -> dict[str, str]:
        """For the metadata of a safetensors file."""
        return {"schema": SCHEMA} | {name: str(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_strings(cls, raw: dict[str, str], where: str) -> "Meta":
        """The inverse. Raises ValueError naming the entry that is missing or unreadable."""
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"{where}: schema {raw.get('schema')!r}, needs {SCHEMA!r}; extract it again")
        try:
            return cls(
                model=raw["model"],
                dtype=raw["dtype"],
                top_k=int(raw["top_k"]),
                tau_axis=float(raw["tau_axis"]),
                pairs_sha256=raw["pairs_sha256"],
                pairs_source=raw["pairs_source"],
                weights_sha256=raw["weights_sha256"],
                n_pairs=int(raw["n_pairs"]),
                n_heldout=int(raw["n_heldout"]),
                basis=raw.get("basis", ""),
            )
        except KeyError as missing:
            raise ValueError(f"{where}: no {missing} in its metadata; extract it again") from None
        except ValueError as e:
            raise ValueError(f"{where}: metadata cannot be read ({e}); extract it again") from None

    def require_pairs(self, pairs: PairSet, where: str) -> None:
        """Raises ValueError if the direction comes from other pairs."""
        if self.pairs_sha256 != pairs.sha256:
            raise ValueError(
                f"{where}: direction of other pairs ({self.pairs_source}, sha256 {self.pairs_sha256[:12]}); "
                f"this run has {pairs.source}, {pairs.sha256[:12]}: "
                "give --vhack-pairs-path the pairs it was made of, or extract it again"
            )


def check_file(path: Path, flag: str, shapes: Shapes | None, pairs: PairSet | None) -> None:
    """All that a direction file's head can say against it: whole, of this schema, of these pairs, of a model of these
    shapes (None: not known). Whether the weights are the same shows once they are loaded.

    Raises:
        ValueError: one line.
    """
    if not path.is_file():
        raise ValueError(f"{flag} {path}: no such file")
    head = safetensors_head(path, flag)
    meta = Meta.from_strings(head.get("__metadata__", {}), f"{flag} {path}")
    if pairs is not None:
        meta.require_pairs(pairs, f"{flag} {path}")
    if shapes is None:
        return
    known = {name: min(size) for name, size in shapes.linears.items()}
    for name, tensor in head.items():
        module = name.rpartition("/")[2].rpartition(".")[2]
        if name == "__metadata__" or name.startswith(("_sv/", "__")):
            continue
        if module not in known or tensor["shape"][-1] != known[module]:
            raise ValueError(
                f"{flag} {path}: direction of another model ({meta.model}): it has {name} {tensor['shape']}, "
                f"r is {known.get(module)} here; extract it again"
            )
