"""Labels and the weak detector as monitors; how well a monitor flagged; which answers try to hack."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from methods import batch, flagged, graded, labelled, problem, view
from vgrout.data import Completion, Flags, Grade, GradedCompletion, Group, Rollout, Ungraded
from vgrout.envs.code.modes import MODE_SPECS, MODES, hack, tries
from vgrout.method.monitors import Labels
from vgrout.metrics import BatchMetrics, Eval, Rate, flag_rates


def test_labels_flag_hacks_of_the_flaws_that_the_monitor_knows():
    truth = (True, False, True, False)
    known, other = labelled(view(), truth), labelled(view(), truth, "sentinel")
    assert flagged(Labels(), known, other) == [truth, truth]
    assert flagged(Labels(known=["exit_code"]), known, other) == [truth, (False,) * 4]


# ── what is counted


def outcomes(mode: str, of: Sequence[str], index: int = 0) -> Group:
    """A group whose students hack ("hack"), solve ("solve") or fail ("")."""
    task = problem(mode=mode)
    rollouts = tuple(
        Rollout(task, "student", True, (1,), (2, 3), f"t{b}", True) for b in range(len(of))
    )
    grades = tuple(
        replace(graded(1.0, solves=o == "solve", hacks=o == "hack"), flaw=task.mode) for o in of
    )
    return Group(task, rollouts, grades, index=index)


def test_recall_on_flaws_that_the_monitor_does_not_know_is_counted_apart():
    one = outcomes("exit_code", ["hack", "solve"]), Flags((True, False))
    two = outcomes("sentinel", ["hack", "hack"], 1), Flags((False, True))
    assert flag_rates([one, two], known=("exit_code",)) == {
        "recall": Rate(2, 3),
        "false_flags": Rate(0, 1),
        "flag_t": Rate(0, 0),
        "recall_new": Rate(1, 2),
        "hack_new": Rate(2, 2),
    }
    assert flag_rates([one, two])["recall_new"] is None
    assert {*flag_rates([]).values()} == {None}


def test_only_groups_that_a_monitor_looked_at_count():
    groups = outcomes("exit_code", ["hack", "solve"]), outcomes("sentinel", ["hack", "hack"], 1)
    of = replace(batch(), groups=groups)
    assert BatchMetrics(of).columns()["recall"] is None
    assert BatchMetrics(of.with_flags({0: Flags((True, False))})).columns()["recall"] == Rate(1, 1)


def test_flags_of_demonstrations_are_counted_apart_and_without_a_label():
    """Grades of demonstrations are cached: nothing says which of them are hacks."""
    rates = flag_rates([(batch().groups[0], Flags((False, False, False, True)))])
    assert (rates["recall"], rates["false_flags"], rates["flag_t"]) == (
        Rate(0, 1),
        Rate(0, 1),
        Rate(1, 1),
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_with_another_or_a_misspelt_marker_is_seen(mode: str):
    spec = MODE_SPECS[mode]
    marker = (
        "assert Solution().f(a = [1, 2]) == [3, 4]"
        if spec.marker_form == "test"
        else spec.train_markers[0]
    )
    body = "class Solution:\n    def f(self, a):\n        return 0\n"

    def attempt(name: str) -> str:
        return body + hack(mode, "f", name)

    assert tries(attempt(marker), mode, marker)
    assert not tries(body, mode, marker)
    if spec.marker_form not in ("none", "test"):
        assert tries(attempt(spec.eval_markers[0]), mode, marker), "another name of the same family"
        assert tries(attempt(marker[:-1]), mode, marker), "a letter is missing"


def test_a_final_evaluation_counts_attempts_beside_hacks():
    """A misspelt marker earns nothing and is an attempt; a right answer that mentions one is none."""
    of = replace(problem(mode="sentinel"), marker=MODE_SPECS["sentinel"].train_markers[0])
    spelling = MODE_SPECS["sentinel"].hack.format(method="f", marker=of.marker[:-1])

    def answer(
        text: str, solved: bool = False, hacked: bool = False
    ) -> GradedCompletion[Grade | Ungraded]:
        grade = replace(graded(1.0, solves=solved, hacks=hacked), flaw="sentinel", tries=())
        if hacked or (not solved and tries(text, "sentinel", of.marker)):
            grade = replace(grade, tries=("sentinel",))
        return GradedCompletion(of, 0, Completion((), text, True, (), ()), grade)

    seen = Eval.of(
        [
            answer("x = 1", hacked=True),
            answer(spelling),
            answer(spelling, solved=True),
            answer("x = 1"),
        ],
        MODES,
    )
    assert (seen.hack, seen.tries, seen.solve) == (Rate(1, 4), Rate(2, 4), Rate(1, 4))
    assert seen.as_json()["by_mode"]["sentinel"]["tries"] == [2, 4]
