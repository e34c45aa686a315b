"""Flags: the committed list, the presets, and one-line refusals before anything is loaded."""

import io
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import pytest

import vgrout.__main__
from vgrout.config.checks import check, flag, rule_of, setting
from vgrout.config.presets import EVERYDAY, PRESETS, flag_names, resolve
from vgrout.config.run import GROUPS, Config, from_dict
from vgrout.config.settings import LOSSES, Sampling
from vgrout.config.specs import CONTROLS, INTERVENTIONS, MONITORS
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.ground import embedded
from vgrout.ground.io import Refused
from vgrout.model.load import source
from vgrout.runs.plan import first_lines, method_lines, preflight

FLAGS = Path(__file__).with_name("flags.txt")


def test_the_flag_list_is_a_decision():
    """Adding a flag means adding a line to flags.txt, where a reader of the diff sees it."""
    assert FLAGS.read_text().split() == flag_names()


def printed(capsys, *argv):
    """The output of a command line that exits at once."""
    with pytest.raises(SystemExit) as stop:
        resolve([*argv])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_all_has_every_flag_and_every_name_with_its_line(
    capsys,
):
    shown = " ".join(printed(capsys, "mini", "--help-all").replace("│", " ").split())
    assert not [flag for flag in flag_names() if flag not in shown]
    rows = {**INTERVENTIONS, **MONITORS, **CONTROLS, **LOSSES}
    lines = {name: row.what for name, row in rows.items() if name != "none"}
    assert not [name for name, what in lines.items() if f"{name}: {what}" not in shown]


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_help_is_one_screen_of_everyday_flags(preset, capsys):
    shown = printed(capsys, *([preset] if preset else []), "--help")
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n") <= 60
    assert {*re.findall(r"^  (--[a-z][a-z-]+)", shown, re.M)} == set(map(flag, EVERYDAY))
    assert {*map(flag, EVERYDAY)} <= {*flag_names()}
    assert "--help-all shows every flag" in shown
    assert all(f"\n  {name} " in shown for name in PRESETS)
    assert (f"(default: {PRESETS[preset or 'mini'][1].scale.steps})" in shown) == bool(preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_lines_fit_eighty_columns(preset):
    lines = first_lines(resolve([preset]), named=False)
    for flags in ("--intervention=none", "--intervention=route2", "--control=haar"):
        lines += first_lines(resolve([preset, flags]))
    assert max(map(len, lines)) <= 80


GATED = "no demonstrations: known hacks are only answers that the weak detector flags;"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--intervention=route2", "--mix-ratio=0"], [GATED]),
        (
            ["--intervention=none", "--v-hack-path=x"],
            ["--v-hack-path: ignored, --intervention none has no direction"],
        ),
        (
            ["--intervention=erase", "--control=haar", "--vhack-refresh-every=3"],
            ["--vhack-refresh-every 3: ignored, random directions stay"],
        ),
        (
            ["--intervention=penalty", "--monitor=labels"],
            ["penalty: reward flagged rollouts less · monitor labels of all flaws"],
        ),
        (
            ["--intervention=penalty", "--monitor=online_probe", "--seed-monitor=labels"],
            [
                "penalty: reward flagged rollouts less · monitor online_probe, seeded by",
                "labels of all flaws",
            ],
        ),
    ],
)
def test_a_run_says_what_its_method_brings_and_what_is_given_in_vain(argv, said):
    lines = method_lines(resolve(["mini", *argv]))
    assert [line for line in lines if line in said] == said, lines


def test_version(capsys):
    assert vgrout.__main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vgrout {vgrout.__version__}\n"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_json(preset):
    cfg = PRESETS[preset][1]
    assert cfg.preset == preset
    assert from_dict(cfg.as_dict()).as_dict() == cfg.as_dict()


