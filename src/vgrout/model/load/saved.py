"""Saved adapters and models as a command line names them: found and checked before they are loaded."""

import re
from dataclasses import dataclass
from pathlib import Path

from vgrout.config.run import Config, from_dict
from vgrout.config.world_names import ORGANISM
from vgrout.ground import embedded
from vgrout.ground.io import Refused, file_sha256, from_json
from vgrout.model.load.source import (
    Shapes,
    find_shapes,
    is_small,
    require_model,
    safetensors_head,
)


@dataclass(frozen=True)
class Saved:
    """An adapter's file and its metadata; its tensors are not read yet."""

    path: Path
    metadata: dict[str, str]
    cfg: Config  # of the run
    model: str | Path  # the base model's folder or id
    folder: Path  # where it lies

    @property
    def is_local(self) -> bool:
        """Whether the base model is a folder, and no hub id, whose files are in the hub's cache."""
        return Path(self.model).is_dir()

    @property
    def base(self) -> str:
        """The base model as other programs find it: its hub id, or the absolute path of its folder."""
        return str(self.folder.resolve() if self.is_local else self.model)

    @property
    def step(self) -> int:
        """How many optimiser steps were done when it was saved."""
        return int(self.metadata.get("step", 0))

    @property
    def final(self) -> bool:
        """Whether it is the run's last adapter, and the run came to its last step."""
        return self.path.name == "train.safetensors" and self.step == self.cfg.scale.steps


def find_adapter(
    run: Path,
    step: int | None = None,
    model: str | None = None,
    flag: str = "adapter",
) -> Saved:
    """Find the adapter of a run directory, or an adapter's file itself.

    step: take the adapter that was saved after so many steps. None: train.safetensors.
    model: base model to use in place of the run's own.
    flag: the flag that named the run or file.

    Raises:
        Refused: one line: no such file or step, not an adapter of this program, or its base model
            is not here.
    """
    if not run.exists():
        raise Refused(f"{flag} {run}: no such run; give a run's folder, or an adapter's file")
    path = run
    if step is not None:
        path = run / f"ckpt_step{step:04d}.safetensors"
        if not path.exists():
            there = ", ".join(sorted(file.name for file in run.glob("ckpt_step*")))
            raise Refused(f"--step {step}: {run} has {there or 'no evaluation checkpoint'}")
    elif run.is_dir():
        path = run / "train.safetensors"
        if not path.exists():
            raise Refused(
                f"{flag} {run}: no train.safetensors in it; give the folder of a run that has trained"
            )
    where = f"{flag} {path}"
    _, metadata = safetensors_head(path, flag)
    if "cfg" not in metadata or not re.fullmatch(r"\d{1,9}", metadata.get("step", "0")):
        raise Refused(f"{where}: not an adapter saved by a run")
    cfg = from_dict(from_json(metadata["cfg"], where), where)
    base: str | Path = model or cfg.model_path
    if model == ORGANISM:
        base = embedded.MODEL_DIR
    return Saved(path, metadata, cfg, base, require_model(base))


@dataclass(frozen=True)
class FoundModel:
    """A model that was found and checked, not loaded: a base, or a base under an adapter."""

    given: str
    name: str  # of the base: "organism", a hub id or a folder
    folder: Path  # where the base lies
    adapter: Path | None  # .safetensors

    @property
    def shapes(self) -> Shapes | None:
        """None where its configuration does not name the usual sizes."""
        return find_shapes(self.folder)

    @property
    def small(self) -> bool:
        """Whether it is a miniature; False where its shapes are not known."""
        return is_small(self.folder)

    @property
    def numbers(self) -> int:
        """How many numbers it has in memory; 0 where its shapes are not known.

        These are its weights; under an adapter U, Vh and merged weights too.
        """
        shapes = self.shapes
        if shapes is None:
            return 0
        if self.adapter is None:
            return shapes.parameters
        return shapes.parameters + shapes.factors + shapes.adapted

    def identity(self) -> dict[str, str | None]:
        """Name of the base and sha256 of the adapter's file, for a run's records."""
        return {"base": self.name, "adapter": file_sha256(self.adapter) if self.adapter else None}


def find_source(given: str, flag: str) -> FoundModel:
    """Find the model that `given`, the value of `flag`, names.

    Raises:
        Refused: one line: nothing of that name here, or not a model or an adapter of this program.
    """
    if given == ORGANISM:
        embedded.EMBEDDED.require_sound(f"{flag} organism:")
        folder = require_model(embedded.MODEL_DIR, flag)
        return FoundModel(given, name=given, folder=folder, adapter=None)
    path = Path(given)
    if path.suffix == ".safetensors" or (path / "train.safetensors").is_file():
        saved = find_adapter(path, flag=flag)
        name = saved.cfg.scale.model if saved.cfg.scale.organism is None else str(saved.model)
        return FoundModel(given, name, saved.folder, saved.path)
    folder = require_model(given, flag)
    return FoundModel(given, name=given, folder=folder, adapter=None)
