"""Several updates a batch: each of them the textbook's, routed, and bit for bit the same after a kill."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tiny
from methods import batch, config, flat, make, relative
from runs import SharedRuns, adapter_bytes, flags, rows, run
from vgrout.config.loss import LossConfig
from vgrout.config.run import OptConfig
from vgrout.grpo import LossMetrics
from vgrout.method import Method
from vgrout.model.policy import Policy
from vgrout.optim import Learnt, Optimizer, learn, lr_at
from vgrout.types import Batch, Group

OPT = OptConfig(
    lr=20.0, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, grad_clip=1e9
)  # warm-up: a thousandth of it
TWICE = ["--updates-per-batch", "2"]


@pytest.fixture
def policy() -> Policy:
    return tiny.policy()


def learnt(policy: Policy, method: Method, of: Batch, opt: OptConfig = OPT) -> Learnt:
    """A step of the trainer."""
    seen = method.flag(of)
    plan = method.plan(method.reward(of, seen), seen)
    return learn(policy, method, Optimizer(policy.adapter, opt, 10), plan, seen, method.cfg)


def of_loss(policy: Policy, n: int, **loss: Any) -> Method:
    method = make(policy, "none")
    method.cfg = config("none", loss=LossConfig(updates_per_batch=n, **loss))
    return method


def textbook_ppo(
    policy: Policy, groups: tuple[Group, ...], n: int, ε: float, normaliser: float
) -> tuple[Tensor, float]:
    """δS after n epochs of PPO (arXiv 1707.06347, eq. 7) on the whole batch, through an explicit W + U diag(δ) Vh and
    plain logits, and the share of tokens that the clip left without a gradient."""
    adapter, fixed = policy.adapter, policy.adapter.δS_hack.detach()
    δ = adapter.δS.detach().clone().requires_grad_()
    adamw = torch.optim.AdamW([δ], lr=lr_at(0, OPT, 10), betas=(0.9, 0.99), weight_decay=0.1)
    old: dict[tuple[int, ...], Tensor] = {}
    cut = total = 0
    for _ in range(n):
        weights = {f"{m}.weight": s.W + (s.U * (δ + fixed)[s.span]) @ s.Vh for m, s in adapter.sites.items()}
        loss = torch.zeros(())
        for group in groups:
            for r, A in zip(group.rollouts, group.advantages, strict=True):
                ids, start = torch.tensor([[*r.prompt_ids, *r.completion_ids]]), len(r.prompt_ids) - 1
                logits = functional_call(policy.model, weights, (ids,)).logits[0, start:-1]
                logp = logits.log_softmax(-1).gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]
                ρ = (logp - old.setdefault(r.prompt_ids + r.completion_ids, logp.detach())).exp()
                loss = loss - torch.minimum(ρ * A, ρ.clamp(1 - ε, 1 + ε) * A).sum() / normaliser
                cut += int(((ρ > 1 + ε) if A > 0 else (ρ < 1 - ε)).sum()) if A else 0
                total += len(r.completion_ids)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    return δ.detach(), cut / total


@pytest.mark.parametrize("n", [1, 2, 4])
def test_updates_are_textbook_ppo(policy: Policy, n: int) -> None:
    method, of = of_loss(policy, n), batch()
    want, cut = textbook_ppo(policy, of.groups, n, 0.2, 4 * method.cfg.scale.prompts_per_step * 12)
    before = policy.adapter.δS.detach().clone()
    got = learnt(policy, method, of)
    assert relative(policy.adapter.δS.detach() - before, want - before) <= 1e-3  # Adam divides rounding by its root
    assert got.loss is not None
    assert got.loss.is_masked == pytest.approx(cut)
    assert (cut > 0) == (n > 1), "or the clip is not tested"
    assert got.loss.ratio_mean is None, "no answer of these was sampled"


@pytest.mark.parametrize(
    ("loss", "tight"),
    [
        ("grpo", {"clip_high": 1e-3}),
        ("grpo", {"clip_low": 1e-3}),
        ("dapo", {"clip_high": 1e-3}),
        ("gspo", {"clip_high": 1e-9}),
        ("gspo", {"clip_low": 1e-9}),
        ("cispo", {"clip_high": 1.001}),
    ],
)
def test_every_bound_binds_from_the_second_update_on(policy: Policy, loss: Any, tight: dict[str, float]) -> None:
    wide = {name: 0.99 if name == "clip_low" else 1e6 for name in tight}
    after = {}
    for n in (1, 2):
        for name, bounds in (("tight", tight), ("wide", wide)):
            method = of_loss(policy, n, loss=loss, **bounds) if n > 1 else of_loss(policy, 1, loss=loss)
            got = learnt(policy, method, batch(), replace(OPT, lr=2.0))
            assert got.loss is not None
            after[n, name] = policy.adapter.δS.detach().clone(), got.loss.is_masked
    assert torch.equal(after[1, "tight"][0], after[1, "wide"][0])
    assert relative(after[2, "tight"][0], after[2, "wide"][0]) > 1e-4
    assert (after[2, "tight"][1] > after[2, "wide"][1]) == (loss != "cispo"), "cispo cuts a weight and drops nothing"


@pytest.mark.parametrize(("loss", "bound"), [("dppo_tv", {"dppo_diff_low": 1e-4}), ("icepop", {})])
def test_ratios_to_the_sampler_move_on_with_the_policy(policy: Policy, loss: Any, bound: dict[str, float]) -> None:
    """Their denominator is what the sampler wrote down; here, where it wrote nothing, the policy before the batch."""
    masked = {}
    for n in (1, 2):
        got = learnt(policy, of_loss(policy, n, loss=loss, **bound), batch(), replace(OPT, lr=300.0))
        assert got.loss is not None
        masked[n] = got.loss.is_masked
    assert masked[1] == 0 < masked[2]


METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "erase": {},
    "route": {},
    "route2": {},
    "route2 band": {"gate_vote": "rollout"},
    "route2 labels": {},
    "sgtm detector": {},
    "screen labels": {},
    "penalty quarantine": {"quarantine_threshold": 0.1, "seed_monitor": "detector"},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_update_is_routed_and_nothing_is_lost(policy: Policy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep + quar = g each time, g of the policy as it is by then; erase alone drops what it says."""
    method = make(policy, *name.split(), **METHODS[name])
    method.cfg = replace(method.cfg, loss=LossConfig(updates_per_batch=3))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    route: Callable[..., Any] = method.route

    def watched(plan: Any, grads: Any, known: Any) -> Any:
        routed = route(plan, grads, known)
        parts = [sum((flat(policy, {m: x.sum(0) for m, x in g.items()}) for g in of), torch.zeros(())) for of in grads]
        both = [part.learns == "both" and name.startswith("sgtm") for part in plan.parts]
        g = sum((2 * part if twice else part for part, twice in zip(parts, both, strict=True)), torch.zeros(()))
        seen.append((flat(policy, routed.keep), flat(policy, routed.quar), g))
        return routed

    monkeypatch.setattr(method, "route", watched)
    got = learnt(policy, method, batch(deployed=(1,)))
    assert len(seen) == 3
    for keep, quar, g in seen:
        if name == "erase":
            assert quar.any() == False  # noqa: E712
            assert relative(keep, g) < 1.5
        else:
            assert relative(keep + quar, g) <= 1e-5
    assert relative(seen[1][2], seen[0][2]) > 1e-3, "another policy, another gradient"
    assert got.update is not None
    assert torch.equal(flat(policy, got.routed.keep if got.routed else None), seen[0][0]), "the row is of the first"


