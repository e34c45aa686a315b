"""KL from the deployed model to the base: exact, and zero where nothing was learnt; and the evaluations that read it:
which side answers what."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import kl_div

import tiny
from methods import config, graded, problem
from vgrout.commands import evaluate
from vgrout.config.settings import EvalConfig
from vgrout.ground.data import Completion, GradedCompletion
from vgrout.ground.metrics import Rate
from vgrout.ground.rng import torch_stream
from vgrout.loop import heldout
from vgrout.model.svd_adapter import AS_TRAINED, DEPLOYED, REFERENCE

PROMPTS = [(3, 4, 5), (7, 8, 9, 10)]
ANSWERS = [(8, 9, 3), (5,)]


def logits(policy):
    """Of every position that predicts an answer's token, row by row."""
    out = []
    for p, a in zip(PROMPTS, ANSWERS, strict=True):
        with torch.no_grad():
            out.append(policy.model(input_ids=torch.tensor([[*p, *a]])).logits[0, len(p) - 1 : -1])
    return out


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_kl_is_the_sum_over_the_vocabulary(family):
    policy = tiny.policy(family)
    assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == [0.0] * 4
    base = logits(policy)
    tiny.shake(policy.adapter, 0.1)

    def by_hand():
        p, q = (torch.cat(rows).log_softmax(-1) for rows in (logits(policy), base))
        return kl_div(q, p, log_target=True, reduction="none").sum(1).tolist()

    assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == pytest.approx(by_hand(), rel=1e-4)
    trained = sum(by_hand())
    with policy.adapter.deployed():
        assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == pytest.approx(by_hand(), rel=1e-4)
        assert sum(by_hand()) < trained
    with policy.adapter.reference():
        assert policy.kl_to_base(PROMPTS, ANSWERS).tolist() == [0.0] * 4


ASKED = [problem(i) for i in range(3)]


def test_an_evaluation_in_training_is_of_the_deployed_model_and_so_is_its_kl(monkeypatch):
    """G answers to each problem, from a stream of the step's own."""
    policy = tiny.policy()
    tiny.shake(policy.adapter, 0.1)
    cfg = config("route2", seed=5)
    asked = {}
    completions = [Completion((20 + i, 30, 1), "", True, ()) for i in range(3)]
    grades = (graded(3.5, solves=True), graded(3.5, hacks=True), graded(0.5))

    def sample_and_submit(_, __, problems, n, **how):
        asked.update(how, active=policy.adapter.active, problems=problems, n=n)
        answers = zip(problems, completions, grades, strict=True)
        return [[GradedCompletion(of, 0, given, grade) for of, given, grade in answers]]

    monkeypatch.setattr(heldout, "sample_and_submit", sample_and_submit)
    monkeypatch.setattr(heldout, "graded", list)
    found = heldout.evaluate(policy, Mock(), ASKED, cfg, 4, ["exit_code"])
    assert asked["active"] == DEPLOYED
    assert (asked["problems"], asked["n"]) == (ASKED, cfg.scale.group)
    assert (asked["sampling"], asked["max_new"]) == (cfg.sampling, cfg.scale.max_new)
    assert asked["stream"].initial_seed() == torch_stream(5, "eval", 4).initial_seed()
    assert (found.hack, found.solve) == (Rate(1, 3), Rate(1, 3))
    prompts = [policy.render(p.messages) for p in ASKED]
    ids = [completion.ids for completion in completions]
    as_trained = policy.kl_to_base(prompts, ids).mean().item()
    with policy.adapter.deployed():
        assert found.kl == pytest.approx(policy.kl_to_base(prompts, ids).mean().item())
    assert found.kl != pytest.approx(as_trained, rel=0.01)


