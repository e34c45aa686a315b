"""Several updates a batch: each of them the textbook's, routed, and bit for bit the same after a kill."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tiny
from methods import batch, make
from runs import adapter_bytes, flags, rows, run
from tiny import relative
from vgrout.config.groups import OptConfig
from vgrout.config.loss import LossConfig
from vgrout.data import Batch, Flags
from vgrout.grpo import policy_gradients
from vgrout.loss_metrics import LossMetrics
from vgrout.method.method import Method
from vgrout.model.policy import Policy
from vgrout.optim import Optimizer, Update, lr_at
from vgrout.tensor_types import Routed

OPT = OptConfig(
    lr=20.0, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, grad_clip=1e9
)  # warm-up: a thousandth of it


@pytest.fixture
def policy() -> Policy:
    return tiny.policy()


def learnt(
    policy: Policy, method: Method, of: Batch, opt: OptConfig = OPT, steps: int = 10
) -> list[Update]:
    """The updates of the trainer's first step."""
    optim, of = Optimizer(policy.adapter, opt, steps), method.flag(of)
    updates: list[Update] = []
    logp_old = ()
    for _ in range(method.cfg.loss.updates_per_batch):
        made = policy_gradients(policy, of, method.cfg, logp_old=logp_old)
        logp_old = made.logp_old
        updates.append(optim.step(method.route(of, made.g), made.metrics, again=bool(updates)))
    return updates


def of_loss(policy: Policy, n: int, **loss: Any) -> Method:
    return make(policy, "none", loss=LossConfig(updates_per_batch=n, **loss))


def textbook_ppo(
    policy: Policy, of: Batch, n: int, ε: float, normaliser: float
) -> tuple[Tensor, float]:
    """δS after n epochs of PPO (arXiv 1707.06347, eq. 7) on the whole batch, through an explicit W + U diag(δ) Vh and
    plain logits, and the share of tokens that the clip left without a gradient."""
    adapter, fixed = policy.adapter, policy.adapter.δS_hack.detach()
    δ = adapter.δS.detach().clone().requires_grad_()
    adamw = torch.optim.AdamW([δ], lr=lr_at(0, OPT, 10), betas=(0.9, 0.99), weight_decay=0.1)
    old: dict[tuple[int, ...], Tensor] = {}
    cut = total = 0
    for _ in range(n):
        loss = torch.zeros(())
        for group in of.groups:
            for r, A in zip(group.rollouts, group.advantages, strict=True):
                δ_of = δ if r.deployed else δ + fixed
                weights = {
                    f"{m}.weight": s.W + (s.U * δ_of[s.span]) @ s.Vh
                    for m, s in adapter.sites.items()
                }
                ids, start = (
                    torch.tensor([[*r.prompt_ids, *r.completion_ids]]),
                    len(r.prompt_ids) - 1,
                )
                logits = functional_call(policy.model, weights, (ids,)).logits[0, start:-1]
                logp = logits.log_softmax(-1).gather(1, torch.tensor(r.completion_ids)[:, None])[
                    :, 0
                ]
                ρ = (logp - old.setdefault(r.prompt_ids + r.completion_ids, logp.detach())).exp()
                loss = loss - torch.minimum(ρ * A, ρ.clamp(1 - ε, 1 + ε) * A).sum() / normaliser
                cut += int(((ρ > 1 + ε) if A > 0 else (ρ < 1 - ε)).sum()) if A else 0
                total += len(r.completion_ids)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    return δ.detach(), cut / total


@pytest.mark.parametrize("n", [1, 2, 4])
def test_updates_are_textbook_ppo(policy, n):
    method, of = of_loss(policy, n), batch(deployed=(1,))
    want, cut = textbook_ppo(policy, of, n, 0.2, 4 * method.cfg.scale.prompts_per_step * 12)
    before = policy.adapter.δS.detach().clone()
    loss = Update.of_batch(learnt(policy, method, of)).loss
    # Adam divides rounding by its root
    assert relative(policy.adapter.δS.detach() - before, want - before) <= 1e-3
    assert loss.is_masked == pytest.approx(cut)
    assert (cut > 0) == (n > 1), "or the clip is not tested"
    assert loss.ratio_mean is None, "no answer of these was sampled"


@pytest.mark.parametrize(
    ("loss", "bound", "lr"),
    [
        ("grpo", {"clip_high": 1e-3}, 2.0),
        ("grpo", {"clip_low": 1e-3}, 2.0),
        ("dppo_tv", {"dppo_diff_low": 1e-4}, 300.0),
        ("icepop", {}, 300.0),
    ],
)
def test_bounds_bind_from_the_second_update_on(policy, loss, bound, lr):
    """Where the sampler wrote nothing down, its policy is the one before the batch."""
    updates = learnt(policy, of_loss(policy, 2, loss=loss, **bound), batch(), replace(OPT, lr=lr))
    first, second = (u.loss.is_masked or 0.0 for u in updates if u.loss)
    assert first == 0 < second


