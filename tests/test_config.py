"""Flags: the committed list, the presets, and one-line refusals before anything is loaded."""

import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

import vgrout.__main__
from vgrout import losses
from vgrout.config.checks import check, flag, rule_of, setting
from vgrout.config.loss import LOSSES, LossConfig, LossName
from vgrout.config.method import CONTROLS, INTERVENTIONS, MONITORS, MethodConfig
from vgrout.config.presets import EVERYDAY, METHODS, PRESETS, flag_names, parse, resolve, resumed
from vgrout.config.run import GROUPS, Config, from_dict
from vgrout.data import organism
from vgrout.model import source
from vgrout.runs.preflight import first_lines, preflight

FLAGS = Path(__file__).with_name("flags.txt")


def test_the_flag_list_is_a_decision() -> None:
    """Adding a flag means adding a line to flags.txt, where a reader of the diff sees it."""
    assert FLAGS.read_text().split() == flag_names()


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The output of a command line that exits at once."""
    with pytest.raises(SystemExit) as stop:
        parse([*argv])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_all_has_every_flag_and_every_name_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(printed(capsys, "mini", "--help-all").replace("│", " ").split())
    assert not [flag for flag in flag_names() if flag not in shown]
    rows = (*INTERVENTIONS.items(), *MONITORS.items(), *CONTROLS.items(), *LOSSES.items())
    lines = {name: row.what for name, row in rows} | {name: what for name, (what, _) in METHODS.items()}
    assert not [name for name, what in lines.items() if f"{name}: {what}" not in shown]


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_help_is_one_screen_of_everyday_flags(
    preset: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed(capsys, *([preset] if preset else []), "--help")
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n") <= 60
    monkeypatch.setenv("COLUMNS", "100")
    assert printed(capsys, *([preset] if preset else []), "--help").count("\n") <= 45
    assert {*re.findall(r"^\W\W?(--[a-z][a-z-]+)", shown, re.M)} == set(map(flag, EVERYDAY))
    assert {*map(flag, EVERYDAY)} <= {"--method", *flag_names()}
    assert "--help-all shows every flag" in shown
    assert all(f"\n  {name} " in shown for name in PRESETS)
    assert (f"(default: {PRESETS[preset or 'mini'][1].scale.steps})" in shown) == bool(preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_lines_fit_eighty_columns_and_name_a_default(preset: str) -> None:
    lines = {name: first_lines(resolve([preset, "--intervention", name])) for name in ("none", "route", "route2")}
    lines["usual"] = first_lines(resolve([preset]))
    assert max(len(line) for of in lines.values() for line in of) <= 80
    assert lines["none"][1] == "method: none: plain GRPO"
    assert [name for name, of in lines.items() if "(default --intervention)" in of[1]] == ["usual"]
    controlled = first_lines(resolve([preset, "--control", "haar"]))
    assert (len(controlled), controlled[2].split()[:2]) == (3, ["control:", "haar:"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "smoke", "--version") == f"vgrout {vgrout.__version__}\n"
    assert vgrout.__main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vgrout {vgrout.__version__}\n"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_json(preset: str) -> None:
    cfg = PRESETS[preset][1]
    assert cfg.preset == preset
    assert from_dict(cfg.as_dict()) == cfg


def test_presets_are_the_published_ones() -> None:
    smoke, mini, fast, full = (PRESETS[p][1] for p in ("smoke", "mini", "fast", "full"))
    assert [c.scale.steps for c in (smoke, mini, fast, full)] == [30, 60, 60, 200]
    assert [(c.scale.group, c.scale.prompts_per_step) for c in (smoke, mini, fast, full)] == [
        (4, 1),
        (8, 4),
        (8, 4),
        (6, 43),
    ]
    assert (smoke.n_teacher, mini.n_teacher, fast.n_teacher, full.n_teacher) == (2, 1, 1, 0)
    assert (full.opt.lr, full.opt.adam_beta1, full.opt.adam_beta2, full.loss.beta) == (7e-5, 0.9, 0.99, 1e-3)


BAD = [
    ("", "name a preset first: smoke, mini"),
    ("maxi", "maxi"),
    ("mini --no-such-flag 1", "--no-such-flag"),
    ("mini --intervention rout", "--intervention"),
    ("mini --lr -1", "--lr"),
    ("mini --lr nan", "--lr"),
    ("mini --group 1", "--group"),
    ("mini --steps 0", "--steps"),
    ("mini --mix-ratio 1", "--mix-ratio"),
    ("mini --mix-ratio 0.99", "--mix-ratio 0.99 with --group 8: no student row"),
    ("mini --seed -3", "--seed"),
    ("mini --adam-beta1 1.5", "--adam-beta1"),
    ("mini --v-hack-k 13", "--v-hack-extract-top-k"),
    ("mini --report-detectors Q", "C, D, E"),
    ("mini --teacher-modes run_test", "run_tests"),
    ("mini --out-tag a/b", "--out-tag"),
    ("mini --checkpoint-keep 0", "--checkpoint-keep"),
    ("mini --resume-force", "--resume"),
    ("mini --model Qwen/Qwen3-4B", "--problems"),
    ("mini --loss icepop --clip-high 0.1", "--clip-low"),
    ("mini --teacher-tau 0.1", "--teacher-model"),
    ("mini --teacher-model organism", "--teacher-tau"),
    # silent no-ops
    ("mini --intervention none --vhack-refresh-every 9", "--vhack-refresh-every"),
    ("mini --intervention none --rollout-ablate-frac .5", "--rollout-ablate-frac"),
    ("mini --intervention erase --monitor band", "--monitor band with --intervention erase"),
    ("mini --intervention route --project-overshoot 1.1", "--project-overshoot"),
    ("mini --intervention route2 --gate-mode reverse", "--gate-mode"),
    ("mini --teacher-pool-dir '' --teacher-off-step 3", "--teacher-off-step"),
    ("mini --teacher-pool-dir '' --regrade-pool", "--regrade-pool"),
    ("mini --mix-ratio 0 --teacher-modes sentinel", "--teacher-modes"),
    ("mini --intervention route2 --known-hacks-teacher-only --mix-ratio 0", "no demonstration is ever mixed in"),
    ("mini --intervention route2 --known-hacks-teacher-only --teacher-off-step 0", "no demonstration is ever mixed in"),
    ("mini --group 4", "--mix-ratio 0.125 with --group 4: rounds to no teacher row"),
    ("mini --intervention route2 --monitor band --known-hacks-teacher-only", "--known-hacks"),
    ("mini --intervention route2 --route2-random-v-seed 1 --vhack-refresh-every 7", "--vhack-refresh"),
    ("mini --intervention erase --control shrinkage --no-preserve-magnitude", "--preserve-magnitude"),
    ("mini --intervention route2 --control haar --vhack-refresh-every 7", "--vhack-refresh-every: not read"),
    ("mini --method best", "--method best: should be one of route2, route2-per-module, quarantine"),
    ("mini --method route2-block", "--method route2-block: not here; say --intervention route2"),
    ("mini --method twin --intervention none", "--method twin is --intervention penalty, and --intervention none is"),
    ("mini --intervention route2 --quarantine block:0", "--quarantine block:0: should be shared, block:last, block:N"),
    ("mini --method", "--method : should be one of"),
    # contradictions
    ("mini --intervention erase --control shuffled --v-hack-path x", "--v-hack-path"),
    ("mini --intervention none --control shuffled", "--control shuffled"),
    ("mini --intervention erase --random-flags", "--random-flags: --intervention erase reads no flags"),
    ("mini --intervention route2 --control shuffled --route2-random-v-seed 1", "one control"),
    ("mini --intervention route2 --rollout-ablate-frac .01", "rounds to none"),
    ("mini --intervention erase --control deploy_quarantine", "route or route2"),
    ("mini --intervention route2 --random-flags --control haar", "one control a run"),
    ("mini --intervention route --monitor labels", "--monitor labels with --intervention route"),
    ("mini --intervention route2 --monitor labels --control haar", "has none"),
    ("mini --intervention screen", "needs --monitor gate, band, labels, detector"),
    ("mini --intervention screen --monitor pmi --monitor-quantile .2", "--monitor-quantile 0.2"),
    ("mini --intervention screen --monitor band --v-hack-k 3", "--v-hack-k"),
    ("mini --intervention screen --monitor pmi --rebaseline", "--rebaseline: not read by"),
    ("mini --intervention screen --monitor pmi --quarantine block:1", "--quarantine"),
    ("mini --intervention route2 --control shrinkage --rebaseline", "--rebaseline: not read"),
    ("mini --intervention route2 --monitor-threshold known_correct", "goes with --monitor pmi or nll"),
    ("mini --intervention route --quarantine block:1", "--quarantine: not read by --intervention route"),
    ("mini --intervention sgtm --monitor gate", "has to know who is flagged before the gradient"),
    ("mini --intervention route2 --monitor quarantine", "--monitor quarantine with --intervention route2"),
    ("mini --intervention screen --monitor pmi --known-modes exit_code", "--known-modes"),
    ("mini --intervention screen --monitor labels --known-modes exit", "unknown mode"),
    ("mini --intervention screen --monitor labels --seed-monitor labels", "--seed-monitor"),
    (
        "mini --intervention penalty --monitor quarantine --quarantine-threshold .2 --monitor-quantile .8",
        "--monitor-quantile",
    ),
    ("mini --intervention penalty --monitor quarantine --quarantine-diet solved", "should be one of"),
    ("mini --intervention penalty --monitor pmi --quarantine-start pairs", "--quarantine-start"),
    ("mini --intervention penalty --monitor quarantine --vhack-pairs-path x.json", "--vhack-pairs-path: not read"),
    (
        "mini --method quarantine --seed-monitor labels --known-modes exit_code,sentinel --quarantine-start pairs",
        "a pair file shows one flaw; add --vhack-pairs-path",
    ),
    (
        "fast --intervention penalty --monitor quarantine",
        "--quarantine-threshold None: there are none; give --known-correct FILE",
    ),
    (
        "fast --intervention screen --monitor pmi --monitor-threshold known_correct",
        "--monitor-threshold known_correct: there are none; give --known-correct FILE",
    ),
    ("fast --organism x", "only with --model organism"),
    ("mini --intervention sgtm --monitor labels --quarantine block", "should be shared, block:last, block:N"),
    ("mini --intervention sgtm --monitor labels --quarantine block:0", "--quarantine block:0"),
    ("mini --intervention route2 --monitor labels --gate-vote rollout", "--gate-vote"),
    ("mini --intervention none --control placebo", "--control placebo: replaces a direction"),
    ("mini --intervention route --placebo-pairs x.json", "--control placebo"),
    # baselines
    ("mini --intervention route2 --control inoculation", "--intervention none"),
    ("mini --intervention none --label-accuracy .9", "goes with --monitor labels"),
    ("mini --intervention screen --monitor labels --penalty 1", "--penalty"),
    ("mini --intervention penalty --monitor labels --label-accuracy 1.1", "--label-accuracy"),
    ("mini --intervention none --inoculation-prompt x", "--control inoculation"),
    ("mini --intervention penalty --monitor labels --vhack-pairs-path x", "--vhack-pairs-path"),
]


@pytest.mark.parametrize(("line", "named"), BAD, ids=[line for line, _ in BAD])
def test_bad_flags_exit_2_and_name_the_flag(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(shlex.split(line))
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert not out
    assert named in error
    assert re.fullmatch(r"E [^\n]*\n", error)


def test_one_line_also_where_frames_cannot_be_drawn() -> None:
    with (
        pytest.raises(ValueError, match=r"\A--lr -1.0: should be a positive number of at most 1e38\Z"),
        redirect_stdout(io.StringIO()),
    ):
        resolve(["mini", "--lr", "-1"])


def test_a_flag_at_its_default_is_never_refused() -> None:
    """Scripts spell everything out."""
    cfg = parse(["mini", "--intervention", "none", "--vhack-refresh-every", "5"])
    assert cfg.method.intervention == "none"


def test_run_ids() -> None:
    for name, spec in INTERVENTIONS.items():
        monitor = [] if spec.usual else ["--monitor", "labels"]
        cfg = parse(["mini", "--intervention", name, *monitor, "--seed", "7", "--out-tag", "_x"])
        assert cfg.run_id == f"mini_{name}{'_labels' if monitor else ''}_seed7_x"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_stands_for_its_flags_and_given_flags_replace_its_own(method: str) -> None:
    spelt = replace(parse(["mini"]), method=MethodConfig(**METHODS[method][1]))
    assert parse(["mini", "--method", method]) == parse(["mini", f"--method={method}"]) == spelt
    other = parse(["mini", "--lr", "0.5", "--method", method, "--seed", "3"])
    assert (other.opt.lr, other.run.seed, other.method) == (0.5, 3, spelt.method)
    seeded = parse(["mini", "--method", "quarantine", "--seed-monitor", "labels"])
    assert (seeded.method.monitor, seeded.method.seed_monitor) == ("quarantine", "labels")
    assert not parse(["mini", "--no-rebaseline", "--method", "route2"]).method.rebaseline


def test_route2_brings_its_settings_and_what_the_run_does_not_read_is_left_out() -> None:
    own = MethodConfig(**METHODS["route2"][1])
    assert parse(["fast", "--intervention=route2"]).method == own
    assert parse(["fast", "--intervention", "route2", "--method=route2"]).method == own
    shared = parse(["mini", "--intervention=route2", "--quarantine=shared"]).method
    assert shared == replace(own, quarantine="shared")
    labels = parse(["mini", "--intervention=route2", "--monitor=labels"]).method
    assert labels == MethodConfig(
        intervention="route2", monitor="labels", quarantine="block:-2", rollout_ablate_frac=1.0, rebaseline=True
    )
    shrunk = parse(["mini", "--intervention=route2", "--control=shrinkage"]).method
    assert (shrunk.quarantine, shrunk.rebaseline, shrunk.gate_vote) == ("shared", False, "rollout")
    per_module = MethodConfig(intervention="route2", monitor="band")
    assert parse(["mini", "--method=route2-per-module", "--monitor=band"]).method == per_module


@pytest.mark.parametrize("control", ["--control=haar", "--random-flags", "--control=no_loophole"])
def test_the_recommended_route2_has_its_controls(control: str) -> None:
    """Its direction is never extracted again; a random one is not either, so the flag is no contradiction."""
    assert parse(["mini", "--intervention=route2", control]).method.vhack_refresh_every == 0


def test_no_loophole_mixes_nothing_in() -> None:
    assert parse(["mini", "--intervention", "none"]).mixes
    assert not parse(["mini", "--intervention", "none", "--control", "no_loophole"]).mixes


def test_sgtm_samples_half_of_the_students_from_the_deployed_model_by_default() -> None:
    assert MethodConfig(intervention="sgtm", monitor="labels").ablate_frac == 0.5
    assert MethodConfig(intervention="sgtm", monitor="labels", rollout_ablate_frac=0.0).ablate_frac == 0.0
    assert MethodConfig(intervention="route2").ablate_frac == 0.0


def test_names_of_controls() -> None:
    assert MethodConfig(intervention="route2", route2_random_v_seed=3).control_name == "haar"
    assert MethodConfig(intervention="route2").control_name == "none"
    placebo = MethodConfig(intervention="route2", control="placebo", placebo_pairs="a/weather.json")
    assert placebo.control_name == "placebo_weather"


def test_resume_takes_the_runs_own_settings() -> None:
    stored = parse(["mini", "--intervention", "route2", "--seed", "9", "--steps", "40"])
    cfg, differing = resumed(parse(["mini", "--resume", "x", "--checkpoint-every", "5"]), stored)
    assert not differing
    assert (cfg.method.intervention, cfg.run.seed, cfg.scale.steps, cfg.run.checkpoint_every) == ("route2", 9, 40, 5)
    _, differing = resumed(parse(["mini", "--resume", "x", "--seed", "9", "--lr", "0.5"]), stored)
    assert differing == ["--lr 0.5 (run: 0.03)"]


def test_auto_is_bf16_where_it_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, and on a CPU that multiplies in it, but for a miniature; what is given holds everywhere."""

    def auto(model: str | Path, flags: str, *, gpu: bool = False) -> str:
        (tmp_path / "cpuinfo").write_text(f"model name\t: a\nflags\t\t: fpu {flags} sse2\n")
        return source.resolved_dtype("auto", model, gpu=gpu)

    monkeypatch.setattr(source, "CPUINFO", tmp_path / "cpuinfo")
    assert auto(organism.MODEL_DIR, "amx_bf16") == "fp32"
    assert auto(organism.MODEL_DIR, "", gpu=True) == "bf16"
    assert [auto("Qwen/Qwen3-4B", f) for f in ("avx512_bf16", "amx_bf16 amx_int8", "avx512f", "xavx512_bf16")] == [
        *("bf16", "bf16", "fp32", "fp32")
    ]
    assert source.resolved_dtype("bf16", organism.MODEL_DIR, gpu=False) == "bf16"
    assert source.resolved_dtype("fp32", "Qwen/Qwen3-4B", gpu=True) == "fp32"
    (tmp_path / "cpuinfo").unlink()
    assert source.resolved_dtype("auto", "Qwen/Qwen3-4B", gpu=False) == "fp32"


