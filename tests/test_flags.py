"""No flag is idle: `train` with it and without gives two different runs, or two different plans.

Every flag has an entry here. A run is seen by its rows, rollouts, final answers, adapter and file names; a
plan by what --dry-run prints.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from files import loaded
from runs import adapter_bytes, once, rows, run
from vgrout import train
from vgrout.config.presets import flag_names, resolve
from vgrout.direction.extract import extract, save
from vgrout.direction.pairs import load_pairs
from vgrout.envs.code.grading.grade import Grader
from vgrout.ground import embedded
from vgrout.ground.io import file_sha256
from vgrout.guard.kill_switch import HeldOutGuard
from vgrout.model.load import source
from vgrout.model.load.load import load_policy
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.runs import recorder
from vgrout.runs.launch import launch

SMALL = [
    "smoke",
    "--threads=1",
    "--steps=2",
    "--eval-ablate-every=0",
    "--final-n-prompts=1",
    "--final-samples=1",
]
NONE = ["--intervention=none"]
ALONE = [*NONE, "--teacher-pool-dir=", "--mix-ratio=0"]
ERASE = ["--intervention=erase", "--vhack-refresh-every=0"]
LABELS = ["--intervention=penalty", "--monitor=labels", "--group=8"]
PROBE = [
    "--intervention=penalty",
    "--monitor=online_probe",
    "--seed-monitor=labels",
    "--group=8",
    "--steps=3",
]
OWN_REWARD = [*ALONE, "--reward=flags_reward:f"]


@dataclass(frozen=True)
class Run:
    """Two runs: with this value, and with the other one, or without the flag."""

    base: list[str]
    value: str
    other: str = ""


@dataclass(frozen=True)
class Plan(Run):
    """Two plans."""


@dataclass(frozen=True)
class Watch(Run):
    """The guard of two command lines, on a series in which held-out falls while in-loop rises."""


LATE = [*NONE, "--guard=log", "--eval-ablate-every=1", "--steps=40"]
GUARD = [*LATE, "--guard-warmup=0"]
FLAGS = {
    "--checkpoint-every": Run(NONE, "1"),
    "--checkpoint-keep": Run([*NONE, "--checkpoint-every=1"], "1"),
    "--compile-reward": Run(NONE, "0.3"),
    "--control": Run(NONE, "no_loophole"),
    "--decline-patience": Watch(GUARD, "9"),
    "--dtype": Run(NONE, "bf16"),
    "--ema-alpha": Watch(GUARD, "0.1"),
    "--env-mode": Run(ALONE, "exit_code"),
    "--eval-n-prompts": Plan([*NONE, "--eval-ablate-every=1"], "1", "2"),
    "--final-n-prompts": Run(NONE, "2"),
    "--final-samples": Run(NONE, "2"),
    "--gate-mode": Run(ERASE, "no_gate"),
    "--guard": Plan(NONE, "off", "log"),
    "--guard-halt-on": Plan(
        [*NONE, "--guard=halt", "--eval-ablate-every=1", "--steps=40"], "gap", "streak,gap"
    ),
    "--guard-warmup": Watch(LATE, "0", "30"),
    "--kl-hard-stop": Watch(GUARD, "0.01"),
    "--known-correct": Run(PROBE, "{half_known}"),
    "--label-false-flags": Run(LABELS, "1"),
    "--lr": Run(NONE, "0.01"),
    "--max-new": Run(NONE, "20"),
    "--max-proxy-real-gap": Watch(GUARD, "0.5"),
    "--memory-gib": Plan(NONE, "0.01"),
    "--mix-ratio": Run(NONE, "0.25"),
    "--model": Plan([*ALONE, "--problems={problems}"], "{model}", "{other_model}"),
    "--n-problems": Run(ALONE, "3"),
    "--organism": Plan(NONE, "{organism}", "{other_organism}"),
    "--out-tag": Plan(NONE, "_tag"),
    "--pass-reward": Run(NONE, "2"),
    "--penalty": Run(LABELS, "0.3"),
    "--placebo-pairs": Run([*ERASE, "--control=placebo"], "long"),
    "--preserve-magnitude": Run(ERASE, "no"),
    "--problems": Plan([*ALONE, "--model={model}"], "{problems}", "{half_problems}"),
    "--project-overshoot": Run([*ERASE, "--no-preserve-magnitude"], "2"),
    "--random-flags": Run(LABELS, "yes"),
    "--report-detectors": Run(NONE, "E"),
    "--reward": Plan(ALONE, "flags_reward:f"),
    "--reward-hack-detector": Run(NONE, "info_rm"),
    "--reward-passes-at": Run(OWN_REWARD, "0.4", "1"),
    "--rm-ensemble-members": Run(
        [*NONE, "--reward-hack-detector=rm_ensemble"],
        "flags_reward:g,flags_reward:h",
        "flags_reward:g,flags_reward:g",
    ),
    "--route2-random-v-seed": Run(ERASE, "3"),
    "--save-eval-ckpts": Run([*NONE, "--eval-ablate-every=1", "--eval-n-prompts=1"], "no"),
    "--seed": Run(NONE, "42"),
    "--teacher-model": Run(NONE, "organism --teacher-tau=0.5"),
    "--teacher-modes": Run([*NONE, "--prompts-per-step=3"], "exit_code"),
    "--teacher-off-step": Run(NONE, "1"),
    "--teacher-pool-dir": Run([*NONE, "--mix-ratio=0.5"], ""),
    "--test-problems": Plan(
        [*ALONE, "--model={model}", "--problems={half_problems}"], "{other_half}"
    ),
    "--v-hack-drop-bottom-frac": Run(ERASE, "0.9"),
    "--v-hack-extract-top-k": Run(ERASE, "6"),
    "--v-hack-k": Run(ERASE, "1"),
    "--v-hack-path": Run(ERASE, "{direction} --v-hack-extract-top-k=6"),  # the file's
    "--v-hack-tau-axis": Run(ERASE, "0.9"),
    "--vhack-pairs-path": Run(ERASE, "{pairs}"),
}


HELD = {  # those whose effect other tests show
    "runs.py": (  # golden runs
        "--beta --gate-modules --gate-vote --group --intervention --known-modes --loss --monitor --monitor-quantile "
        "--prompts-per-step --quarantine --rebaseline --rollout-ablate-frac --seed-monitor --steps "
        "--vhack-refresh-every"
    ),
    "test_faults.py": "--echo-trap-enabled --echo-trap-halt --echo-trap-threshold --max-error-retries",
    "test_flags.py": "--allow-weak-sandbox --columns --threads",
    "test_guard.py": "--reward-hack-halt",
    "test_gates.py": "--known-hacks-teacher-only",
    "test_grpo.py": "--dppo-diff-high --dppo-diff-low",
    "test_labels.py": "--flags-kept",
    "test_llm_judge.py": "--llm-judge-max-new --llm-judge-model --llm-judge-prompt --llm-judge-timeout --llm-judge-url",
    "test_losses.py": "--adv-tau --teacher-tau --unbiased",
    "test_optim.py": "--adam-beta1 --adam-beta2 --grad-clip --warmup-frac --weight-decay",
    "test_problems.py": "--marker-names",
    "test_run_dir.py": "--output-dir",
    "test_sampler.py": "--temperature --top-k --top-p",
    "test_shadow.py": "--shadow",
    "test_shards.py": "--tensor-parallel",
    "test_text_env.py": "--env --reference",
    "test_thinking.py": "--llm-judge-thoughts --thinking",
    "test_tracking.py": "--track",
    "test_train.py": "--dry-run --eval-ablate-every --preserve-thinking --resume",
    "test_trust.py": "--trust-code",
    "test_unannounced.py": "--unannounced-modes",
    "test_verifiers.py": "--env-args",
}


def test_every_flag_has_an_entry():
    held = [name for names in HELD.values() for name in names.split()]
    assert sorted([*FLAGS, *held]) == flag_names()
    for file, names in HELD.items():
        text = Path(__file__).with_name(file).read_text()
        for name in names.split():
            assert name in text or name[2:].replace("-", "_") in text, (file, name)


@pytest.fixture(scope="module")
def files(tmp_path_factory, shared_run):
    """What entries name in braces."""
    home = tmp_path_factory.mktemp("files")
    # a plan names the model; no weight is read
    shutil.copytree(embedded.MODEL_DIR, home / "other_model")
    lines = embedded.PROBLEMS.read_text().splitlines(keepends=True)
    (home / "half.jsonl").write_text("".join(lines[::2]))
    shutil.copytree(embedded.DATA_DIR, home / "other_organism")
    shutil.copy(home / "half.jsonl", home / "other_organism" / embedded.PROBLEMS.name)
    manifest = loaded(home / "other_organism" / "manifest.json")
    manifest["files"][embedded.PROBLEMS.name] = file_sha256(home / "half.jsonl")
    (home / "other_organism" / "manifest.json").write_text(json.dumps(manifest))
    rest = (json.dumps(json.loads(line) | {"split": "test"}) for line in lines[1::2])
    (home / "other_half.jsonl").write_text("\n".join(rest) + "\n")
    decomposed = shared_run.folder.parent / "svd_cache"
    policy = load_policy(
        embedded.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=decomposed
    )
    few_axes = extract(policy, load_pairs(embedded.PAIRS_DIR / "run_tests.json"), 6, 0.0)
    save(few_axes, home / "direction.safetensors")
    known = json.loads(embedded.KNOWN_CORRECT.read_text())
    (home / "half_known.json").write_text(json.dumps(known[::2]))
    (home / "flags_reward.py").write_text(
        "def f(completion):\n    return 0.5\n\n\n"
        "def g(prompt, answer):\n    return len(answer)\n\n\n"
        "def h(prompt, answer):\n    return -len(answer)\n"
    )
    return {
        "home": str(home),
        "model": str(embedded.MODEL_DIR),
        "other_model": str(home / "other_model"),
        "problems": str(embedded.PROBLEMS),
        "half_problems": str(home / "half.jsonl"),
        "other_half": str(home / "other_half.jsonl"),
        "organism": str(embedded.DATA_DIR),
        "other_organism": str(home / "other_organism"),
        "direction": str(home / "direction.safetensors"),
        "pairs": str(embedded.PAIRS_DIR / "exit_code.json"),
        "known": str(embedded.KNOWN_CORRECT),
        "half_known": str(home / "half_known.json"),
    }


def lines_of(name, entry, files):
    """The two command lines."""

    def line(value):
        first, *more = value.split(" --")
        given = {"yes": name, "no": f"--no-{name[2:]}"}.get(first, f"{name}={first}")
        return [given, *(f"--{m}" for m in more)]

    both = line(entry.value), line(entry.other) if entry.other else []
    return [[word.format(**files) for word in (*SMALL, *entry.base, *own)] for own in both]


def seen(path):
    """A run without its times and its configuration."""
    adapter = hashlib.sha256(adapter_bytes(path)).hexdigest()
    names = sorted(str(f.relative_to(path)) for f in path.rglob("*"))
    answers = [(path / name).read_text() for name in ("rollouts.jsonl", "final.jsonl")]
    return {"rows": rows(path), "adapter": adapter, "names": names, "answers": answers}


def plan(argv, capsys):
    """What --dry-run prints."""
    capsys.readouterr()
    assert train.main(once([*argv, "--dry-run"])) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("disk", "time"))]


def verdicts(argv):
    cfg = resolve(once(argv))
    guard = HeldOutGuard(cfg.guard)
    out = []
    for i in range(40):
        now = guard.update(i, min(1.0, 0.3 + 0.01 * i), max(0.0, 0.6 - 0.012 * i), 0.002 * i, n=400)
        out.append((now.reason, now.proxy_real_gap, now.streak, guard.fired))
    return out


@pytest.mark.long
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_makes_a_difference(name, files, shared_run, capsys, monkeypatch):
    entry = FLAGS[name]
    monkeypatch.syspath_prepend(files["home"])
    a, b = lines_of(name, entry, files)
    match entry:
        case Plan():
            one, other = plan(a, capsys), plan(b, capsys)
        case Watch():
            one, other = verdicts(a), verdicts(b)
        case _:
            one, other = seen(shared_run(*a)), seen(shared_run(*b))
    assert one != other, f"{name} is idle: {entry}"


@pytest.mark.long
def test_a_weak_sandbox_is_allowed_by_its_flag(here, monkeypatch, capsys):
    from grading.test_grader import BARE

    weak = partial(Grader, without=BARE)
    monkeypatch.setattr("vgrout.envs.code.environment.Grader", weak)
    argv = [*SMALL, *NONE, "--dry-run"]
    with pytest.raises(Exception, match="--allow-weak-sandbox"):
        launch(train.train, resolve(argv))
    assert train.main([*argv, "--allow-weak-sandbox"]) == 0


@pytest.mark.long
def test_every_column_is_on_the_console_by_its_flag(tmp_path, capsys):
    """--columns"""
    heads = []
    for columns in ("main", "all"):
        run(tmp_path, *SMALL, *NONE, f"--columns={columns}")
        heads.append(
            next(
                line.split()
                for line in capsys.readouterr().out.splitlines()
                if line.startswith("step ")
            )
        )
    assert "gn" in heads[1]
    assert len(heads[0]) < len(heads[1]) / 2


@pytest.mark.long
def test_threads_are_torchs(shared_run, tmp_path):
    """--threads"""
    before = torch.get_num_threads()
    try:
        for n in (1, 2):
            shared_run(*SMALL, *NONE, f"--threads={n}", f"--out-tag=_threads{n}")
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "own"),
    [pytest.param([], "fp32", marks=pytest.mark.slow), (["--dtype=bf16"], "bf16")],
)
def test_a_resumed_run_goes_on_in_its_own_dtype(
    given,
    own,
    shared_run,
    tmp_path,
    monkeypatch,
):
    """On a machine where auto means the other one; to the last bit."""
    argv = [*SMALL, *NONE, *given]
    whole, path = shared_run(*argv), shared_run.copy(shared_run(*argv, stop_after=0), tmp_path)
    monkeypatch.setattr(source, "MINIATURE_BELOW", 0)
    monkeypatch.setattr(source, "cpu_multiplies_bf16", lambda: own == "fp32")
    assert source.resolved_dtype("auto", embedded.MODEL_DIR, gpu=False) != own
    monkeypatch.chdir(path.parents[2])
    assert run(path.parents[2], *SMALL[:2], f"--resume={path}") == path
    record = loaded(path / "run.json")
    assert record["dtype"] == record["config"]["run"]["dtype"] == own
    assert (rows(path), adapter_bytes(path)) == (rows(whole), adapter_bytes(whole))
    assert all(
        row["realised"] == pytest.approx(1, abs={"fp32": 1e-3, "bf16": 0.1}[own])
        for row in rows(path)
    )


@pytest.mark.long
def test_a_change_that_rounding_swallows_is_a_warning_once(
    tmp_path,
    shared_run,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(SvdAdapter, "realised_share", lambda _: 0.3)
    shared_run.warm(tmp_path)
    run(tmp_path, *SMALL, *NONE)
    assert capsys.readouterr().out.count("0.30 of the adapter's change is in the weights") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("apart", "warned"), [(2.0, 1), pytest.param(-2.0, 0, marks=pytest.mark.slow)]
)
def test_a_direction_that_hardly_separates_is_a_warning_once(
    apart,
    warned,
    tmp_path,
    shared_run,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(recorder, "SETTLED", 0)
    monkeypatch.setattr(recorder, "APART", apart)
    shared_run.warm(tmp_path)
    run(tmp_path, *SMALL, "--intervention=route2")
    assert capsys.readouterr().out.count("known hacks hardly differ from other answers") == warned
