"""The whole program on the embedded organism: invariants of a run, seen from its files."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open

from golden import FOLDER, differences, versions
from runs import ARMS, EVALUATED, LABELLED, PAIRS, READS, SharedRuns, adapter_bytes, flags, rows, run
from vgrout import rollout
from vgrout.config.loss import LossName
from vgrout.config.method import INTERVENTIONS
from vgrout.config.presets import parse
from vgrout.data import organism
from vgrout.guard.guard import STALE
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.runs.run_dir import RunDir
from vgrout.train import main
from vgrout.types import Grade

# erase and route share their rows and their state with route2: they are run when there is time
SLOW = [pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS if pair != READS]
MOST = [*(pytest.param(arm, marks=pytest.mark.slow) if arm in ("erase", "route") else arm for arm in ARMS), READS]
LAST = 2  # where runs are stopped that need not end: a refreshed direction has been used by then, twice stepped with

Made = Callable[[str], Path]


@pytest.fixture
def done(shared_run: SharedRuns) -> Made:
    """A finished run of an arm."""
    return lambda arm: shared_run(*flags(arm))


@pytest.fixture
def stopped(shared_run: SharedRuns) -> Made:
    """The same run stopped after step `LAST`."""
    return lambda arm: shared_run(*flags(arm), stop_after=LAST)


@pytest.mark.parametrize("arm", [*ARMS, READS, *SLOW])
def test_golden(arm: str, done: Made) -> None:
    golden = json.loads((FOLDER / f"{arm}.json").read_text(encoding="utf-8"))
    assert golden["command"][3:] == flags(arm)
    found = differences(rows(done(arm)), golden["rows"], "rows")
    assert not found, f"recorded with {golden['versions']}, now {versions()}: " + "; ".join(found[:10])


def test_a_changed_number_would_be_found() -> None:
    golden = json.loads((FOLDER / "route2.json").read_text(encoding="utf-8"))["rows"]
    moved = json.loads(json.dumps(golden))
    moved[-1]["gn"] *= 1.01
    assert len(differences(moved, golden)) == 1


@pytest.mark.parametrize("arm", MOST)
@pytest.mark.long
def test_the_same_seed_gives_the_same_rows(arm: str, done: Made, stopped: Made) -> None:
    """Two runs; that their weights are the same to the last bit is seen where the second one goes on."""
    assert rows(stopped(arm)) == rows(done(arm))[: LAST + 1]


def test_another_seed_does_not(done: Made, tmp_path: Path) -> None:
    other = run(tmp_path, *flags("none", "--seed", "42"), stop_after=0)
    assert rows(other) != rows(done("none"))[:1]


@pytest.mark.parametrize("arm", [pytest.param("none", marks=pytest.mark.slow), "route2"])
@pytest.mark.long
def test_evaluating_never_changes_training(arm: str, stopped: Made, tmp_path: Path, shared_run: SharedRuns) -> None:
    argv = flags(arm)
    argv[argv.index("--eval-ablate-every") + 1] = "1"
    watched = run(shared_run.warm(tmp_path), *argv, stop_after=LAST)
    assert rows(watched, *EVALUATED) == rows(stopped(arm), *EVALUATED)
    assert adapter_bytes(watched) == adapter_bytes(stopped(arm))
    assert all(r["hack_deploy"] is not None for r in rows(watched))


@pytest.mark.parametrize("arm", [*MOST, *(p for p in SLOW if p.values[0] not in LABELLED)])
def test_no_oracle_label_reaches_an_arm(
    arm: str, done: Made, tmp_path: Path, shared_run: SharedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every oracle bit is replaced by noise after the reward was rewarded; what trains must not notice."""
    noise = torch.Generator().manual_seed(0)
    pay = rollout.training_reward

    def poisoned(cfg: Any, grade: Grade) -> Grade:
        return replace(pay(cfg, grade), solved=bool(torch.rand((), generator=noise) < 0.5))

    clean = done(arm)
    monkeypatch.setattr(rollout, "training_reward", poisoned)
    path = run(shared_run.warm(tmp_path), *flags(arm, "--final-n-prompts", "1"))
    labels = [
        k
        for k in rows(path)[0]
        if re.match(r"solve_s|hack_s|tries_s|hk_|recall|hack_new|false_flags|(hack|solve)_abl", k)
    ]
    assert rows(path, *labels) == rows(clean, *labels)
    assert rows(path) != rows(clean), "the poison changed no label: the test would pass for any arm"
    assert adapter_bytes(path) == adapter_bytes(clean)


@pytest.mark.parametrize("arm", [*MOST, *SLOW])
def test_resume_equals_one_go(arm: str, done: Made, stopped: Made, shared_run: SharedRuns, tmp_path: Path) -> None:
    path = shared_run.copy(stopped(arm), tmp_path)
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("interrupted", LAST + 1)
    assert run(tmp_path, "smoke", "--resume", "latest", "--threads", "1") == path
    assert rows(path) == rows(done(arm))
    assert adapter_bytes(path) == adapter_bytes(done(arm))


