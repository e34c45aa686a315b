"""A frozen probe beside one that is refitted, under a penalty (Taufeeque et al. 2026, arXiv 2602.15515).

    R'_b = R_b − α ψ(y_b, θ)

ψ is a logistic regression on hidden states of the present policy θ, fitted on contrastive pairs. A frozen one was
fitted before the first step, and may stop seeing hacks because the policy's representations drift; the other is fitted
again on the same pairs, as the present policy reads them. The one is penalised, and the other in shadow: `vgrout
report` compares what they flag. ◆ One block's mean state over the answer, in place of a question's last token in many
layers; demonstrations that are flagged are left out.

    uv run vgrout train mini --intervention examples.rivals.probe_penalty:ProbePenalty \\
        --monitor examples.rivals.probe_penalty:FrozenProbe --shadow examples.rivals.probe_penalty:RefittedProbe
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.direction.pairs import PairSet
from vgrout.ground import ranks
from vgrout.ground.data import Flags, GroupView
from vgrout.method.base import Intervention, Monitor, Rewards, Views, flags_of, positions
from vgrout.method.live_direction import Setup
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy

RIDGE = 1e-2  # on the weights of standardised states
EVERY = 5  # steps after which the other probe is fitted again
Tokens = tuple[int, ...]


class ProbePenalty(Intervention):
    name = "probe_penalty"
    what = "R − α ψ, where ψ is the monitor's score and α is --penalty"
    settings = ("penalty",)
    reads_flags = True
    usual_monitor = ""

    def reward(self, view: GroupView, flagged: Sequence[bool]) -> Rewards:
        alpha = 1.0 if self.cfg.method.penalty is None else self.cfg.method.penalty
        rewards: list[float | None] = []
        for b, score in enumerate(view.scores):
            left_out = view.sources[b] == "teacher" and flagged[b]
            rewards.append(None if left_out else view.rewards[b] - alpha * (score or 0))
        return tuple(rewards)


class FrozenProbe(Monitor):
    """Flags where ψ > ½."""

    name = "frozen_probe"
    what = "a logistic probe of the present policy's hidden states, fitted once on pairs"
    settings = ("vhack_pairs_path",)  # so that the run reads pairs

    def __init__(self, policy: Policy, pairs: PairSet) -> None:
        self.policy = policy
        self.layer = max(1, policy.model.config.num_hidden_layers // 2)
        encode = policy.encode
        self.prompts = [encode(pair.prompt) for pair in pairs.pairs] * 2
        self.answers = [encode(pair.hack) for pair in pairs.pairs]
        self.answers += [encode(pair.clean) for pair in pairs.pairs]
        self.fit()

    @classmethod
    def make(cls, setup: Setup) -> "FrozenProbe":
        assert setup.pairs is not None
        return cls(setup.policy, setup.pairs)

    def states(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Float[Tensor, "n D"]:
        states = token_states(self.policy, prompts, answers, self.layer, base=False)
        means = [of_answer.mean(0).tolist() for of_answer in states]
        return torch.tensor(ranks.from_first(means), dtype=torch.float64)

    def fit(self) -> None:
        h = self.states(self.prompts, self.answers)
        is_hack = torch.arange(len(h)) < len(h) // 2
        self.mean, self.deviation = h.mean(0), h.std(0).clamp(min=1e-6)
        self.w = logistic((h - self.mean) / self.deviation, is_hack.double())

    def flag(self, views: Views, step: int) -> list[Flags]:
        where = positions(views)
        prompts = [views[i].prompt_ids for i, _ in where]
        h = self.states(prompts, [views[i].answer_ids(b) for i, b in where])
        psi = ((h - self.mean) / self.deviation @ self.w).sigmoid().tolist()
        scores = dict(zip(where, psi, strict=True))
        return flags_of(views, {at for at, score in scores.items() if score > 0.5}, scores)

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "deviation": self.deviation, "w": self.w}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.mean, self.deviation, self.w = state["mean"], state["deviation"], state["w"]


class RefittedProbe(FrozenProbe):
    """The same, fitted again on the present policy every five steps."""

    name = "refitted_probe"
    what = "the same, fitted again every five steps"

    def flag(self, views: Views, step: int) -> list[Flags]:
        if step and step % EVERY == 0:
            self.fit()
        return super().flag(views, step)


def logistic(x: Float[Tensor, "n D"], y: Float[Tensor, " n"]) -> Float[Tensor, " D"]:
    """w that minimises mean −log p(y | σ(x · w)) + RIDGE/2 ‖w‖², by Newton's method."""
    w = x.new_zeros(x.shape[1])
    for _ in range(30):
        p = (x @ w).sigmoid()
        gradient = x.T @ (p - y) / len(y) + RIDGE * w
        hessian = (x.T * (p * (1 - p))) @ x / len(y) + RIDGE * torch.eye(len(w), dtype=x.dtype)
        w = w - torch.linalg.solve(hessian, gradient)
    return w
