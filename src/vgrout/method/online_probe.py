"""A linear probe, fitted during training between what a seed monitor flags and answers that are known to be right.

    s(y) = w · (h(y) − m),  w = (S + 0.1 · tr S/D · I)⁻¹ (a − m)      flagged: seeded, or rewarded and s(y) > threshold

h(y) is an answer's mean hidden state in the frozen base, over its own tokens and none of its thought. a is the mean of
h over all rows that the seed monitor has flagged so far, m and S mean and covariance over every other known correct
answer: Fisher's discriminant (Fisher 1936) with a ridge. The threshold is a quantile of s over the other half of the
known correct answers.

The base does not move, so the policy can change what it writes but not how that is read.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vgrout.config.specs import MONITORS
from vgrout.direction.pairs import MIN_KNOWN_CORRECT
from vgrout.ground import ranks
from vgrout.ground.data import Flags, Grade
from vgrout.ground.io import Refused
from vgrout.method.base import Monitor, Position, Views, flags_of, positions, rewarded
from vgrout.method.live_direction import Setup
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy

SAMPLED = 256  # answers of the base, about, among which right ones are looked for
RIDGE = 0.1  # of the mean variance, added to the covariance before it is inverted
# What survives a resume, by attribute. Answers of the base that are sampled and graded again need not all be accepted
# again.
KEPT = {
    "_sum": "probe_sum",
    "_count": "probe_count",
    "_m": "probe_mean",
    "_root": "probe_root",
    "_judge": "probe_judge",
}


class Text(NamedTuple):
    """One answer as tokens."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def accepted_of_base(setup: Setup) -> list[Text]:
    """Sample answers of the base to training problems, and return those that the reference accepts.

    Raises:
        Refused: there are fewer than MIN_KNOWN_CORRECT.
    """
    assert setup.answers_of_base is not None, "answers have to be graded"
    policy = setup.policy
    given = setup.answers_of_base(setup.problems[: math.ceil(SAMPLED / setup.cfg.scale.group)])
    known: list[Text] = []
    for answer in given:
        if isinstance(answer.grade, Grade) and answer.grade.solved:
            prompt = policy.render(answer.problem.messages)
            without_thought = answer.ids[answer.thought.tokens :]
            known.append(Text(prompt, without_thought or answer.ids))
    if len(known) < MIN_KNOWN_CORRECT:
        raise Refused(
            f"--monitor online_probe: the reference accepts {len(known)} of {len(given)} answers of the base, "
            f"{MIN_KNOWN_CORRECT} are needed; give right answers with --known-correct FILE"
        )
    return known


class OnlineProbe(Monitor):
    """See above. quantile: of the scores of known correct answers; it is the threshold.

    States are read after half of the base's blocks.
    """

    spec = MONITORS["online_probe"]

    def __init__(
        self,
        policy: Policy,
        seed_monitor: Monitor,
        *,
        known_correct: Sequence[Text],
        quantile: float,
    ) -> None:
        """Raises Refused for fewer than four known correct answers."""
        if len(known_correct) < 4:
            raise Refused(
                f"--known-correct: {len(known_correct)} answers, --monitor {self.spec.name} needs at least 4"
            )
        self.policy = policy
        self.seed_monitor = seed_monitor
        self._quantile = quantile
        self.layer = max(1, policy.model.config.num_hidden_layers // 2)
        known = self.states(known_correct)
        fit = known[::2]
        self._judge = known[1::2]  # whose scores the threshold is a quantile of
        self._m = fit.mean(0)  # [D]
        S = torch.cov(fit.T)  # [D, D]
        D = fit.shape[1]
        ridge = (RIDGE * S.trace() / D).clamp(min=1e-12)
        identity = torch.eye(D, dtype=S.dtype)
        self._root = torch.linalg.cholesky(S + ridge * identity)
        # of the states of what the seed has flagged
        self._sum = torch.zeros(D, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.float64)

    @classmethod
    def make(cls, setup: Setup, seed_monitor: Monitor | None = None) -> "OnlineProbe":
        assert seed_monitor is not None
        policy = setup.policy
        known: list[Text] = []
        for answer in setup.known_correct:
            prompt = policy.encode(answer.prompt)
            completion = policy.encode_completion(answer.completion)
            known.append(Text(prompt, completion))
        if not known:
            known = accepted_of_base(setup)
        return cls(
            policy,
            seed_monitor,
            known_correct=known,
            quantile=setup.cfg.method.monitor_quantile,
        )

    @property
    def sees_labels(self) -> bool:
        """It learns from what its seed flags: a bound where that is one."""
        return self.seed_monitor.sees_labels

    def states(self, texts: Sequence[Text]) -> Float[Tensor, "n D"]:
        """h of each text, in fp64 on the CPU."""
        prompts = [text.prompt for text in texts]
        completions = [text.completion for text in texts]
        states = token_states(self.policy, prompts, completions, self.layer)
        means = [of_text.mean(0).tolist() for of_text in states]
        return torch.tensor(ranks.from_first(means), dtype=torch.float64)

    def flag(self, views: Views, step: int) -> list[Flags]:
        """Learn from what the seed monitor flags in this step, then score and flag."""
        by_seed = ranks.from_first(self.seed_monitor.flag(views, step))
        seeded = {(i, b) for i, b in positions(views) if by_seed[i].flagged[b]}
        passing = rewarded(views)
        h = self._states_at(views, sorted({*passing, *seeded}))
        for position in sorted(seeded):
            self._sum = self._sum + h[position]
            self._count = self._count + 1
        scores: dict[Position, float] = {}
        flagged = set(seeded)
        if self._count:
            a = self._sum / self._count
            difference = a - self._m
            column = difference[:, None]  # [D, 1]
            w = torch.cholesky_solve(column, self._root)[:, 0]
            of_known = (self._judge - self._m) @ w
            threshold = float(torch.quantile(of_known, self._quantile))
            for position in passing:
                s = (h[position] - self._m) @ w
                scores[position] = float(s)
                if scores[position] > threshold:
                    flagged.add(position)
        return flags_of(views, flagged, scores)

    def _states_at(
        self,
        views: Views,
        read: Sequence[Position],
    ) -> dict[Position, Tensor]:
        """h [D] of the answers at these positions."""
        if not read:
            return {}
        texts: list[Text] = []
        for i, b in read:
            view = views[i]
            texts.append(Text(view.prompt_ids, view.answer_ids(b)))
        states = self.states(texts)
        return dict(zip(read, states, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        state = dict(self.seed_monitor.state_dict())
        for attribute, key in KEPT.items():
            state[key] = getattr(self, attribute)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        of_seed = dict(state)
        for attribute, key in KEPT.items():
            setattr(self, attribute, of_seed.pop(key).double())
        self.seed_monitor.load_state_dict(of_seed)