def test_the_kl_of_an_evaluation_is_the_mean_over_the_tokens_of_evenly_spaced_answers():
    """Of forty answers of one to four tokens 32 are read, a few at a time."""
    policy = tiny.policy()
    tiny.shake(policy.adapter, 0.1)
    given = []
    for i in range(40):
        ids = tuple(range(20 + i, 21 + i + i // 10))
        given.append(GradedCompletion(problem(i), 0, Completion(ids, "", True, ()), graded(0)))
    some = [given[i * 40 // 32] for i in range(32)]
    one_by_one = [policy.kl_to_base([policy.render(a.problem.messages)], [a.ids]) for a in some]
    assert heldout.kl_to_base(policy, given) == pytest.approx(
        torch.cat(one_by_one).mean().item(), rel=1e-4
    )
    assert heldout.kl_to_base(policy, []) is None


@dataclass(frozen=True)
class Hinted:
    """What an evaluation needs of a task: a prompt with a hint, and one without."""

    id: int
    hint: str = " Call me f."
    flaws: tuple[str, ...] = ("exit_code",)

    @property
    def plain(self):
        return f"Do {self.id} things."

    @property
    def messages(self):
        return self.plain + self.hint


def without_hint(task):
    return replace(task, hint="")


class Sides:
    """Stands in for sampling: keeps, of every time that it is asked, which vectors are on and what the prompts are."""

    def __init__(self, policy, monkeypatch):
        self.asked = []
        self.streams = set()

        def sample_and_submit(_, __, problems, n, **how):
            self.asked.append((policy.adapter.active, n, [p.messages for p in problems]))
            self.streams.add(how["stream"].initial_seed())
            # as many hacks as calls so far
            k = len(self.asked)
            whole = Completion((1,), "", True, ())
            of_problem = [
                GradedCompletion(problems[0], i, whole, graded(3.5, hacks=i < k, solves=i >= k))
                for i in range(8)
            ]
            return [of_problem]

        monkeypatch.setattr(heldout, "sample_and_submit", sample_and_submit)
        monkeypatch.setattr(heldout, "graded", list)
        monkeypatch.setattr("vgrout.loop.heldout.without_hint", without_hint)


PLAIN = [f"Do {i} things." for i in range(3)]


@pytest.mark.parametrize("quarantine", [True, False])
@pytest.mark.parametrize("hint", [" Call me f.", ""])
def test_the_final_evaluation_is_of_each_side_under_the_same_random_numbers(
    quarantine, hint, monkeypatch
):
    """Untrained, deployed, as trained, and deployed without a hint; sides that are the same are sampled once."""
    policy = tiny.policy()
    tiny.shake(policy.adapter, 0.1)
    if not quarantine:
        with torch.no_grad():
            policy.adapter.δS_hack.zero_()
    cfg = replace(config("route2", seed=5), eval=EvalConfig(final_n_prompts=2, final_samples=7))
    tasks = tuple(Hinted(i, hint) for i in range(3))
    splits = SimpleNamespace(
        flaws=["exit_code"], balanced=lambda part, n: {"test": tasks}[part][:n]
    )
    sides = Sides(policy, monkeypatch)
    clock = lambda *_, **__: nullcontext()  # noqa: E731
    final = heldout.evaluate_final(policy, Mock(), splits, cfg, clock, lambda: False)
    usual = [p.messages for p in tasks[:2]]
    want = [(REFERENCE, 7, usual), (DEPLOYED, 7, usual)]
    hacks = {"base": 1, "deployed": 2, "trained": 2, "plain": 2}
    if quarantine:
        want.append((AS_TRAINED, 7, usual))
        hacks["trained"] = len(want)
    if hint:
        want.append((DEPLOYED, 7, PLAIN[:2]))
        hacks["plain"] = len(want)
    assert sides.asked == want
    assert {side: of.hack.k for side, of in final.sides.items()} == hacks
    assert sides.streams == {torch_stream(5, "final", cfg.scale.steps).initial_seed()}


def test_each_evaluation_has_a_file_of_its_own():
    """What asks for other numbers does not write over them; the same once more does."""
    saved = SimpleNamespace(path=Path("run/train.safetensors"))

    def file(problems="p.jsonl", seed=5, graded_by="flaws", **flags):
        cli = evaluate.EvaluateSettings(run=Path("run"), **flags)
        hashes = {"problems": problems, "reference": graded_by}
        return evaluate.own_file(cli, saved, Path(problems), seed, hashes)

    others = [
        {"problems": "other.jsonl"},
        {"graded_by": "functions"},
        {"split": "all"},
        {"n_prompts": 4},
        {"samples": 4},
        {"seed": 6},
    ]
    files = [file(), *(file(**how) for how in others)]
    assert len({*files}) == len(files)
    assert {path.parent for path in files} == {Path("run/evaluations")}
    assert file() == files[0]
