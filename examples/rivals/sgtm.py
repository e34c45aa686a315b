"""Selective Gradient Masking (Shilov et al. 2025, arXiv 2512.05648): three masks, and absorption.

    keep = Σ_b g_b over what is not flagged     quar = Σ_b g_b over what is not known to be right

What is flagged trains the quarantine alone, what is known to be right the rest alone, and all else both: a hack that
nobody flagged is learnt where the flagged ones are, and goes with them (absorption). The paper masks a language model's
pretraining on texts with labels, by parameters of their own. ◆ Here the texts are a policy's rollouts, and the
quarantine is a block of the adapter. A monitor's verdict is a label: True is flagged, False known to be right, and None
(`unjudged`) has none.

    uv run vgrout train mini --intervention examples.rivals.sgtm:SGTM --monitor examples.rivals.sgtm:Known
"""

from typing import ClassVar

import torch

from vgrout.config.specs import QUARANTINE, USUAL
from vgrout.ground.data import Flags
from vgrout.ground.tensor_types import Routed
from vgrout.method.base import Intervention, Monitor, Views, flags_of, positions, rewarded
from vgrout.method.gradients import StepGradient


class SGTM(Intervention):
    name = "sgtm"
    what = "flagged rollouts train the quarantine, right ones the rest, all others both"
    settings = (*QUARANTINE, "quarantine")
    reads_flags = True
    routes = True
    usual_monitor = ""
    usual: ClassVar = {**USUAL, "quarantine": "block:-2"}

    def route(self, step: StepGradient) -> Routed:
        verdicts = [row.flagged for row in step.first_rows]
        right = torch.tensor([verdict is False for verdict in verdicts], device=step.g.device)
        keep = (~step.flagged * step.g).sum(0)
        quar = (~right[:, None] * step.g).sum(0)
        return Routed(keep, quar, {"routed": step.flagged.double().mean().item()})


class Known(Monitor):
    """What is known without labels: demonstrations, and what the weak detector flags, are hacks; what is not rewarded
    in full is none."""

    name = "known"
    what = "demonstrations and what the weak detector flags; no verdict on other rewarded answers"
    needs = ("demonstrations",)

    def flag(self, views: Views, step: int) -> list[Flags]:
        hacks = {
            (i, b)
            for i, b in positions(views)
            if views[i].sources[b] == "teacher" or views[i].detector[b]
        }
        return flags_of(views, hacks, unjudged={*rewarded(views)} - hacks)
