"""Your own intervention: what a rule flags in the text is not learnt from. A minute, no GPU.

uv run python examples/own_intervention.py
"""

import re

import torch

import vgrout
from vgrout.method.base import Intervention, StepGrads
from vgrout.tensor_types import GradRows, Routed
from vgrout.types import GroupView

SUSPECT = re.compile(r"sys\.exit|__eq__|open\(|print\(")


class Rule(Intervention):
    """keep = Σ_b g_b over the rollouts whose text the rule does not flag; the others are dropped."""

    name = "rule"
    grad_rows: GradRows = "rollout"  # a gradient for each rollout, not one sum for a group

    def split(self, step: StepGrads) -> Routed:
        keep = {m: torch.zeros(r, device=self.device) for m, r in self.sizes.items()}
        for view, rows in zip(step.views, step.rows, strict=True):
            mask = torch.tensor([not suspicious(view, b) for b in range(len(view))], device=self.device)
            for m in keep:
                keep[m] += (mask[:, None] * rows[m]).sum(0)
        return Routed(keep)


def suspicious(view: GroupView, b: int) -> bool:
    """An intervention sees texts, rewards and token ids, and no label of the strict oracle."""
    return view.sources[b] == "student" and SUSPECT.search(view.texts[b]) is not None


vgrout.register_intervention(Rule, "what a rule flags is not learnt from")
if __name__ == "__main__":
    run = vgrout.train_run("smoke", intervention="rule", steps=6, final_n_prompts=6, final_samples=1)
    print(run.rows[["step", "hack_s", "solve_s", "gn"]])
    print(f"deployed hack {run.final['hack_deploy']:.0%}, solve {run.final['solve_deploy']:.0%}")
