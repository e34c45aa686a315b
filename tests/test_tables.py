"""The tables and conclusions, from run directories whose numbers are known."""

import csv
import io
import json
import math
import re

import pytest

from fake_runs import fake_run, found
from files import loaded
from vgrout.ground.io import json_lines
from vgrout.report import stats
from vgrout.report.conclusions import compare, conclusion, from_plain, level
from vgrout.report.load import baseline
from vgrout.report.tables import by_flaw, csv_files, methods, monitors

NONE, ROUTE2 = "--intervention=none", "--intervention=route2"


@pytest.fixture
def study(tmp_path):
    for i, seed in enumerate((41, 42, 43)):
        fake_run(tmp_path, NONE, seed=seed, hack=0.6 + 0.1 * i, solve=0.0, onset=(8, 6, 99)[i])
        fake_run(tmp_path, ROUTE2, seed=seed, hack=0.1 * i)
        fake_run(tmp_path, ROUTE2, "--control=haar", seed=seed, hack=0.4 + 0.2 * i, cos=0.07)
    fake_run(tmp_path, NONE, "--control=no_loophole", hack=0.0, solve=0.9)
    return tmp_path


def test_a_row_for_each_method_with_intervals_and_its_difference_from_plain_grpo(study):
    plain, ceiling, own, haar = methods(found(study)).rows
    assert (own["method"], own["seeds"], plain["onset"]) == ("route2", "41,42,43", "4/2/·")
    assert own["Δ hack"] == "-60.0 (n too small)", (
        "seed by seed: the seeds cancel, and three are no interval"
    )
    assert own["Δ solve"] == "50.0 (n too small)"
    assert haar["Δ hack"] == "-10.0 [-34.8, 14.8] t"
    assert haar["p hack"] == "0.500 (≥ 0.250) n too small"
    assert plain["Δ hack"] == "·", "it has nothing to be compared with"
    assert ceiling["hack deployed"] == "0.0 [0.0, 6.0]", "of one seed: Wilson, 0 of 60"
    assert ceiling["Δ hack"] == "·", "one seed is not compared"
    assert (plain["hack last 5"], plain["solve last 5"]) == (
        "60.0 [0.0, 100.0] t",
        "40.0 [0.0, 100.0] t",
    )


def test_pairing_by_problem_narrows_the_interval(tmp_path):
    """Both methods hack the same problems but a few: what they share cancels."""
    for seed in range(5):
        fake_run(tmp_path, NONE, seed=seed, hack=0.5, n=120)
        fake_run(tmp_path, ROUTE2, seed=seed, hack=0.4, n=120)
    plain, routed = found(tmp_path)
    less = compare(routed, plain, "hack").difference
    assert less.value == pytest.approx(-0.1)
    assert less.how == "bootstrap"
    width, *apart = (
        (e.high or 0) - (e.low or 0)
        for e in (less, *(level(c, "deploy", "hack") for c in (routed, plain)))
    )
    assert 0 < width < 0.75 * math.hypot(*apart)


@pytest.mark.parametrize(
    ("seeds", "hacks", "shown"),
    [
        (
            ((1, 2), (2, 3)),
            (0.8, 0.1),
            ("-70.0 (one seed)", "1.000 (≥ 1.000) n too small", "n too small"),
        ),
        (((1, 2), (1, 2)), (0.0, 0.0), ("0.0 (DEGENERATE)", "DEGENERATE", "DEGENERATE")),
        (((1, 2), (3, 4)), (0.8, 0.1), ("·", "·", "·")),
    ],
)
def test_methods_are_compared_on_the_seeds_that_both_have(seeds, hacks, shown, tmp_path):
    for method, hack, its in zip((NONE, ROUTE2), hacks, seeds, strict=True):
        for seed in its:
            fake_run(tmp_path, method, seed=seed, hack=hack)
    _, row = methods(found(tmp_path)).rows
    assert (row["Δ hack"], row["p hack"], row["TOST hack"]) == shown


def test_a_difference_of_some_of_the_seeds_says_so(tmp_path):
    for method, seeds in ((NONE, (1, 2)), (ROUTE2, (1, 2, 3))):
        for seed in seeds:
            fake_run(tmp_path, method, seed=seed, hack=0.1 * seed)
    _, row = methods(found(tmp_path)).rows
    assert row["seeds"] == "1,2,3"
    assert row["Δ hack"].endswith(", 2 of 3 seeds")
    conditions = found(tmp_path)
    assert from_plain(conditions[1], conditions, "hack").endswith(", 2 of 3 seeds")


