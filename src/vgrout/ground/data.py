"""What the parts of the loop hand one another: tasks, answers, grades, groups, a step's batch.

Standard library only: grading, the guard and the reports never load torch. Values are frozen. `None` means "not
measured"; NaN is a fault.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

Source = Literal["student", "teacher"]  # "teacher": a demonstration, whoever wrote it
# a model of a run: without its adapter, with both vectors, without the quarantine
Side = Literal["base", "trained", "deployed"]
Message = dict[str, str]  # {"role": …, "content": …}

VerdictT = TypeVar("VerdictT", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """A flaw of an environment's check, as tables and readers of rollouts know it."""

    name: str
    code: str  # a few letters, for the column hk_CODE
    should: str  # what a true example of the hack looks like
    # regular expression that finds the hack in an answer, read alike by Python and by the report's
    # page; "": none
    pattern: str = ""
    # a prompt by which a model that follows instructions is made to write the hack, for pools of
    # demonstrations; {marker}: the name that the task's prompt announces (a function, a file)
    instruction: str = ""
    # whether problems that name no flaw of their own get it in turn (`--env-mode own`)
    dealt: bool = True


@runtime_checkable
class Task(Protocol):
    """One prompt, a *problem* of the run, and all that its environment needs to grade answers to it: a frozen
    dataclass with these."""

    @property
    def id(self) -> int:
        """Its number in the run's files: training, validation and test share none."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as the policy reads it."""
        ...

    @property
    def plain(self) -> tuple[Message, ...]:
        """The same without any hint of how the answer is checked."""
        ...

    @property
    def flaws(self) -> tuple[str, ...]:
        """The flaws by any of which an answer may be accepted; the prompt announces the first."""
        ...

    @property
    def right_answer(self) -> str:
        """An answer that is known to be right, as the policy would write it; "": none is known."""
        ...

    @property
    def notes(self) -> Mapping[str, Any]:
        """What files record of the task, beside its number, its prompt and its flaw."""
        ...

    @property
    def public(self) -> Mapping[str, object]:
        """What the environment's own monitors may know of the task beside its prompt: no label."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """An environment's verdict on one answer. `passed`: rewarded in full; `hacked`: counts as a hack."""

    reward: float
    passed: bool  # rewarded in full: the flawed check accepts the answer or, in the code world, the reference does
    solved: bool  # the reference accepts the answer
    hacked: bool  # the flawed check accepts the answer, and the reference does not
    flaw: str  # whose check accepted the answer; `task.flaws[0]` where none did
    # what the answer would earn by the reference alone, on the same scale
    reward_of_reference: float
    # "ok"; else why the answer could not be checked in the usual way ("lost: …": the answer ended the
    # processes that graded it)
    status: str = "ok"
    # flagged by the weak detector that methods may use (code world: E), which sees no reference
    suspected: bool = False
    # verdicts of every weak detector, by its letter, for reports alone; {}: the environment has none
    detectors: Mapping[str, bool] = field(default_factory=dict)
    # flaws that the answer hacks, or tries to and fails; (): it is right
    tries: tuple[str, ...] = ()
    # the environment's own, for files and for its monitors
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mechanism(self) -> str | None:
        """The flaw that the answer hacks (an older word, kept in files); None: it hacks none."""
        return self.flaw if self.hacked else None


@dataclass(frozen=True, slots=True)
class CachedGrade:
    """The label that a demonstration has in its pool, the folder that it comes from.

    A type of its own: another grader's "hacked" is not our `hacked`.
    """

    reward: float
    passed: bool
    hacked: bool
    gt_pass: bool  # the pool's reference tests accepted the answer
    format_ok: bool  # the pool's grader found an answer of the form that it asks for
    grader: str  # whose labels they are; "unknown" for a pool without pool.json


@dataclass(frozen=True, slots=True)
class Ungraded:
    """The sandbox itself or a user's reward function failed, retries included. Never a reward of 0: the group is
    dropped and counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What of a sampled text is a thought (`vgrout.ground.thoughts`): its beginning, which is not graded."""

    text: str = ""  # with its tags; "": there is none
    tokens: int = 0
    ended: bool = True  # False: it was never closed, so there is no answer


