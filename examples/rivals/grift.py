"""Gradient fingerprints (GRIFT, Wang et al. 2026, arXiv 2604.16242) as a monitor, beside `gate`.

    x_b = P u_b / ‖P u_b‖,  u_b = ∇ −log π(y_b) / ‖∇ −log π(y_b)‖

An answer's fingerprint is the gradient of its own log-likelihood, projected at random; two clusters are made of the
fingerprints, and the one that has more of the known hacks is flagged. The paper takes LoRA gradients of chosen layers,
and labels the clusters by a few answers that were read. From abstracts and summaries: the paper itself was not at hand.
◆ Here the gradient is on δS in all layers; the clusters are those of a step, by angle, from means of known hacks
(demonstrations, and what the weak detector flags) and of the rest; known hacks are flagged always, as under `gate`.

    uv run vgrout train mini --intervention route2 --monitor examples.rivals.grift:Grift
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from vgrout.config.run import Config
from vgrout.ground.rng import torch_stream
from vgrout.method.gates import GradientMonitor
from vgrout.method.gradients import GradientFlags, StepGradient

DIMENSIONS = 256


class Grift(GradientMonitor):
    name = "grift"
    what = "the cluster of gradient fingerprints that has the known hacks, and these"
    settings = ("known_hacks_teacher_only",)
    needs = ("demonstrations",)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.centres = torch.zeros(2, DIMENSIONS)  # of hacks, of the rest; 0: none were seen yet

    def flag_gradients(self, step: StepGradient, number: int) -> GradientFlags:
        A = torch.tensor([row.advantage for row in step.first_rows]).to(step.g)
        known = torch.tensor([row.known_hack for row in step.first_rows], device=step.g.device)
        x = self.fingerprints(step.g, A)
        there = x.any(1)
        hack = known & there
        if hack.any() and (there & ~known).any():
            start = torch.stack((x[hack].mean(0), x[there & ~known].mean(0)))
            self.centres = two_means(x[there], start)
        centres = self.centres.to(x)
        nearest = (x @ normalize(centres, dim=1).T).argmax(1)
        of_hacks = 0  # the cluster with the larger share of known hacks
        shares = [hack[there & (nearest == k)].double().mean().nan_to_num() for k in (0, 1)]
        if shares[1] > shares[0]:
            of_hacks = 1
        flagged = there & (known | ((nearest == of_hacks) & centres.any()))
        f = flagged.to(step.g)
        return GradientFlags(f[:, None], f, {"routed": f[there].mean().item()})

    def fingerprints(self, g: Float[Tensor, "N R"], A: Float[Tensor, " N"]) -> Float[Tensor, "N d"]:
        """x, 0 where there is no gradient. g is that of −A log π, so its sign is A's."""
        stream = torch_stream(self.cfg.run.seed, "grift")
        P = torch.randn(g.shape[1], DIMENSIONS, generator=stream).to(g)
        return normalize(A.sign()[:, None] * g @ P, dim=1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"centres": self.centres.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.centres = state["centres"]


def two_means(x: Float[Tensor, "n d"], centres: Float[Tensor, "2 d"]) -> Float[Tensor, "2 d"]:
    """Lloyd's algorithm on unit vectors, by their angle to the centres. An empty cluster keeps its centre."""
    for _ in range(20):
        of_second: Bool[Tensor, " n"] = (x @ normalize(centres, dim=1).T).argmax(1) == 1
        new = [
            x[part].mean(0) if part.any() else old
            for part, old in zip((~of_second, of_second), centres, strict=True)
        ]
        centres = torch.stack(new)
    return centres
