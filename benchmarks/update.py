"""The update phase: against the plain model, shared prompts against copies, and its peak memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from benchmarks import rig
from benchmarks.flops import Shape, contraction_flops, packed_flops
from benchmarks.report import Ratio, at_most, gemm_rate, interleaved, peak_memory
from benchmarks.rows import Report, Row
from vgrout import grpo, ranks
from vgrout.config.loss import LossConfig
from vgrout.grading.grade import cores
from vgrout.grpo import policy_gradients
from vgrout.model.logprobs import Batch, TokenLogprobs, collate
from vgrout.model.packing import Packed
from vgrout.model.policy import Policy
from vgrout.model.sampling import Sampling
from vgrout.model.svd_adapter import AdaptedLinear, PerRolloutGrads
from vgrout.tensor_types import GradRows, Packing, RolloutGrads, UpdatePlan
from vgrout.types import Batch as Step
from vgrout.types import Group, Rollout

QWEN_VOCABULARY = 151_936


def gradients(
    policy: Policy, groups: list[Group], grad_rows: GradRows, packing: Packing, max_new: int
) -> list[RolloutGrads]:
    """Forward and backward of one update: each group's gradients."""
    (grads,), _ = policy_gradients(
        policy,
        UpdatePlan(tuple(groups)),
        LossConfig(),
        max_new=max_new,
        prompts_per_step=len(groups),
        grad_rows=grad_rows,
        packing=packing,
    )
    return grads


def plain(policy: Policy, rollouts: list[Rollout]) -> None:
    """The model without adapter: its own forward on padded rows, log-softmax of all logits, backward to all weights."""
    batch = collate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts], policy.device)
    weights = list(policy.model.parameters())
    with policy.adapter.reference():
        for w in weights:
            w.requires_grad_(True)
        try:
            logp = policy.model(input_ids=batch.ids, use_cache=False).logits.float().log_softmax(-1)
            at = batch.mask.nonzero(as_tuple=True)
            (-logp[at[0], batch.at[at], batch.target[at]].sum()).backward()
        finally:
            for w in weights:
                w.requires_grad_(False)
                w.grad = None


def full_logits(policy: Policy, rollouts: list[Rollout]) -> None:
    """The frozen model's forward and backward with the logits of every position of every padded row."""
    batch = collate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts], policy.device)
    with policy.adapter.per_rollout_grads(len(rollouts)):
        logp = policy.model(input_ids=batch.ids, use_cache=False).logits.float().log_softmax(-1)
        at = batch.mask.nonzero(as_tuple=True)
        (-logp[at[0], batch.at[at], batch.target[at]].sum()).backward()


def method_update(loaded: rig.Loaded, groups: list[Group]) -> None:
    """The trainer's work between grading and the optimiser."""
    cfg, method = loaded.cfg, loaded.method
    batch = Step(tuple(groups), (), (), cfg.env.pass_reward, cfg.generations, 0)
    flags = method.flag(batch)
    plan = method.plan(batch, flags)
    grads, _ = policy_gradients(
        loaded.policy,
        plan,
        cfg.loss,
        max_new=cfg.scale.max_new,
        prompts_per_step=len(groups),
        grad_rows=method.grad_rows,
        sampling=Sampling(),
        packing=cfg.run.packing,
    )
    method.route(plan, grads, flags)


def phase(quick: bool = False) -> Report:
    """Forward, backward and routing against the plain model's forward and backward."""
    with rig.workplace(), rig.grader() as grader:
        none, route2 = rig.load("none", grader), rig.load("route2", grader)
        drawn = rig.draw(none)
        times = interleaved(
            {
                "plain": partial(plain, none.policy, drawn.rollouts),
                "none": partial(method_update, none, drawn.groups),
                "route2": partial(method_update, route2, drawn.groups),
            },
            6 if quick else 30,
            "update phase",
        )
        rows = [
            at_most(
                "update",
                f"{name}: forward, backward, routing",
                "plain model, same rows",
                Ratio.of(times[name].wall, times["plain"].wall),
                goal,
            )
            for name, goal in (("none", 1.2), ("route2", 1.5))
        ]
        best, shape = gemm_rate(), Shape.of(none.policy.model)
        for name, loaded in (("none", none), ("route2", route2)):
            flops = work(loaded, drawn.groups, shape)
            used = flops / statistics.median(times[name].cpu) / best
            figure = f"{flops / 1e9:.1f} GFLOP, {used:.0%} of this machine's matrix products"
            rows.append(Row("update", f"{name}: work and use", "bound: matrix products on one thread", figure))
            if cores() > 1:
                rows.append(_on_all_cores(name, flops, statistics.median(times[name].wall), 6 if quick else 30))
    return Report(rows)


def work(loaded: rig.Loaded, groups: list[Group], shape: Shape) -> int:
    """FLOPs of the update's matrix products, those with U and Vh too: what is shared counts once."""
    flops = 0

    def count(model: PreTrainedModel, batch: Batch | Packed, support: Sampling | None) -> TokenLogprobs:
        nonlocal flops
        assert isinstance(batch, Packed)
        pairs = int(batch.positions.sum()) + batch.tokens  # each token sees those before it in its row, and itself
        flops += packed_flops(shape, batch.tokens, pairs, batch.edges.shape[1])
        return compute(model, batch, support)

    def contract(self: PerRolloutGrads, site: AdaptedLinear, pieces: Sequence[Any], *rest: Any) -> None:
        nonlocal flops
        flops += contraction_flops(*site.W.shape, len(site.Vh), rest[-1].shape[1], len(pieces))
        add(self, site, pieces, *rest)

    compute, add = grpo.completion_logprobs, PerRolloutGrads.add_packed
    with (
        mock.patch.object(grpo, "completion_logprobs", count),
        mock.patch.object(PerRolloutGrads, "add_packed", contract),
    ):
        method_update(loaded, groups)
    return flops


