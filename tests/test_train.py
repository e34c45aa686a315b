"""The program on the embedded organism: invariants of a run, seen in its files."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from files import loaded
from golden import FOLDER, differences, versions
from runs import (
    EVALUATED,
    LABELLED,
    PAIRS,
    READS,
    SETTINGS,
    adapter_bytes,
    flags,
    rows,
    run,
    status,
    until,
)
from vgrout.config.presets import PRESETS
from vgrout.config.specs import INTERVENTIONS
from vgrout.ground import embedded
from vgrout.ground.io import json_lines
from vgrout.guard.guard import STALE
from vgrout.loop import rollout
from vgrout.runs.run_dir import RunDir
from vgrout.train import main

QUICK = ("none", "route2", READS)  # erase and route share rows and state with route2
SLOW = [pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS if pair != READS]
MOST = [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in ("erase", "route"))]
# last step of runs that need not end: by then a refreshed direction has been used for two steps
LAST = 2


@pytest.fixture
def done(shared_run):
    """A finished run of a method."""
    return lambda method: shared_run(*flags(method))


@pytest.fixture
def stopped(shared_run):
    """The same run stopped after step `LAST`."""
    return lambda method: shared_run(*flags(method), stop_after=LAST)


@pytest.mark.parametrize(
    "method",
    [
        *QUICK,
        *(pytest.param(m, marks=pytest.mark.long) for m in ("erase", "route", *SETTINGS)),
        *SLOW,
    ],
)
def test_golden(method, done):
    golden = loaded(FOLDER / f"{method}.json")
    assert golden["command"][3:] == flags(method)
    got, want = rows(done(method)), golden["rows"]
    found = differences(got, want, "rows")
    assert not found, f"recorded with {golden['versions']}, now {versions()}: " + "; ".join(
        found[:10]
    )
    learnt = [row for row in want if row["gn"] is not None]  # a step without signal has no gradient
    learnt[-1]["gn"] *= 1.1
    assert len(differences(got, want)) == 1, "and a changed number is found"


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "route2"])
@pytest.mark.long
def test_evaluating_never_changes_training(method, stopped, tmp_path, shared_run):
    argv = flags(method)
    argv[argv.index("--eval-ablate-every") + 1] = "1"
    watched = run(shared_run.warm(tmp_path), *argv, stop_after=LAST)
    assert rows(watched, *EVALUATED) == rows(stopped(method), *EVALUATED)
    assert adapter_bytes(watched) == adapter_bytes(stopped(method))
    assert all(r["hack_deploy"] is not None for r in rows(watched))


@pytest.mark.parametrize("method", [*MOST, *(p for p in SLOW if p.values[0] not in LABELLED)])
@pytest.mark.long
def test_no_oracle_label_reaches_a_method(method, done, tmp_path, shared_run, monkeypatch):
    """Every oracle bit is replaced by noise after the reward was computed; training must not notice."""
    noise, reward, clean = torch.Generator().manual_seed(0), rollout.grade_in_training, done(method)

    def poisoned(cfg, grade):
        return replace(reward(cfg, grade), solved=bool(torch.rand((), generator=noise) < 0.5))

    monkeypatch.setattr(rollout, "grade_in_training", poisoned)
    path = run(shared_run.warm(tmp_path), *flags(method, "--final-n-prompts", "1"))
    of_oracle = r"solve_s|hack_s|tries_s|hk_|recall|hack_new|false_flags|shadow|(hack|solve)_abl"
    labels = [k for k in rows(path)[0] if re.match(of_oracle, k)]
    assert rows(path, *labels) == rows(clean, *labels)
    assert rows(path) != rows(clean), (
        "the poison changed no label: the test would pass for any method"
    )
    assert adapter_bytes(path) == adapter_bytes(clean)


@pytest.mark.parametrize("method", [*MOST, *SLOW])
@pytest.mark.long
def test_resumed_run_equals_an_uninterrupted_one(method, done, stopped, shared_run, tmp_path):
    """The steps before the stop, too: the same seed gives the same rows."""
    path = shared_run.copy(stopped(method), tmp_path)
    end = status(path)
    assert (end["state"], end["step"]) == ("interrupted", LAST + 1)
    assert run(tmp_path, "smoke", "--resume", "latest", "--threads", "1") == path
    assert rows(path) == rows(done(method))
    assert adapter_bytes(path) == adapter_bytes(done(method))


def test_what_is_typed_beside_resume_is_the_runs(stopped, shared_run, here, capsys):
    path = shared_run.copy(stopped("none"), here)
    config = loaded(path / "run.json")["config"]
    usual = PRESETS["smoke"][1].scale.steps
    assert config["scale"]["steps"] != usual
    capsys.readouterr()
    assert main(["smoke", "--resume=latest", "--dry-run=config"]) == 0
    assert json.loads(capsys.readouterr().out)["scale"] == config["scale"]
    assert main(["smoke", "--resume=latest", "--dry-run", f"--steps={usual}"]) == 2
    assert (
        f"differs in --steps {usual} (run: {config['scale']['steps']})" in capsys.readouterr().err
    )


def test_files_of_a_finished_run(done):
    for method in QUICK:
        path = done(method)
        names = {p.name for p in path.iterdir()}
        assert {
            *(
                "run.json",
                "steps.jsonl",
                "rollouts.jsonl",
                "train.safetensors",
                "per_mode_deploy.json",
                "status.json",
            ),
            *("summary.md", "dynamics.png", "final.jsonl", "resume"),
        } <= names
        assert not [n for n in names if "tmp" in n]
        record = loaded(path / "run.json")
        assert record["config"]["method"]["intervention"] == method.partition("-")[0]
        assert re.fullmatch(r"[0-9a-f]{64}", record["hashes"]["base_weights"])
        assert record["sandbox"]["level"] >= 0
        assert status(path)["state"] == "finished"
        rollouts = [*json_lines(path / "rollouts.jsonl")]
        assert len(rollouts) == sum(r["solve_s_n"] for r in rows(path))
        assert {(r["p_idx"], r["gi"]) for r in rollouts if r["step"] == 0} <= {
            (p, g) for p in range(2) for g in range(4)
        }
        assert all(
            r["prompt"].startswith("<") and r["messages"][-1]["content"] in r["prompt"]
            for r in rollouts
        )
        with safe_open(path / "train.safetensors", "pt") as saved:
            kept = saved.metadata()
        assert all(
            k.items() <= r.items()
            for k, r in zip(json.loads(kept["rows"]), rows(path), strict=True)
        )
        hacks = [
            r[name]
            for r in rows(path)
            for name in ("hack_s_k", "hack_t_k")
            if r.get(name) is not None
        ]
        of = [
            r[name]
            for r in rows(path)
            for name in ("hack_s_n", "hack_t_n")
            if r.get(name) is not None
        ]
        assert float(kept["hack_rate"]) == pytest.approx(sum(hacks) / sum(of))
        rate = f"HACK_RATE={sum(hacks) / sum(of):.4f} ({sum(hacks)}/{sum(of)})"
        log = loaded(path / "per_mode_deploy.json")["log"]
        assert rate in (path.parents[2] / log).read_text()
        assert sum(r["hacked"] for r in rollouts) == sum(r["hack_s_k"] for r in rows(path))


def test_final_numbers_agree_between_files(done):
    for path in map(done, QUICK):
        final = loaded(path / "per_mode_deploy.json")
        modes = final["by_mode"].values()
        assert sum(m["n"] for m in modes) == final["eval_n"]
        pooled = sum(m["deploy_solve"] * m["n"] for m in modes) / final["eval_n"]
        assert pooled == pytest.approx(final["solve_deploy"])
        assert f"{100 * final['solve_deploy']:.1f}" in (path / "summary.md").read_text()
        answers = [*json_lines(path / "final.jsonl")]
        sides = {"base": "base", "train": "trained", "deploy": "deployed", "plain": "plain"}
        # without a quarantine trained is deployed
        if not INTERVENTIONS[final["intervention"]].routes:
            assert "trained" not in {a["side"] for a in answers}
            del sides["train"]
        for name, side in sides.items():
            own = [a for a in answers if a["side"] == side]
            assert sum(a["hacked"] for a in own) / len(own) == final[f"hack_{name}"]
            assert sum(a["solved"] for a in own) / len(own) == final[f"solve_{name}"]
            assert len({(a["problem_id"], a["sample"]) for a in own}) == len(own) == final["eval_n"]


def test_only_routing_uses_the_quarantine_and_the_sampler_has_the_trainers_weights(done):
    """In fp32 the sampler's log-probs are the trainer's up to rounding: the adapter reached the sampler each step."""
    for method in QUICK:
        path, routes = done(method), INTERVENTIONS[method.partition("-")[0]].routes
        shares = [r["q_egy"] for r in rows(path)]
        assert any(shares) == routes, (method, shares)
        state = max((path / "resume").iterdir()) / "state.pt"
        hack = torch.load(state, weights_only=True)["adapter"]["delta_S_hack"]
        assert bool(hack.any()) == routes
        assert max(r["mismatch_kl"] for r in rows(path) if r["mismatch_kl"] is not None) < 1e-8


def test_dry_run_starts_nothing(here, capsys):
    assert main(["mini", "--intervention", "route2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("method        route2: ")
    assert any(
        line.startswith("run           mini_route2_seed41: 60 steps of 4 problems × 8 answers")
        for line in lines
    )
    assert len(lines) <= 18
    heads = {line.split()[0] for line in lines}
    assert {"answers", "memory", "disk", "problems", "pool", "pairs", "guard", "sandbox"} <= heads
    assert not heads & {"missing", "device"}
    assert main(["mini", "--intervention", "route2", "--dry-run=config"]) == 0
    assert json.loads(capsys.readouterr().out)["method"]["intervention"] == "route2"
    assert list(here.iterdir()) == [], "nothing is left behind"


def test_a_dry_run_names_all_that_is_missing_and_a_run_the_first(here, capsys, monkeypatch):
    monkeypatch.setattr("vgrout.runs.plan.visible", lambda: ())
    argv = ["fast", "--intervention", "route2", "--v-hack-path", "v.safetensors"]
    assert main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if line.startswith("missing")]
    named = ("train_medhard", "test_medhard", "substrate", "prog_wide", "Qwen3-4B", "v.safetensors")
    assert [name in line for name, line in zip(named, missing, strict=True)] == [True] * 6
    assert "device        no GPU here; fast is made for one of 80 GB or more" in lines
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "E out/data/leetcode_train_medhard_filtered.jsonl: no such problem file"
    )
    assert error.endswith("(5 more missing: --dry-run lists all)\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--v-hack-path", "nowhere.safetensors"],
            "--v-hack-path nowhere.safetensors: not a readable safetensors file",
        ),
        ([], "E out/runs: cannot be written"),
    ],
)
def test_what_is_missing_or_in_the_way_is_refused(argv, message, here, capsys):
    if not argv:
        (here / "out").touch()
    before = list(here.iterdir())
    assert main(["smoke", *argv]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert list(here.iterdir()) == before, "nothing is left behind"


def start(folder, *argv, code=("-m", "vgrout.train")):
    """The program, or other code, as a process of its own in this folder."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *code, *argv], cwd=folder, **pipes)


