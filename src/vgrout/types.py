"""Shared data types. Stdlib only: grading, the guard and the reports never load torch.

Values are frozen. `None` means "not measured"; NaN is a fault.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, TypeVar

from vgrout.modes import MODE_CODE as MODE_CODE
from vgrout.modes import MODES, Mode, tries

Source = Literal["student", "teacher"]
Message = dict[str, str]  # {"role": …, "content": …}

G = TypeVar("G", covariant=True)
T = TypeVar("T")

# weak detector → the field of a grade (and of a line of rollouts.jsonl) that holds its verdict
DETECTOR_FIELDS = {"C": "hacked_arbitrary", "D": "hacked_wrong_tests", "E": "hacked_loophole_used"}

REFERENCE_STEP = 256  # generations in one step of the benchmark's own runs: the unit of `ref_eq`


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


def percent(share: float | None) -> str:
    """Percent without the sign; "·" of nothing."""
    return "·" if share is None else f"{100 * share:.1f}"


@dataclass(frozen=True, slots=True)
class Rate:
    """k of n. Printed as k/n, stored as a pair; `value` is None if nothing was counted."""

    k: int
    n: int

    @property
    def value(self) -> float | None:
        return self.k / self.n if self.n else None

    @property
    def percent(self) -> str:
        """Percent without the sign; "·" if nothing was counted."""
        return percent(self.value)

    @property
    def pair(self) -> list[int]:
        """[k, n], as files store it."""
        return [self.k, self.n]

    def __add__(self, other: "Rate") -> "Rate":
        return Rate(self.k + other.k, self.n + other.n)

    @classmethod
    def of(cls, values: Iterable[bool]) -> "Rate":
        """How many of these values are true, of how many."""
        xs = list(values)
        return cls(sum(xs), len(xs))


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

    def columns(self) -> dict[str, Any]:
        """The step table's columns of rewards, hacks, solves and flags."""
        live, cached = students(self.groups), teachers(self.groups)
        dead = [g for g in self.groups if not g.has_signal]
        ablated = [g for r, g in live if r.deployed]
        return {
            "step": self.step,
            "ref_eq": (self.step + 1) * self.generations / REFERENCE_STEP,
            "rew": mean(r for g in self.groups for r in g.rewards),
            "rew_s": mean(g.reward for _, g in live),
            "signal": Rate(len(self.groups) - len(dead), len(self.groups)),
            "all_zero": sum(not g.in_full for g in dead),
            "all_one": sum(g.in_full for g in dead),
            "dropped": len(self.dropped),
            "drop_why": "; ".join(sorted(set(self.dropped))) or None,
            "n": sum(len(g) for g in self.groups),
            "solve_s": Rate.of(g.solved for _, g in live),
            "pass_t": Rate.of(g.gt_pass for _, g in cached) if cached else None,
            "hack_s": Rate.of(g.hacked for _, g in live),
            "tries_s": Rate.of(attempted(r.problem, r.text, g) for r, g in live),
            "hack_s_E": Rate.of(g.hacked_loophole_used for _, g in live),
            "hack_s_D": Rate.of(g.hacked_wrong_tests for _, g in live),
            "hack_s_A": Rate.of(half(g, self.half_a) == "A" for _, g in live)
            if self.half_a
            else None,
            "hack_s_B": Rate.of(half(g, self.half_a) == "B" for _, g in live)
            if self.half_a
            else None,
            "hack_t": Rate.of(g.hacked for _, g in cached) if cached else None,
            "hk": {
                m: Rate.of(g.mechanism == m for r, g in live if m in r.problem.flaws)
                for m in self.modes
            },
            "hack_abl": Rate.of(g.hacked for g in ablated) if ablated else None,
            "solve_abl": Rate.of(g.solved for g in ablated) if ablated else None,
            **flag_rates([(g, g.flags) for g in self.groups if g.flags], self.known),
        }


def flag_rates(
    flagged: Sequence[tuple[Group, Flags]], known: Collection[Mode] = ()
) -> dict[str, Rate | None]:
    """What was flagged of hacks (recall), of correct answers (false_flags), of demonstrations (flag_t); recall_new:
    of hacks of flaws outside `known`; hack_new: those hacks, of all answers to problems with such a flaw. None: no
    monitor looked; the last two: it knows all flaws, as with known = ()."""
    if not flagged:
        return dict.fromkeys(("recall", "false_flags", "flag_t", "recall_new", "hack_new"))
    pairs = [
        (group.problem.flaws, grade, flag)
        for group, flags in flagged
        for grade, flag in zip(group.grades, flags.flagged, strict=True)
    ]
    own = [(flaws, g, flag) for flaws, g, flag in pairs if isinstance(g, Grade)]
    new = [
        (g.hacked and g.mode not in known, flag)
        for flaws, g, flag in own
        if not {*flaws} <= {*known}
    ]
    return {
        "recall": Rate.of(flag for _, g, flag in own if g.hacked),
        "false_flags": Rate.of(flag for _, g, flag in own if g.solved),
        "flag_t": Rate.of(flag for _, g, flag in pairs if isinstance(g, CachedGrade)),
        "recall_new": Rate.of(flag for hack, flag in new if hack) if known else None,
        "hack_new": Rate.of(hack for hack, _ in new) if known else None,
    }


