"""Names of earlier versions: refused where a person gives them, read under today's name where a file has them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake_run
from vgrout.config.checks import flag
from vgrout.config.method import CONTROLS, INTERVENTIONS
from vgrout.config.presets import flag_names, parse
from vgrout.config.renamed import GONE, NEEDLESS, RENAMED, Renamed, current_hashes
from vgrout.config.run import from_dict, identity
from vgrout.report.runs import cells, load
from vgrout.sweep.ledger import Ledger
from vgrout.sweep.study_file import load_study_file
from vgrout.types import Rate

GIVEN = [r for r in RENAMED if r.of != "hash"]  # what a person can give
IDS = [f"{r.of} {r.old}" for r in GIVEN]
# Flags that use every name of today, and what they were called.
TODAY = [
    ["--report-detectors=C,E", "--packing=padded", "--intervention=none"],
    ["--intervention=route2", "--known-hacks-teacher-only", "--control=none"],
    ["--intervention=route2", "--random-flags"],
    ["--intervention=route", "--control=deploy_quarantine"],
    ["--intervention=route2", "--rebaseline"],
    ["--intervention=screen", "--monitor=pmi", "--monitor-threshold=known_correct", "--known-correct=mine.json"],
    ["--intervention=erase", "--v-hack-k=3"],
    ["--intervention=none", "--control=advantage_mod", "--vhack-pairs-path=mine.json"],
]


def old_settings(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as the version before the renaming wrote it. It called its arms as today in run.json."""
    names = {r.new: r.old for r in RENAMED if r.of == "setting" and not r.said}
    values = {(r.of, r.new): r.old for r in RENAMED if not r.said and r.of not in ("setting", "hash", "intervention")}
    return {
        group: {names.get(n, n): values.get((n, v), v) if isinstance(v, str) else v for n, v in of.items()}
        if isinstance(of, dict)
        else of
        for group, of in (config | {"method": old_arm(config["method"])}).items()
    }


