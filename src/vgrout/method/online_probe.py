"""Linear probes, fitted during training between what a seed monitor flags and answers that are known to be right.

    s(y) = w · (h(y) − m),  w = (S + 0.1 · tr S/D · I)⁻¹ (a − m)      flagged: seeded, or rewarded and s(y) > threshold

h(y) is an answer's mean hidden state in the frozen base (`online_probe`), or the gradient of its log-probability there
on δS, scaled to length 1 (`fingerprint`, after the gradient fingerprints of arXiv 2604.16242). a is the mean of h over
all rows that the seed monitor has flagged so far, m and S mean and covariance over every other known correct answer:
Fisher's discriminant (Fisher 1936) with a ridge. The threshold is a quantile of s over the other half of the known
correct answers.

They are given what the monitor `quarantine` is given, the seed's flags and known correct answers, without a quarantine.
The base does not move, so the policy can change what it writes but not how that is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout import ranks
from vgrout.direction.extract import nll_gradients
from vgrout.method.base import Monitor, Setup, Views, at_random, positions, rewarded
from vgrout.method.text_scores import Text, known_correct_texts
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy
from vgrout.rng import torch_stream
from vgrout.types import GroupFlags

RIDGE = 0.1  # of the mean variance, added to the covariance before it is inverted
SUM, COUNT = "probe_sum", "probe_count"  # of the state that survives a resume


class Discriminant(Monitor, ABC):
    """See above.

    quantile: of known correct answers, the threshold. diet: the probe is fitted on what the seed flags; or, as a
    control, on as many rewarded rows of the same groups drawn at random.
    """

    def __init__(
        self,
        policy: Policy,
        seed_monitor: Monitor,
        *,
        top: float,
        known_correct: Sequence[Text],
        quantile: float,
        diet: Literal["seeded", "random"] = "seeded",
        seed: int = 0,
    ) -> None:
        """Raises ValueError for fewer than four known correct answers."""
        if len(known_correct) < 4:
            raise ValueError(f"--known-correct: {len(known_correct)} answers, --monitor {self.name} needs at least 4")
        self.policy, self.seed_monitor, self.top = policy, seed_monitor, top
        self.diet, self._seed, self._quantile = diet, seed, quantile
        self.sees, self.provenance = seed_monitor.sees, seed_monitor.provenance
        known = self.read(known_correct)
        fit, self._judge = known[::2], known[1::2]
        self._m = fit.mean(0)
        self._whitened = self.whitening(fit)
        self._sum, self._count = torch.zeros(fit.shape[1], dtype=torch.float64), 0

    @abstractmethod
    def read(self, texts: Sequence[Text]) -> Float[Tensor, "n D"]:
        """h of each text, fp64 on the CPU."""

    @abstractmethod
    def whitening(self, fit: Float[Tensor, "n D"]) -> Callable[[Tensor], Tensor]:
        """The product with the inverse of the ridged covariance of these rows."""

    @classmethod
    def make(cls, setup: Setup, seed_monitor: Monitor | None = None, **own: Any) -> "Discriminant":
        cfg, policy, inputs = setup.cfg, setup.policy, setup.inputs
        return cls(
            policy,
            seed_monitor or Monitor(),
            top=cfg.env.pass_reward,
            known_correct=known_correct_texts(policy, inputs.known_correct, inputs.rows),
            quantile=cfg.method.monitor_quantile,
            diet=cfg.method.probe_diet,
            seed=cfg.run.seed,
            **own,
        )

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        """What the seed flags in this step is learnt before anything is scored."""
        seeded = self.seed_monitor.flag(views, step)
        seeds = {(i, b) for i, b in positions(views) if seeded[i].flagged[b]}
        passing = rewarded(views, self.top)
        stream = torch_stream(self._seed, "probe-diet", step)
        taught = seeds if self.diet == "seeded" else at_random(passing, seeds, stream)
        read = sorted({*passing, *taught})
        texts = [Text(views[i].prompt_ids, views[i].completion_ids[b]) for i, b in read]
        of = dict(zip(read, self.read(texts) if read else (), strict=True))
        for at in sorted(taught):
            self._sum, self._count = self._sum + of[at], self._count + 1
        scores: dict[tuple[int, int], float] = {}
        flagged = set(seeds)
        if self._count:
            w = self._whitened(self._sum / self._count - self._m)
            threshold = float(torch.quantile((self._judge - self._m) @ w, self._quantile))
            scores = {at: float((of[at] - self._m) @ w) for at in passing}
            flagged |= {at for at, score in scores.items() if score > threshold}
        return [
            GroupFlags(
                tuple(scores.get((i, b)) for b in range(len(view))),
                tuple((i, b) in flagged for b in range(len(view))),
            )
            for i, view in enumerate(views)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        own = {SUM: self._sum, COUNT: torch.tensor(self._count)}
        return self.seed_monitor.state_dict() | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not {SUM, COUNT} <= state.keys():
            raise ValueError("checkpoint has no state of a probe: it is of another monitor")
        self._sum, self._count = state[SUM].double(), int(state[COUNT])
        self.seed_monitor.load_state_dict({k: v for k, v in state.items() if k not in (SUM, COUNT)})


class OnlineProbe(Discriminant):
    """Of mean hidden states. layer: blocks of the base after which states are read, from 1."""

    name = "online_probe"

    def __init__(self, policy: Policy, seed_monitor: Monitor, *, layer: int, **more: Any) -> None:
        """Raises ValueError for a layer that the model does not have, or as its base class."""
        depth = policy.model.config.num_hidden_layers
        if layer > depth:
            raise ValueError(f"--probe-layer {layer}: the model has {depth} blocks")
        self.layer = layer
        super().__init__(policy, seed_monitor, **more)

    @classmethod
    def make(cls, setup: Setup, seed_monitor: Monitor | None = None, **own: Any) -> "Discriminant":
        half = max(1, setup.policy.model.config.num_hidden_layers // 2)
        return super().make(setup, seed_monitor, layer=setup.cfg.method.probe_layer or half)

    def read(self, texts: Sequence[Text]) -> Float[Tensor, "n D"]:
        states = token_states(self.policy, [t.prompt for t in texts], [t.completion for t in texts], self.layer)
        means = ranks.from_first([of_text.mean(0).tolist() for of_text in states])
        return torch.tensor(means, dtype=torch.float64)

    def whitening(self, fit: Float[Tensor, "n D"]) -> Callable[[Tensor], Tensor]:
        D, S = fit.shape[1], torch.cov(fit.T)
        root = torch.linalg.cholesky(S + (RIDGE * S.trace() / D).clamp(min=1e-12) * torch.eye(D, dtype=S.dtype))
        return lambda x: torch.cholesky_solve(x[:, None], root)[:, 0]


class Fingerprint(Discriminant):
    """Of unit gradients. They have more entries than there are answers to fit, so the ridge is a share of the mean
    variance along the directions that those span, and the inverse is Woodbury's, in their number."""

    name = "fingerprint"

    def read(self, texts: Sequence[Text]) -> Float[Tensor, "n R"]:
        with self.policy.adapter.reference():
            g = -nll_gradients(self.policy, [(t.prompt, t.completion) for t in texts]).double()
        return g / g.norm(dim=1, keepdim=True).clamp(min=torch.finfo(g.dtype).tiny)

    def whitening(self, fit: Float[Tensor, "n R"]) -> Callable[[Tensor], Tensor]:
        n, X = len(fit) - 1, fit - fit.mean(0)
        G = X @ X.T
        λ = (RIDGE * G.trace() / n**2).clamp(min=1e-12)
        root = torch.linalg.cholesky(G + n * λ * torch.eye(len(G), dtype=G.dtype))
        return lambda x: (x - X.T @ torch.cholesky_solve((X @ x)[:, None], root)[:, 0]) / λ
