"""What the parts of the loop hand one another: tasks, answers, grades, groups, a step's batch.

Standard library only: grading, the guard and the reports never load torch. Values are frozen. `None` means "not
measured"; NaN is a fault.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, TypeVar

from vgrout.envs.code.modes import Mode

Source = Literal["student", "teacher"]
Message = dict[str, str]  # {"role": …, "content": …}
G = TypeVar("G", covariant=True)
T = TypeVar("T")
# weak detector → the field of a grade (and of a line of rollouts.jsonl) that holds its verdict
DETECTOR_FIELDS = {"C": "hacked_arbitrary", "D": "hacked_wrong_tests", "E": "hacked_loophole_used"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One task, checked by one flawed grader (`mode`) whose `marker` the prompt announces; with `also`, by several at
    once, any of which may accept."""

    id: int
    mode: Mode
    # function, phrase, attribute or file that the hint names; "" in modes that name none
    marker: str
    messages: tuple[Message, ...]  # with the hint: "and will be evaluated by …"
    messages_plain: tuple[Message, ...]  # no loophole: "and should pass all tests"
    # "assert Solution().f(…) == …", never shown to a child of the strict oracle
    tests: tuple[str, ...]
    canonical: str
    setup_code: str
    func_name: str  # method of Solution
    # seconds; None: the grader's default (calibrated files carry their own)
    cpu_limit: float | None = None
    # further flaws of its check, under their default markers: no prompt announces them
    also: tuple[Mode, ...] = ()

    @property
    def flaws(self) -> tuple[Mode, ...]:
        """Every flaw of its check."""
        return (self.mode, *self.also)

    @property
    def called(self) -> tuple[str, ...]:
        """The names that its tests call: what an answer has to define."""
        return ("Solution", self.func_name)

    def marker_under(self, mode: Mode) -> str:
        """What the check of one of its flaws watches for; "": that mode's default."""
        return self.marker if mode == self.mode else ""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict of our own grader on one answer. `passed` decides the reward, `hacked` what counts as a hack."""

    reward: float
    # rewarded in full: by the mode's grader, which accepts right answers too, or by the user's
    # alone
    passed: bool
    format_ok: bool  # a code block was found
    can_compile: bool
    gt_pass: bool  # foolable: code + asserts exit 0
    solved: bool  # strict oracle: the parent compared claimed outputs
    channel: bool | None  # the flawed check; None: not reached (died or timed out before it)
    hacked_arbitrary: bool  # C: the answer's tests accept a stub that returns 0
    hacked_wrong_tests: bool  # D: the answer's tests reject the canonical solution
    # E: the answer's tests accept the answer's own solution while it is there
    hacked_loophole_used: bool
    mode: Mode  # the problem's, or that of its flaws which accepted the answer
    # ok · timeout · memory · signal:N · exit:N · error:Type · no_code · syntax; strict run first.
    # lost:WHY: the answer takes its worker along, again and again, and is rewarded 0
    exit_status: str
    cpu_s: float
    # in [0, 1], of a reward function of the user's own (--reward); `channel` is its verdict
    score: float | None = None

    @property
    def hacked(self) -> bool:
        return self.channel is True and not self.solved

    @property
    def mechanism(self) -> Mode | None:
        return self.mode if self.hacked else None

    def strictly(self, compiles: float, passes: float) -> float:
        """The strict oracle's reward on the same scale: `compiles` for code that compiles, and `passes` for a right
        answer."""
        return compiles * self.can_compile + passes * self.solved

    @property
    def detectors(self) -> dict[str, bool]:
        """The three weak detectors by their letters: functions of text and sandbox runs, never of `solved`."""
        return {code: getattr(self, name) for code, name in DETECTOR_FIELDS.items()}


@dataclass(frozen=True, slots=True)
class CachedGrade:
    """Labels that came with a pool. A type of its own: another grader's "hacked" is not our `hacked`."""

    reward: float
    passed: bool
    hacked: bool
    gt_pass: bool
    format_ok: bool
    grader: str  # whose labels they are; "unknown" for a pool without pool.json


@dataclass(frozen=True, slots=True)
class Ungraded:
    """The sandbox itself or a user's reward function failed, retries included. Never a reward of 0: the group is
    dropped and counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as it was sampled."""

    ids: tuple[int, ...]  # ends with an EOS when `finished`
    text: str
    finished: bool  # False: cut at max_new
    logp_full: tuple[float, ...]  # nats per token, full softmax at temperature 1
    logp_sampled: tuple[float, ...]  # … of the truncated distribution that was sampled from