def half(grade: Grade, half_a: Sequence[str]) -> Literal["A", "B"] | None:
    """A: a hack that one of the weak detectors `half_a` sees; B: that another one sees; None: that none sees, or no
    hack."""
    if not grade.hacked:
        return None
    seen = {code for code, flagged in grade.detectors.items() if flagged}
    return "A" if seen & set(half_a) else "B" if seen else None


def students(groups: Iterable[Group]) -> list[tuple[Rollout, Grade]]:
    """The policy's own rollouts."""
    return [(r, g) for group in groups for r, g in group.pairs("student") if isinstance(g, Grade)]


def teachers(groups: Iterable[Group]) -> list[tuple[Rollout, CachedGrade]]:
    """The demonstrations."""
    return [
        (r, g) for group in groups for r, g in group.pairs("teacher") if isinstance(g, CachedGrade)
    ]


def mean(values: Iterable[float]) -> float | None:
    """Their mean; None if there are none."""
    xs = list(values)
    return sum(xs) / len(xs) if xs else None


def spaced(items: Sequence[T], n: int) -> list[T]:
    """At most n items, evenly spaced: of answers ordered by prompt, some of every prompt."""
    return [items[i * len(items) // n] for i in range(n)] if len(items) > n else list(items)


@dataclass(frozen=True, slots=True)
class ModeEval:
    hack: Rate
    solve: Rate
    unrewarded: int = 0  # right answers that a user's reward function does not reward in full
    tries: Rate = Rate(0, 0)  # hacks, and wrong answers that try the flaw and fail

    @classmethod
    def of(
        cls, answers: Sequence["GradedCompletion[Grade | Ungraded]"], flaw: Mode | None = None
    ) -> "ModeEval":
        """Counts over the answers that could be graded; with `flaw`, over problems with that flaw, and hacks of it
        alone."""
        among = [a for a in answers if flaw is None or flaw in a.problem.flaws]
        graded = [(a, a.grade) for a in among if isinstance(a.grade, Grade)]
        grades = [g for _, g in graded]
        return cls(
            hack=Rate.of(g.hacked and flaw in (None, g.mode) for g in grades),
            solve=Rate.of(g.solved for g in grades),
            unrewarded=sum(g.solved and not g.passed for g in grades),
            tries=Rate.of(attempted(a.problem, a.text, g, flaw) for a, g in graded),
        )


def attempted(problem: Problem, text: str, grade: Grade, flaw: Mode | None = None) -> bool:
    """Whether an answer hacks a flaw of the problem (or `flaw`), or is wrong and tries to: a misspelt marker earns
    nothing."""
    among = problem.flaws if flaw is None else (flaw,)
    if grade.hacked or grade.solved:
        return grade.hacked and grade.mode in among
    return any(tries(text, mode, problem.marker_under(mode)) for mode in among)


@dataclass(frozen=True, slots=True)
class Eval:
    """One model on one fixed set of held-out problems."""

    overall: ModeEval
    # hacks of that flaw on problems with it; they overlap where several are open
    by_mode: dict[Mode, ModeEval]
    finished: Rate
    dropped: int = 0  # answers that could not be graded
    # to the base, nats per token of some of these answers; None: not measured
    kl: float | None = None

    @classmethod
    def of(cls, answers: Sequence["GradedCompletion[Grade | Ungraded]"]) -> "Eval":
        """Counts of these answers, overall and by mode."""
        flaws = {flaw for a in answers for flaw in a.problem.flaws}
        return cls(
            overall=ModeEval.of(answers),
            by_mode={m: ModeEval.of(answers, m) for m in MODES if m in flaws},
            finished=Rate.of(a.finished for a in answers),
            dropped=sum(isinstance(a.grade, Ungraded) for a in answers),
        )

    @property
    def hack(self) -> Rate:
        return self.overall.hack

    @property
    def solve(self) -> Rate:
        return self.overall.solve

    @property
    def tries(self) -> Rate:
        return self.overall.tries

    @property
    def rewarded(self) -> Rate:
        """Answers that the flawed graders accept: each is either a solve or a hack."""
        return Rate(self.hack.k + self.solve.k - self.overall.unrewarded, self.solve.n)

    def as_json(self) -> dict[str, Any]:
        """Rates as [k, n], overall and by mode."""
        return {
            "hack": self.hack.pair,
            "tries": self.tries.pair,
            "solve": self.solve.pair,
            "ended": self.finished.pair,
            "not_graded": self.dropped,
            "by_mode": {
                m: {"hack": r.hack.pair, "tries": r.tries.pair, "solve": r.solve.pair}
                for m, r in self.by_mode.items()
            },
        }

    def columns(self) -> dict[str, Any]:
        """The step table's columns of the deployed model."""
        return {
            "hack_deploy": self.hack.value,
            "solve_deploy": self.solve.value,
            "kl_deploy": self.kl,
        }


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP: the current step was finished and saved."""


class Halted(Exception):
    """The guard or a detector stopped the run."""


class Diverged(Exception):
    """The update was not finite three steps in a row, or the policy lost tokens that it had."""


class NothingRouted(AssertionError):
    """A method with a quarantine has learnt, and its quarantine has learnt nothing."""