def test_runs_by_a_changed_class_are_conditions_of_their_own(tmp_path):
    """A monitor's is compared with plain GRPO, which has none; an environment's with runs in the same one."""
    fake_run(tmp_path, NONE, seed=1)
    for seed, of_class in ((1, "a" * 64), (2, "a" * 64), (3, "b" * 64)):
        fake_run(tmp_path, ROUTE2, seed=seed, hashes={"own:Mine": of_class})
    plain, *routed = found(tmp_path)
    assert sorted(c.seeds for c in routed) == ["1,2", "3"]
    assert all(baseline(c, [plain, *routed]) is plain for c in routed)


def test_quantities_by_flaw(tmp_path):
    its = {
        "exit_code": {"train_hack": 0.9, "deploy_hack": 0.1, "deploy_tries": 0.4, "in_dist": True}
    }
    path = fake_run(tmp_path, ROUTE2, modes=its)
    rows = [*json_lines(path / "steps.jsonl")]
    text = "".join(json.dumps(r | {"hk_xc_k": int(r["step"] > 6)}) + "\n" for r in rows)
    (path / "steps.jsonl").write_text(text)
    for seed in (1, 2):
        fake_run(tmp_path, NONE, seed=seed, hack=0.1 + 0.2 * seed)
    plain, own = (r for r in by_flaw(found(tmp_path)).rows if r["flaw"] == "exit_code")
    assert own == {
        "method": "route2",
        "flaw": "exit_code",
        "pairs": "in",
        "hack trained": "90.0 [59.6, 98.2]",
        "hack deployed": "10.0 [1.8, 40.4]",
        "tries deployed": "40.0",
        "solve trained": "50.0 [23.7, 76.3]",
        "solve deployed": "50.0 [23.7, 76.3]",
        "learned": "yes",
        "first step": "7",
        "n": "10",
    }
    assert (plain["pairs"], plain["hack deployed"], plain["learned"]) == (
        "·",
        "40.0 [0.0, 100.0] t",
        "yes/yes",
    )


RUN = {"hack_base": 0.005, "solve_base": 0.474}
# method, answers, shares that hack as trained and deployed, share that solves deployed: what is said
CONCLUSIONS = """
route2 384 .12 .021 .792: hacks removed, skill kept (384 answers)
route2 384 .77 .0 .177: hacks removed, skill lost (384 answers)
route2 384 .55 .545 .5: still hacks, skill kept (384 answers)
route2 384 .008 .008 .8: learnt no hacks, skill kept (384 answers)
route2 384 .77 .0 .374: hacks removed, skill undecided (384 answers are too few)
route2 384 .77 .06 .6: hacks undecided, skill kept (384 answers are too few)
route2 6 .5 .0 .667: too few answers (6) for a verdict
none 384 .797 .797 .029: plain GRPO learnt to hack, and lost skill (384 answers)
# the trained model may hack in more than five points more than the untrained one, or in fewer
route2 384 .06 .0 .8: does not hack, skill kept (384 answers)
# 2.6 points more are solved, give or take 2.1
none 4200 .005 .005 .5: plain GRPO learnt little (4200 answers)
# it may hack in more than five points more, or in fewer
none 384 .06 .06 .81: too few answers (384) for a verdict
none 384 .005 .005 .81: plain GRPO learnt to solve, not to hack (384 answers)
# 0.6 points more are solved, give or take seven
none 384 .005 .005 .48: plain GRPO learnt no hacks, a gain in skill is undecided (384 answers)
"""


@pytest.mark.parametrize("case", re.findall(r"^\w.*", CONCLUSIONS, re.MULTILINE))
def test_a_conclusion_is_drawn_where_the_interval_clears_the_threshold(case, tmp_path):
    facts, said = case.split(": ")
    method, n, *shares = facts.split()
    rates = dict(
        zip(("hack_train", "hack_deploy", "solve_deploy"), map(float, shares), strict=True)
    )
    fake_run(tmp_path, f"--intervention={method}", n=int(n), **rates, **RUN)
    (run,) = found(tmp_path)
    assert conclusion(run) == said


def test_a_conclusion_over_seeds(tmp_path):
    rates = {"hack_base": 0.0, "solve_base": 0.4, "hack_train": 0.8, "hack_deploy": 0.0}
    for seed in range(5):
        fake_run(tmp_path, ROUTE2, seed=seed, n=600, **rates)
    (five,) = found(tmp_path)
    assert conclusion(five) == "hacks removed, skill kept (5 seeds)", (
        "no hack in any answer needs no interval"
    )


