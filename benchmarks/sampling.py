"""Sampling with a merged adapter against the bare model in the same engine, and the engine against transformers'."""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import rig
from benchmarks.flops import Shape, decode_bytes
from benchmarks.report import Ratio, at_least, interleaved
from benchmarks.rows import Report, Row
from vgrout.data import organism
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.rng import torch_stream


def answers(policy: Policy, prompts: list[tuple[int, ...]], seed: int = rig.SEED) -> int:
    """Tokens of one step's answers."""
    stream = torch_stream(seed, "bench")
    of = sample(policy, prompts, rig.G, Sampling(), organism.MAX_NEW, stream)
    return sum(len(a.ids) for each in of for a in each)


def generate(policy: Policy, prompts: list[tuple[int, ...]], max_new: int = organism.MAX_NEW) -> int:
    """The same by transformers: one batch, left-padded, as TRL calls it."""
    settings, longest = Sampling(), max(map(len, prompts))
    rows = [p for p in prompts for _ in range(rig.G)]
    ids = torch.tensor([[*[policy.pad_id] * (longest - len(p)), *p] for p in rows])
    mask = torch.tensor([[*[0] * (longest - len(p)), *[1] * len(p)] for p in rows])
    generator: Any = policy.model
    with torch.no_grad():
        out = generator.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            max_new_tokens=max_new,
            pad_token_id=policy.pad_id,
        )
    rows = out[:, longest:].tolist()
    ends = [next((t for t, token in enumerate(row) if token in policy.eos_ids), len(row) - 1) + 1 for row in rows]
    return sum(ends)


def run(quick: bool = False) -> Report:
    """Tokens a second with an adapter, without, and by transformers."""
    rounds = 6 if quick else 30
    with rig.workplace(), rig.grader() as grader:
        loaded = rig.load("none", grader)
        policy = loaded.policy
        prompts = [policy.render(p.messages) for p in loaded.problems.draw(rig.SEED, 0, rig.P)]
        bare = replace(
            policy, model=AutoModelForCausalLM.from_pretrained(organism.MODEL_DIR, dtype=torch.float32).eval()
        )
        with torch.no_grad():
            policy.adapter.δS.fill_(1e-9)  # merged weights that are the base's: the same answers, token by token
        policy.adapter.merge()
        tokens: dict[str, list[int]] = {"adapter": [], "bare": [], "generate": []}

        def adapter() -> None:
            policy.adapter.merge()  # once a step: part of what an adapter costs
            tokens["adapter"].append(answers(policy, prompts))

        times = interleaved(
            {
                "adapter": adapter,
                "bare": lambda: tokens["bare"].append(answers(bare, prompts)),
                "generate": lambda: tokens["generate"].append(generate(bare, prompts)),
            },
            rounds,
            "sampling",
        )
        rate = {name: [n / s for n, s in zip(tokens[name][1:], times[name].wall, strict=True)] for name in times}
        shape = Shape.of(policy.model)
    rows = [
        at_least(
            "sampling", "adapter merged, tokens / s", "bare base model", Ratio.of(rate["adapter"], rate["bare"]), 0.97
        ),
        at_least(
            "sampling", "this engine, tokens / s", "transformers.generate", Ratio.of(rate["bare"], rate["generate"]), 2
        ),
    ]
    n = rig.P * rig.G
    step = decode_bytes(shape, n, 100)
    figure = f"{step / 2**20:.1f} MiB a decoding step of {n} rows, {step / n / 1024:.0f} KiB a token"
    return Report([*rows, Row("sampling", "bytes read", "bound: they fit a cache, so calls bind", figure)])