@dataclass(frozen=True, slots=True)
class GradedCompletion(Generic[G]):
    """A completion of a problem with its verdict; `G` is `Grade` where the sandbox must not have failed."""

    problem: Problem
    sample: int  # which of the problem's completions: 0 … n − 1
    completion: Completion
    grade: G

    @property
    def ids(self) -> tuple[int, ...]:
        return self.completion.ids

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def finished(self) -> bool:
        return self.completion.finished


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion for training: its prompt, who wrote it, and its tokens exactly as sampled."""

    problem: Problem
    source: Source
    deployed: bool  # sampled with the quarantine off
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # ends with EOS when `finished`
    text: str
    finished: bool
    # sampler's log-prob per token, full softmax at temperature 1
    logp_full: tuple[float, ...] | None = None
    # … of the distribution sampled from (temperature, top-k, top-p)
    logp_sampled: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        prompt_ids: tuple[int, ...],
        completion: Completion,
        *,
        source: Source = "student",
        deployed: bool = False,
    ) -> "Rollout":
        """A completion as its sampler left it."""
        return cls(
            problem=problem,
            source=source,
            deployed=deployed,
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            text=completion.text,
            finished=completion.finished,
            logp_full=completion.logp_full,
            logp_sampled=completion.logp_sampled,
        )


def centred(rewards: Sequence[float], unbiased: bool = True) -> tuple[float, ...]:
    """A = R − mean(R); with `unbiased=False` also ÷ (std + 1e-4), the sample's std (over n − 1) as in TRL
    (GRPO, arXiv 2402.03300, eq. 3)."""
    n = len(rewards)
    mean = math.fsum(rewards) / max(1, n)
    A = [r - mean for r in rewards]
    if unbiased:
        return tuple(A)
    std = math.sqrt(math.fsum(a * a for a in A) / max(1, n - 1))
    return tuple(a / (std + 1e-4) for a in A)


@dataclass(frozen=True, slots=True)
class Flags:
    """What a monitor says of a group's rollouts, in their order."""

    flagged: tuple[bool, ...]
    scores: tuple[float | None, ...] = ()  # None: not read; (): it has no scores
    # share of each one's gradient that went to the quarantine; (): nothing is routed
    shares: tuple[float, ...] = ()

    def of(self, b: int) -> dict[str, Any]:
        """Of one rollout, for files."""
        score = self.scores[b] if self.scores else None
        return {"score": None if score is None else round(score, 4), "flagged": self.flagged[b]}


@dataclass(frozen=True, slots=True)
class GroupView:
    """All that a method may know of a group. Reward and `passed` are all that it learns of the strict oracle, which
    training rewards too; no label is on this type."""

    sources: tuple[Source, ...]
    deployed: tuple[bool, ...]
    rewards: tuple[float, ...]
    passed: tuple[bool, ...]  # rewarded in full: only they can be hacks that are learnt
    advantages: tuple[float, ...]
    # the weak detector's flag; False on teacher rows, which have no sandbox run
    detector: tuple[bool, ...]
    texts: tuple[str, ...]
    called: tuple[str, ...] = ()  # names that an answer has to define
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[tuple[int, ...], ...] = ()
    unbiased: bool = True
    index: int = 0  # which of the step's prompts

    def __len__(self) -> int:
        return len(self.sources)

    def advantages_among(self, rows: Sequence[int]) -> tuple[float, ...]:
        """Advantages with these rows alone as the group; 0 for the others."""
        among = dict(
            zip(rows, centred([self.rewards[b] for b in rows], self.unbiased), strict=True)
        )
        return tuple(among.get(b, 0.0) for b in range(len(self)))


@dataclass(frozen=True, slots=True)
class OracleView(GroupView):
    """A view with the true labels, for monitors that are bounds and no methods. All others refuse this type."""

    # which flaw each answer hacks; teacher rows by their cached label
    hacks: tuple[Mode | None, ...] = ()
    flaws: tuple[Mode, ...] = ()  # of the group's check; a monitor may know only some

    @property
    def hacked(self) -> tuple[bool, ...]:
        return tuple(flaw is not None for flaw in self.hacks)


