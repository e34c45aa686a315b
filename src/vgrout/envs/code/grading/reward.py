"""A user's reward function, which scores answers in place of the modes' flawed checks.

Of an answer it sees only the text. It may ask for: prompt (the last user message), completion and answer (a right one)
as texts, info and state as dicts, or any key of info by itself. The reference tests do not use it.
"""

from vgrout.envs.code.problem import Problem
from vgrout.ground.errors import Refused
from vgrout.ground.scoring import TIMEOUT, RewardFailed, ScoringFunction


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


def reward_function(name: str, passes_at: float = 1.0, timeout: float = TIMEOUT) -> ScoringFunction:
    """The function that --reward names. Raises Refused, one line."""
    return ScoringFunction(
        name, arguments, NAMES, flag="--reward", passes_at=passes_at, timeout=timeout
    )


def probe(reward: ScoringFunction, problem: Problem, retries: int | None = 0) -> float:
    """The score of the problem's canonical solution. Raises Refused, one line, if that fails for good; from what the
    function raised, if it did."""
    (score,) = reward.scores(problem, [problem.right_answer], retries)
    if isinstance(score, RewardFailed):
        raise Refused(
            f"{reward.flag} {reward.name}: asked about the canonical solution of problem {problem.id}, it {score}"
        ) from score.__cause__
    return score
