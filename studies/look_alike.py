"""A monitor of studies/look-alike.toml: labels of one kind of misreading.

It is a class of one's own, as anybody may write it: `--monitor studies.look_alike:LabelsOfNumbers`. The study's other
one is examples/rivals/strict_tests.py.
"""

from examples.rivals.strict_tests import asked, by_prompt
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import Flags, OracleView
from vgrout.method.base import Monitor, Views
from vgrout.method.live_direction import Setup


class LabelsOfNumbers(Monitor):
    """True labels of the problems that compare numbers or letters with a constant. Of lengths and of neighbours in a
    list it knows nothing."""

    name = "labels_of_numbers"
    what = "true labels of one kind of misread comparison: a bound, never a method"
    sees_labels = True

    def __init__(self, problems: dict[str, Problem]) -> None:
        self.problems = problems

    @classmethod
    def make(cls, setup: Setup) -> "LabelsOfNumbers":
        return cls(by_prompt(setup))

    def flag(self, views: Views, step: int) -> list[Flags]:
        flags: list[Flags] = []
        for view in views:
            assert isinstance(view, OracleView)
            knows = kind(asked(view, self.problems)) == "number"
            flags.append(Flags(tuple(hacked and knows for hacked in view.hacked)))
        return flags


def kind(problem: Problem) -> str:
    """What its solution compares: number, length or neighbour; "" where its check reads it right."""
    if problem.reading == "right":
        return ""
    if "zip(" in problem.canonical:
        return "neighbour"
    return "length" if "len(w)" in problem.canonical else "number"