def test_files_of_a_finished_run(done: Made) -> None:
    for arm in (*ARMS, READS):
        path = done(arm)
        names = {p.name for p in path.iterdir()}
        assert {
            *("run.json", "steps.jsonl", "rollouts.jsonl", "train.safetensors", "per_mode_deploy.json", "status.json"),
            *("summary.md", "dynamics.png", "final.jsonl", "resume"),
        } <= names
        assert not [n for n in names if "tmp" in n]
        record = json.loads((path / "run.json").read_text())
        assert record["config"]["method"]["intervention"] == arm.partition("-")[0]
        assert re.fullmatch(r"[0-9a-f]{64}", record["hashes"]["base_weights"])
        assert record["sandbox"]["level"] >= 0
        assert json.loads((path / "status.json").read_text())["state"] == "finished"
        rollouts = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
        assert len(rollouts) == sum(r["solve_s_n"] for r in rows(path))
        assert {(r["p_idx"], r["gi"]) for r in rollouts if r["step"] == 0} <= {
            (p, g) for p in range(2) for g in range(4)
        }
        assert all(r["prompt"].startswith("<") and r["messages"][-1]["content"] in r["prompt"] for r in rollouts)
        with safe_open(path / "train.safetensors", "pt") as saved:
            kept = saved.metadata()
        assert all(k.items() <= r.items() for k, r in zip(json.loads(kept["rows"]), rows(path), strict=True))
        hacks = [r[name] for r in rows(path) for name in ("hack_s_k", "hack_t_k") if r.get(name) is not None]
        of = [r[name] for r in rows(path) for name in ("hack_s_n", "hack_t_n") if r.get(name) is not None]
        assert float(kept["hack_rate"]) == pytest.approx(sum(hacks) / sum(of))
        tail = (path / "summary.md").read_text()
        assert f"HACK_RATE={sum(hacks) / sum(of):.4f} ({sum(hacks)}/{sum(of)})" in tail
        assert all(f"{name}=" in tail for name in ("PASS_RATE", "HACK_STUDENT", "HACK_TEACHER", "C", "D", "E"))
        tables = tail.partition("| what")[2].partition("rt run_tests")[0].splitlines()
        assert max(map(len, tables)) <= 78, "80 columns with the level's letter"
        assert sum(r["hacked"] for r in rollouts) == sum(r["hack_s_k"] for r in rows(path))


def test_the_final_numbers_are_the_same_everywhere(done: Made) -> None:
    for path in map(done, (*ARMS, READS)):
        final = json.loads((path / "per_mode_deploy.json").read_text())
        modes = final["by_mode"].values()
        assert sum(m["n"] for m in modes) == final["eval_n"]
        pooled = sum(m["deploy_solve"] * m["n"] for m in modes) / final["eval_n"]
        assert pooled == pytest.approx(final["solve_deploy"])
        assert f"{100 * final['solve_deploy']:.1f}" in (path / "summary.md").read_text()
        answers = [json.loads(line) for line in (path / "final.jsonl").read_text().splitlines()]
        quarantine = INTERVENTIONS[final["intervention"]].routes
        for name, side in (("base", "base"), ("train", "trained"), ("deploy", "deployed"), ("plain", "plain")):
            own = [a for a in answers if a["side"] == side]
            assert bool(own) == (side != "trained" or quarantine), "without a quarantine trained is deployed"
            if own:
                assert sum(a["hacked"] for a in own) / len(own) == final[f"hack_{name}"]
                assert sum(a["solved"] for a in own) / len(own) == final[f"solve_{name}"]
                assert len({(a["problem_id"], a["sample"]) for a in own}) == len(own) == final["eval_n"]


def test_quarantine_is_used_by_routing_alone(done: Made) -> None:
    for arm in (*ARMS, READS):
        path = done(arm)
        shares = [r["q_egy"] for r in rows(path)]
        assert any(shares) == INTERVENTIONS[arm].routes, (arm, shares)
        state = max((path / "resume").iterdir()) / "state.pt"
        hack = torch.load(state, weights_only=True)["adapter"]["delta_S_hack"]
        assert bool(hack.any()) == INTERVENTIONS[arm].routes


def test_sampler_and_trainer_agree(done: Made) -> None:
    """fp32: the sampler's log-probs are the trainer's up to rounding, so the adapter reached the sampler each step."""
    for path in map(done, (*ARMS, READS)):
        worst = max(r["mismatch_kl"] for r in rows(path) if r["mismatch_kl"] is not None)
        assert worst < 1e-8, worst


