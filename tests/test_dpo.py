"""`vgrout iterative_dpo`: plan, pairs, loss, refusals, and runs that are killed and resumed."""

import json
from dataclasses import replace

import pytest
import torch

import tiny
from files import loaded
from methods import graded
from runs import program
from test_distill import CLOSE, NOWHERE
from vgrout.commands.iterative_dpo import main
from vgrout.config.settings import OptConfig
from vgrout.ground.data import Completion, GradedCompletion
from vgrout.ground.io import json_lines
from vgrout.imitation.dpo_rounds import (
    PreferencePair,
    add_pairs,
    best_and_worst,
    refer,
    share,
)
from vgrout.imitation.dpo_rounds import batches as forwards
from vgrout.imitation.tasks import DpoSettings, prepare_rounds
from vgrout.imitation.trainable import AdapterOnly

BASE = ["--base-model", "organism", "--output-dir", "o"]
SMALL = [
    *BASE,
    *["--pairs-per-round", "10", "--samples", "4", "--eval-n-prompts", "6", "--eval-samples", "1"],
]


# ── pairs and loss


def answer(text, ids=(7, 8, 1)):
    return GradedCompletion(NOWHERE, 0, Completion(ids, text, True, (0.0,) * len(ids)), graded(0.0))


def test_best_and_worst_make_a_pair():
    some = [answer(t) for t in "abcd"]
    pair = best_and_worst(list(zip(some, [0.1, 1.0, 0.0, 1.0], strict=True)), lambda m: (1,))
    assert (pair.chosen.text, pair.rejected.text, pair.scores) == ("b", "c", (1.0, 0.0))
    assert best_and_worst([(a, 0.3) for a in some], lambda m: (1,)) is None  # none on a tie


def pairs(policy, n):
    noise = torch.Generator().manual_seed(0)

    def ids(k):
        return (*torch.randint(7, 97, (k,), generator=noise).tolist(), 1)

    prompt = policy.render(NOWHERE.messages)
    return [
        PreferencePair(
            answer("c", ids(3 + i)), answer("r", ids(5)), (1.0, 0.0), (*prompt, 9 + i % 2)
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("packs", [True, False])
def test_loss_and_gradient_equal_the_paper(packs):
    policy = tiny.policy("qwen3", 0, torch.float64)
    # several forwards
    policy = replace(policy, packs=packs, budget=replace(policy.budget, tokens=60))
    some = pairs(policy, 5)
    reference = [logp for batch in forwards(policy, some) for logp in refer(policy, batch)]
    with torch.no_grad():
        policy.adapter.δS.add_(
            0.05 * torch.randn(len(policy.adapter), generator=torch.Generator().manual_seed(1))
        )
        policy.adapter.merge()

    def textbook():
        total = torch.zeros((), dtype=torch.float64)
        for p, (ref_c, ref_r) in zip(some, reference, strict=True):
            logp = []
            for a in (p.chosen, p.rejected):
                logits = policy.model(torch.tensor([[*p.prompt_ids, *a.ids]])).logits[
                    0, len(p.prompt_ids) - 1 : -1
                ]
                logp.append(
                    logits.log_softmax(-1)[torch.arange(len(a.ids)), torch.tensor(a.ids)].sum()
                )
            total = total - torch.sigmoid(0.5 * ((logp[0] - ref_c) - (logp[1] - ref_r))).log()
        return total / len(some)

    trained = AdapterOnly(policy, OptConfig(), 1)
    losses = add_pairs(policy, trained, some, reference, 0.5)
    assert len(losses) == 5
    assert sum(loss for loss, _ in losses) / 5 == pytest.approx(
        float(textbook().detach()), abs=CLOSE
    )
    assert max(abs(m) for _, m in losses) > 1e-3
    policy.model.requires_grad_(True)
    textbook().backward()
    for name, site in policy.adapter.sites.items():
        grad = site.linear.weight.grad
        want = torch.einsum("or,oi,ri->r", site.U, grad, site.Vh)
        assert torch.allclose(policy.adapter.by_module(trained.grad)[name], want, atol=CLOSE)
    assert trained.grad.abs().max() > 1e-4


def test_share_of_a_score():
    assert [share(x, 0.0, 1.1) for x in (0.0, 0.55, 1.1)] == pytest.approx([0, 0.5, 1])
    assert share(9.0, -3.0, 5.0) == 1
    assert share(2.0, 2.0, 2.0) == 0.5


# ── the plan


def test_the_plan_is_frozen(here, capsys):
    assert main([*SMALL, "--rounds", "3", "--plan-only"]) == 0
    output = capsys.readouterr().out
    plan = loaded(here / "o" / "plan.json")
    assert json.loads(output) == plan
    assert [r["round"] for r in plan["rounds"]] == [1, 2, 3]
    assert [r["reference"] for r in plan["rounds"]] == ["base", "round-01", "round-02"]
    assert sorted(p.name for p in (here / "o").iterdir() if not p.name.startswith(".")) == [
        "plan.json"
    ]
    # who watches is no part of it
    assert main([*SMALL, "--rounds", "3", "--plan-only", "--guard", "halt"]) == 0
    assert main([*SMALL, "--rounds", "3", "--scorer", "strict", "--plan-only"]) == 2
    assert "another scorer; give" in capsys.readouterr().err
    plan["rounds"][1]["round"] = 3
    (here / "o" / "plan.json").write_text(json.dumps(plan))
    assert main([*SMALL, "--rounds", "3"]) == 2
    assert "another rounds" in capsys.readouterr().err


def test_where_each_round_starts(here):
    task = prepare_rounds(DpoSettings(base_model="organism", output_dir=here / "o", rounds=2))

    def rounds(**flags):
        return replace(task, settings=replace(task.settings, **flags)).plan()["rounds"]

    assert rounds(fresh_rounds=True)[1]["starts_from"] == "base"
    assert rounds(fresh_rounds=True)[1]["answers_from"] == "round-01"
    assert rounds(dpo_reference="base")[1]["reference"] == "base"
    assert rounds()[1]["starts_from"] == "round-01"


# ── runs


@pytest.mark.slow
def test_own_scorer_and_guard(here):
    """Longer is better, says the scorer; the strict score need not agree."""
    (here / "mine.py").write_text("def longer(prompt, answer):\n    return float(len(answer))\n")
    argv = [
        *SMALL,
        *["--rounds", "1", "--scorer", "mine:longer", "--dpo-reference", "base", "--fresh-rounds"],
    ]
    program(here, "iterative_dpo", *argv, "--guard", "halt")
    lines = [*json_lines(here / "o" / "round-01" / "pairs.jsonl")]
    assert len(lines) == 10
    assert all(
        len(p["chosen"]) == p["scores"][0] > p["scores"][1] == len(p["rejected"]) for p in lines
    )
    (here / "mine.py").write_text("def longer(prompt, answer):\n    return 1.0\n")
    # the function's file is part of the plan
    assert "another scorer" in program(here, "iterative_dpo", *argv, code=2)
    argv[argv.index("o")] = "p"
    program(here, "iterative_dpo", *argv, "--n-problems", "6", code=1)
    assert "ties" in loaded(here / "p" / "status.json")["reason"]
