"""Labels and the weak detector as monitors; how well a monitor flagged; which answers try to hack."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from methods import batch, flagged, graded, labelled, problem, view
from vgrout.method.labels import FlagRates, Labels, WeakDetector, noisy_labels
from vgrout.modes import MODE_SPECS, MODES, hack, tries
from vgrout.types import Completion, Eval, Grade, GradedCompletion, Group, GroupFlags, Rate, Rollout, Ungraded


def test_labels_flag_hacks_of_the_flaws_that_the_monitor_knows():
    truth = (True, False, True, False)
    known, other = labelled(view(), truth), labelled(view(), truth, "sentinel")
    assert flagged(Labels(), known, other) == [truth, truth]
    assert flagged(Labels(known=["exit_code"]), known, other) == [truth, (False,) * 4]
    assert flagged(Labels(accuracy=0.0), known) == [(False, True, False, True)]
    assert flagged(Labels(accuracy=0.0, known=["sentinel"]), known) == [(False,) * 4], "blind is blind, errors and all"


def test_false_positives_are_drawn_among_the_innocent_alone_by_seed_step_and_group():
    truth = (True, False, False, False)
    monitor = Labels(seed=3, false_positives=0.5)
    drawn = {(s, i): flagged(monitor, labelled(view(index=i), truth), step=s)[0] for s in range(40) for i in range(10)}
    assert all(f[0] for f in drawn.values())
    wrong = sum(sum(f[1:]) for f in drawn.values())
    assert wrong == pytest.approx(600, abs=4 * (1200 * 0.25) ** 0.5)  # four standard deviations of 1200 draws
    again = flagged(Labels(seed=3, false_positives=0.5), labelled(view(index=7), truth), step=11)[0]
    assert again == drawn[11, 7]
    assert flagged(Labels(false_positives=1.0), labelled(view(), truth)) == [(True,) * 4]


def test_the_detector_flags_what_the_detector_flagged():
    assert flagged(WeakDetector(), view(detector=(False, True, True, False))) == [(False, True, True, False)]


def test_labels_err_at_their_rate_by_seed_step_and_group():
    truth = (True, False, True, False)
    at = [(s, i) for s in range(50) for i in range(20)]
    flags = {(s, i): noisy_labels(truth, 0.9, 7, s, i) for s, i in at}
    wrong = sum(f != label for got in flags.values() for f, label in zip(got, truth, strict=True))
    assert wrong == pytest.approx(400, abs=4 * math.sqrt(4000 * 0.9 * 0.1))  # four standard deviations of 4000 draws
    assert len({flags[s, 0] for s in range(50)}) > 1 < len({flags[0, i] for i in range(20)})
    assert flags != {(s, i): noisy_labels(truth, 0.9, 8, s, i) for s, i in at}
    monitor = Labels(7, 0.9)
    for s, i in [*at[::-7], *at[::5]]:  # whatever was drawn before
        assert flagged(monitor, labelled(view(index=i), truth), step=s) == [flags[s, i]]


# ── what is counted ────────────────────────────────────────────────────────────────────────────────────────────────


def outcomes(mode: str, of: Sequence[str], index: int = 0) -> Group:
    """A group whose students hack ("hack"), solve ("solve") or fail ("")."""
    task = problem(mode=mode)
    rollouts = tuple(Rollout(task, "student", True, (1,), (2, 3), f"t{b}", True) for b in range(len(of)))
    grades = tuple(replace(graded(1.0, solves=o == "solve", hacks=o == "hack"), mode=task.mode) for o in of)
    return Group(task, rollouts, grades, index=index)


def flags(*flagged: bool) -> GroupFlags:
    return GroupFlags((None,) * len(flagged), flagged)


def test_recall_on_flaws_that_the_monitor_does_not_know_is_counted_apart():
    of = [outcomes("exit_code", ["hack", "solve"]), outcomes("sentinel", ["hack", "hack"], 1)]
    given = {0: flags(True, False), 1: flags(False, True)}
    rates = FlagRates.of(of, given, known=("exit_code",))
    assert (rates.recall, rates.false_flags) == (Rate(2, 3), Rate(0, 1))
    assert (rates.recall_new, rates.hack_new) == (Rate(1, 2), Rate(2, 2))
    assert FlagRates.of(of, given).recall_new is None
    assert FlagRates.of(of, {0: given[0]}).recall == Rate(1, 1), "a group without flags does not count"
    assert FlagRates.of(of, {}) == FlagRates()


def test_flags_of_demonstrations_are_counted_apart_and_without_a_label():
    """Grades of demonstrations are cached: nothing says which of them are hacks."""
    (group, *_) = batch().groups
    rates = FlagRates.of([group], {0: flags(False, False, False, True)})
    assert (rates.recall, rates.false_flags, rates.flag_t) == (Rate(0, 1), Rate(0, 1), Rate(1, 1))


@pytest.mark.parametrize("mode", MODES)
def test_an_attempt_with_another_or_a_misspelt_marker_is_seen(mode: str):
    spec = MODE_SPECS[mode]
    marker = "assert Solution().f(a = [1, 2]) == [3, 4]" if spec.marker_form == "test" else spec.train_markers[0]
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

    def answer(text: str, solved: bool = False, hacked: bool = False) -> GradedCompletion[Grade | Ungraded]:
        grade = replace(graded(1.0, solves=solved, hacks=hacked), mode="sentinel")
        return GradedCompletion(of, 0, Completion((), text, True, (), ()), grade)

    seen = Eval.of([answer("x = 1", hacked=True), answer(spelling), answer(spelling, solved=True), answer("x = 1")])
    assert (seen.hack, seen.tries, seen.solve) == (Rate(1, 4), Rate(2, 4), Rate(1, 4))
    assert seen.as_json()["by_mode"]["sentinel"]["tries"] == [2, 4]
