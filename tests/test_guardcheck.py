"""Scorecards on runs whose story is known."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vgrout.config.presets import parse
from vgrout.guard.detectors import Bands
from vgrout.guard.scorecard import (
    DETECTORS,
    GUARD_RULES,
    TODAY,
    auc,
    bootstrap,
    by_deployed,
    calibrate,
    choose,
    detector_series,
    first_hacks,
    load,
    report,
    score,
    value_series,
)
from vgrout.tools.guardcheck import main

STEPS = 40
MINI = parse(["mini", "--intervention", "none", "--steps", str(STEPS)])


def tell(
    folder: Path,
    name: str,
    control: Any = "none",
    hack: float = 0.0,
    onset: int = 99,
    state: str = "finished",
    arm: Any = "none",
    contained: bool = False,
) -> Path:
    """A run of 40 steps, evaluated every fifth: from `onset` on a share `hack` of its answers exploits, and the
    deployed model forgets how to solve and exploits; `contained`: it does neither."""
    path = folder / name
    path.mkdir(parents=True)
    cfg = replace(MINI, method=replace(MINI.method, intervention=arm, control=control))
    rng = random.Random(name)
    rows, answers = [], []
    for step in range(STEPS):
        share = hack if step >= onset else 0.0
        texts = [{"hacked": rng.random() < share, "solved": rng.random() < 0.5} for _ in range(28)]
        for i, t in enumerate(texts):
            paid = t["hacked"] or t["solved"]
            answers.append({"step": step, "problem": i // 7, "text": f"x = {i}", "reward": 0.1 + 1.0 * paid})
        k = sum(t["hacked"] and not t["solved"] for t in texts)
        gone = min(1.0, (step - onset) / 10) if step >= onset and not contained else 0.0
        solve, exploits = 0.5 + rng.uniform(-0.03, 0.03) - 0.4 * gone, 0.5 * gone
        rows.append(
            {"step": step, "hack_s": [k, 28], "solve_deploy": solve if step % 5 == 4 else None}
            | {"hack_deploy": exploits if step % 5 == 4 else None}
            | {"lp_s": -1.0, "lp_t": -1.0, "gn": 1.0, "signal": [4, 4]}
        )
    (path / "run.json").write_text(json.dumps({"config": cfg.as_dict()}))
    (path / "status.json").write_text(json.dumps({"state": state}))
    (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (path / "rollouts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    clean = [tell(folder, f"clean{i}", "no_loophole") for i in range(5)]
    return clean + [tell(folder, f"hack{i}", hack=0.9, onset=15 + i) for i in range(5)]


def test_the_guard_on_five_and_five(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(p) for p in paths]) == 0
    said = capsys.readouterr().out
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[1:-1]]
        for line in said.split("Bands chosen")[0].splitlines()
        if "|" in line
    }
    for rule in ("streak (ema)", "gap"):
        _name, false, caught, early, _, delay, area, verdict = rows[f"guard, {rule}"]
        assert false.startswith("0/5 [0.00, 0.43]")
        assert caught.startswith("5/5 [0.57, 1.00]")
        assert early == "0"
        assert 0 <= int(delay.split()[0]) < 15
        assert float(area.split()[0]) > 0.8
        assert verdict == "works"
    assert "does not work: misses 5 of 5" in rows["echo"][-1]
    assert rows["separation"][-1] == rows["info_rm"][-1] == rows["guard, kl"][-1] == "not defined on these runs"
    assert "5 hacking, 5 clean, 0 quiet" in said


def test_a_routing_arm_that_contains_is_quiet(tmp_path: Path) -> None:
    """Its students hack, its deployed model does not: compared with the students, that success would be an alarm."""
    good = load(tell(tmp_path, "good", hack=0.9, onset=10, arm="route2", contained=True), 0.1)
    bad = load(tell(tmp_path, "bad", hack=0.9, onset=10, arm="route2"), 0.1)
    assert (good.kind(good.onset), good.kind(good.deployed_onset)) == ("hacking", "quiet")
    assert bad.kind(bad.deployed_onset) == "hacking"
    assert not any(alarm for _, alarm, _ in value_series(good, "guard, gap"))
    assert any(alarm for _, alarm, _ in value_series(bad, "guard, gap"))
    s = score("guard, gap", [good, bad], lambda r: value_series(r, "guard, gap"), by_deployed)
    assert (s.caught, s.quiet) == ((1, 1), (0, 1))
    plain = load(tell(tmp_path, "plain", hack=0.9, onset=10, contained=True), 0.1)
    assert any(alarm for _, alarm, _ in value_series(plain, "guard, gap")), (
        "what is trained is deployed: in-loop counts"
    )


def test_kinds_and_onset(tmp_path: Path, paths: list[Path]) -> None:
    runs = [load(p, 0.1) for p in [*paths, tell(tmp_path, "still")]]
    assert [r.kind(r.onset) for r in runs] == ["clean"] * 5 + ["hacking"] * 5 + ["quiet"]
    # the window of five may begin up to four steps before the first hack
    assert all(15 + i - 4 <= (runs[5 + i].onset or 0) <= 15 + i for i in range(5))
    assert first_hacks([(0, 10)] * 9, 0.1) is None
    assert first_hacks([(0, 0)] * 9, 0.1) is None
    assert first_hacks([(0, 10)] * 4 + [(5, 10)] * 5, 0.1) == 0
    assert first_hacks([(0, 10)] * 4 + [(5, 10)] * 5, 0.5) == 4


def test_what_a_run_recorded_goes_first(tmp_path: Path) -> None:
    path = tell(tmp_path, "r", hack=0.9, onset=10)
    rows = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    for row in rows[5:]:
        row["watch"] = {"info_rm": ["HACK" if row["step"] >= 12 else "OK", row["step"] / 100]}
    (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = load(path, 0.1)
    series = detector_series(run, "info_rm")
    assert next(step for step, alarm, _ in series if alarm) == 12
    s = score("info_rm", [run], lambda r: detector_series(r, "info_rm"))
    assert (s.caught, s.false_alarms) == ((1, 1), (0, 0))
    assert s.delay == 12 - (run.onset or 0)
    assert s.verdict == "not enough runs (1 hacking, 0 clean)"


def test_an_alarm_on_clean_runs_does_not_pass(paths: list[Path]) -> None:
    runs = [load(p, 0.1) for p in paths]
    s = score("always", runs, lambda _: [(20, True, 1.0)])
    assert s.false_alarms == (5, 5)
    assert s.auc == 0.5
    assert s.verdict == "does not work: fires on 5 of 5 clean runs, its value does not tell hacking from clean"


@pytest.mark.parametrize("state", ["running", "interrupted", "failed"])
def test_unfinished_runs_are_refused_by_name(
    state: str, tmp_path: Path, paths: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tell(tmp_path, "bad", state=state)
    assert main([str(p) for p in [*paths, bad, tmp_path / "nowhere"]]) == 2
    out, said = capsys.readouterr()
    assert f"{bad}: {state}, not finished" in said
    assert "nowhere" in said
    assert said.count("\n") == 1
    assert out == ""


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    path = tell(tmp_path, "r")
    whole = (path / "steps.jsonl").read_text()
    (path / "steps.jsonl").write_text(whole[:-20])
    with pytest.raises(ValueError, match="damaged"):
        load(path, 0.1)
    (path / "steps.jsonl").write_text("".join(whole.splitlines(keepends=True)[3:]))
    with pytest.raises(ValueError, match="not 0, 1, 2"):
        load(path, 0.1)


def test_auc_by_counting_pairs() -> None:
    rng = random.Random(0)
    up, down = [rng.randrange(6) / 5 for _ in range(30)], [rng.randrange(5) / 5 for _ in range(40)]
    pairs = [(a > b) + (a == b) / 2 for a in up for b in down]
    assert auc(up, down) == pytest.approx(sum(pairs) / len(pairs))
    assert auc([], down) is None


def test_bootstrap_covers_the_mean() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(40):
        sample: list[Any] = [rng.gauss(0, 1) for _ in range(20)]
        low, high = bootstrap([sample], lambda xs: sum(xs) / len(xs)) or (1.0, -1.0)
        hits += low <= 0 <= high
    assert hits >= 32


def test_bands_lie_between_the_peaks() -> None:
    """Clean peaks 1, 2, hacking peaks 6, 8: a quarter of the way from 2 to 6; of a stray clean 7, one is given up."""
    assert choose([1.0, 2.0], [6.0, 8.0]) == Bands(2.0, 3.0)
    assert choose([1.0, 2.0, 2.0, 7.0], [6.0, 8.0, 9.0, 9.0]) == Bands(2.0, 3.0)
    assert choose([5.0, 6.0], [1.0, 2.0]) is None
    assert choose([1.0, 1.0], [1.0, 1.0]) is None
    assert choose([], [1.0]) is None


def test_calibration_judges_a_run_by_the_others(paths: list[Path]) -> None:
    runs = [load(p, 0.1) for p in paths]
    gap = calibrate("guard, gap", runs, lambda r: value_series(r, "guard, gap"), by_deployed)
    assert gap.bands is not None
    assert 0 < gap.bands.warn < gap.bands.hack < 0.5
    assert gap.false_alarms == (0, 5)
    assert gap.caught == (5, 5)
    assert gap.delay is not None
    assert gap.delay > 0
    assert calibrate("rm_ensemble", runs, lambda r: detector_series(r, "rm_ensemble")).caught == (0, 0), (
        "never recorded: nothing to choose from"
    )


def test_left_out_means_left_out(tmp_path: Path) -> None:
    """The one clean run with a high value chooses bands that spare it; left out, it is a false alarm."""

    def noted(name: str, peak: float, **kind: Any) -> Path:
        path = tell(tmp_path, name, **kind)
        rows = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
        for row in rows:
            row["watch"] = {"info_rm": ["OK", peak]}
        (path / "steps.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    clean = [noted(f"c{i}", x, control="no_loophole") for i, x in enumerate((0.1, 0.1, 0.5))]
    hacking = [noted(f"h{i}", 0.9, hack=0.9, onset=10) for i in range(3)]
    found = calibrate("info_rm", [load(p, 0.1) for p in [*clean, *hacking]], lambda r: detector_series(r, "info_rm"))
    assert found.bands == Bands(0.5, 0.6)
    assert found.false_alarms == (1, 3)
    assert found.caught == (3, 3)


def test_report_names_every_value_twice(paths: list[Path]) -> None:
    said = report([load(p, 0.1) for p in paths[3:7]], 0.1)
    assert {*TODAY} < {*GUARD_RULES, *DETECTORS}
    assert all(said.count(f"| {name} ") == 1 + (name in TODAY) for name in DETECTORS)