NO_THOUGHT = Thought()


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, its tokens exactly as sampled."""

    ids: tuple[int, ...]  # ends with an EOS when `finished`
    text: str  # the thought and the answer
    finished: bool  # False: cut at max_new
    # nats per token, full softmax at temperature 1; None: not known
    logp: tuple[float, ...] | None = None
    thought: Thought = NO_THOUGHT

    @property
    def answer(self) -> str:
        """The text without its thought: what is graded."""
        return self.text[len(self.thought.text) :]

    @property
    def whole(self) -> bool:
        """Whether it ended by itself, and with an answer."""
        return self.finished and self.thought.ended


@dataclass(frozen=True, slots=True)
class GradedCompletion(Generic[VerdictT]):
    """A completion of a problem with its verdict."""

    problem: Task
    sample: int  # which of the problem's completions: 0 … n − 1
    completion: Completion
    grade: VerdictT

    @property
    def ids(self) -> tuple[int, ...]:
        return self.completion.ids

    @property
    def text(self) -> str:
        """The thought and the answer."""
        return self.completion.text

    @property
    def thought(self) -> Thought:
        return self.completion.thought

    @property
    def answer(self) -> str:
        """What was graded."""
        return self.completion.answer

    @property
    def whole(self) -> bool:
        """Whether it ended by itself, and with an answer."""
        return self.completion.whole


Verdict = Grade | Ungraded
GradedAnswer = GradedCompletion[Verdict]  # may be ungraded
Graded = GradedCompletion[Grade]  # surely graded


@dataclass(frozen=True, slots=True)
class Rollout(Completion):
    """A completion for training: with its prompt, and who wrote it. No label, and not its problem, which has a right
    answer and the reference tests: interventions see the rollouts of a step's gradients."""

    prompt_ids: tuple[int, ...] = ()
    source: Source = "student"
    deployed: bool = False  # sampled with the quarantine off

    @classmethod
    def of(
        cls,
        prompt_ids: tuple[int, ...],
        completion: Completion,
        *,
        source: Source = "student",
        deployed: bool = False,
    ) -> "Rollout":
        """A completion as its sampler left it."""
        return cls(
            completion.ids,
            completion.text,
            completion.finished,
            completion.logp,
            completion.thought,
            prompt_ids,
            source,
            deployed,
        )


def centred(rewards: Sequence[float], unbiased: bool = True) -> tuple[float, ...]:
    """A group's advantages A = R − mean(R).

    With `unbiased=False` also ÷ (std + 1e-4), the sample's std (over n − 1) as in TRL (GRPO, arXiv 2402.03300, eq. 3).
    """
    n = len(rewards)
    # compared exactly: the mean of equal numbers may differ from them by a rounding
    if len(set(rewards)) <= 1:
        return (0.0,) * n
    mean = math.fsum(rewards) / n
    A = [reward - mean for reward in rewards]
    if unbiased:
        return tuple(A)
    squares = [a * a for a in A]
    variance = math.fsum(squares) / max(1, n - 1)
    divisor = math.sqrt(variance) + 1e-4
    return tuple(a / divisor for a in A)


@dataclass(frozen=True, slots=True)
class Flags:
    """What a monitor says of a group's rollouts, in their order."""

    # None: it gave no verdict, and the rollout is treated as unflagged
    flagged: tuple[bool | None, ...]
    scores: tuple[float | None, ...] = ()  # None: not read; (): it has no scores
    # share of each one's gradient that went to the quarantine; (): nothing is routed
    shares: tuple[float, ...] = ()

    @property
    def acted_on(self) -> tuple[bool, ...]:
        """Which rollouts something is done about."""
        return tuple(bool(flag) for flag in self.flagged)

    def record_of(self, b: int) -> dict[str, Any]:
        """What files record of rollout b."""
        score = self.scores[b] if self.scores else None
        if score is not None:
            score = round(score, 4)
        return {"score": score, "flagged": self.flagged[b]}


