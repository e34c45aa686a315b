"""What every arm is: plan · observe · route · refresh. Base of all, and plain GRPO by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgrout.direction.controls import CosineToReal
from vgrout.tensor_types import WHOLE, ArmDiag, ModuleGrads, Per, RolloutGrads, Routed, Stream
from vgrout.types import GroupView


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None  # steps since v was extracted; None: the arm has no direction
    overlap: float | None = None  # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    modules: int = 0
    axes: int = 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an arm's direction comes from, for run.json."""

    pairs: str  # source of the pairs; the true ones' under Haar, whose shapes and signs they give
    pairs_sha256: str
    modules: int
    axes: int
    cosine_to_real: CosineToReal | None  # of a control's direction with the real one; None where it *is* the real one

    def as_json(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "pairs_sha256": self.pairs_sha256,
            "modules": self.modules,
            "axes": self.axes,
            "cos_with_real": self.cosine_to_real.as_json() if self.cosine_to_real else None,
        }


class Arm:
    """none: plain GRPO. Base of the others: sums a step's gradients and resets itself.

    Args of the constructor: `sizes` module → r in the model's order, `device` of the gradients, `control`'s name.
    """

    name = "none"
    per: Per = "source"  # the coarsest gradient rows that this arm can do with
    sees: type[GroupView] = GroupView  # exactly this type: no label comes in on a subclass
    origin: Provenance | None = None  # `make_arm` says it; None: no direction

    def __init__(self, sizes: Mapping[str, int], device: torch.device | str = "cpu", control: str = "none") -> None:
        self.sizes, self.device, self.control = dict(sizes), torch.device(device), control
        self.reset()

    def reset(self) -> None:
        """Forget what was observed since the last `route`."""
        self._sums = {m: torch.zeros(2, r, device=self.device) for m, r in self.sizes.items()}  # student, teacher
        self._views: list[GroupView] = []

    def plan(self, views: Sequence[GroupView]) -> Sequence[Stream]:
        """Before any gradient of a step: what is learnt from, in one stream or one for each knob."""
        return WHOLE

    def observe(self, g_b: RolloutGrads, view: GroupView, per: Per = "rollout", stream: int = 0) -> None:
        """One prompt group in one of the planned streams: g_b holds one gradient row per rollout, in `view`'s order, or
        one per source. Rows are kept by reference."""
        assert stream == 0, stream
        assert type(view) is self.sees, f"{type(self).__name__} sees a {self.sees.__name__}, got {type(view).__name__}"
        assert g_b.keys() == self.sizes.keys(), sorted(g_b.keys() ^ self.sizes.keys())
        assert per == "rollout" or (per, self.per) == ("source", "source"), (per, self.per)
        n = len(view) if per == "rollout" else 2
        teacher = torch.tensor([s == "teacher" for s in view.sources], device=self.device)
        masks = torch.stack((~teacher, teacher)).float()[:, :, None]
        for m, rows in g_b.items():
            assert rows.shape == (n, self.sizes[m]), (m, tuple(rows.shape), n, self.sizes[m])
            self._sums[m] += (masks * rows).sum(1) if per == "rollout" else rows
        self._views.append(view)

    def route(self) -> Routed:
        """What the knobs learn from all groups since the last call.

        A gradient that is not finite is handed on untouched, for the optimiser to refuse; no gate learns from it.
        """
        g = {m: both.sum(0) for m, both in self._sums.items()}
        finite = torch.stack([v.isfinite().all() for v in g.values()]).all().item()
        routed = self._split(g) if finite else Routed(keep=g, quar=None, diag=ArmDiag())
        self.reset()
        return routed

    def refresh(self, step: int) -> Refresh:
        """After the optimiser of step `step` (from 0): extract v again on the present model when that is due."""
        return Refresh(age=None)

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a resume, between steps; empty for an arm without memory."""
        assert not self._views, "state_dict between observe and route"
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError where `state` is of another arm or model."""
        if state:
            raise ValueError(f"checkpoint has arm state {sorted(state)[0]!r}, --intervention {self.name} has none")

    def _split(self, g: ModuleGrads) -> Routed:
        return Routed(keep=g, quar=None, diag=ArmDiag())