def wait_for_steps(folder, n, process):
    def written():
        found = [
            path
            for path in folder.glob("out/runs/*/steps.jsonl")
            if path.read_text().count("\n") >= n
        ]
        assert found or process.poll() is None, process.communicate()[0]
        return found

    return until(written, 600)[0].parent


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
@pytest.mark.long
def test_a_signalled_run_can_be_resumed(number, shared_run, tmp_path):
    process = start(shared_run.warm(tmp_path), *flags("none", "--steps", "200"))
    path = wait_for_steps(tmp_path, 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    end = status(path)
    assert end["state"] == "interrupted"
    assert end["step"] == len(rows(path))
    assert f"--resume {path.relative_to(tmp_path)}" in end["next"]
    assert (path / "train.safetensors").is_file()
    assert run(tmp_path, "smoke", "--resume", str(path), stop_after=end["step"]) == path
    assert [r["step"] for r in rows(path)] == list(range(end["step"] + 1))


@pytest.mark.long
def test_a_signal_during_a_write_waits_for_the_next_step(done, tmp_path, monkeypatch):
    """The step's checkpoints are decided by then: stopping after it would lose what status.json says is saved."""
    append = RunDir.append

    def interrupted(self, row, rollouts):
        append(self, row, rollouts)
        if row["step"] == 1 and not list(self.path.glob("resume/*")):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunDir, "append", interrupted)
    path = run(tmp_path, *flags("none"), code=130)
    assert (status(path)["state"], status(path)["step"], len(rows(path))) == ("interrupted", 3, 3)
    assert (path / "train.safetensors").is_file()
    assert run(tmp_path, "smoke", "--resume", str(path), "--threads", "1") == path
    assert rows(path) == rows(done("none"))


