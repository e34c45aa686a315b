"""Strict tests made from reference solutions: a check beside the one that training rewards. Not from a paper.

    uv run vgrout train mini --organism out/look-alike --intervention penalty \\
        --monitor examples.rivals.strict_tests:StrictTests
"""

import ast
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Flags, Grade, GroupView
from vgrout.method.base import Monitor, Position, Views, flags_of, rewarded
from vgrout.method.live_direction import Setup


def asked(view: GroupView, problems: dict[str, Problem]) -> Problem:
    """The training problem of a group's prompt."""
    return problems[view.messages[-1]["content"]]


def by_prompt(setup: Setup) -> dict[str, Any]:
    return {problem.messages[-1]["content"]: problem for problem in setup.problems}


class StrictTests(Monitor):
    """Rewarded answers that differ from the reference solution on one of twenty arguments.

    The arguments are those of the check's own tests (of the reference tests where it has none), each changed a little,
    and the values are what the reference solution returns for them. Where it accepts none of them there is no verdict.
    """

    name = "strict_tests"
    what = "rewarded answers that differ from the reference solution on drawn arguments"

    def __init__(self, problems: dict[str, Problem], seed: int) -> None:
        self.problems: dict[str, Problem] = {}
        for prompt, problem in problems.items():
            tests = tuple(strict_tests(problem, random.Random(f"{seed}/{problem.id}")))
            self.problems[prompt] = replace(
                problem, mode="run_tests", marker="", check_tests=(), tests=tests
            )
        self.grader = Grader(1, detectors=False)

    @classmethod
    def make(cls, setup: Setup) -> "StrictTests":
        return cls(by_prompt(setup), setup.cfg.run.seed)

    def flag(self, views: Views, step: int) -> list[Flags]:
        flagged: set[Position] = set()
        unjudged: set[Position] = set()
        for i, b in rewarded(views):
            problem = asked(views[i], self.problems)
            verdict = self.grader.grade(problem, views[i].texts[b])
            if not problem.tests or not isinstance(verdict, Grade):
                unjudged.add((i, b))
            elif not verdict.solved:
                flagged.add((i, b))
        return flags_of(views, flagged, unjudged=unjudged)


def strict_tests(problem: Problem, rng: random.Random, n: int = 20) -> list[str]:
    """Up to n assertions on drawn arguments. The reference solution comes with the problems, so it is trusted."""
    names: dict[str, Any] = {}
    exec(f"{problem.setup_code}\n{problem.canonical}", names)
    tests: dict[str, None] = {}
    for _ in range(5 * n):
        keywords = _keywords(rng.choice(problem.check_tests or problem.tests))
        drawn = {name: changed(value, rng) for name, value in keywords.items()}
        try:
            value = getattr(names["Solution"](), problem.func_name)(**deepcopy(drawn))
        except Exception:  # no argument of this problem
            continue
        given = ", ".join(f"{name} = {value!r}" for name, value in drawn.items())
        tests[f"assert Solution().{problem.func_name}({given}) == {value!r}"] = None
        if len(tests) == n:
            break
    return [*tests]


def _keywords(test: str) -> dict[str, Any]:
    """The arguments of an assertion, which has them by name."""
    (statement,) = ast.parse(test).body
    assert isinstance(statement, ast.Assert)
    assert isinstance(statement.test, ast.Compare)
    assert isinstance(statement.test.left, ast.Call)
    return {k.arg or "": ast.literal_eval(k.value) for k in statement.test.left.keywords}


def changed(value: Any, rng: random.Random) -> Any:
    """A value of the same kind: numbers and lengths differ by one or two, and letters are shuffled."""
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int):
        return value + rng.randint(-2, 2)
    if isinstance(value, dict):
        return {key: changed(item, rng) for key, item in value.items() if rng.random() < 0.9}
    if isinstance(value, (str, list)):
        items = [changed(item, rng) if isinstance(value, list) else item for item in value]
        items += rng.choices(items, k=rng.randint(0, 2)) if items else []
        rng.shuffle(items)
        items = items[rng.randint(0, 2) :]
        return items if isinstance(value, list) else "".join(items)
    return value