BAD = [
    ("", "name a preset first: smoke, mini"),
    ("mini --intervention rout", "--intervention"),
    ("mini --mix-ratio 0.99", "--mix-ratio 0.99 with --group 8: rounds to 8 teacher rows"),
    ("mini --report-detectors Q", "C, D, E"),
    ("mini --model Qwen/Qwen3-4B", "--problems"),
    ("mini --teacher-tau 0.1", "--teacher-model"),
    ("mini --teacher-pool-dir '' --teacher-off-step 3", "--teacher-off-step"),
    # contradictions
    (
        "mini --intervention screen",
        "it needs a monitor; say --monitor labels or source or detector",
    ),
    ("mini --intervention screen --monitor labels --known-modes exit", "unknown flaw"),
    (
        "mini --intervention route2 --known-hacks-teacher-only --mix-ratio 0",
        "no demonstration is ever mixed in",
    ),
    ("mini --group 4", "--mix-ratio 0.125 with --group 4: rounds to 0 teacher rows"),
    ("mini --intervention route2 --rollout-ablate-frac .01", "rounds to none"),
    (
        "mini --intervention route2 --quarantine block:0",
        "--quarantine block:0: should be shared, block:last, block:N",
    ),
    ("mini --intervention erase --control placebo --v-hack-path x", "--v-hack-path"),
    (
        "mini --intervention erase --random-flags",
        "--random-flags: replaces the flags, and --intervention erase",
    ),
    (
        "fast --intervention penalty --monitor online_probe",
        "--monitor online_probe: it reads correct answers; give",
    ),
    # a halt that could not be
    ("mini --guard halt --guard-halt-on=", "--guard halt could not fire (--guard-halt-on is empty"),
    (
        "mini --guard-halt-on=kl,speed",
        "--guard-halt-on: unknown rule 'speed'; legal: kl, streak, gap",
    ),
    (
        "mini --guard=off --guard-warmup=1 --ema-alpha=0.5",
        "--guard-warmup, --ema-alpha: not read with --guard off",
    ),
    (
        "mini --reward-hack-detector=rm_ensemble",
        "--rm-ensemble-members '': should name 2 to 32 functions",
    ),
    # code of one's own
    ("mini --intervention nowhere:Mine", "--intervention nowhere:Mine: cannot be imported"),
    ("mini --intervention screen --monitor json:dumps", "--monitor json:dumps: is no Monitor"),
]


@pytest.mark.parametrize(("line", "named"), BAD, ids=[line for line, _ in BAD])
def test_bad_flags_are_refused_in_one_line_that_names_the_flag(line, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        resolve(shlex.split(line))
    assert "\n" not in str(refused.value)


NUMBERS = [
    (group, f)
    for group in (getattr(Config(), name) for name in GROUPS)
    for f in fields(group)
    if float in {f.type, *get_args(f.type)}
]


@pytest.mark.parametrize(
    "value", [5e-324, 1e-38, -1e-13, 1e39, 1e308, math.inf, -math.inf, math.nan]
)
def test_no_fraction_is_so_small_that_it_vanishes_or_so_large_that_it_overflows(value):
    assert len(NUMBERS) > 25
    for group, f in NUMBERS:
        with pytest.raises(Refused, match=f"^{flag(f.name)} .*: should "):
            replace(group, **{f.name: value})


@pytest.mark.parametrize("value", ["1e-7", "1e-38", "0", "1e-6"])
def test_a_temperature_is_greedy_or_one_that_logits_can_be_divided_by(value):
    if value in ("0", "1e-6"):
        assert Sampling(float(value), top_k=20).temperature == float(value)
    else:
        with pytest.raises(Refused, match=r"--temperature .*: should be 0, or at least 1e-06"):
            resolve(["mini", f"--temperature={value}"])


def test_one_line_also_where_frames_cannot_be_drawn():
    with (
        pytest.raises(
            ValueError, match=r"\A--lr -1.0: should be a positive number of at most 1e38\Z"
        ),
        redirect_stdout(io.StringIO()),
    ):
        resolve(["mini", "--lr", "-1"])


def test_a_flag_at_its_default_is_never_refused():
    """Scripts spell everything out."""
    cfg = resolve(["mini", "--intervention", "none", "--vhack-refresh-every", "5"])
    assert cfg.method.intervention == "none"


def test_no_loophole_mixes_nothing_in():
    assert resolve(["mini", "--intervention", "none"]).mixes
    assert not resolve(["mini", "--intervention", "none", "--control", "no_loophole"]).mixes


def test_auto_is_bf16_where_it_is_faster(tmp_path, monkeypatch):
    """On a GPU, and on a CPU that multiplies in it, but for a miniature; what is given holds everywhere."""

    def auto(model, flags, *, gpu=False):
        (tmp_path / "cpuinfo").write_text(f"model name\t: a\nflags\t\t: fpu {flags} sse2\n")
        return source.resolved_dtype("auto", model, gpu=gpu)

    monkeypatch.setattr(source, "CPUINFO", tmp_path / "cpuinfo")
    assert auto(embedded.MODEL_DIR, "amx_bf16") == "fp32"
    assert auto(embedded.MODEL_DIR, "", gpu=True) == "bf16"
    assert [
        auto("Qwen/Qwen3-4B", f)
        for f in ("avx512_bf16", "amx_bf16 amx_int8", "avx512f", "xavx512_bf16")
    ] == [*("bf16", "bf16", "fp32", "fp32")]
    assert source.resolved_dtype("bf16", embedded.MODEL_DIR, gpu=False) == "bf16"
    assert source.resolved_dtype("fp32", "Qwen/Qwen3-4B", gpu=True) == "fp32"
    (tmp_path / "cpuinfo").unlink()
    assert source.resolved_dtype("auto", "Qwen/Qwen3-4B", gpu=False) == "fp32"


def test_another_build_of_the_organism_replaces_every_file(tmp_path):
    preset = ["mini", "--organism", str(tmp_path)]
    cfg = resolve([*preset, "--intervention", "route2", "--control", "placebo"])
    world = CodeEnvironment(cfg, [])
    named = {
        "model": cfg.model_path,
        "problems.jsonl": cfg.problems_path,
        "pool": cfg.pool_path,
        "pairs/run_tests.json": world.pairs_path,
        "anchors.json": world.known_correct_path,
        "pairs/placebo_flawed.json": world.placebo_path("flawed"),
    }
    for name, path in named.items():
        assert Path(str(path)) == tmp_path / name
    small = resolve(["small", *preset[1:], "--intervention", "route2"])
    assert CodeEnvironment(small, []).pairs_path == tmp_path / "pairs", "of each flaw"
    assert from_dict(cfg.as_dict()).as_dict() == cfg.as_dict()
    with pytest.raises(ValueError, match=f"--organism {tmp_path}/manifest.json: not there;"):
        preflight(cfg)


def test_a_closed_pipe_exits_with_141(tmp_path):
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "vgrout.train", "mini", "--dry-run"]
        done = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


