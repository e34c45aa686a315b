"""Every lever on against off, one at a time, in turn. That the numbers stay the same is each one's test, named here."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import rig
from benchmarks.report import Ratio, interleaved
from benchmarks.rows import Report, Row
from benchmarks.update import full_logits, gradients
from vgrout.data import organism
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.model.svd_adapter import AdaptedLinear
from vgrout.rng import torch_stream
from vgrout.types import CachedGrade, Group, Rollout


@dataclass(frozen=True)
class Lever:
    """One optimisation, switched on and off."""

    name: str
    on: Callable[[], object]
    off: Callable[[], object]
    how: str  # its switch, and the test that the numbers are the same without it


def run(quick: bool = False) -> Report:
    """Every lever's time off over its time on."""
    with rig.workplace(), rig.grader() as grader:
        loaded = rig.load("none", grader)
        policy, drawn = loaded.policy, rig.draw(loaded)
        with torch.no_grad():
            policy.adapter.δS.fill_(1e-9)
        policy.adapter.merge()
        rows = []
        for lever in [*_sampling(policy, drawn, grader), *_update(policy, drawn)]:
            times = interleaved({"off": lever.off, "on": lever.on}, 1 if quick else 15, lever.name)
            ratio = Ratio.of(times["off"].wall, times["on"].wall)
            rows.append(Row("levers", lever.name, "without it", str(ratio), lever.how))
    notes = [
        "In the goal column: how a lever is switched off, and the test that its numbers are those without it (fp32, "
        "relative: 1e-5 for gradients, 1e-4 for log-probs; samples token by token)."
    ]
    return Report(rows, notes)


def _draw(policy: Policy, prompts: list[tuple[int, ...]], n: int, **kw: Any) -> None:
    sample(policy, prompts, n, Sampling(), organism.MAX_NEW, torch_stream(rig.SEED, "bench"), **kw)


def _sampling(policy: Policy, drawn: rig.Drawn, grader: Any) -> list[Lever]:
    prompts = drawn.prompts
    each = [p for p in prompts for _ in range(rig.G)]
    on = partial(_draw, policy, prompts, rig.G)

    def one_by_one() -> None:
        for p in prompts:
            _draw(policy, [p], rig.G)

    def graded(beside: bool, apart: bool = False) -> None:
        futures = []

        def submit(p: int, i: int, answer: Any) -> None:
            problem = replace(drawn.problems[p]) if apart else drawn.problems[p]
            futures.append(grader.submit(problem, answer.text))

        stream = torch_stream(rig.SEED, "bench")
        of = sample(policy, prompts, rig.G, Sampling(), organism.MAX_NEW, stream, submit if beside else None)
        if not beside:
            for p, answers in enumerate(of):
                for i, answer in enumerate(answers):
                    submit(p, i, answer)
        for future in futures:
            future.result()

    return [
        Lever(
            "prompt read once for its samples", on, partial(_draw, policy, each, 1), "test_a_prompt_is_prefilled_once"
        ),
        Lever(
            "equal beginnings of answers computed once",
            on,
            partial(_draw, policy, prompts, rig.G, share_prefixes=False),
            "share_prefixes; test_rows_with_the_same_tokens_so_far_are_computed_once",
        ),
        Lever(
            "own decoding step, static keys and values",
            on,
            partial(_draw, replace(policy, lean=False), prompts, rig.G),
            "Policy.lean; test_lean_policy_samples_the_same_tokens",
        ),
        Lever(
            "finished rows dropped",
            on,
            partial(_draw, policy, prompts, rig.G, drop_finished=False),
            "drop_finished; test_dropping_finished_rows_changes_no_token",
        ),
        Lever("all prompts in one batch", on, one_by_one, "one call a prompt; test_sampling_in_turns_changes_no_token"),
        Lever("grading beside sampling", partial(graded, True), partial(graded, False), "on_finish; the same grades"),
        Lever(
            "equal answers graded once",
            partial(graded, True),
            partial(graded, True, apart=True),
            "a problem object each; test_an_answer_that_is_being_graded_is_not_run_beside_itself",
        ),
    ]


def _update(policy: Policy, drawn: rig.Drawn) -> list[Lever]:
    def grads(grad_rows: Any, packing: Any, groups: list[Group] = drawn.groups) -> Callable[[], object]:
        return partial(gradients, policy, groups, grad_rows, packing, organism.MAX_NEW)

    half = [*drawn.groups[::2], *(_dead(g) for g in drawn.groups[1::2])]
    shared = grads("source", "shared")

    def with_old() -> None:
        batch = _batch(policy, drawn.rollouts)
        with torch.no_grad():
            completion_logprobs(policy.model, batch)
        grads("rollout", "padded")()

    def unmerged() -> None:
        with low_rank(policy):
            grads("rollout", "padded")()

    padded = grads("rollout", "padded")
    test = "test_packings_differ_by_rounding_only"
    same = f"--packing; {test}"
    return [
        Lever(
            "W' merged once a step",
            padded,
            unmerged,
            "U diag(δ) Vh x in every forward; test_merged_weights_are_what_a_hook_would_compute",
        ),
        Lever(
            "no second forward for log π_old",
            padded,
            with_old,
            "π detached; test_every_rows_gradient_is_the_textbook_one",
        ),
        Lever(
            "groups without signal skipped (half of them)",
            grads("rollout", "padded", half),
            padded,
            "test_groups_without_signal_cost_nothing_and_change_nothing",
        ),
        Lever(
            "head on completions only",
            padded,
            partial(full_logits, policy, drawn.rollouts),
            "test_log_probs_are_the_models_own_row_by_row",
        ),
        Lever("no padding, one gradient a rollout", grads("rollout", "packed"), padded, same),
        Lever("equal students are one row", grads("rollout", "shared"), grads("rollout", "packed"), same),
        Lever("no padding, sums by source", grads("source", "packed"), grads("source", "padded"), same),
        Lever("prompt and equal beginnings shared, sums by source", shared, grads("source", "packed"), same),
        Lever(
            "sums by source where the method needs no more",
            shared,
            grads("rollout", "shared"),
            f"Method.grad_rows; {test}",
        ),
    ]


def _batch(policy: Policy, rollouts: list[Rollout]) -> Any:
    return collate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts], policy.device)


def _dead(group: Group) -> Group:
    return replace(group, grades=tuple(CachedGrade(1.0, False, False, True, "bench") for _ in group.grades))


@contextmanager
def low_rank(policy: Policy) -> Generator[None]:
    """The base model with U diag(δ) Vh x added to every Linear's output: an adapter that is not merged."""

    def added(site: AdaptedLinear) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            return y + ((args[0] @ site.Vh.mT) * δ[site.span]) @ site.U.mT

        return hook

    δ = policy.adapter.δS.detach() + policy.adapter.δS_hack.detach()
    handles = [site.linear.register_forward_hook(added(site)) for site in policy.adapter.sites.values()]
    try:
        with policy.adapter.reference():
            yield
    finally:
        for handle in handles:
            handle.remove()