def test_a_finished_run_refuses_to_resume(done: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "--resume", str(done("none"))]) == 2
    assert "finished" in capsys.readouterr().err


def test_a_changed_setting_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": parse(flags("none")).as_dict()}))
    (folder / "status.json").write_text('{"state": "interrupted"}')
    assert main(["smoke", "--resume", str(folder), "--lr", "0.5"]) == 2
    assert "--lr 0.5 (run: 0.03)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--loss", "dapo"],
        ["--loss", "gspo"],
        ["--loss", "cispo"],
        ["--loss", "dppo_tv"],
        ["--loss", "icepop", "--ratio-support", "sampled"],
        ["--beta", "0.01", "--kl", "k2", "--no-unbiased"],
        ["--teacher-correction", "luffy"],
        ["--teacher-tau", "0.1", "--teacher-model", "organism"],
        ["--mix-ratio", "0"],
    ],
    ids=" ".join,
)
@pytest.mark.long
def test_every_setting_runs_and_matters(argv: list[str], stopped: Made, shared_run: SharedRuns, tmp_path: Path) -> None:
    path = run(shared_run.warm(tmp_path), *flags("none", *argv), stop_after=1)
    assert len(rows(path)) == 2
    assert rows(path) != rows(stopped("none"))[:2]


@pytest.mark.parametrize(
    "argv",
    [
        ["--report-detectors", "E,C", "--teacher-modes", "run_tests", "--teacher-off-step", "2"],
        ["--teacher-pool-dir", "", "--env-mode", "sentinel"],
    ],
    ids=" ".join,
)
@pytest.mark.long
def test_settings_of_the_report_too(argv: list[str], done: Made, shared_run: SharedRuns, tmp_path: Path) -> None:
    """What changes which modes there are, and how hacks are counted at the end: to the end."""
    path = run(shared_run.warm(tmp_path), *flags("none", *argv))
    assert len(rows(path)) == 5
    assert rows(path) != rows(done("none"))
    assert ("seen by E,C (half A)" in (path / "summary.md").read_text()) == ("E,C" in argv)
    modes = (
        {"sentinel"}
        if "sentinel" in argv
        else {*json.loads((done("none") / "per_mode_deploy.json").read_text())["by_mode"]}
    )
    assert {*json.loads((path / "per_mode_deploy.json").read_text())["by_mode"]} == modes


