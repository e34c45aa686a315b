"""A user's reward function, which scores answers in place of the modes' flawed checks.

Of an answer it sees only the text. It may ask for: prompt (the last user message), completion and answer (a right one)
as texts, info and state as dicts, or any key of info by itself. The reference tests do not use it. Standard library
only.
"""

from collections.abc import Callable

from vgrout.envs.code.problem import Problem
from vgrout.errors import Refused
from vgrout.scoring import NO_OBSERVER, TIMEOUT, FailureObserver, RewardFailed, ScoringFunction


def arguments(problem: Problem, text: str) -> dict[str, object]:
    """All that a reward function may ask for, made afresh, so that it may change them."""
    columns = {
        "id": problem.id,
        "mode": problem.mode,
        "marker": problem.marker,
        "messages": [dict(message) for message in problem.messages],
        "tests": list(problem.tests),
        "setup_code": problem.setup_code,
        "func_name": problem.func_name,
    }
    own = {
        "prompt": problem.messages[-1]["content"] if problem.messages else "",
        "completion": text,
        "answer": problem.canonical,
    }
    return columns | own | {"info": dict(columns), "state": own | {"info": dict(columns)}}


NAMES = tuple(arguments(Problem(0, "run_tests", "", (), (), (), "", "", ""), ""))


class RewardFunction(ScoringFunction):
    """A loaded reward function; see `ScoringFunction`."""

    def __init__(
        self, name: str, passes_at: float = 1.0, flag: str = "--reward", timeout: float = TIMEOUT
    ) -> None:
        super().__init__(name, NAMES, flag=flag, passes_at=passes_at, timeout=timeout)

    def __reduce__(self) -> tuple[object, ...]:
        """Another rank imports it by itself."""
        return RewardFunction, (self.name, self.passes_at, self.flag, self.timeout)

    def score(
        self,
        problem: Problem,
        text: str,
        retries: int | None = 0,
        gives_up: Callable[[], bool] = lambda: False,
        observer: FailureObserver = NO_OBSERVER,
    ) -> float:
        """The score of this answer, in [0, 1]. Raises RewardFailed with the reason, one line.

        retries: how often it is asked again after a failure; None: until `gives_up`. observer: is told of each failure.
        """
        return self.score_of(lambda: arguments(problem, text), retries, gives_up, observer)

    def probe(self, problem: Problem, retries: int | None = 0) -> float:
        """The score of the problem's canonical solution. Raises Refused, one line, if that fails for good; from
        what the function raised, if it did."""
        try:
            return self.score(problem, problem.right_answer, retries)
        except RewardFailed as e:
            raise Refused(
                f"{self.flag} {self.name}: asked about the canonical solution of problem {problem.id}, it {e}"
            ) from e.__cause__