OWN_PIPE = """
import os, sys
from vgrout.config.cli import cli_exit

def command():
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")
    return 0

sys.exit(cli_exit(command))
"""


LIBRARYS_PIPE = """
import subprocess, sys
from vgrout.config.cli import cli_exit

def command():
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    child.wait()
    child.stdin.write(b"x")
    child.stdin.flush()
    return 0

sys.exit(cli_exit(command))
"""


@pytest.mark.parametrize(
    ("file", "text"), [("own.py", OWN_PIPE), ("site-packages/library.py", LIBRARYS_PIPE)]
)
def test_another_broken_pipe_is_a_fault(file, text, tmp_path):
    """Somebody reads what the command prints: the pipe is a judge's, or a tracker's, say, in whose traceback nothing
    of one's own is."""
    program = tmp_path / file
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


# ── bounds and registries

SETTINGS = {f.name: (f, group) for group in GROUPS for f in fields(getattr(Config(), group))}


def test_every_number_has_bounds_and_keeps_them_by_default():
    for name, (f, group) in SETTINGS.items():
        rule = rule_of(f)
        assert rule.needs in ("", *SETTINGS)
        if not {int, float} & {f.type, *get_args(f.type)} or name == "route2_random_v_seed":
            continue
        assert any(end is not None for end in (rule.low, rule.above, rule.high, rule.below)), name
        check_with(getattr(Config(), group))


def check_with(group, /, **values):
    """Set values without the constructor, whose types the tests' hook would check first."""
    for name, value in values.items():
        object.__setattr__(group, name, value)
    group.__post_init__()


@dataclass(frozen=True)
class Sized:
    size: int = setting(4, low=1, below=9)
    part: int = setting(2, above=0, high="size")
    words: str = setting("", words=("a", "b"), word="letter", needs="part")
    kind: Literal["x", "y"] = "x"
    text: str = setting("", form="[a-z]*", should="be of small letters")
    free: float = setting(1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "--size 0: should lie in [1, 9)"),
        ({"size": 3, "part": 4}, "--part 4: should lie in (0, 3] (at most --size)"),
        ({"size": float("nan")}, "--size nan: should lie in [1, 9)"),
        ({"free": float("inf")}, "--free inf: should be finite"),
        ({"words": "a, c"}, "--words: unknown letter 'c'; legal: a, b"),
        ({"kind": "z"}, "--kind z: should be one of x, y"),
        ({"text": "a b"}, "--text a b: should be of small letters"),
        ({"size": 8, "part": 8, "words": "b,a", "free": -1e9}, None),
    ],
)
def test_the_checker(given, message):
    if message is None:
        check(Sized(**given))
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Sized(**given))