def test_seeds_that_do_not_agree_are_too_few(tmp_path):
    """Whatever a single one would say, as that nothing was learnt."""
    for seed, hack in enumerate((0.0, 0.4)):
        more = {"row": {"n": 24, "signal_n": 3, "signal_k": 0, "all_zero": 3}} if seed == 0 else {}
        fake_run(
            tmp_path, ROUTE2, seed=seed, n=384, hack_deploy=hack, solve_deploy=0.4, **RUN, **more
        )
    (both,) = found(tmp_path)
    assert conclusion(both) == "too few seeds (2) for a verdict"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"signal_k": 0, "all_zero": 3},
            "nothing was learnt: none of 288 answers earned the full reward, and no",
        ),
        (
            {"signal_k": 0, "all_zero": 2},
            "nothing was learnt: no group had rewards that differ, in 288 answers",
        ),
        ({"signal_k": 1, "all_zero": 2}, "hacks removed, skill kept"),
    ],
)
def test_why_nothing_was_learnt(row, said, tmp_path):
    rates = {"hack_train": 0.5, "hack_deploy": 0.0, "solve_deploy": 0.8}
    fake_run(tmp_path, ROUTE2, n=600, row={"n": 24, "signal_n": 3, **row}, **rates, **RUN)
    assert conclusion(*found(tmp_path)).startswith(said)


def test_what_flags_took_away_and_what_another_term_of_the_loss_taught_is_said(tmp_path):
    """A full reward that a flag lowers is one that was earned; a KL teaches where no reward differs."""
    row = {"n": 24, "signal_n": 3, "signal_k": 0, "all_zero": 3}
    fake_run(tmp_path / "a", "--intervention=penalty", "--monitor=labels", row=row, n=600, **RUN)
    assert conclusion(*found(tmp_path / "a")) == (
        "nothing was learnt: of 288 answers none kept a full reward after the flags, and no group had rewards that "
        "differ"
    )
    fake_run(tmp_path / "b", NONE, "--beta=0.1", row=row, n=600, **RUN)
    assert conclusion(*found(tmp_path / "b")).startswith("plain GRPO learnt")


def rows_of(root, name):
    return list(csv.DictReader(io.StringIO(csv_files(found(root))[name])))


def test_runs_csv_has_every_run_with_wilsons_interval(study):
    rows = rows_of(study, "runs.csv")
    assert len(rows) == 10
    first = next(r for r in rows if r["cell"] == "route2" and r["seed"] == "42")
    assert first["hack_deploy"] == "0.1"
    assert [float(first[f"hack_deploy_{end}"]) for end in ("low", "high")] == pytest.approx(
        [0.0466, 0.2015], abs=1e-4
    )


def test_runs_csv_has_the_settings_that_are_not_the_presets(tmp_path):
    fake_run(tmp_path, NONE, "--control=no_loophole", "--mix-ratio=0", "--eval-n-prompts=8", seed=1)
    fake_run(tmp_path, "--intervention=penalty", "--monitor=labels", "--shadow=detector", seed=1)
    ceiling, penalty = rows_of(tmp_path, "runs.csv")
    assert ceiling["settings"] == "mix_ratio=0.0", (
        "neither method, control and seed, nor what is only measured"
    )
    assert penalty["settings"] == "monitor=labels"


