"""A batch whose loss or gradient was not finite, on disk: what it takes to run it again."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrout.config.run import Config, from_dict
from vgrout.files import write_atomic
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.types import CachedGrade, Grade, Group, Problem, Rollout

MOST = 10  # batches kept of one run: a run that skips more has the same story to tell


@dataclass(frozen=True)
class Batch:
    """The groups of one step that had signal, and the adapter as it was."""

    step: int
    cfg: Config
    adapter: dict[str, Tensor]
    groups: list[Group]


def save(run: Path, step: int, cfg: Config, adapter: SvdAdapter, groups: Sequence[Group]) -> Path | None:
    """`nonfinite_stepNNNN.pt` in the run directory; None where it has enough of them already."""
    path = run / f"nonfinite_step{step:04d}.pt"
    if len(list(run.glob("nonfinite_step*.pt"))) >= MOST:
        return None
    data = {
        "schema": 1,
        "step": step,
        "config": cfg.as_dict(),
        "adapter": adapter.state_dict(),
        "groups": [
            {
                "problem": asdict(g.problem),
                "unbiased": g.unbiased,
                "detector_code": g.detector_code,
                "shaped": g.shaped,
                "rollouts": [{k: v for k, v in _fields(r).items() if k != "problem"} for r in g.rollouts],
                "grades": [asdict(v) | {"cached": isinstance(v, CachedGrade)} for v in g.grades],
            }
            for g in groups
        ],
    }
    buffer = io.BytesIO()
    torch.save(data, buffer)
    write_atomic(path, buffer.getvalue())
    return path


def load(path: Path) -> Batch:
    """Raises ValueError, one line, on a file that is not there or not one of these."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a nonfinite_stepNNNN.pt of a run")
    try:
        data: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        groups = [_group(g) for g in data["groups"]]
        return Batch(data["step"], from_dict(data["config"]), data["adapter"], groups)
    except Exception as e:
        raise ValueError(f"{path}: cannot be read as a saved batch ({type(e).__name__}: {e})".split("\n")[0]) from None


def _fields(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}


def _group(data: dict[str, Any]) -> Group:
    problem = Problem(**data["problem"])
    grades: list[Grade | CachedGrade] = []
    for grade in data["grades"]:
        values = {k: v for k, v in grade.items() if k != "cached"}
        grades.append(CachedGrade(**values) if grade["cached"] else Grade(**values))
    return Group(
        problem,
        tuple(Rollout(problem=problem, **r) for r in data["rollouts"]),
        tuple(grades),
        unbiased=data["unbiased"],
        detector_code=data["detector_code"],
        shaped=tuple(shaped) if (shaped := data.get("shaped")) is not None else None,
    )