def timed(name: str, rounds: int) -> tuple[list[float], float]:
    """Seconds of each update, shared out to the ranks, and the matrix products that these can do together, FLOP/s."""
    loaded = rig.load(name, None)
    drawn, seconds = rig.draw(loaded), []
    rates = ranks.gather(gemm_rate)
    for _ in range(rounds):
        ranks.gather(lambda: None)
        start = time.perf_counter()
        method_update(loaded, drawn.groups)
        seconds.append(time.perf_counter() - start)
    return seconds, sum(rates)


def _on_all_cores(name: str, flops: int, alone: float, rounds: int) -> Row:
    """One rank a core, against the products of all cores at once."""
    seconds, rate = rig.on_ranks(cores(), partial(timed, name, rounds))
    wall = statistics.median(seconds)
    figure = f"{flops / wall / rate:.0%} of this machine's matrix products, {alone / wall:.2f} × one rank"
    what, against = f"{name}: work and use, {cores()} ranks", f"bound: matrix products on {cores()} threads"
    if name != "none":
        return Row("update", what, against, figure)
    return Row("update", what, against, figure, "≥ 60%", flops / wall / rate >= 0.6)


def sharing(quick: bool = False) -> Report:
    """One prompt for a group's rollouts against a copy for each, both packed, on the organism and at longer prompts."""
    rows = []
    with rig.workplace():
        with rig.grader() as grader:
            loaded = rig.load("none", grader)
        drawn = rig.draw(loaded)
        rows.append(_shared("organism's answers", loaded.policy, drawn.groups, 128, 6 if quick else 30))
        policy = rig.random_policy()
        groups = rig.noise_groups(1024, 8, 2, 256, 64)
        rows.append(_shared("prompt 256, answer 64", policy, groups, 64, 4 if quick else 20))
        rows += [_same(name, policy, groups) for name in ("rollout", "group")]
    return Report(rows)


def _shared(name: str, policy: Policy, groups: list[Group], max_new: int, rounds: int) -> Row:
    copies, once = (
        sum(
            (len(g) if packing == "packed" else 1) * len(g.rollouts[0].prompt_ids)
            + sum(len(r.completion_ids) for r in g.rollouts)
            for g in groups
        )
        for packing in ("packed", "shared")
    )
    runs = {packing: partial(gradients, policy, groups, "group", packing, max_new) for packing in ("packed", "shared")}
    times = interleaved(runs, rounds, "prompt sharing")
    ratio, tokens = Ratio.of(times["packed"].wall, times["shared"].wall), copies / once
    what = f"{name}: G (P + R) / (P + G R) = {tokens:.2f}"
    goal = f"≥ {0.9 * tokens:.2f} × (within 10 %)"
    return Row("sharing", what, "a copy of the prompt each", str(ratio), goal, ratio.median >= 0.9 * tokens)


def _same(grad_rows: GradRows, policy: Policy, groups: list[Group]) -> Row:
    packings: tuple[Packing, Packing] = ("padded", "shared")
    flat = [
        torch.cat([torch.cat(list(g.values()), 1) for g in gradients(policy, groups, grad_rows, packing, 64)])
        for packing in packings
    ]
    worst = float(((flat[0] - flat[1]).norm(dim=1) / flat[0].norm(dim=1)).max())
    what = {"rollout": "every rollout's g_b", "group": "every group's g"}[grad_rows]
    return Row("sharing", what, "padded rows", f"relative difference {worst:.0e}", "≤ 1e-5", worst <= 1e-5)


def memory(quick: bool = False) -> Report:
    """Peak of the update phase, shared prompts and completion-only head, against all rows' full logits."""
    rows = []
    with rig.workplace():
        for name, vocabulary, group, prompts in (
            ("organism's shape, 1,024 tokens known", 1024, rig.G, rig.P),
            ("the same, Qwen3's 151,936 tokens", QWEN_VOCABULARY, 4, 1 if quick else 2),
        ):
            policy = rig.random_policy(vocab_size=vocabulary)
            groups = rig.noise_groups(1024, group, prompts, 64, 80)
            rollouts = [r for g in groups for r in g.rollouts]
            runs: dict[str, Callable[[], object]] = {
                "full": partial(full_logits, policy, rollouts),
                "none": partial(gradients, policy, groups, "source", "shared", 80),
                "route2": partial(gradients, policy, groups, "rollout", "shared", 80),
                "head alone": partial(gradients, policy, groups, "rollout", "padded", 80),
            }
            small = rig.noise_groups(1024, 2, 1, 8, 8)
            gradients(policy, small, "rollout", "shared", 8)  # first-use buffers are nobody's
            peaks = {key: peak_memory(run) for key, run in runs.items()}
            for key in ("none", "route2", "head alone"):
                a, b = peaks[key], peaks["full"]
                if not a or not b:
                    rows.append(Row("memory", f"{key}, {name}", "full logits", "not measurable here", "≤ 0.5 ×", None))
                    continue
                figure = f"{a / b:.2f} × ({a / 2**20:.0f} MiB of {b / 2**20:.0f})"
                goal = ("≤ 0.5 ×", a <= b / 2) if key != "head alone" else ("", None)
                rows.append(Row("memory", f"{key}, {name}", "full logits of all rows", figure, *goal))
    return Report(rows)