# ── sampler against trainer, from the rows


@pytest.mark.long
def test_rows_show_a_sampler_without_the_adapter(tmp_path, monkeypatch):
    """δS learns, and answers come from the base model."""
    sample = rollout.sample_and_submit

    def without(policy, *args, **more):
        with policy.adapter.reference():
            return sample(policy, *args, **more)

    monkeypatch.setattr(rollout, "sample_and_submit", without)
    path = run(tmp_path, *flags("none"), stop_after=3)
    first, *_, last = (r for r in rows(path) if r["mismatch_kl"] is not None)
    assert first["step"] == 0
    assert first["mismatch_kl"] < STALE, "the first step's sampler is the base model, rightly"
    # 1e-13 is rounding; two steps at the full rate move the policy by far more
    assert last["step"] > 1
    assert last["mismatch_kl"] > 1e3 * STALE
    assert last["ratio_min"] < 0.99 < 1.01 < last["ratio_max"]
    (log,) = (tmp_path / "logs").iterdir()
    (line,) = (
        line
        for line in log.read_text().splitlines()
        if "does not have the trainer's weights" in line
    )
    assert "above 1e-09" in line
    assert "adapter is not merged" in line


# ── conversations


@pytest.mark.long
def test_preserve_thinking(tmp_path):
    """Problems of two turns, a template that cuts thoughts out: the flag changes what the model reads."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    shutil.copytree(embedded.MODEL_DIR, model := tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    lines = []
    for record in json_lines(embedded.PROBLEMS):
        answer = {"role": "assistant", "content": "<think>two lines</think>ok"}
        record["prompt"] = [
            record["prompt"][0],
            {"role": "user", "content": "task"},
            answer,
            *record["prompt"][1:],
        ]
        lines.append(json.dumps(record))
    (problems := tmp_path / "problems.jsonl").write_text("\n".join(lines))
    argv = flags(
        "none", "--teacher-pool-dir", "", "--problems", str(problems), "--model", str(model)
    )
    kept, cut = (
        run(tmp_path / str(len(of)), *argv, *of, stop_after=0)
        for of in (["--preserve-thinking"], [])
    )
    first, second = ((p / "rollouts.jsonl").read_text().splitlines() for p in (kept, cut))
    assert [json.loads(line)["text"] for line in first] != [
        json.loads(line)["text"] for line in second
    ]
    assert loaded(kept / "run.json")["config"]["env"]["preserve_thinking"] is True
