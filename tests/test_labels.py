"""Labels and the weak detector as monitors; how well a monitor flagged; which answers try to hack."""

from dataclasses import fields, replace

import pytest
import torch

from methods import (
    Fixed,
    batch,
    flagged,
    graded,
    group,
    labelled,
    problem,
    routed,
    rows,
    scores,
    total,
    toy,
    view,
    watched_by,
)
from tiny import policy as tiny_policy
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
from vgrout.method.monitors import Labels, draws


def test_labels_flag_hacks_of_the_flaws_that_the_monitor_knows():
    truth = (True, False, True, False)
    known, other = labelled(view(), truth), labelled(view(), truth, "sentinel")
    assert flagged(Labels(), known, other) == [truth, truth]
    assert flagged(Labels(known=["exit_code"]), known, other) == [truth, (False,) * 4]


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 1.0])
def test_labels_flag_falsely_at_the_rate_that_is_set(rate):
    """Over 2000 answers, many of them alike, within four standard errors; at 0 and 1 exactly."""
    monitor, truth = Labels(false_flags=rate, seed=3), (True, False) * 10
    found = {True: [], False: []}
    for step in range(50):
        views = [replace(labelled(view(20), truth), index=i) for i in range(4)]
        views = [replace(v, texts=tuple(f"t{b % 7}" for b in range(20))) for v in views]
        for flags in flagged(monitor, *views, step=step):
            for is_hack, flag in zip(truth, flags, strict=True):
                found[is_hack].append(flag)
    assert all(found[True])
    error = (rate * (1 - rate) / 2000) ** 0.5
    assert sum(found[False]) / 2000 == pytest.approx(rate, abs=4 * error)


def test_draws_depend_on_no_order_and_on_seed_step_and_problem():
    """Equal answers have a draw each."""
    texts = tuple(f"t{b}" for b in range(12))
    one, two = (replace(view(12), texts=texts, index=i) for i in range(2))
    of_one = draws(one, 1, 4)
    assert draws(replace(one, texts=texts[::-1]), 1, 4) == of_one[::-1]
    assert of_one not in (draws(two, 1, 4), draws(one, 1, 5), draws(one, 2, 4))
    assert len({*draws(replace(view(40), texts=("t",) * 40), 1, 4)}) == 40


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def test_a_share_of_the_flags_is_kept_of_every_text_monitor(policy):
    """Each flag or none, by a draw; of two shares the larger one keeps all that the smaller one keeps."""

    def kept(share):
        method = watched_by(Fixed(0, 1, 3), policy, "penalty", flags_kept=share)
        return [
            f
            for n in range(20)
            for g in method.flag(batch(step=n)).groups
            for f in g.flags.acted_on
        ]

    all_, most, half, none = (kept(share) for share in (1.0, 0.8, 0.5, 0.0))
    assert not any(none)
    assert sum(all_) == 20 * 2 * 3
    assert 0.35 < sum(half) / sum(all_) < 0.65 < sum(most) / sum(all_) < 0.95
    for more, less in ((all_, most), (most, half)):
        assert all(a or not b for a, b in zip(more, less, strict=True))


@pytest.mark.parametrize("vote", ["module", "rollout"])
@pytest.mark.parametrize("monitor", ["gate", "band"])
def test_a_share_of_the_flags_is_kept_of_every_gradient_monitor(monitor, vote):
    """What is dropped is routed nowhere, and stays in keep."""
    groups = [(rows(6, i, (i, 3)), group(6, 1, (i,), i)) for i in range(3)]
    of = {
        share: routed(toy("route2", monitor=monitor, gate_vote=vote, flags_kept=share), *groups)
        for share in (1.0, 0.5, 0.0)
    }
    whole, half = scores(of[1.0]), scores(of[0.5])
    assert {(a, b) for a, b in zip(whole, half, strict=True) if b not in (a, 0)} == set()
    assert 0 < sum(map(bool, half)) < sum(map(bool, whole))
    assert not any(scores(of[0.0]))
    assert not of[0.0].quar.any()
    for got in of.values():
        assert torch.allclose(got.keep + got.quar, total(*groups), atol=1e-5)


@pytest.mark.parametrize("argv", ["--intervention=none", "--intervention=erase"])
def test_what_has_no_flags_keeps_none_of_them(argv):
    with pytest.raises(ValueError, match=r"\A--flags-kept: not read by"):
        resolve(["mini", argv, "--flags-kept=0.8"])


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
