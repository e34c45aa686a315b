"""One task of the code world."""

from dataclasses import dataclass

from vgrout.envs.code.modes import Mode
from vgrout.ground.data import Message


@dataclass(frozen=True, slots=True)
class Problem:
    """One task, checked by one flawed grader (`mode`) whose `marker` the prompt announces; with `also`, by several at
    once, any of which may accept."""

    id: int
    mode: Mode
    # function, phrase, attribute or file that the hint names; "" in modes that name none
    marker: str
    messages: tuple[Message, ...]  # with the hint: "and will be evaluated by …"
    plain: tuple[Message, ...]  # no loophole: "and should pass all tests"
    # "assert Solution().f(…) == …", never shown to a child that runs an answer for the reference tests
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
    def right_answer(self) -> str:
        """Its canonical solution, as a policy would write it."""
        return f"```python\n{self.canonical}\n```"

    @property
    def notes(self) -> dict[str, object]:
        """What files record of it, beside its number, its prompt and its flaw."""
        return {"marker": self.marker}

    @property
    def public(self) -> dict[str, object]:
        """What a monitor of code may know of it."""
        return {"called": self.called}

    @property
    def called(self) -> tuple[str, ...]:
        """The names that its tests call: what an answer has to define."""
        return ("Solution", self.func_name)

    def marker_under(self, mode: Mode) -> str:
        """What the check of one of its flaws watches for; "": that mode's default."""
        return self.marker if mode == self.mode else ""