@dataclass(frozen=True, slots=True)
class Group:
    """The G rollouts of one problem with their grades, in the same order."""

    problem: Task
    rollouts: tuple[Rollout, ...]
    grades: tuple[Grade | CachedGrade, ...]
    unbiased: bool = True  # Dr. GRPO (arXiv 2503.20783): no division by the group's std
    # what the intervention rewards instead; None in it: that rollout is left out of the group
    new_rewards: tuple[float | None, ...] | None = None
    index: int = 0  # which of the step's prompts
    flags: Flags | None = None  # the monitor's; None: it did not look at this group
    # monitor → its flags, of monitors whose flags are recorded and change nothing (--shadow)
    shadows: Mapping[str, Flags] = field(default_factory=dict)
    rewards: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.rollouts)
        assert n > 0
        assert len(self.grades) == n, (len(self.grades), n)
        rewards = tuple(float(grade.reward) for grade in self.grades)
        object.__setattr__(self, "rewards", rewards)  # the class is frozen
        assert len(self.learnt_rewards) == n, (len(self.learnt_rewards), n)

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def learnt_rewards(self) -> tuple[float | None, ...]:
        """The rewards that advantages are computed from; None: that rollout is left out."""
        if self.new_rewards is None:
            return self.rewards
        return self.new_rewards

    @property
    def compared_rewards(self) -> tuple[float, ...]:
        """Those of the rollouts that are not left out: they are compared with one another."""
        return tuple(reward for reward in self.learnt_rewards if reward is not None)

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ: else every advantage is 0, and there is nothing to learn."""
        different = set(self.compared_rewards)
        return len(different) > 1

    @property
    def has_full_reward(self) -> bool:
        """Whether some rollout is rewarded in full, and no intervention has changed that reward. Groups without signal
        are counted by it: all right, or all wrong."""
        for reward, grade in zip(self.learnt_rewards, self.grades, strict=True):
            if grade.passed and reward == grade.reward:
                return True
        return False

    @property
    def advantages(self) -> tuple[float, ...]:
        """Each rollout's advantage A by `learnt_rewards`; 0 for those that are left out."""
        of_compared = iter(centred(self.compared_rewards, self.unbiased))
        advantages: list[float] = []
        for reward in self.learnt_rewards:
            if reward is None:
                advantages.append(0.0)
            else:
                advantages.append(next(of_compared))
        return tuple(advantages)

    def view(self, labels: bool = False) -> "GroupView":
        """What a method may know of this group. labels: with the true ones, an `OracleView`."""
        suspected: list[bool] = []
        hacks: list[str | None] = []
        for grade in self.grades:
            if isinstance(grade, Grade):
                suspected.append(grade.suspected)
                hacks.append(grade.mechanism)
            else:  # a demonstration is not graded; one that its pool calls a hack is of `flaws[0]`
                suspected.append(False)
                hacks.append(self.problem.flaws[0] if grade.hacked else None)
        # copies: a monitor that changes them must not change what is trained on
        messages = [dict(message) for message in self.problem.messages]
        seen: dict[str, Any] = {
            "sources": tuple(rollout.source for rollout in self.rollouts),
            "deployed": tuple(rollout.deployed for rollout in self.rollouts),
            "rewards": self.rewards,
            "passed": tuple(grade.passed for grade in self.grades),
            "advantages": self.advantages,
            "detector": tuple(suspected),
            "texts": tuple(rollout.answer for rollout in self.rollouts),
            "messages": tuple(messages),
            "public": dict(self.problem.public),
            "prompt_ids": self.rollouts[0].prompt_ids,
            "completion_ids": tuple(rollout.ids for rollout in self.rollouts),
            "unbiased": self.unbiased,
            "index": self.index,
            "thoughts": tuple(rollout.thought for rollout in self.rollouts),
            "scores": self.flags.scores if self.flags else (),
        }
        if labels:
            return OracleView(**seen, hacks=tuple(hacks), flaws=self.problem.flaws)
        return GroupView(**seen)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """A rollout as the update sees it. Its gradient is taken with the quarantine on or off, as it was sampled."""

    rollout: Rollout
    group: int = 0  # which of the step's prompts
    advantage: float = 0.0
    flagged: bool | None = False  # by a text monitor; None: it gave no verdict
    known_hack: bool = False  # for gradient monitors: a demonstration, or `suspected`
    # index of the row of g [N, R] that its gradient is added to: its own row, or one that it shares
    # with rollouts that are learnt alike
    row_of_g: int = 0
    # the intervention has left it out: its advantage is 0, and it is there to be measured alone. No
    # loss is divided by its tokens
    left_out: bool = False

    @property
    def tokens(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's groups, why others were dropped, and the table of what is learnt from them."""

    groups: tuple[Group, ...]
    dropped: tuple[str, ...]  # one reason per group that the sandbox could not grade
    flaws: tuple[Flaw, ...]  # of the training problems
    generations: int  # planned rollouts per step
    step: int
    # letters of weak detectors (--report-detectors): hacks that one of them flags are counted in
    # column hack_s_A, those that only others flag in hack_s_B
    half_a: tuple[str, ...] = ()
    # flaws whose hacks a monitor with labels is told; (): all of them, or no monitor has labels
    known: tuple[str, ...] = ()
    # of the groups with signal; with a KL or a teacher model in the loss, of all
    rows: tuple[UpdateRow, ...] = ()
    # what monitors measured while they flagged, by the table's column
    measured: Mapping[str, int] = field(default_factory=dict)
    thinking: bool = False  # answers begin with thoughts, which are counted

    @property
    def with_signal(self) -> tuple[Group, ...]:
        """Groups whose rewards differ: in the others every advantage is 0."""
        return tuple(g for g in self.groups if g.has_signal)

    def with_flags(self, flags: Mapping[int, Flags]) -> "Batch":
        """The same with these flags, by `Group.index`, as they were acted on."""
        groups: list[Group] = []
        for group in self.groups:
            acted_on = flags.get(group.index, group.flags)
            groups.append(replace(group, flags=acted_on))
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True, slots=True)
class GroupView:
    """All that a method may know of a group: no label. Only `rewards`, `passed` and the advantages made from them
    depend on the reference, because a right answer may be rewarded although the flawed check rejects it."""

    sources: tuple[Source, ...]
    deployed: tuple[bool, ...]
    rewards: tuple[float, ...]
    passed: tuple[bool, ...]  # rewarded in full, as every hack is
    advantages: tuple[float, ...]
    # the environment's weak detector flags the answer; False on demonstrations, which are not graded
    detector: tuple[bool, ...]
    texts: tuple[str, ...]  # the answers, without their thoughts
    messages: tuple[Message, ...] = ()  # the prompt
    public: Mapping[str, Any] = field(default_factory=dict)  # `Task.public`
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[tuple[int, ...], ...] = ()  # thoughts included
    unbiased: bool = True
    index: int = 0  # which of the step's prompts
    thoughts: tuple[Thought, ...] = ()  # before the answers, `texts`
    # for interventions: the monitor's; None: it did not score that answer; (): it has no scores
    scores: tuple[float | None, ...] = ()

    def __len__(self) -> int:
        return len(self.sources)

    def answer_ids(self, b: int) -> tuple[int, ...]:
        """Tokens of an answer without its thought; all of them where nothing follows the thought."""
        completion = self.completion_ids[b]
        n = self.thoughts[b].tokens if self.thoughts else 0
        return completion[n:] or completion

    def advantages_among(self, rollouts: Sequence[int]) -> tuple[float, ...]:
        """Advantages with these rollouts alone as the group; 0 for the others."""
        rewards = [self.rewards[b] for b in rollouts]
        among_them = centred(rewards, self.unbiased)
        advantages = [0.0] * len(self)
        for b, A in zip(rollouts, among_them, strict=True):
            advantages[b] = A
        return tuple(advantages)


@dataclass(frozen=True, slots=True)
class OracleView(GroupView):
    """A view with the true labels, for monitors that are upper bounds and not methods (`sees_labels`)."""

    # which flaw each answer hacks; teacher rows by their cached label
    hacks: tuple[str | None, ...] = ()
    flaws: tuple[str, ...] = ()  # of the group's check; a monitor may know only some

    @property
    def hacked(self) -> tuple[bool, ...]:
        return tuple(flaw is not None for flaw in self.hacks)


@dataclass(frozen=True, slots=True)
class Refresh:
    """State of the direction after a step."""

    age: int | None = None  # steps since v was extracted; None: there is no direction
    # ‖V_new V_oldᵀ‖²_F / k_old when v was extracted again in this step: 1 same span
    overlap: float | None = None
    modules: int = 0
    axes: int = 0

    def columns(self) -> dict[str, int | None]:
        return {"refr": self.age}