def old_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Who is flagged and what is done about it, when the two were controls, gates and baselines; and the settings of
    the arms that are gone."""
    out = {k: v for k, v in arm.items() if k not in YOUNG}
    out |= {"rebaseline": "on" if arm["rebaseline"] else "usual", "own_streams": "usual", "flagged_penalty": 0.0}
    monitor, form = arm["monitor"], arm["quarantine"]
    out |= {"route2_gate": "pairs" if monitor == "band" else "tau"}
    out |= {"quarantine_block": int(form.removeprefix("block:")) if form.startswith("block:") else None}
    if arm["random_flags"]:
        out["control"] = "mass_matched"
    elif arm["intervention"] in ("penalty", "screen") and monitor != "labels":
        out["monitor"] = monitor  # was none yet
    elif arm["intervention"] in ("penalty", "screen"):
        out |= {"control": {"penalty": "gt_penalty", "screen": "gt_screening"}[arm["intervention"]]}
        out["intervention"] = "none"
    elif monitor == "labels":
        out["control"] = "oracle"
    return out


YOUNG = (
    *("monitor", "random_flags", "label_false_positives", "known_modes", "seed_monitor", "quarantine_threshold"),
    *("quarantine_diet", "quarantine_share", "saturated_groups", "gate_vote", "gate_modules", "quarantine"),
)


def said_by_parser(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(["mini", *argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_new_names_are_there_and_the_old_ones_are_not() -> None:
    for r in GIVEN:
        if r.of == "setting":
            assert flag(r.new) in flag_names()
            assert flag(r.old) not in flag_names()
    for of, names in (("intervention", INTERVENTIONS), ("control", CONTROLS)):
        assert all((r.said or r.new in names) and r.old not in names for r in RENAMED if r.of == of)


@pytest.mark.parametrize("r", GIVEN, ids=IDS)
@pytest.mark.long
def test_an_old_name_on_the_command_line_exits_2_and_names_the_new_one(
    r: Renamed, capsys: pytest.CaptureFixture[str]
) -> None:
    if r.of == "setting":
        spelt = [[flag(r.old)], [flag(r.old), "x"], [f"{flag(r.old)}=x"], [f"--{r.old}"], [f"--no-{flag(r.old)[2:]}"]]
        expected = f"E {flag(r.old)}: renamed; say {r.said or flag(r.new)}\n"
    else:
        spelt = [[flag(r.of), r.old], [f"{flag(r.of)}={r.old}"], [f"--{r.of}={r.old}"]]
        expected = f"E {flag(r.of)} {r.old}: renamed; say {r.said or f'{flag(r.of)} {r.new}'}\n"
    for argv in spelt:
        assert said_by_parser(argv, capsys) == expected
        assert said_by_parser(["--lr", "0.1", *argv], capsys) == expected


@pytest.mark.parametrize(("of", "old"), GONE)
def test_what_is_gone_exits_2_on_the_command_line_and_says_what_does_it_today(
    of: str, old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"E {flag(of)} {old}: is gone; say {GONE[of, old]}\n"
    for argv in ([flag(of), old], [f"{flag(of)}={old}"], ["--lr", "0.1", f"--{of}={old}", "--steps=3"]):
        assert said_by_parser(argv, capsys) == expected
    parse(["mini", *GONE[of, old].split()])


@pytest.mark.parametrize("name", NEEDLESS)
def test_a_setting_that_nothing_needs_exits_2_and_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([flag(name), "x"], [f"{flag(name)}=x"], [f"--{name}=0"], [f"--no-{flag(name)[2:]}"]):
        assert said_by_parser(argv, capsys) == f"E {flag(name)}: not needed, {NEEDLESS[name]}; leave it out\n"


def test_a_word_that_was_renamed_elsewhere_is_none_of_a_flag_s_business() -> None:
    assert parse(["mini", "--intervention", "none", "--out-tag", "anchors"]).run.out_tag == "anchors"


def test_the_program_refuses_before_it_loads_torch() -> None:
    code = (
        "import sys, vgrout.train\n"
        "try: sys.exit(vgrout.train.main(sys.argv[1:]))\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "mini", "--half-a", "E"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "E --half-a: renamed; say --report-detectors\n"


@pytest.mark.parametrize("r", GIVEN, ids=IDS)
@pytest.mark.parametrize("listed", [False, True])
def test_an_old_name_in_a_study_file_is_refused_with_file_and_table(r: Renamed, listed: bool, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    value = '["both", "{0}"]' if listed else '"{0}"'
    key, value = (r.old, value.format("x")) if r.of == "setting" else (r.of, value.format(r.old))
    path.write_text(f'preset = "mini"\nseeds = [1]\n[[arms]]\nname = "mine"\n{key.replace("_", "-")} = {value}\n')
    with pytest.raises(ValueError, match="renamed") as refused:
        load_study_file(path)
    assert str(refused.value) == f"{path}: [[arms]] 1 (mine): {r.line()}"


@pytest.mark.parametrize(("of", "old"), GONE)
@pytest.mark.parametrize("listed", [False, True])
def test_what_is_gone_is_refused_in_a_study_file_with_file_and_table(
    of: str, old: str, listed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "study.toml"
    value = f'["none", "{old}"]' if listed else f'"{old}"'
    path.write_text(f'preset = "mini"\nseeds = [1]\n[[arms]]\nname = "mine"\n{of} = {value}\n')
    with pytest.raises(ValueError, match="is gone") as refused:
        load_study_file(path)
    assert str(refused.value) == f"{path}: [[arms]] 1 (mine): {flag(of)} {old}: is gone; say {GONE[of, old]}"


@pytest.mark.parametrize("name", NEEDLESS)
def test_a_setting_that_nothing_needs_is_refused_in_a_study_file_with_file_and_table(name: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(f'preset = "mini"\nseeds = [1]\n[common]\n{name.replace("_", "-")} = 1\n[[arms]]\nlr = 0.1\n')
    with pytest.raises(ValueError, match="not needed") as refused:
        load_study_file(path)
    assert str(refused.value) == f"{path}: [common]: {flag(name)}: not needed, {NEEDLESS[name]}; leave it out"


@pytest.mark.parametrize(("of", "old"), GONE)
def test_a_run_json_of_what_is_gone_is_refused_with_the_same_line(of: str, old: str) -> None:
    before = old_settings(parse(["mini", "--intervention=route2"]).as_dict())
    before["method"] |= {of: old, "reader_threshold": "anchors", "flagged_penalty": 0.5}
    with pytest.raises(ValueError, match="is gone") as refused:
        from_dict(before)
    assert str(refused.value) == f"{flag(of)} {old}: is gone; say {GONE[of, old]}"


@pytest.mark.parametrize("arm", [["--intervention=none"], ["--intervention=route2"]])
@pytest.mark.parametrize(("was", "today"), [("usual", False), ("off", False), ("on", True), (False, False)])
def test_settings_that_are_gone_or_have_other_values_leave_a_living_arm_as_it_is(
    arm: list[str], was: str | bool, today: bool
) -> None:
    cfg = parse(["mini", *arm, *(["--rebaseline"] if today and "route2" in arm[0] else [])])
    before = cfg.as_dict()
    before["method"] |= {"rebaseline": was}
    for own in ("usual", "off"):
        before["method"] |= {"own_streams": own, "flagged_penalty": 0.0}
        assert from_dict(before) == cfg


@pytest.mark.parametrize("own", [{"own_streams": "on"}, {"flagged_penalty": 0.5}])
def test_a_living_arm_under_a_setting_that_is_gone_is_refused(own: dict[str, Any]) -> None:
    before = parse(["mini", "--intervention=route2"]).as_dict()
    before["method"] |= own
    with pytest.raises(ValueError, match=f"unknown settings {next(iter(own))}; the run was made by another version"):
        from_dict(before)


@pytest.mark.parametrize("argv", TODAY, ids=[" ".join(argv) for argv in TODAY])
def test_a_run_json_of_before_is_the_same_run(argv: list[str]) -> None:
    cfg = parse(["mini", *argv])
    before = old_settings(cfg.as_dict())
    assert from_dict(before) == cfg
    assert identity(from_dict(before)) == identity(cfg)
    assert {"half_a", "update_layout"} <= {name for of in before.values() if isinstance(of, dict) for name in of}


def test_hashes_of_before_are_compared_under_todays_key() -> None:
    assert current_hashes({"anchors": "a", "pairs": None}) == {"known_correct": "a", "pairs": None}


def age(run: Path) -> None:
    """Turn the files of a run into those of the version before."""
    arms = {r.new: r.old for r in RENAMED if r.of == "intervention"}
    record, final = (json.loads((run / name).read_text()) for name in ("run.json", "per_mode_deploy.json"))
    config = old_settings(record["config"])
    controls = {"deploy_quarantine": "ablate_kept"}
    control = config["method"]["control"]
    if (accuracy := config["method"]["label_accuracy"]) != 1:
        control += f"_acc{accuracy:g}"
    record |= {"config": config, "control": controls.get(control, control)}
    record["hashes"] = {"anchors" if k == "known_correct" else k: v for k, v in record["hashes"].items()}
    arm = config["method"]["intervention"]
    final |= {"arm": arms.get(arm, arm), "control": record["control"]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "per_mode_deploy.json").write_text(json.dumps(final))


@pytest.mark.parametrize(
    ("flags", "title"),
    [
        (["--intervention=none"], "none"),
        (["--intervention=erase"], "erase"),
        (["--intervention=route", "--control=deploy_quarantine"], "route · deploy_quarantine"),
        (["--intervention=route2", "--random-flags"], "route2 · random_flags"),
        (["--intervention=route2", "--monitor=band"], "route2 (pair band)"),
        (["--intervention=route2", "--monitor=labels"], "route2 (labels)"),
        (["--intervention=penalty", "--monitor=labels", "--label-accuracy=0.9"], "penalty (labels_acc0.9)"),
        (["--intervention=screen", "--monitor=pmi", "--monitor-threshold=known_correct"], "screen (pmi)"),
        (["--intervention=route2", "--rebaseline"], "route2"),
    ],
)
def test_runs_of_before_and_of_today_are_one_cell_of_a_report(flags: list[str], title: str, tmp_path: Path) -> None:
    hashes = {"known_correct": "1abcdef01"}
    old, new = (fake_run(tmp_path, *flags, seed=seed, hashes=hashes) for seed in (1, 2))
    age(old)
    assert "anchors" in (old / "run.json").read_text()
    assert "route2_gate" in (old / "run.json").read_text()
    assert [(c.title, c.seeds) for c in cells(load([old, new]).runs)] == [(title, "1,2")]


def test_runs_of_an_arm_that_is_gone_are_read_by_the_settings_that_it_had(tmp_path: Path) -> None:
    """It learnt with streams of its own and a baseline of its own: without either it is another cell."""
    usual = {"own_streams": "usual", "rebaseline": "usual", "flagged_penalty": 0.0}
    parts = [{"own_streams": "off"}, {"rebaseline": "off"}, {"flagged_penalty": 0.5}]
    for own in ({}, *parts):
        path = fake_run(tmp_path, "--intervention=screen", "--monitor=pmi", seed=1)
        record, final = (json.loads((path / name).read_text()) for name in ("run.json", "per_mode_deploy.json"))
        record["config"]["method"] |= {"intervention": "pmi", "monitor": "usual", **usual, **own}
        (path / "run.json").write_text(json.dumps(record))
        (path / "per_mode_deploy.json").write_text(json.dumps(final | {"arm": "pmi"}))
        line = {"score": 2.0, "flagged": True, "exploited": True, "gt_correct": False, "env_mode": "sentinel"}
        (path / "rollouts.jsonl").write_text(json.dumps(line | {"problem_id": 1}) + "\n")
    runs = load([tmp_path]).runs
    titles = ["pmi", *(f"pmi ({name} {value})" for own in parts for name, value in own.items())]
    assert sorted(c.title for c in cells(runs)) == sorted(titles)
    assert all(run.gates == [(2.0, True)] and run.flags == {"sentinel": Rate(1, 1)} for run in runs)


def test_a_sweep_finds_a_run_of_before(tmp_path: Path) -> None:
    flags = ("--intervention=route2", "--random-flags")
    run = fake_run(tmp_path, *flags, hashes={"known_correct": "a"})
    age(run)
    ledger = Ledger(tmp_path)
    ledger.refresh()
    wanted = identity(parse(["mini", *flags]))
    found = ledger.find(wanted, {"known_correct": "a"})
    assert found is not None
    assert found.path == run
    assert ledger.find(wanted, {"known_correct": "edited since"}) is None
