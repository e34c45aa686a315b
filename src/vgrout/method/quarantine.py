"""The quarantine as a monitor: trained on what a seed monitor flags, it is an expert in hacking, and what it makes
likelier than the deployed model does is flagged too.

    s(y) = [log π_ε(y) − log π_0(y)] / (ε · |log π_0(y)|)     flagged: seeded, or rewarded and s(y) > threshold

under the present parameters, π_ε with the quarantine on to the share ε. Flagged rows train the quarantine
(`part`), which is how it learns to read. Before it has learnt anything s = 0, and the seed flags alone;
started on pairs, δS_hack = −5 lr · sign(mean D) with D the difference of the pairs' gradients (direction/extract.py),
and it reads from the first step on.

Why relative: an answer that the deployed model is already sure of, log π_0 ≈ 0, cannot become likelier by a fixed
number of nats, and the hacks of a policy that has started to hack are such answers. Why a small ε: fully on, the
quarantine writes the hack that it knows and makes others less likely; to the first order, ⟨∇ log π(y), δS_hack⟩, it
goes towards what hacks share. Why the rest of the group counts against it: trained on flagged rows alone, the
quarantine also makes likelier what all answers share.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout import ranks
from vgrout.direction.controls import Provenance
from vgrout.direction.extract import obtain
from vgrout.method.base import Monitor, Setup, Views, at_random, positions, rewarded
from vgrout.method.text_scores import Text, TextScorer, known_correct_texts, mean_logp
from vgrout.model.policy import Policy, modules_of_block
from vgrout.rng import torch_stream
from vgrout.types import GroupFlags, GroupView

Diet = Literal["flagged", "seeded", "random"]
LATEST = "known_correct_scores"  # of the state that survives a resume
SHARE = 0.1  # ε: a small one reads to the first order, and in bf16 is lost to rounding
TAUGHT = 0.5  # advantage of each row that trains the quarantine
STARTS = 5.0  # full steps of AdamW, which goes by ± its learning rate under a gradient that stays
KNOWN_A_STEP, KNOWN = 8, 24  # known correct answers read in a step, and scores that make a threshold. Two forwards of
# 48 answers in each step cost 1.4 times the step of the penalty, of all 204 of the organism's three times
SURE = 1e-3  # nats a token: of a log-prob nearer to 0 the rounding of two forwards (1e-6) would be the score


class Quarantine(TextScorer):
    """See above.

    fixed: the threshold; None: the `quantile` of the latest KNOWN scores of `known_correct`, of which KNOWN_A_STEP are
    drawn and read in every step.
    diet: what the quarantine is trained on: what is flagged, or what the seed monitor flags alone; or, as a control, as
    many rewarded rows of the same groups drawn at random.
    """

    name = "quarantine"
    owns_quarantine = True

    def __init__(
        self,
        policy: Policy,
        seed_monitor: Monitor,
        *,
        top: float,
        fixed: float | None = None,
        known_correct: Sequence[Text] = (),
        quantile: float = 0.9,
        diet: Diet = "flagged",
        seed: int = 0,
    ) -> None:
        assert fixed is not None or known_correct, "a threshold of known correct answers, and there are none"
        self.policy, self.seed_monitor, self.top = policy, seed_monitor, top
        self._fixed, self._known, self._quantile = fixed, tuple(known_correct), quantile
        self.diet, self._seed = diet, seed
        self.sees, self.provenance = seed_monitor.sees, seed_monitor.provenance
        self._latest: list[float] = []  # scores of known correct answers

    @classmethod
    def make(cls, setup: Setup, seed_monitor: Monitor | None = None) -> "Quarantine":
        cfg, policy, inputs = setup.cfg, setup.policy, setup.inputs
        provenance = start(setup)
        monitor = cls(
            policy,
            seed_monitor or Monitor(),
            top=cfg.env.pass_reward,
            fixed=cfg.method.quarantine_threshold,
            known_correct=known_correct_texts(policy, inputs.known_correct, inputs.rows),
            quantile=cfg.method.monitor_quantile,
            diet=cfg.method.quarantine_diet,
            seed=cfg.run.seed,
        )
        monitor.provenance = provenance or monitor.provenance
        return monitor

    def texts(self, view: GroupView) -> list[Text]:
        known = view.logp or (None,) * len(view)
        return [Text(view.prompt_ids, ids, logp=p) for ids, p in zip(view.completion_ids, known, strict=True)]

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        """One forward with the quarantine on to its share; one with it off for those that the deployed model did not
        sample, which come with its log-prob. 0 where δS_hack is 0 still."""
        adapter = self.policy.adapter
        if not texts or not bool(adapter.δS_hack.any()):
            return torch.zeros(len(texts), dtype=torch.float64)
        prompts, answers = [t.prompt for t in texts], [t.completion for t in texts]
        on = mean_logp(self.policy, prompts, answers, adapter.quarantine_at(SHARE))
        off = torch.tensor([t.logp if t.logp is not None else 0.0 for t in texts], dtype=torch.float64)
        unknown = [i for i, t in enumerate(texts) if t.logp is None]
        if unknown:
            some = [prompts[i] for i in unknown], [answers[i] for i in unknown]
            off[unknown] = mean_logp(self.policy, *some, adapter.deployed())
        return (on - off) / (SHARE * (-off).clamp(min=SURE))

    def flag(self, views: Views, step: int) -> list[GroupFlags]:
        seeded = self.seed_monitor.flag(views, step)
        passing = rewarded(views, self.top)
        texts = [self.texts(view) for view in views]
        values = ranks.from_first(self.scores([texts[i][b] for i, b in passing]).tolist())
        scores = dict(zip(passing, values, strict=True))
        threshold = self._threshold(step)
        seeds = {(i, b) for i, b in positions(views) if seeded[i].flagged[b]}
        flagged = seeds | {at for at, score in scores.items() if score > threshold}
        match self.diet:
            case "flagged":
                taught = flagged
            case "seeded":
                taught = seeds
            case _:
                taught = at_random(passing, flagged, torch_stream(self._seed, "quarantine-diet", step))
        return [
            GroupFlags(
                tuple(scores.get((i, b)) for b in range(len(view))),
                tuple((i, b) in flagged for b in range(len(view))),
                advantages(view, [(i, b) in taught for b in range(len(view))]),
            )
            for i, view in enumerate(views)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        return self.seed_monitor.state_dict() | {LATEST: torch.tensor(self._latest, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if LATEST not in state:
            raise ValueError("checkpoint has no scores of known correct answers: it is of another version")
        self._latest = state[LATEST].tolist()
        self.seed_monitor.load_state_dict({k: v for k, v in state.items() if k != LATEST})

    def _threshold(self, step: int) -> float:
        if self._fixed is not None:
            return self._fixed
        if not bool(self.policy.adapter.δS_hack.any()):
            return 0.0  # nor is there a score above it
        drawn = torch.randperm(len(self._known), generator=torch_stream(self._seed, "known-correct", step)).tolist()
        read = ranks.from_first(self.scores([self._known[i] for i in drawn[:KNOWN_A_STEP]]).tolist())
        self._latest = [*self._latest, *read][-KNOWN:]
        return max(0.0, float(torch.quantile(torch.tensor(self._latest, dtype=torch.float64), self._quantile)))


def advantages(view: GroupView, taught: Sequence[bool]) -> tuple[float, ...]:
    """By which a group trains the quarantine: TAUGHT for each row that is taught, and as much below zero in sum for the
    policy's other answers to this prompt, none of them below −TAUGHT. A demonstration is never pushed down: nothing
    bounds how far. No row is taught: 0 for all."""
    n = sum(taught)
    others = [source == "student" and not on for source, on in zip(view.sources, taught, strict=True)]
    below = -TAUGHT * min(1.0, n / sum(others)) if n and any(others) else 0.0
    return tuple(TAUGHT if on else below if other else 0.0 for on, other in zip(taught, others, strict=True))


def start(setup: Setup) -> Provenance | None:
    """Puts the policy's quarantine where --quarantine-start says; a resumed run's state comes over it. Returns where
    the pairs come from, if it is on pairs.

    Raises:
        ValueError: a pair that this model has no room for, or no finite gradient of.
    """
    cfg, policy, adapter = setup.cfg, setup.policy, setup.policy.adapter
    method, pairs = cfg.method, setup.inputs.pairs
    if method.quarantine_start == "zero":
        return None
    provenance = None
    if method.starts_on_pairs:
        axes = obtain(policy, pairs, None, method.v_hack_extract_top_k, method.v_hack_tau_axis).axes
        signs = {m: -a.mean.sign() for m, a in axes.items()}
        assert pairs is not None
        provenance = Provenance(pairs.source, pairs.sha256, len(signs), len(signs), None)
    else:
        drawn = torch.randint(2, (len(adapter),), generator=torch_stream(cfg.run.seed, "quarantine-start"))
        signs = adapter.by_module(2.0 * drawn - 1.0)
    own = modules_of_block(policy, signs, method.quarantine_block) if method.quarantine_block else list(signs)
    placed = {m: sign * (m in own) for m, sign in signs.items()}
    with torch.no_grad():
        adapter.δS_hack.copy_(STARTS * cfg.opt.lr * adapter.flat(placed))
    adapter.merge()
    return provenance
