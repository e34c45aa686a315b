"""`vgrout distill`: losses and gradients, refusals, and runs that are killed and resumed."""

import errno
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from safetensors.torch import load_file

import tiny
from files import loaded
from golden import FOLDER, differences, versions
from runs import IMITATIONS, imitate, imitation_rows, program, status, teach
from runs import rows as rows_of
from test_tracking import curve, events
from vgrout.commands.distill import main
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import GradedCompletion, Ungraded
from vgrout.ground.io import NothingAligned, Refused
from vgrout.imitation import distill_methods
from vgrout.imitation.distill_methods import MiniLlm, MixedModel, Uld, mixed_model
from vgrout.imitation.tasks import DistillSettings, DistillTask
from vgrout.imitation.trainable import AdapterOnly, FullModel
from vgrout.model.load.saved import FoundModel
from vgrout.model.logprobs import completion_logprobs
from vgrout.model.policy import LanguageModel
from vgrout.model.sampling.sampler import sample
from vgrout.runs import checkpoint
from vgrout.runs.inputs import Inputs

F64 = torch.float64
# transformers' norms work in fp32 whatever the model's dtype, and the sampler's log-probs are fp32
CLOSE = 1e-6
NOWHERE = Problem(0, "run_tests", "", ({"role": "user", "content": "ab"},), (), (), "", "", "f")
SMALL = [
    *("--group", "2", "--prompts-per-step", "2", "--eval-n-prompts", "2"),
    *("--final-n-prompts", "6", "--final-samples", "1"),
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the organism, far enough from it to be another model."""
    return teach(tmp_path_factory.mktemp("teacher") / "train.safetensors")


# ── what is learnt from a batch


def task(**settings):
    nothing = FoundModel("tiny", "tiny", Path("nowhere"), None)
    chosen = DistillSettings(teacher="tiny", max_new=9, **settings)
    return DistillTask(
        chosen, chosen.config(nothing), Inputs([], [], None, None), nothing, nothing, ""
    )


def answers(behaviour, n=6):
    problems = [NOWHERE, replace(NOWHERE, messages=({"role": "user", "content": "xyz"},))]
    prompts = [behaviour.render(p.messages) for p in problems]
    sampled = sample(
        behaviour, prompts, n // 2, MiniLlm.sampling, 9, torch.Generator().manual_seed(3)
    )
    return [
        GradedCompletion(p, i, a, Ungraded(""))
        for p, of_prompt in zip(problems, sampled, strict=True)
        for i, a in enumerate(of_prompt)
    ]


def rows(lm, r):
    """Log-softmax at every position of an answer by the model's own forward, and the answer's tokens."""
    prompt = lm.render(r.problem.messages)
    logits = lm.model(torch.tensor([[*prompt, *r.ids]])).logits[0, len(prompt) - 1 : -1]
    return logits[:, : len(lm.tok)].log_softmax(-1), torch.tensor(r.ids)


def gradients(lm):
    out = [p.grad.clone() for p in lm.model.parameters() if p.grad is not None]
    lm.model.zero_grad(set_to_none=True)
    assert max(float(g.abs().max()) for g in out) > 1e-4
    return out


def require_gradient(student, want):
    """The gradient that the student has is that of `want`."""
    got = gradients(student)
    want.backward()
    for a, b in zip(got, gradients(student), strict=True):
        assert torch.allclose(a, b, atol=CLOSE)


def textbook_minillm(student, teacher, given, normalize):
    total = torch.zeros((), dtype=F64)
    for a in given:
        (q, y), (p, _) = rows(student, a), rows(teacher, a)
        at = (torch.arange(len(y)), y)
        r = (p[at] - q[at]).detach()
        w = (q[at].detach() - torch.tensor(a.completion.logp, dtype=F64)).exp()
        kl = (q.exp() * (q - p.detach())).sum(-1)
        for t in range(len(y)):
            later = r[t + 1 :]
            R = later.sum() / (max(1, len(later)) if normalize else 1)
            total = total + w[t] * (kl[t] - R * q[at][t])
    return total / sum(len(a.completion.logp) for a in given)


# of student and teacher
HEADS = [("qwen3", "qwen3"), ("qwen3-padded", "qwen3"), ("qwen3", "qwen3-padded")]


@pytest.mark.parametrize(
    ("packs", "normalize", "heads"),
    [
        (True, True, HEADS[0]),
        (False, False, HEADS[1]),
        (True, False, HEADS[2]),
    ],
)
def test_minillm_equals_the_textbook_loss(packs, normalize, heads):
    student, teacher = (tiny.policy(kind, seed, F64) for seed, kind in enumerate(heads))
    few = replace(student.budget, tokens=40)  # several forwards
    student, teacher = (replace(lm, packs=packs, budget=few) for lm in (student, teacher))
    method = MiniLlm(t := task(minillm_length_normalize=normalize), student, teacher)
    given = answers(method.behaviour)
    learner = FullModel(student, t.cfg.opt, 1)
    got = method.learn(learner, given, 0)
    want = textbook_minillm(student, teacher, given, normalize)
    assert got["loss"] == pytest.approx(float(want.detach()), abs=CLOSE)
    require_gradient(student, want)


@pytest.mark.parametrize("kind", [AdapterOnly, FullModel])
def test_nothing_of_a_step_that_is_not_finite_is_learnt_later(
    kind,
):
    student = tiny.policy()
    (answer, *_), opt = answers(student), task().cfg.opt
    batch, learner = (
        student.batch([student.render(answer.problem.messages)], [answer.ids]),
        kind(student, opt, 9),
    )

    def scaled(by):
        return lambda: by * completion_logprobs(student.model, batch).sum()

    norms = []
    for by in (1.0, math.nan, 1.0):
        update = learner.step(math.isfinite(learner.add(batch, scaled(by))))
        norms.append(update and update.gn)
    assert norms[1] is None
    assert norms[2] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.parametrize("heads", HEADS)
def test_uld_equals_the_textbook_loss(heads):
    student, teacher = (tiny.policy(kind, seed, F64) for seed, kind in enumerate(heads))
    method = Uld(t := task(method="uld"), student, teacher)
    given = answers(method.behaviour)
    got = method.learn(FullModel(student, t.cfg.opt, 1), given, 0)
    assert got["aligned"] == 1
    want = torch.zeros((), dtype=F64)
    for a in given:
        (q, y), (p, _) = rows(student, a), rows(teacher, a)
        sorted_q, sorted_p = (x.exp().sort(-1, descending=True).values for x in (q, p.detach()))
        want = want - q[torch.arange(len(y)), y].sum() + 1.5 * (sorted_q - sorted_p).abs().sum()
    want = want / sum(len(a.completion.logp) for a in given)
    assert got["loss"] == pytest.approx(float(want.detach()), abs=CLOSE)
    require_gradient(student, want)


def test_uld_across_tokenizers(monkeypatch):
    """The same characters under a tokenizer that gives them other ids: every position meets, and sorted distributions
    do not care for ids."""
    student, teacher = tiny.policy("qwen3", 0, F64), tiny.policy("qwen3", 1, F64)
    method = Uld(t := task(method="uld"), student, teacher)
    given = answers(teacher)
    monkeypatch.setattr(LanguageModel, "tokenizer_sha256", property(lambda self: str(id(self))))
    other = Uld(t, student, teacher)
    assert not other.same_tokens
    # no special token in them
    plain = [a for a in given if not {0, 2, 3, 4, 5, 6} & set(a.ids)]
    assert plain
    apart = other.learn(FullModel(student, t.cfg.opt, 1), plain, 0)
    assert apart["aligned"] == 1
    again = method.learn(FullModel(student, t.cfg.opt, 1), plain, 0)
    assert apart["ce"] == pytest.approx(again["ce"], abs=CLOSE)
    assert apart["distance"] == pytest.approx(again["distance"], abs=CLOSE)
    topk = Uld(task(method="uld", uld_strategy="topk_align", uld_top_k=5), student, teacher)
    few = topk.learn(FullModel(student, t.cfg.opt, 1), plain, 0)
    assert 0 < few["distance"] <= 2


@pytest.mark.parametrize(("unknown", "λ"), [("x", 1.5), ("all", 1.5), ("all", 0.0)])
def test_a_student_that_cannot_spell_an_answer(unknown, λ, monkeypatch):
    """What it can spell of an answer is compared."""
    student, teacher = tiny.policy("qwen3", 0, F64), tiny.policy("qwen3", 1, F64)
    given = [a for a in answers(teacher) if len(a.ids) > 1]
    monkeypatch.setattr(LanguageModel, "tokenizer_sha256", property(lambda self: str(id(self))))
    method = Uld(t := task(method="uld", uld_lambda=λ), student, teacher)
    spelled = [b"" if unknown in ("all", b.decode()) else b for b in method.student_bytes.of]
    method.student_bytes = replace(method.student_bytes, of=tuple(spelled))
    got = method.learn(FullModel(student, t.cfg.opt, 1), given, 0)
    assert (got["aligned"] == 0) == (unknown == "all")
    assert (got["distance"] is None) == (λ == 0)


def test_answers_that_cannot_be_written_in_the_students_tokens_end_the_run(
    monkeypatch,
):
    student, teacher = tiny.policy("qwen3", 0, F64), tiny.policy("qwen3", 1, F64)
    given = answers(teacher)
    monkeypatch.setattr(LanguageModel, "tokenizer_sha256", property(lambda self: str(id(self))))
    method = Uld(t := task(method="uld"), student, teacher)
    monkeypatch.setattr(LanguageModel, "encode_completion", lambda *_: ())
    with pytest.raises(NothingAligned, match="tokens of --student"):
        method.learn(FullModel(student, t.cfg.opt, 1), given, 0)


def test_top_k_of_tokenizers_that_share_no_token(monkeypatch):
    """All would be in the bucket of the rest, where the distance is 0."""
    student, teacher = tiny.policy("qwen3", 0, F64), tiny.policy("qwen3", 1, F64)
    monkeypatch.setattr(LanguageModel, "tokenizer_sha256", property(lambda self: str(id(self))))
    monkeypatch.setattr(distill_methods, "nearest_tokens", lambda *_: torch.full((97,), -1))
    with pytest.raises(Refused, match="topk_align"):
        Uld(task(method="uld", uld_strategy="topk_align", uld_top_k=5), student, teacher)


@pytest.mark.long
def test_a_run_that_aligned_nothing_is_no_run_of_uld(tmp_path, monkeypatch, capsys):
    """It is evaluated and written, says so in its last lines, and ends with 1."""
    monkeypatch.setattr(LanguageModel, "tokenizer_sha256", property(lambda self: str(id(self))))
    monkeypatch.setattr(distill_methods, "aligned", lambda *_: [(0, 0)])
    path = imitate(tmp_path, *IMITATIONS["distill-uld"], code=1)
    assert [row["aligned"] for row in rows_of(path)] == [0.0] * 4
    assert status(path)["state"] == "failed"
    assert "--uld-lambda 0" in status(path)["next"]
    assert "NOTHING WAS ALIGNED" in (path / "summary.md").read_text()
    assert (path / "final.json").is_file()
    assert "Traceback" not in capsys.readouterr().err


def test_the_anchor_is_a_language_model_loss():
    student, teacher = (tiny.policy("qwen3", seed, F64) for seed in (0, 1))
    t = task(minillm_pretrain_anchor_weight=2.0, minillm_pretrain_anchor_path="x")
    method = MiniLlm(t := replace(t, anchor="abcdefghij"), student, teacher)
    learner = FullModel(student, t.cfg.opt, 1)
    got = method.learn_anchor(learner, 0)
    # ten tokens: one window, the whole text
    ids = student.tok("abcdefghij", add_special_tokens=False)["input_ids"]
    logits = student.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    want = -logits[torch.arange(9), torch.tensor(ids[1:])].mean()
    assert got == pytest.approx(float(want.detach()), abs=CLOSE)
    require_gradient(student, 2.0 * want)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_mixture_log_probs(ratio):
    student, teacher = tiny.policy("qwen3-padded", 0), tiny.policy("qwen3", 1)
    behaviour = mixed_model(student, teacher, ratio)
    assert isinstance(behaviour, MixedModel) == (ratio > 0)  # at 0 it really is the student
    for a in answers(behaviour):
        (q, y), (p, _) = rows(student, a), rows(teacher, a)
        mixed = ((1 - ratio) * q.exp() + ratio * p.exp()).log()
        assert torch.allclose(
            torch.tensor(a.completion.logp), mixed[torch.arange(len(y)), y], atol=1e-4
        )


def test_what_shows_in_the_models_is_refused():
    with pytest.raises(ValueError, match="gradient is zero"):
        MiniLlm(task(), tiny.policy("qwen3", 0), tiny.policy("qwen3", 0))
    student, teacher = tiny.policy("qwen3", 0), tiny.policy("qwen3", 1, pad=None)
    teacher.tok.add_tokens(["<more>"])
    with pytest.raises(ValueError, match="another tokenizer"):
        MiniLlm(task(), student, teacher)


def test_plan_only(here, adapter, capsys):
    assert main(["--teacher", str(adapter), "--plan-only", "--steps", "7"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["answers"] == 7 * 4 * 8
    assert plan["settings"]["optimiser"]["lr"] == 3e-2  # of δS in a miniature
    assert plan["settings"]["method"] == "minillm"
    assert not list((here / "out" / "distill").glob("*_*"))


# ── runs


@pytest.mark.long
@pytest.mark.parametrize("name", IMITATIONS)
def test_golden(name, tmp_path):
    """DPO's rounds too."""
    golden = loaded(FOLDER / f"{name}.json")
    command = IMITATIONS[name]
    assert golden["command"][2:] == ["vgrout", *command]
    found = differences(imitation_rows(imitate(tmp_path, *command)), golden["rows"], "rows")
    assert not found, f"recorded with {golden['versions']}, now {versions()}: " + "; ".join(
        found[:10]
    )


def distil(here, *argv, **how):
    """A distillation in a process of its own; returns the run directory."""
    program(here, "distill", *argv, **how)
    return max((here / "out" / "distill").iterdir())


@pytest.mark.long
def test_three_nonfinite_steps_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(MiniLlm, "learn", lambda *_: {"loss": math.nan})
    path = imitate(tmp_path, *IMITATIONS["distill-minillm"], code=4)
    assert [row["skipped"] for row in rows_of(path)] == [1, 1, 1]
    assert status(path)["state"] == "diverged"
    assert [p.name for p in checkpoint.complete(path)] == ["step_000003"]


FULL = {  # which file's second writing finds the disk full, and what is left then
    "distill-minillm": (checkpoint, "save", "step_000002"),
    "dpo": (checkpoint, "save", "step_000001"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FULL)
def test_resume_after_a_full_disk_matches_golden(name, tmp_path, monkeypatch, capsys):
    """One line names the last good checkpoint; repeated steps replace themselves in rows and trackers."""
    module, function, left = FULL[name]
    # the second call fails; no frame of a test's file may be on the way, which counts as a user's own
    is_full = OSError(errno.ENOSPC, "No space left on device")
    outcomes = itertools.chain([DEFAULT, is_full], itertools.repeat(DEFAULT))
    full = Mock(wraps=getattr(module, function), side_effect=outcomes)
    command = [*IMITATIONS[name], "--track", "tensorboard"]
    if name != "dpo":
        command += ["--checkpoint-every", "2"]
    with monkeypatch.context() as m:
        m.setattr(module, function, full)
        path = imitate(tmp_path, *command, code=1)
    end = status(path)
    assert end["state"] == "failed"
    assert end["reason"].startswith("disk full")
    assert f"the last good checkpoint is {left}" in end["reason"]
    assert "Traceback" not in capsys.readouterr().out
    again = (
        command if name == "dpo" else ["distill", "--resume", "latest", "--track", "tensorboard"]
    )
    assert imitate(tmp_path, *again) == path
    golden = loaded(FOLDER / f"{name}.json")
    assert not differences(imitation_rows(path), golden["rows"])
    steps = [row["step"] for row in rows_of(path)]
    assert steps == list(range(len(steps)))
    assert [step for step, _ in curve(events(path), "train/skipped")] == steps
    (resumed,) = loaded(path / "run.json")["resumed"]
    assert resumed["step"] == int(left[-1])
    assert status(path)["state"] == "finished"


KILL = """
import os, signal
from vgrout.imitation.distill_loop import Distillation
def die(self, row, lines, record=Distillation.record):
    record(self, row, lines)
    if row.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Distillation.record = die
"""


@pytest.mark.slow
def test_kill_and_resume(here, adapter):
    """Rows, learnt bytes and final numbers are the same; a finished run is not resumed, and its student can teach."""
    (here / "text.txt").write_text("The solution should be a method of the class Solution. " * 20)
    argv = ["--teacher", str(adapter), *SMALL, "--full"]
    argv += ["--steps", "4", "--checkpoint-every", "2", "--eval-every", "3"]
    argv += ["--minillm-pretrain-anchor-weight", ".1", "--minillm-pretrain-anchor-path", "text.txt"]
    lived = distil(here, *argv)
    path = distil(here, *argv, "--out-tag", "x", how=KILL, code=-9)
    assert path != lived
    assert len(rows_of(path)) == 3
    assert main(["--resume", "latest", "--steps", "60"]) == 2  # another run, though 60 are usual
    assert distil(here, "--resume", "latest") == path
    made = rows_of(path)
    assert made == rows_of(lived)
    assert all(math.isfinite(r["kl"]) and r["skipped"] == 0 for r in made)
    finals = [loaded(p / "final.json")["sides"] for p in (lived, path)]
    assert finals[0] == finals[1]
    assert finals[0]["deployed"]["hack"][1] == 6
    assert status(path)["state"] == "finished"
    a, b = (load_file(p / "train" / "model.safetensors") for p in (lived, path))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert main(["--resume", str(path)]) == 2  # nothing is left to do
    learnt = str(path / "train")
    assert main(["--teacher", learnt, "--student", "organism", "--plan-only"]) == 0
    assert main(["--teacher", learnt, "--student", learnt]) == 2  # not itself