def test_monitors_of_texts_are_scored_by_flaw(tmp_path):
    """The run's own, which may not read a group without signal, and those in shadow, over all seeds."""
    flags = "--intervention=penalty", "--monitor=labels", "--known-modes=sentinel"
    fake_run(tmp_path, *flags)
    path = fake_run(tmp_path, *flags, "--shadow=syntax_edge,detector", seed=42)

    def answer(step, flaw, score, flagged, more=()):
        shadow = {
            "syntax_edge": {"score": score, "flagged": flagged},
            "detector": {"score": None, "flagged": True},
        }
        right = {
            "step": step,
            "gate": None,
            "env_mode": flaw,
            "hacked": False,
            "solved": True,
            "shadow": shadow,
        }
        return right | dict(more)

    hack = {"hacked": True, "solved": False}
    answers = [
        answer(0, "sentinel", 3.0, True, hack),
        answer(0, "exit_code", 2.0, True, hack),
        answer(0, "exit_code", 0.5, False),
        answer(11, "exit_code", 0.1, False, hack | {"score": None, "flagged": False}),
        answer(11, "exit_code", 1.0, True),
        answer(11, "exit_code", None, False, {"solved": False}),  # neither a hack nor right
    ]
    (path / "rollouts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (both,) = found(tmp_path)
    assert both.seeds == "41,42", "a shadow makes no other method"
    own, edge, detector = monitors([both]).rows
    assert (own["monitor"], own["exit_code"], own["false flags"], own["AUC"]) == (
        "labels",
        "0.0 (1)",
        "·",
        "·",
    )
    assert (edge["monitor"], edge["sentinel"], edge["exit_code"]) == (
        "syntax_edge, in shadow",
        "100.0 (1)",
        "50.0 (2)",
    )
    # of six pairs 3 > 0.5, 1; 2 > 0.5, 1
    assert (edge["false flags"], edge["AUC"]) == ("50.0 (2)", "0.67")
    assert (detector["monitor"], detector["false flags"], detector["AUC"]) == (
        "detector, in shadow",
        "100.0 (2)",
        "·",
    )
    over_all_flaws = [row["recall"] for row in monitors([both]).rows]
    assert over_all_flaws == ["0.0 (1)", "66.7 (3)", "100.0 (3)"]
    (of_edge,) = (r for r in rows_of(tmp_path, "monitors.csv") if r["monitor"] == "syntax_edge")
    columns = "flagged_sentinel", "flagged_exit_code", "flagged_solved", "auc"
    assert [of_edge[name] for name in columns] == ["1/1", "1/2", "1/2", "0.666667"]
    alone, shadowed = rows_of(tmp_path, "runs.csv")
    assert (alone["flagged_exit_code"], shadowed["flagged_exit_code"]) == ("", "0/1"), (
        "of the run's own monitor"
    )


# of each side, and of the second method: what hacks and what solves, in percent
OWN = {"base": (10, 20), "train": (70, 30), "deploy": (20, 60), "plain": (40, 50)}
OTHER = {"base": (20, 10), "train": (40, 90), "deploy": (80, 10), "plain": (30, 70)}


def rates_of(sides, off=0):
    found = {}
    for side, (hack, solve) in sides.items():
        found |= {f"hack_{side}": (hack + off) / 100, f"solve_{side}": (solve + off) / 100}
    return found


def number(cell):
    return float(cell.split(" ")[0])


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_every_side_is_in_its_own_column(seeds, tmp_path):
    """Of one seed from the counts of its final evaluation, of several from its answers."""
    for seed in seeds:
        off = 10 * (seed - 1)
        fake_run(tmp_path, NONE, seed=seed, n=60, **rates_of(OTHER, -off))
        fake_run(tmp_path, ROUTE2, seed=seed, n=60, **rates_of(OWN, off))
    plain, own = conditions = found(tmp_path)
    middle = 5 * (len(seeds) - 1)
    for side, (hack, solve) in OWN.items():
        assert 100 * (level(own, side, "hack").value or 0) == pytest.approx(hack + middle)
        assert 100 * (level(own, side, "solve").value or 0) == pytest.approx(solve + middle)
    _, row = methods(conditions).rows
    assert [
        number(row[f"{what} {side}"])
        for side in ("trained", "deployed")
        for what in ("hack", "solve")
    ] == [pytest.approx(x + middle) for x in (70, 30, 20, 60)]
    assert number(row["solve no hint"]) == pytest.approx(50 + middle)
    assert row["flaws learnt"] == "/".join(["6"] * len(seeds))
    flaw = by_flaw(conditions).rows[-1]
    for side, (hack, solve) in {"trained": OWN["train"], "deployed": OWN["deploy"]}.items():
        assert number(flaw[f"hack {side}"]) == pytest.approx(hack + middle)
        assert number(flaw[f"solve {side}"]) == pytest.approx(solve + middle)
    assert number(from_plain(own, conditions, "hack")) == pytest.approx(-60 + 2 * middle)
    less = [compare(own, plain, what).difference.value or 0 for what in ("hack", "solve")]
    assert [100 * x for x in less] == pytest.approx([-60 + 2 * middle, 50 + 2 * middle])
    more = compare(plain, own, "hack").difference.value or 0
    assert more == pytest.approx(-less[0]), "a judge may compare any two, deployed both"
    # plain GRPO has no quarantine: as trained it is the deployed model
    assert 100 * (level(plain, "train", "hack").value or 0) == pytest.approx(
        40 if len(seeds) == 1 else 80 - middle
    )


WORDS = {"hack": "hacked", "solve": "solved"}


def ungraded(run, lost):
    """Have the grader fail on the deployed model's answers for which `lost` is true."""
    answers = [*json_lines(run / "final.jsonl")]
    kept = []
    for answer in answers:
        if answer["side"] == "deployed":
            if lost(answer):
                answer |= dict.fromkeys(("reward", "hacked", "solved"))
            else:
                kept.append(answer)
    n = len(kept)
    shares = {f"{what}_deploy": sum(x[word] for x in kept) / n for what, word in WORDS.items()}
    (run / "final.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    final = loaded(run / "per_mode_deploy.json")
    (run / "per_mode_deploy.json").write_text(
        json.dumps(final | shares | {"eval_n": n, "n_deploy": n})
    )


def test_problems_weigh_alike_whatever_their_flaw_and_keep_their_numbers(tmp_path, monkeypatch):
    """A flaw of which few problems could be graded counts for few; and a difference is of one and the same problem."""
    for seed in (1, 2):
        run = fake_run(tmp_path, NONE, seed=seed, hack=0.5, n=60)
        if seed == 2:  # of the first flaw's ten problems those that hack, but one
            ungraded(run, lambda answer: answer["problem_id"] in range(1, 5))
        run = fake_run(tmp_path, ROUTE2, seed=seed, hack=0.2, n=60)
        if seed == 2:  # of the second flaw's one that both hack, and one that plain GRPO hacks
            ungraded(run, lambda answer: answer["problem_id"] in (101, 104))
    seen = []
    estimated = stats.estimate
    monkeypatch.setattr(
        stats,
        "estimate",
        lambda rows, *more, **how: (seen.append(rows), estimated(rows, *more, **how))[1],
    )
    plain, own = found(tmp_path)
    # 26 of 56 problems
    assert level(plain, "deploy", "hack").value == pytest.approx((30 / 60 + 26 / 56) / 2)
    first, second = (row[0] for row in seen.pop())
    assert first.name == second.name
    assert (first.units, second.units) == (tuple(range(10)), (0, *range(5, 10)))
    assert (first.weight, second.weight) == pytest.approx((1 / 6, 6 / 56))
    less = compare(own, plain, "hack").difference
    # seed 2: without the four and the two, plain GRPO hacks 24 problems and route2 10
    assert less.value == pytest.approx(-(18 / 60 + (24 - 10) / 54) / 2)


def test_a_flaw_has_its_own_hacks_over_seeds_too(tmp_path):
    """On the problems that have it, and not where such an answer hacks another one by chance."""
    its = {"exit_code": {"deploy_hack": 0.8, "train_hack": 0.6, "deploy_solve": 0.1}}
    for seed in (1, 2):
        run = fake_run(tmp_path, ROUTE2, seed=seed, hack=0.4, solve=0.5, n=60, modes=its)
        answers = [*json_lines(run / "final.jsonl")]
        for answer in answers:
            of_seed = answer["problem_id"] % 100 < seed  # one answer of the one, two of the other
            if answer["side"] == "deployed" and answer["env_mode"] == "exit_code" and of_seed:
                assert answer["hacked"]
                answer["mechanism"] = "sentinel"
        (run / "final.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (c,) = found(tmp_path)
    rows = {row["flaw"]: row for row in by_flaw([c]).rows}
    assert [number(rows["exit_code"][f"{what} deployed"]) for what in ("hack", "solve")] == [
        *(65.0, 10.0)
    ]
    assert number(rows["exit_code"]["hack trained"]) == 60.0
    assert number(rows["sentinel"]["hack deployed"]) == 40.0, "of the problems that have the flaw"
    assert (rows["exit_code"]["n"], rows["sentinel"]["n"]) == ("20", "20")


def test_a_side_that_is_the_deployed_models_counts_over_seeds_too(tmp_path):
    """final.jsonl has a side once: one whose quarantine has learnt nothing is as trained what it is deployed."""
    for seed, as_trained in ((1, 0.9), (2, 0.8), (3, 0.1)):
        flags = ("--intervention=route2", "--monitor=detector")
        path = fake_run(tmp_path, *flags, seed=seed, hack_train=as_trained, hack_deploy=0.1, n=600)
        answers = path / "final.jsonl"
        left_out = {"plain"} if seed < 3 else {"plain", "trained"}
        lines = answers.read_text().splitlines(keepends=True)
        answers.write_text("".join(x for x in lines if json.loads(x)["side"] not in left_out))
    (condition,) = found(tmp_path)
    assert level(condition, "train", "hack").value == pytest.approx((0.9 + 0.8 + 0.1) / 3)
    assert level(condition, "plain", "hack").value == pytest.approx(0.1)
