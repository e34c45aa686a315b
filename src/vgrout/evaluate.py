"""One estimator for every arm: a fixed set of held-out problems, an own random stream, knob on or off, per mode."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

from vgrout.grading.grade import Grader
from vgrout.nouns import MODES, Eval, Grade, ModeEval, Problem, Rate
from vgrout.policy import Policy
from vgrout.rng import torch_stream
from vgrout.sampler import Sample, Sampling, sample

Side = Literal["base", "trained", "deployed", "quarantine"]


def evaluate(
    policy: Policy,
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    *,
    side: Side,
    sampling: Sampling,
    max_new: int,
    seed: int,
    step: int,
    purpose: str = "eval",
) -> Eval:
    """Sample n answers to each problem and grade them.

    side: base = both knobs off, trained = both on, deployed = quarantine off, quarantine = kept knob off. The stream
    depends on (seed, purpose, step) only: sides share their noise, so their difference is less noisy than either, and
    training never sees it.
    """
    futures = []

    def submit(prompt: int, index: int, answer: Sample) -> None:
        futures.append((problems[prompt].mode, answer.finished, grader.submit(problems[prompt], answer.text)))

    adapter = policy.adapter
    views = {
        "base": adapter.reference,
        "trained": nullcontext,
        "deployed": adapter.deployed,
        "quarantine": adapter.ablate_kept,
    }
    with views[side]():
        sample(
            policy,
            [policy.render(p.messages) for p in problems],
            n,
            sampling,
            max_new,
            torch_stream(seed, purpose, step),
            submit,
        )
    counts = {m: [0, 0, 0] for m in MODES if any(p.mode == m for p in problems)}
    dropped = 0
    for mode, _, future in futures:
        grade = future.result()
        if not isinstance(grade, Grade):
            dropped += 1
            continue
        counts[mode][0] += grade.exploited
        counts[mode][1] += grade.gt_correct
        counts[mode][2] += 1
    return Eval(
        by_mode={m: ModeEval(hack=Rate(h, k), solve=Rate(s, k)) for m, (h, s, k) in counts.items()},
        finished=Rate(sum(f for _, f, _ in futures), len(futures)),
        dropped=dropped,
    )