def test_a_batch_has_one_learning_rate_and_stops_at_an_update_that_is_not_finite(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, of = of_loss(policy, 3), batch()
    optim = Optimizer(policy.adapter, OPT, 10)
    rates, calls = [], 0
    step = optim.step

    def watched(routed: Any, again: bool = False) -> Any:
        update = step(routed, again)
        rates.append(update.lr if update else None)
        return update

    monkeypatch.setattr(optim, "step", watched)
    plan = method.plan(of, {})
    for _ in range(2):
        learn(policy, method, optim, plan, {}, method.cfg)
    assert rates == [lr_at(0, OPT, 10)] * 3 + [lr_at(1, OPT, 10)] * 3
    assert optim.done == 2

    def broken(*_: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls < 2

    monkeypatch.setattr("vgrout.optim.all_finite", broken)
    got = learn(policy, method, optim, plan, {}, method.cfg)
    assert got.skipped
    assert got.loss is None
    assert calls == 2, "nothing is tried after it"
    assert optim.done == 3


def test_a_rows_numbers_are_of_the_first_update_and_the_clips_a_mean() -> None:
    first = LossMetrics(loss=1.0, kl=0.1, is_masked=0.0, masked_mismatch_kl=None, unmasked_mismatch_kl=1e-9)
    second = LossMetrics(loss=9.0, kl=0.9, is_masked=0.5, masked_mismatch_kl=0.3, unmasked_mismatch_kl=3e-9)
    assert LossMetrics.of_batch([first]) == first
    got = LossMetrics.of_batch([first, second])
    assert got == replace(first, is_masked=0.25, masked_mismatch_kl=0.3, unmasked_mismatch_kl=2e-9)


DIE = """
import os, signal, sys
from vgrout import optim, train
real, steps = optim.Optimizer.step, [0]
def step(self, routed, again=False):
    steps[0] += not again
    if steps[0] == 3 and again:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, routed, again)
optim.Optimizer.step = step
sys.exit(train.main({argv!r}))
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["route2", "penalty-quarantine"])
def test_a_run_killed_between_two_updates_goes_on_bit_for_bit(
    method: str, shared_run: SharedRuns, tmp_path: Path
) -> None:
    command = flags(method, *TWICE, "--checkpoint-every", "1", "--clip-high", "0.01", "--lr", "0.1")
    whole = shared_run(*command)
    shared_run.warm(tmp_path)
    died = subprocess.run([sys.executable, "-c", DIE.format(argv=command)], cwd=tmp_path, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    again = run(tmp_path, *command, "--resume", "latest")
    assert len(rows(again)) == 5
    assert rows(again) == rows(whole)
    assert adapter_bytes(again) == adapter_bytes(whole)
    assert any(row["is_masked"] for row in rows(whole)), "or the clip never binds"