@pytest.mark.parametrize("name", ["none", "route2", "route2 labels", "penalty detector"])
def test_every_update_is_routed_and_nothing_is_lost(policy, name, monkeypatch):
    """keep + quar = Σ g each time, g of the policy as it is by then."""
    place = {"quarantine": "shared"} if name.startswith("route2") else {}
    method = make(policy, *name.split(), loss=LossConfig(updates_per_batch=3), **place)
    sums: list[Tensor] = []
    route: Callable[..., Any] = method.route
    monkeypatch.setattr(method, "route", lambda of, g: sums.append(g.sum(0)) or route(of, g))
    updates = learnt(policy, method, batch(deployed=(1,)))
    for update, g in zip(updates, sums, strict=True):
        keep, quar = update.routed.keep, update.routed.quar
        assert relative(keep if quar is None else keep + quar, g) <= 1e-5
    assert relative(sums[1], sums[0]) > 1e-3, "another policy, another gradient"
    assert Update.of_batch(updates).routed is updates[0].routed, "the row is of the first"


def test_a_batch_moves_the_gates_means_once() -> None:
    """Its memory is in steps, however many updates a step has."""

    def means_after(n: int, steps: int = 1) -> dict[str, Tensor]:
        policy = tiny.policy()
        method = make(policy, "route2", loss=LossConfig(updates_per_batch=n))
        for step in range(steps):
            learnt(policy, method, replace(batch(), step=step))
        return method.monitor.state_dict()

    once, thrice, two_steps = means_after(1), means_after(3), means_after(3, steps=2)
    for name in ("gate/total", "gate/weight"):
        assert torch.equal(once[name], thrice[name]), name
    assert (two_steps["gate/weight"] > thrice["gate/weight"]).all()


def test_what_later_updates_route_is_on_record(policy: Policy) -> None:
    """Else a run whose first updates routed nothing would end as one that never routed."""
    adapter = policy.adapter
    keep, nothing = torch.ones(len(adapter)), torch.zeros(len(adapter))
    optim = Optimizer(adapter, OPT, 10)
    updates = [
        optim.step(Routed(keep, quar), LossMetrics(), again=i > 0)
        for i, quar in enumerate((nothing, keep))
    ]
    assert Update.of_batch(updates).q_egy == pytest.approx(0.25)
    assert adapter.δS_hack.any()


@pytest.mark.long
def test_nothing_more_is_learnt_from_a_batch_after_an_update_that_is_not_finite(
    shared_run, tmp_path, monkeypatch
):
    calls = list[tuple]()

    def second_is_not(*args: Any, **how: Any) -> Any:
        calls.append(args)
        made = policy_gradients(*args, **how)
        return replace(made, g=None) if len(calls) == 2 else made

    monkeypatch.setattr("vgrout.grpo.policy_gradients", second_is_not)
    path = run(
        shared_run.warm(tmp_path), *flags("none", "--updates-per-batch", "3", "--steps", "2")
    )
    assert [(row["skipped"], row["loss"] is None) for row in rows(path)] == [(1, True), (0, False)]
    assert len(calls) == 2 + 3


DIE = """
import os, signal, sys
from vgrout import optim, train
real, steps = optim.Optimizer.step, [0]
def step(self, *args, again=False):
    steps[0] += not again
    if steps[0] == 3 and again:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args, again=again)
optim.Optimizer.step = step
sys.exit(train.main({argv!r}))
"""


@pytest.mark.long
def test_a_run_killed_between_two_updates_goes_on_bit_for_bit(shared_run, tmp_path):
    clip = ["--updates-per-batch", "2", "--clip-high", "0.01", "--lr", "0.1"]
    command = flags("route2", *clip, "--checkpoint-every", "1")
    whole = shared_run(*command)
    shared_run.warm(tmp_path)
    died = subprocess.run(
        [sys.executable, "-c", DIE.format(argv=command)], cwd=tmp_path, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    again = run(tmp_path, *command, "--resume", "latest")
    assert len(rows(again)) == 5
    assert rows(again) == rows(whole)
    assert adapter_bytes(again) == adapter_bytes(whole)
    assert any(row["is_masked"] for row in rows(whole)), "or the clip never binds"


def test_every_rank_goes_by_the_flags_of_the_first(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a monitor of one's own, or of a language model, need not come out alike."""
    method = make(policy, "penalty", "detector")
    own = method.flag(batch()).groups

    def of_first(flags: list[Flags]) -> list[Flags]:
        return [replace(of, flagged=tuple(not flag for flag in of.flagged)) for of in flags]

    monkeypatch.setattr("vgrout.ranks.from_first", of_first)
    for group, before in zip(method.flag(batch()).groups, own, strict=True):
        assert group.flags is not None
        assert before.flags is not None
        assert group.flags.flagged == tuple(not flag for flag in before.flags.flagged)