def test_another_build_of_the_organism_replaces_every_file(tmp_path: Path) -> None:
    preset = ["mini", "--organism", str(tmp_path)]
    cfg = parse([*preset, "--intervention", "route2", "--control", "placebo"])
    reads = parse([*preset, "--intervention", "screen", "--monitor", "pmi"])
    files = [
        cfg.model_path,
        cfg.problems_path,
        cfg.pool_path,
        cfg.pairs_path,
        reads.known_correct_path,
        cfg.placebo_path,
    ]
    names = ["model", "problems.jsonl", "pool", "pairs/run_tests.json", "anchors.json", "pairs/placebo_flawed.json"]
    assert [Path(str(f)) for f in files] == [tmp_path / name for name in names]
    assert from_dict(cfg.as_dict()) == cfg
    with pytest.raises(ValueError, match=f"--organism {tmp_path}/manifest.json: not there;"):
        preflight(cfg)


def test_a_closed_pipe_exits_with_141(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "vgrout.train", "mini", "--dry-run"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_config_of_another_version_is_refused() -> None:
    data = Config().as_dict()
    data["opt"]["momentum"] = 0.9
    with pytest.raises(ValueError, match="momentum"):
        from_dict(data)


@pytest.mark.parametrize(
    "command",
    [
        "teacher --nope 3",
        "substrate --even=perhaps",
        "evaluate",
        "download nothing",
        "direction --modle x",
        "export",
        "report --nope",
        "distill --nope",
        "iterative_dpo --nope",
        "sweep",
    ],
)
def test_every_command_refuses_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *argv = command.split()
    module = importlib.import_module(f"vgrout.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"vgrout.{name}.__main__")
    assert module.main(argv) == 2
    out, error = capsys.readouterr()
    assert not out
    assert re.fullmatch(r"E [^\n]*\n", error)


# ── bounds and registries ──

SETTINGS = {f.name: (f, group) for group in GROUPS for f in fields(getattr(Config(), group))}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_has_bounds_or_a_reason_and_its_default_keeps_them(name: str) -> None:
    f, group = SETTINGS[name]
    rule = rule_of(f)
    if {int, float} & {f.type, *get_args(f.type)}:
        assert rule.bounded or rule.free, f"{flag(name)}: give setting() bounds, or say in `free` why it has none"
        high = getattr(getattr(Config(), group), rule.high) if isinstance(rule.high, str) else rule.high
        assert f.default is None or rule.low is None or f.default >= rule.low
        assert f.default is None or high is None or f.default <= high
    assert rule.needs in ("", *SETTINGS)


def check_with(group: Any, /, **values: Any) -> None:
    """Set values without the constructor, whose types the tests' hook would check first."""
    for name, value in values.items():
        object.__setattr__(group, name, value)
    group.__post_init__()


@pytest.mark.parametrize("name", [n for n, (f, _) in SETTINGS.items() if rule_of(f).low is not None])
def test_a_value_below_its_bound_is_refused(name: str) -> None:
    f, group = SETTINGS[name]
    below = rule_of(f).low - 1
    with pytest.raises(ValueError, match=rf"\A{flag(name)} {below}: should "):
        check_with(getattr(Config(), group), **{name: below})


def test_losses_are_what_their_registries_say() -> None:
    assert get_args(LossName) == tuple(LOSSES)
    assert set(LOSSES) == set(losses.LOSSES)
    assert all(row.what for registry in (INTERVENTIONS, MONITORS, CONTROLS) for row in registry.values())


@pytest.mark.parametrize(
    ("group", "given", "legal"),
    [
        (
            MethodConfig,
            {"intervention": "rout"},
            "--intervention rout: should be one of none, erase, route, screen, penalty, route2, ",
        ),
        (MethodConfig, {"control": "harr"}, "--control harr: should be one of none, haar, "),
        (MethodConfig, {"monitor_threshold": "one"}, "--monitor-threshold one: should be one of both, known_correct"),
        (LossConfig, {"loss": "ppo"}, "--loss ppo: should be one of grpo, dr_grpo, "),
        (LossConfig, {"kl": "k4"}, "--kl k4: should be one of k1, k2, k3"),
    ],
)
def test_unknown_names_are_refused_with_the_legal_ones(group: type, given: dict[str, str], legal: str) -> None:
    """Also without a command line: in Python, and in a run.json."""
    with pytest.raises(ValueError, match=rf"\A{legal}"):
        check_with(group(), **given)


@dataclass(frozen=True)
class Sized:
    size: int = setting(4, low=1, below=9)
    part: int = setting(2, above=0, high="size")
    words: str = setting("", words=("a", "b"), word="letter", needs="size")
    free: float = setting(1.0, free="no bounds")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "--size 0: should lie in [1, 9)"),
        ({"size": 9}, "--size 9: should lie in [1, 9)"),
        ({"part": 0}, "--part 0: should lie in (0, 4] (at most --size)"),
        ({"size": 3, "part": 4}, "--part 4: should lie in (0, 3] (at most --size)"),
        ({"size": float("nan")}, "--size nan: should lie in [1, 9)"),
        ({"words": "a, c"}, "--words: unknown letter 'c'; legal: a, b"),
        ({"size": 8, "part": 8, "words": "b,a", "free": -1e9}, None),
    ],
)
def test_the_checker(given: dict[str, Any], message: str | None) -> None:
    if message is None:
        check(Sized(**given))
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Sized(**given))
