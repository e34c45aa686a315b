"""Speed of an extraction against one backward per completion. Ratios of one interleaved run.

- one by one, leaf: δS as a parameter behind three dense products, one forward and backward per completion, and its
  gradient read off after each: what extraction costs without per-rollout gradients;
- one by one, probe: per-rollout gradients as ours with batches of one, so that the difference is the batching alone.

All three give the same gradients, checked.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import Ratio, interleaved
from benchmarks.rows import Report, Row
from vgrout.data import organism
from vgrout.direction.extract import TOKENS_PER_BATCH, gradients, mean_nll, tokens_of
from vgrout.direction.pairs import PairSet, load_pairs
from vgrout.model.logprobs import collate
from vgrout.model.policy import Policy, as_policy, load_policy

AGREE = 1e-3  # largest relative difference of a pair's gradient between two ways, fp32: sums in another order

Extractor = Callable[[Policy, PairSet, str], Float[Tensor, "n R"]]


def batched(policy: Policy, pairs: PairSet, side: str) -> Float[Tensor, "n R"]:
    """As the trainer extracts."""
    return gradients(policy, pairs, side, TOKENS_PER_BATCH)


def one_by_one_probe(policy: Policy, pairs: PairSet, side: str) -> Float[Tensor, "n R"]:
    """The same in batches of one."""
    return gradients(policy, pairs, side, 1)


def one_by_one_leaf(policy: Policy, pairs: PairSet, side: str) -> Float[Tensor, "n R"]:
    """δS as a leaf, y + U diag(δS) Vh x in every adapted Linear, a backward per completion."""
    δS = torch.zeros(len(policy.adapter), device=policy.device, requires_grad=True)
    grads = []
    with ExitStack() as hooks:
        for site in policy.adapter.sites.values():

            def add(_: nn.Module, args: tuple[Any, ...], y: Tensor, site: Any = site) -> Tensor:
                return y + ((args[0] @ site.Vh.mT) * δS[site.span].to(y.dtype)) @ site.U.mT

            hooks.callback(site.linear.register_forward_hook(add).remove)
        for i, pair in enumerate(pairs.pairs):
            prompt, answer = tokens_of(policy, pair, getattr(pair, side), f"pair {i}")
            (grad,) = torch.autograd.grad(mean_nll(policy, collate([prompt], [answer], policy.device)).sum(), δS)
            grads.append(grad.float().cpu())
    return torch.stack(grads)


WAYS: dict[str, Extractor] = {
    "batched": batched,
    "one by one, probe": one_by_one_probe,
    "one by one, leaf": one_by_one_leaf,
}


def stand_in(hidden: int, layers: int, tok: PreTrainedTokenizerBase) -> Policy:
    """A random Qwen3 of middle size with the organism's tokenizer; its weights do not matter to the clock."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tok),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        eos_token_id=tok.eos_token_id,
    )
    return as_policy(Qwen3ForCausalLM(config).to(_device()).eval(), tok, None)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(name: str, policy: Policy, pairs: PairSet, rounds: int) -> tuple[list[Row], float]:
    """Rows of both ratios, and the largest relative difference of a pair's gradient between two ways."""
    found = {way: both_sides(extractor, policy, pairs) for way, extractor in WAYS.items()}
    want = found["one by one, leaf"]
    worst = max(((g - want).norm(dim=1) / want.norm(dim=1)).max().item() for g in found.values())
    assert worst < AGREE, f"{name}: the ways give different gradients: {worst:.1e}"
    contestants = {way: partial(both_sides, extractor, policy, pairs) for way, extractor in WAYS.items()}
    times = interleaved(contestants, rounds, f"direction, {name}")
    rows = [
        Row("direction", f"{len(pairs)} pairs, {name}", way, str(Ratio.of(times[way].wall, times["batched"].wall)))
        for way in WAYS
        if way != "batched"
    ]
    return rows, worst


def both_sides(extractor: Extractor, policy: Policy, pairs: PairSet) -> Float[Tensor, "n2 R"]:
    """Ends with a copy to the host: nothing is in flight when the clock stops."""
    return torch.cat([extractor(policy, pairs, side) for side in ("hack", "clean")])


def run(quick: bool = False) -> Report:
    """On the organism, and on a stand-in ten times its size."""
    pairs = load_pairs(organism.PAIRS_DIR / "run_tests.json")
    small = load_policy(organism.MODEL_DIR, device=_device(), dtype=torch.float32, cache_dir=None)
    larger = stand_in(*((256, 3) if quick else (384, 6)), small.tok)
    rounds = 1 if quick else 5
    rows, notes = [], []
    for name, policy in (("organism", small), ("stand-in", larger)):
        measured, worst = measure(name, policy, pairs, rounds)
        rows += measured
        size = sum(p.numel() for p in policy.model.parameters()) / 1e6
        notes.append(f"direction, {name}: {size:.1f} M parameters, the ways agree to {worst:.0e}.")
    return Report(rows, notes)