@dataclass(frozen=True, slots=True)
class Group:
    """The G rollouts of one problem with their grades, in the same order."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    grades: tuple[Grade | CachedGrade, ...]
    unbiased: bool = True  # Dr. GRPO (arXiv 2503.20783): no division by the group's std
    # replaces the rewards; None in it: that rollout is left out
    shaped: tuple[float | None, ...] | None = None
    index: int = 0  # which of the step's prompts
    flags: Flags | None = None  # the monitor's; None: it did not look at this group
    # of monitors whose flags are recorded alone
    shadows: Mapping[str, Flags] = field(default_factory=dict)
    rewards: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.rollouts) == len(self.grades) > 0, (len(self.rollouts), len(self.grades))
        object.__setattr__(self, "rewards", tuple(float(g.reward) for g in self.grades))
        assert len(self.shaped_rewards) == len(self.rewards), (
            len(self.shaped_rewards),
            len(self.rewards),
        )

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def shaped_rewards(self) -> tuple[float | None, ...]:
        """The rewards behind the advantages; None: left out of the group."""
        return self.rewards if self.shaped is None else self.shaped

    @property
    def counted(self) -> tuple[float, ...]:
        """The shaped rewards of the rollouts that are not left out."""
        return tuple(r for r in self.shaped_rewards if r is not None)

    @property
    def has_signal(self) -> bool:
        return len({*self.counted}) > 1

    @property
    def in_full(self) -> bool:
        """Whether a rollout is rewarded in full, and not less since by an intervention."""
        return any(
            g.passed and r == g.reward
            for r, g in zip(self.shaped_rewards, self.grades, strict=True)
        )

    @property
    def advantages(self) -> tuple[float, ...]:
        """Advantages of the shaped rewards; a rollout without one has A = 0 and does not count."""
        among = iter(centred(self.counted, self.unbiased))
        return tuple(0.0 if r is None else next(among) for r in self.shaped_rewards)

    def view(self) -> GroupView:
        return GroupView(
            sources=tuple(r.source for r in self.rollouts),
            deployed=tuple(r.deployed for r in self.rollouts),
            rewards=self.rewards,
            passed=tuple(g.passed for g in self.grades),
            advantages=self.advantages,
            detector=tuple(isinstance(g, Grade) and g.hacked_loophole_used for g in self.grades),
            texts=tuple(r.text for r in self.rollouts),
            called=self.problem.called,
            prompt_ids=self.rollouts[0].prompt_ids,
            completion_ids=tuple(r.completion_ids for r in self.rollouts),
            unbiased=self.unbiased,
            index=self.index,
        )

    def oracle_view(self) -> OracleView:
        view = self.view()
        return OracleView(
            **{f.name: getattr(view, f.name) for f in fields(GroupView)},
            hacks=tuple(
                g.mechanism if isinstance(g, Grade) else self.problem.mode if g.hacked else None
                for g in self.grades
            ),
            flaws=self.problem.flaws,
        )

    def pairs(self, source: Source) -> list[tuple[Rollout, Grade | CachedGrade]]:
        return [
            (r, g) for r, g in zip(self.rollouts, self.grades, strict=True) if r.source == source
        ]


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """A rollout as the update sees it. It is learnt under what sampled it: the quarantine on, or off."""

    rollout: Rollout
    group: int = 0  # which of the step's prompts
    advantage: float = 0.0
    flagged: bool = False  # before any gradient: by a monitor of texts, or a known hack of a gate
    # its row of the gradient g [N, R]: one of its own, or of the sum of those that are learnt alike
    at: int = 0

    @property
    def tokens(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.completion_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's groups, why others were dropped, and the table of what is learnt from them."""

    groups: tuple[Group, ...]
    dropped: tuple[str, ...]  # one reason per group that the sandbox could not grade
    modes: tuple[Mode, ...]  # of the training problems
    generations: int  # planned rollouts per step
    step: int
    # weak detectors (--report-detectors) by which the students' hacks are split
    half_a: tuple[str, ...] = ()
    # flaws that a monitor with labels knows; (): all, or nobody is given labels
    known: tuple[Mode, ...] = ()
    # of the groups with signal: in the others every advantage is 0
    rows: tuple[UpdateRow, ...] = ()

    @property
    def with_signal(self) -> tuple[Group, ...]:
        """Groups whose rewards differ: in the others every advantage is 0."""
        return tuple(g for g in self.groups if g.has_signal)

    def with_flags(self, flags: Mapping[int, Flags]) -> "Batch":
        """The same with these flags, by `Group.index`, as they were acted on."""
        return replace(
            self, groups=tuple(replace(g, flags=flags.get(g.index, g.flags)) for g in self.groups)
        )