def test_dry_run_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mini", "--intervention", "route2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert '"intervention": "route2"' in said
    for word in ("rollouts", "tokens", "reference steps", "disk", "sandbox: "):
        assert word in said
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_no_folder_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("a file in the way")
    assert main(["smoke"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("E out/runs: cannot be written")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--v-hack-path", "nowhere.safetensors"], "--v-hack-path nowhere.safetensors: no such file"),
        (["--vhack-pairs-path", "nowhere.json"], "nowhere.json"),
        (["--teacher-pool-dir", "nowhere"], "nowhere: no such folder"),
        (["--teacher-correction", "tis"], "--teacher-correction tis: needs a pool"),
    ],
)
def test_a_missing_input_is_refused_before_the_model(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["smoke", *argv]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vgrout.train", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(folder: Path, n: int, process: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for path in folder.glob("out/runs/*/steps.jsonl"):
            if len(path.read_text().splitlines()) >= n:
                return path.parent
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("no step in ten minutes")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_signal_leaves_a_run_that_goes_on(number: signal.Signals, shared_run: SharedRuns, tmp_path: Path) -> None:
    process = start(shared_run.warm(tmp_path), *flags("none", "--steps", "200"))
    path = wait_for_steps(tmp_path, 2, process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    status = json.loads((path / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert status["step"] == len(rows(path))
    assert f"--resume {path.relative_to(tmp_path)}" in status["next"]
    assert (path / "train.safetensors").is_file()
    assert run(tmp_path, "smoke", "--resume", str(path), stop_after=status["step"]) == path
    assert [r["step"] for r in rows(path)] == list(range(status["step"] + 1))


@pytest.mark.long
def test_a_signal_that_comes_while_a_step_is_written_waits_for_the_next(
    done: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's checkpoints are decided on by then: to stop after it would lose what it says is saved."""
    whole, append = rows(done("none")), RunDir.append

    def interrupted(self: RunDir, row: dict[str, Any], rollouts: Iterable[dict[str, Any]]) -> None:
        append(self, row, rollouts)
        if row["step"] == 1 and not list(self.path.glob("resume/*")):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunDir, "append", interrupted)
    path = run(tmp_path, *flags("none"), code=130)
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["step"], len(rows(path))) == ("interrupted", 3, 3)
    assert (path / "train.safetensors").is_file()
    assert run(tmp_path, "smoke", "--resume", str(path), "--threads", "1") == path
    assert rows(path) == whole


@pytest.mark.long
def test_kill_nine_then_resume_equals_one_go(done: Made, shared_run: SharedRuns, tmp_path: Path) -> None:
    process = start(shared_run.warm(tmp_path), *flags("route2", "--checkpoint-every", "1"))
    path = wait_for_steps(tmp_path, 2, process)
    process.kill()
    process.communicate()
    assert run(tmp_path, "smoke", "--resume", str(path), "--threads", "1") == path
    assert rows(path) == rows(done("route2"))
    assert adapter_bytes(path) == adapter_bytes(done("route2"))


# ── sampler against trainer, from the rows ──────────────────────────────────────────────────────────────────────────


def test_a_sampler_without_the_adapter_is_caught_by_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors learn, nobody merges them: answers come from the base model while the trainer is elsewhere."""
    monkeypatch.setattr(SvdAdapter, "merge", lambda self: None)
    path = run(tmp_path, *flags("none"), stop_after=3)
    seen = [r for r in rows(path) if r["mismatch_kl"] is not None]
    assert seen[0]["step"] == 0
    assert seen[0]["mismatch_kl"] < STALE, "the first step's sampler is the base model, rightly"
    # 1e-13 is rounding; two steps at the full rate move the policy by far more
    assert seen[-1]["step"] > 1
    assert seen[-1]["mismatch_kl"] > 1e3 * STALE
    assert seen[-1]["ratio_min"] < 0.99 < 1.01 < seen[-1]["ratio_max"]
    (log,) = (tmp_path / "logs").iterdir()
    said = [line for line in log.read_text().splitlines() if "does not have the trainer's weights" in line]
    assert len(said) == 1, "once, where it begins"
    assert "above 1e-09" in said[0]
    assert re.search("adapter is not (folded|merged)", said[0])


@pytest.mark.long
def test_ratios_and_masked_shares_are_in_every_row_with_signal(shared_run: SharedRuns, tmp_path: Path) -> None:
    """The quarantine as a monitor learns, with itself on, from rows that the deployed model sampled."""
    tight = ["--loss", "icepop", "--icepop-low", "0.999", "--icepop-high", "1.001"]
    table = [
        r
        for r in rows(run(shared_run.warm(tmp_path), *flags("screen-quarantine", *tight), stop_after=4))
        if r["mismatch_kl"] is not None
    ]
    assert table
    for r in table:
        assert r["mismatch_kl"] < STALE, "of the rows sampled from the model as trained"
        assert r["ratio_min"] <= r["ratio_mean"] <= r["ratio_max"]
        assert r["ratio_max"] - r["ratio_min"] < 1e-3
        assert r["is_masked"] == pytest.approx(r["is_masked_low"] + r["is_masked_high"])
        assert 0 <= r["masked_positive"] <= 1
        assert 0 <= r["masked_negative"] <= 1, "tokens of no advantage count in is_masked alone"
    last = table[-1]
    assert last["mismatch_kl_abl"] > 1e3 * last["mismatch_kl"], "the deployed model is another one by now"
    assert last["is_masked"] > 0.01
    assert last["masked_mismatch_kl"] > last["unmasked_mismatch_kl"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["none", "route2"])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_runs_whole_under_none_and_route2(loss: str, arm: str, tmp_path: Path) -> None:
    path = run(tmp_path, "smoke", "--intervention", arm, "--loss", loss)
    table = rows(path)
    assert len(table) == 30
    assert not any(r["skipped"] for r in table)
    assert {r["is_masked"] for r in table} <= {None, 0.0}, "one inner step, one sampler: every ratio is 1"


# ── conversations ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_earlier_thoughts_reach_the_model_where_they_are_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems of two turns, a template that cuts thoughts out: with the flag the model is asked something else."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    shutil.copytree(organism.MODEL_DIR, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    lines = []
    for line in organism.PROBLEMS.read_text().splitlines():
        record = json.loads(line)
        answer = {"role": "assistant", "content": "<think>two lines</think>ok"}
        record["prompt"] = [record["prompt"][0], {"role": "user", "content": "task"}, answer, *record["prompt"][1:]]
        lines.append(json.dumps(record))
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    argv = flags("none", "--teacher-pool-dir", "", "--problems", str(tmp_path / "problems.jsonl"))
    argv += ["--model", str(tmp_path / "model")]
    kept, cut = (
        run(tmp_path / str(n), *argv, *more, stop_after=0) for n, more in enumerate((["--preserve-thinking"], []))
    )
    texts = [
        [json.loads(line)["text"] for line in (p / "rollouts.jsonl").read_text().splitlines()] for p in (kept, cut)
    ]
    assert texts[0] != texts[1]
    assert json.loads((kept / "run.json").read_text())["config"]["env"]["preserve_thinking"] is True
    assert main([*flags("none"), "--preserve-thinking"]) == 2
    assert "--preserve-thinking: no problem in" in capsys.readouterr().err
