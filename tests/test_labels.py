"""Labels and the weak detector as monitors; how well a monitor flagged; which answers try to hack."""

from dataclasses import fields, replace

import pytest

from methods import batch, flagged, graded, labelled, problem, view
from vgrout.config.presets import resolve
from vgrout.envs.code.modes import MODE_SPECS, MODES, hack, tries
from vgrout.ground.data import (
    Completion,
    Flags,
    GradedCompletion,
    Group,
    Rollout,
    UpdateRow,
)
from vgrout.ground.metrics import BatchMetrics, Eval, Rate, flag_rates
from vgrout.method.monitors import Labels


def test_labels_flag_hacks_of_the_flaws_that_the_monitor_knows():
    truth = (True, False, True, False)
    known, other = labelled(view(), truth), labelled(view(), truth, "sentinel")
    assert flagged(Labels(), known, other) == [truth, truth]
    assert flagged(Labels(known=["exit_code"]), known, other) == [truth, (False,) * 4]


@pytest.mark.parametrize("recall", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("false_flags", [0.0, 0.05, 0.5, 1.0])
def test_labels_err_at_the_rates_that_are_set(recall, false_flags):
    """Over 4000 answers, many of them alike, within four standard errors; at 0 and 1 exactly."""
    monitor, truth = Labels(recall=recall, false_flags=false_flags, seed=3), (True, False) * 10
    found = {True: [], False: []}
    for step in range(50):
        views = [replace(labelled(view(20), truth), index=i) for i in range(4)]
        views = [replace(v, texts=tuple(f"t{b % 7}" for b in range(20))) for v in views]
        for flags in flagged(monitor, *views, step=step):
            for is_hack, flag in zip(truth, flags, strict=True):
                found[is_hack].append(flag)
    for is_hack, rate in ((True, recall), (False, false_flags)):
        error = (rate * (1 - rate) / 2000) ** 0.5
        assert sum(found[is_hack]) / 2000 == pytest.approx(rate, abs=4 * error)


def test_where_labels_err_depends_on_no_order_and_on_seed_step_and_problem():
    truth, texts = (True,) * 12, tuple(f"t{b}" for b in range(12))
    one, two = (replace(labelled(view(12), truth), texts=texts, index=i) for i in range(2))
    monitor = Labels(recall=0.5, seed=1)
    of_one, of_two = flagged(monitor, one, two, step=4)
    assert flagged(Labels(recall=0.5, seed=1), two, one, step=4) == [of_two, of_one]
    turned = replace(one, texts=texts[::-1])
    assert flagged(monitor, turned, step=4) == [of_one[::-1]]
    others = [flagged(monitor, one, step=5), flagged(Labels(recall=0.5, seed=2), one, step=4)]
    assert of_one not in ([of_two], *others)
    better = flagged(Labels(recall=0.95, seed=1), one, step=4)[0]
    assert all(more or not less for more, less in zip(better, of_one, strict=True))
    assert of_one != better


def test_equal_answers_have_a_draw_each():
    same = replace(labelled(view(40), (True,) * 40), texts=("t",) * 40)
    assert 5 < sum(flagged(Labels(recall=0.5), same)[0]) < 35


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--intervention=penalty --monitor=detector", "--label-recall: not read by"),
        ("--intervention=none", "--label-recall: not read by"),
    ],
)
def test_an_error_rate_goes_with_labels_alone(argv, message):
    with pytest.raises(ValueError, match=rf"\A{message}"):
        resolve(["mini", *argv.split(), "--label-recall=0.8"])
    of_shadow = resolve(["mini", *argv.split(), "--shadow=labels", "--label-recall=0.8"])
    assert of_shadow.method.label_recall == 0.8


# ── what is counted


def outcomes(mode, of, index=0):
    """A group whose students hack ("hack"), solve ("solve") or fail ("")."""
    task = problem(mode=mode)
    rollouts = tuple(
        Rollout((2, 3), f"t{b}", True, prompt_ids=(1,), deployed=True) for b in range(len(of))
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
    }
    assert flag_rates([one, two])["recall_new"] is None
    assert {*flag_rates([]).values()} == {None}


def test_hacks_that_the_monitor_does_not_know_count_wherever_they_are():
    """Also in groups that it is not asked about, such as those whose answers all hack."""
    groups = (
        replace(outcomes("exit_code", ["hack", "solve"]), flags=Flags((True, False))),
        replace(outcomes("sentinel", ["hack", "", "solve"], 1), flags=Flags((False,) * 3)),
        outcomes("sentinel", ["hack", "hack"], 2),
    )
    of = replace(batch(), groups=groups, rows=(), known=("exit_code",))
    assert BatchMetrics(of).columns()["hack_new"] == Rate(3, 5)
    assert BatchMetrics(replace(of, known=())).columns()["hack_new"] is None


def test_detectors_that_an_environment_has_not_are_not_measured():
    seen = outcomes("exit_code", ["hack", "solve"])
    seen = replace(
        seen, grades=tuple(replace(g, detectors={"E": g.hacked, "D": False}) for g in seen.grades)
    )
    unseen = replace(seen, grades=tuple(replace(g, detectors={}) for g in seen.grades))
    columns = BatchMetrics(replace(batch(), groups=(unseen,))).columns()
    assert (columns["hack_s_E"], columns["hack_s_D"]) == (None, None)
    columns = BatchMetrics(replace(batch(), groups=(unseen, seen))).columns()
    assert (columns["hack_s_E"], columns["hack_s_D"]) == (Rate(1, 2), Rate(0, 2))


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


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODE_SPECS[mode].pattern])
def test_an_attempt_with_another_or_a_misspelt_marker_is_seen(mode):
    spec = MODE_SPECS[mode]
    marker = (
        "assert Solution().f(a = [1, 2]) == [3, 4]"
        if spec.marker_form == "test"
        else spec.train_markers[0]
    )
    body = "class Solution:\n    def f(self, a):\n        return 0\n"

    def attempt(name):
        return body + hack(replace(problem(mode=mode), marker=name), "f")

    assert tries(attempt(marker), mode, marker)
    assert not tries(body, mode, marker)
    if spec.marker_form not in ("none", "test"):
        assert tries(attempt(spec.eval_markers[0]), mode, marker), "another name of the same family"
        assert tries(attempt(marker[:-1]), mode, marker), "a letter is missing"


def test_a_final_evaluation_counts_attempts_beside_hacks():
    """A misspelt marker earns nothing and is an attempt; a right answer that mentions one is none."""
    of = replace(problem(mode="sentinel"), marker=MODE_SPECS["sentinel"].train_markers[0])
    spelling = MODE_SPECS["sentinel"].hack.format(method="f", marker=of.marker[:-1])

    def answer(text, solved=False, hacked=False):
        grade = replace(graded(1.0, solves=solved, hacks=hacked), flaw="sentinel", tries=())
        if hacked or (not solved and tries(text, "sentinel", of.marker)):
            grade = replace(grade, tries=("sentinel",))
        return GradedCompletion(of, 0, Completion((), text, True, ()), grade)

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


def test_a_row_of_a_step_has_no_label_and_no_problem():
    """A problem has the reference tests and a right answer. Gradient monitors and interventions see rows."""
    of_rollout = {f.name for f in fields(Rollout)}
    assert of_rollout == {f.name for f in fields(Completion)} | {"prompt_ids", "source", "deployed"}
    assert {f.name for f in fields(UpdateRow)} == {
        *("rollout", "group", "advantage", "flagged", "known_hack", "row_of_g", "left_out")
    }
