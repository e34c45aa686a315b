"""Your own intervention: what a monitor flags counts half. One to two minutes, no GPU.

    uv run python examples/own_intervention.py

The same class in a whole `smoke` run, typed:

    uv run vgrout train smoke --monitor detector --intervention examples.own_intervention:Halve
"""

import torch

import vgrout
from vgrout.ground.tensor_types import Routed
from vgrout.method.base import Intervention
from vgrout.method.gradients import StepGradient


@vgrout.register_intervention
class Halve(Intervention):
    """keep = Σ_b w_b g_b with w = ½ for the flagged rows of g [N, R], 1 for the others."""

    name = "halve"
    what = "what is flagged counts half"
    reads_flags = True
    usual_monitor = "detector"

    def route(self, step: StepGradient) -> Routed:
        weights = torch.where(step.flagged, 0.5, 1.0)
        return Routed(keep=(weights * step.g).sum(0))


if __name__ == "__main__":
    run = vgrout.train_run(
        "smoke", intervention="halve", steps=6, final_n_prompts=6, final_samples=1
    )
    print(run.steps[["step", "hack_s", "solve_s", "recall", "gn"]])
    print(f"deployed hack {run.final['hack_deploy']:.0%}, solve {run.final['solve_deploy']:.0%}")
