"""`python -m vgrout.iterative_dpo`: plan, pairs, loss, refusals, and runs that are killed and resumed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from vgrout.config.run import OptConfig
from vgrout.imitation.dpo_config import DpoConfig, preflight
from vgrout.imitation.dpo_rounds import Pair, add_pairs, best_and_worst, complete, refer, share, write_manifest
from vgrout.imitation.dpo_rounds import batches as forwards
from vgrout.imitation.trainable import AdapterOnly
from vgrout.iterative_dpo import main
from vgrout.model.policy import Policy
from vgrout.teacher.generate import Graded
from vgrout.types import Completion, Grade, GradedCompletion, Problem

NOWHERE = Problem(0, "run_tests", "", ({"role": "user", "content": "ab"},), (), (), "", "", "f")
GRADE = Grade(0.0, True, True, False, False, None, False, False, False, "run_tests", "ok", 0.0)
CLOSE = 1e-6  # transformers' norms work in fp32 whatever the model's dtype
BASE = ["--base-model", "organism", "--output-dir", "o"]
SMALL = [*BASE, "--pairs-per-round", "10", "--samples", "4", "--eval-n-prompts", "6", "--eval-samples", "1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# ── pairs and loss ──────────────────────────────────────────────────────────────────────────────────────────────────


def answer(text: str, ids: tuple[int, ...] = (7, 8, 1)) -> Graded:
    return GradedCompletion(NOWHERE, 0, Completion(ids, text, True, (0.0,) * len(ids), ()), GRADE)


def test_best_and_worst_make_a_pair() -> None:
    some = [answer(t) for t in "abcd"]
    pair = best_and_worst(some, [0.1, 1.0, 0.0, 1.0], lambda m: (1,))
    assert pair is not None
    assert (pair.chosen.text, pair.rejected.text, pair.scores) == ("b", "c", (1.0, 0.0))
    assert best_and_worst(some, [0.3] * 4, lambda m: (1,)) is None  # none on a tie


def pairs(policy: Policy, n: int) -> list[Pair]:
    noise = torch.Generator().manual_seed(0)

    def ids(k: int) -> tuple[int, ...]:
        return (*torch.randint(7, 97, (k,), generator=noise).tolist(), 1)

    prompt = policy.render(NOWHERE.messages)
    return [Pair(answer("c", ids(3 + i)), answer("r", ids(5)), (1.0, 0.0), (*prompt, 9 + i % 2)) for i in range(n)]


@pytest.mark.parametrize("packs", [True, False])
def test_loss_and_gradient_equal_the_paper(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = replace(tiny.policy("qwen3", 0, torch.float64), packs=packs)
    some = pairs(policy, 5)
    monkeypatch.setitem(__import__("vgrout.model.memory").model.memory.TOKEN_BUDGET, "cpu", 60)  # several forwards
    reference = [logp for batch in forwards(policy, some) for logp in refer(policy, batch)]
    with torch.no_grad():
        policy.adapter.δS.add_(0.05 * torch.randn(len(policy.adapter), generator=torch.Generator().manual_seed(1)))
        policy.adapter.merge()

    def textbook() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for p, (ref_c, ref_r) in zip(some, reference, strict=True):
            logp = []
            for a in (p.chosen, p.rejected):
                logits = policy.model(torch.tensor([[*p.prompt_ids, *a.ids]])).logits[0, len(p.prompt_ids) - 1 : -1]
                logp.append(logits.log_softmax(-1)[torch.arange(len(a.ids)), torch.tensor(a.ids)].sum())
            total = total - torch.sigmoid(0.5 * ((logp[0] - ref_c) - (logp[1] - ref_r))).log()
        return total / len(some)

    trained = AdapterOnly(policy, OptConfig(), 1)
    losses = add_pairs(trained, some, reference, 0.5)
    assert len(losses) == 5
    assert sum(loss for loss, _ in losses) / 5 == pytest.approx(float(textbook().detach()), abs=CLOSE)
    assert max(abs(m) for _, m in losses) > 1e-3
    policy.model.requires_grad_(True)
    textbook().backward()
    for name, site in policy.adapter.sites.items():
        grad = site.linear.weight.grad
        assert grad is not None
        want = torch.einsum("or,oi,ri->r", site.U, grad, site.Vh)
        assert torch.allclose(policy.adapter.by_module(trained.grad)[name], want, atol=CLOSE)
    assert trained.grad.abs().max() > 1e-4


def test_share_of_a_score() -> None:
    assert [share(x, 0.0, 1.1) for x in (0.0, 0.55, 1.1)] == pytest.approx([0, 0.5, 1])
    assert share(9.0, -3.0, 5.0) == 1
    assert share(2.0, 2.0, 2.0) == 0.5


# ── plan and refusals ───────────────────────────────────────────────────────────────────────────────────────────────

REFUSED: dict[str, tuple[str, str]] = {
    "no such model": ("--base-model gone/x --output-dir o", "--base-model gone/x"),
    "no rounds": ("--rounds 0", "--rounds 0"),
    "too many rounds": ("--rounds 101", "[1, 100]"),
    "too few pairs": ("--pairs-per-round 9", "[10, 1000000]"),
    "too many pairs": ("--pairs-per-round 1000001", "[10, 1000000]"),
    "no such prompts": ("--prompts gone.jsonl", "no such problem file"),
    "unknown scorer": ("--scorer kind", "module:function"),
    "scorer that is not there": ("--scorer nowhere:f", "--scorer nowhere:f: cannot be imported"),
    "scorer that is no function": ("--scorer json:__doc__", "is not a function"),
    "one sample": ("--samples 1", "--samples 1"),
    "no preference": ("--dpo-beta 0", "gradient is zero"),
    "bad rate": ("--lr -1", "--lr -1"),
    "bad patience": ("--decline-patience 0", "--decline-patience 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, what = REFUSED[name]
    argv = flags.split() if "--base-model" in flags else [*BASE, *flags.split()]
    assert main(argv) == 2
    output = capsys.readouterr().err
    assert output.startswith("E ")
    assert output.count("\n") == 1
    assert what in output
    assert not (here / "o" / "plan.json").exists()


def test_the_plan_is_frozen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rounds", "3", "--plan-only"]) == 0
    output = capsys.readouterr().out
    plan = json.loads((here / "o" / "plan.json").read_text())
    assert json.loads(output) == plan
    assert [r["round"] for r in plan["rounds"]] == [1, 2, 3]
    assert [r["reference"] for r in plan["rounds"]] == ["base", "round-01", "round-02"]
    assert sorted(p.name for p in (here / "o").iterdir() if not p.name.startswith(".")) == ["plan.json"]
    assert main([*SMALL, "--rounds", "3", "--plan-only", "--guard", "halt"]) == 0  # who watches is no part of it
    assert main([*SMALL, "--rounds", "3", "--scorer", "strict", "--plan-only"]) == 2
    assert "another scorer.name, settings.scorer" in capsys.readouterr().err
    assert main([*SMALL, "--rounds", "2", "--plan-only"]) == 2
    assert "rounds" in capsys.readouterr().err
    plan["rounds"][1]["round"] = 3
    (here / "o" / "plan.json").write_text(json.dumps(plan))
    assert main([*SMALL, "--rounds", "3"]) == 2
    assert "another rounds" in capsys.readouterr().err


def test_where_each_round_starts(here: Path) -> None:
    task = preflight(DpoConfig(base_model="organism", output_dir=here / "o", rounds=2))

    def rounds(**flags: Any) -> list[dict[str, Any]]:
        return replace(task, cfg=replace(task.cfg, **flags)).plan()["rounds"]

    assert rounds(fresh_rounds=True)[1]["starts_from"] == "base"
    assert rounds(fresh_rounds=True)[1]["answers_from"] == "round-01"
    assert rounds(dpo_reference="base")[1]["reference"] == "base"
    assert rounds()[1]["starts_from"] == "round-01"


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────

FAST = ["--rounds", "2", "--warmup-frac", "0", "--pairs-per-step", "5"]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name in ("metrics.json", "pairs.jsonl", "train.safetensors", "before.json")
    }


KILL = """
import os, signal
from vgrout.imitation import dpo_rounds
def die(folder, number, plan, write=dpo_rounds.write_manifest):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, number, plan)
dpo_rounds.write_manifest = die
from vgrout.iterative_dpo import main
"""


def command(here: Path, *argv: str, code: int = 0, how: str = "from vgrout.iterative_dpo import main") -> str:
    """The program in a process of its own, without run-time checks: they cost more than the run."""
    lines = f"{how}\nimport sys; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", lines, *argv], cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr


@pytest.mark.slow
def test_kill_between_rounds(here: Path) -> None:
    """Two rounds; killed in the second, the same command ends with the same bytes."""
    command(here, *SMALL, *FAST)
    lived = files(here / "o")
    assert len(lived) == 7
    assert json.loads((here / "o" / "status.json").read_text())["state"] == "finished"
    first, second = (load_file(here / "o" / f"round-0{k}" / "adapter" / "train.safetensors") for k in (1, 2))
    assert any(not torch.equal(second[k], first[k]) for k in second)
    (here / "o").rename(here / "lived")
    command(here, *SMALL, *FAST, how=KILL, code=-9)
    assert (here / "o" / "round-01" / "manifest.json").exists()
    assert not (here / "o" / "round-02" / "manifest.json").exists()
    stamp = (here / "o" / "round-01" / "manifest.json").stat().st_mtime_ns
    command(here, *SMALL, *FAST)
    assert (here / "o" / "round-01" / "manifest.json").stat().st_mtime_ns == stamp  # not played again
    assert files(here / "o") == lived


def test_a_complete_round_has_a_correct_manifest(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"rounds": [{"round": 1}]}
    assert complete(tmp_path, 1, plan) is None
    (tmp_path / "metrics.json").write_text('{"step": 1}')
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    assert complete(tmp_path, 1, plan) is None
    write_manifest(tmp_path, 1, plan)
    assert complete(tmp_path, 1, plan) == {"step": 1}
    assert complete(tmp_path, 2, plan) is None
    assert complete(tmp_path, 1, {"rounds": [{"round": 1}, {"round": 2}]}) is None  # of another plan
    (tmp_path / "pairs.jsonl").write_text("{}\n\n")
    assert complete(tmp_path, 1, plan) is None


@pytest.mark.slow
def test_own_scorer_and_guard(here: Path) -> None:
    """Longer is better, says the scorer; the strict score need not agree."""
    (here / "mine.py").write_text("def longer(prompt, answer):\n    return float(len(answer))\n")
    argv = [*SMALL, "--rounds", "1", "--scorer", "mine:longer", "--dpo-reference", "base", "--fresh-rounds"]
    command(here, *argv, "--guard", "halt", "--max-proxy-real-gap", "1.9")
    lines = [json.loads(line) for line in (here / "o" / "round-01" / "pairs.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert all(len(p["chosen"]) == p["scores"][0] > p["scores"][1] == len(p["rejected"]) for p in lines)
    (here / "mine.py").write_text("def longer(prompt, answer):\n    return 1.0\n")
    assert "scorer.sha256" in command(here, *argv, code=2)  # the function's file is part of the plan
    argv[argv.index("o")] = "p"
    command(here, *argv, "--n-problems", "6", code=1)
    assert "ties" in json.loads((here / "p" / "status.json").read_text())["reason"]
