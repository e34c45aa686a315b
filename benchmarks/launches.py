"""Kernels that an update and a decoding step launch on a GPU, and the bytes they move, counted without one.

The model is on torch's meta device, which computes nothing: shapes decide what is called, and they
have their true sizes. Counted are operations of torch that launch a kernel, below autograd; some
launch two, so it is the least. Bytes are those that operations other than matrix products and
attention read and write. Two depths are counted, and the blocks between them multiplied.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import gpu, rig
from benchmarks.bounds import Load
from benchmarks.measure import Figure, page
from vgrout import grpo, loss_metrics
from vgrout.model import (
    attention,
    fused,
    kv_cache,
    layout,
    lean_layers,
    logprobs,
    memory,
    prefixes,
    rollout_grads,
    svd_adapter,
)
from vgrout.model.kv_cache import LayerPast, StaticCache
from vgrout.model.lean_decoder import LeanDecoder
from vgrout.model.policy import Policy
from vgrout.model.rollout_grads import per_rollout_grads
from vgrout.model.svd_adapter import Active, SvdAdapter

DECODING = "a decoding step"
FORWARDS = (4_096, 12_867)  # tokens: usual, and what the plan gives an H200
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
ATTENTION = "aten::_scaled_dot_product"
# make room, or give a tensor another name
NOTHING = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::lift_fresh",
    "aten::_unsafe_view",
}
READ_IN_PART = {"aten::index_select", "aten::embedding", "aten::index", "aten::gather"}
WRITTEN_ONLY = {"aten::fill_", "aten::zero_", "aten::new_zeros", "aten::zeros_like"}

# Of a policy that has numbers, whose tokenizer and settings are taken.
SMALL = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Count:
    """What was launched."""

    launches: int = 0
    bytes: int = 0

    def further(self, deeper: "Count", blocks: int) -> "Count":
        """The count of `blocks` more blocks, of which `deeper` has two more than this."""
        return Count(
            self.launches + (deeper.launches - self.launches) * blocks // 2,
            self.bytes + (deeper.bytes - self.bytes) * blocks // 2,
        )


class Counting(TorchDispatchMode):
    """Counts what is called within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Count()
        self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator, kwargs = func, kwargs or {}
        out = operator(*args, **kwargs)
        name: str = operator._schema.name
        if not (self._in_kernel or name in NOTHING or _is_view(operator)):
            product = name in PRODUCTS or name.startswith(ATTENTION)
            self.add(1, 0 if product else _moved(name, (args, kwargs), out))
        return out

    def add(self, launches: int, moved: int) -> None:
        self.seen = Count(self.seen.launches + launches, self.seen.bytes + moved)

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one launch."""

        def launched(*given: Any) -> Any:
            self._in_kernel = True
            try:
                out = function(*given)
            finally:
                self._in_kernel = False
            self.add(1, _moved("", given, out))
            return out

        return launched


def _is_view(operator: Any) -> bool:
    aliases = [a.alias_info for a in operator._schema.arguments if a.alias_info is not None]
    return operator.is_view or (len(aliases) > 0 and not any(a.is_write for a in aliases))


def _moved(name: str, given: object, out: object) -> int:
    """Bytes that are read and written."""
    written = sum(map(_bytes, _distinct(out)))
    if name in READ_IN_PART:
        return 2 * written
    if name in WRITTEN_ONLY:
        return written
    if name == "aten::index_copy_":  # the source, to as many places
        return 2 * _bytes(_distinct(given)[-1])
    return written + sum(map(_bytes, _distinct(given)))


def _distinct(values: object) -> list[Tensor]:
    return list({id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}.values())


def _bytes(x: Tensor) -> int:
    """Those of its distinct elements."""
    n = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n


class _Attention(torch.autograd.Function):
    """A varlen kernel: one launch forward and two backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, counting: Counting) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.counting = counting
        counting.add(1, 0)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counting.add(2, 0)
        q, k, v = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


@contextmanager
def on_meta(counting: Counting) -> Generator[None]:
    """Within the context the program takes the meta device for a GPU with a varlen kernel."""

    def uploaded(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def snapshot(adapter: SvdAdapter, number: int) -> svd_adapter._Merge:
        δS, δS_hack = adapter.δS.detach().clone(), adapter.δS_hack.detach().clone()
        return svd_adapter._Merge(number, δS, δS_hack, Active(True, False))

    def varlen_kernel(*_: object) -> Callable[..., Tensor]:
        return lambda q, k, v, *_: _Attention.apply(q, k, v, counting)

    def attention_of_step(q: Tensor, **_: object) -> Tensor:
        counting.add(1, 0)
        return torch.empty_like(q)

    with ExitStack() as ends:
        for module in (attention, layout, prefixes, rollout_grads, grpo, logprobs, loss_metrics):
            ends.enter_context(mock.patch.object(module, "uploaded", uploaded))
        ends.enter_context(mock.patch.object(attention, "varlen_kernel", varlen_kernel))
        ends.enter_context(mock.patch.object(fused, "compiled", counting.kernel))
        ends.enter_context(mock.patch.object(SvdAdapter, "_snapshot", snapshot))
        ends.enter_context(mock.patch.object(SvdAdapter, "unmerged", return_value=None))
        ends.enter_context(
            mock.patch.object(kv_cache, "scaled_dot_product_attention", attention_of_step)
        )
        of_decoder = counting.kernel(lean_layers.rms_norm)
        ends.enter_context(mock.patch.object(lean_layers, "rms_norm", of_decoder))
        budgets = {"meta": memory.HEAD_BUDGET["cuda"]}
        ends.enter_context(mock.patch.dict(memory.HEAD_BUDGET, budgets))
        yield


def meta_policy(shape: dict[str, Any], like: Policy) -> Policy:
    """A policy without numbers, in bf16, which has all else of `like`. Make it within `on_meta`."""
    model = rig.random_model(device="meta", dtype=torch.bfloat16, **shape).requires_grad_(False)

    def decompose(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = min(W.shape)
        S = W.new_empty(r, dtype=torch.float32)
        return W.new_empty(W.shape[0], r), S, W.new_empty(r, W.shape[1])

    return replace(like, model=model, adapter=SvdAdapter(model, None, decompose=decompose))


def of_update(policy: Policy, load: Load, by_rollout: bool, counting: Counting) -> Count:
    """An update's. by_rollout: a gradient for each rollout, as `route2` needs."""
    config: Any = policy.model.config
    sizes = (load.group, load.prompts, load.prompt, load.answer)
    batch, cfg = rig.learnt(rig.noise_groups(config.vocab_size, *sizes), by_rollout)
    rows = grpo.merge_twins(batch.rows).rows
    update = grpo._GradientPass(policy, cfg, grpo._norm(batch, cfg), None, True, ())
    counting.seen = Count()
    with counting, per_rollout_grads(policy.adapter, len(rows)) as collected:
        update.backward(rows, collected)
    return counting.seen


def of_decoding(policy: Policy, load: Load, counting: Counting) -> Count:
    """One decoding step's, of all rows: what a CUDA graph holds."""
    lean = LeanDecoder(policy.model, static=True)
    rows = load.prompts * load.group
    embeddings: Any = policy.model.get_input_embeddings()
    like: Tensor = embeddings.weight
    config: Any = policy.model.config
    shape = (load.prompts, config.num_key_value_heads, load.prompt, config.head_dim)
    past = [LayerPast(like.new_empty(shape), like.new_empty(shape)) for _ in lean.layers]
    lean.cache = StaticCache(past, None, rows, load.answer)
    lean.position = torch.zeros(rows, dtype=torch.long, device="meta")
    lean._set_rotary(like, load.prompt + load.answer)
    counting.seen = Count()
    with counting, torch.no_grad():
        lean._forward(lean.position)
    return counting.seen


def counted(shape: dict[str, Any], load: Load, tokens: int, fuse: bool) -> dict[str, Count]:
    """By what is done: updates with forwards of so many tokens, and a decoding step."""
    counting = Counting()
    like = gpu.random_policy(shape | SMALL, "cpu", torch.float32)
    depth = shape["num_hidden_layers"]
    of_depths: list[dict[str, Count]] = []
    with on_meta(counting):
        for layers in (1, 3):
            policy = meta_policy(shape | {"num_hidden_layers": layers}, like)
            policy = replace(policy, budget=replace(policy.budget, tokens=tokens))
            fused.fuse(policy.model, fuse)
            of_depth = {DECODING: of_decoding(policy, load, counting)}
            for name, by_rollout in (("none", False), ("route2", True)):
                of_depth[f"update, {name}"] = of_update(policy, load, by_rollout, counting)
            of_depths.append(of_depth)
    shallow, deep = of_depths
    return {what: shallow[what].further(deep[what], depth - 1) for what in shallow}


def run() -> str:
    """Launches and bytes at Qwen3-4B's shapes and the load of `fast`, with fused blocks and without."""
    figures: list[Figure] = []
    for tokens in FORWARDS:
        plain, with_kernels = (
            counted(gpu.QWEN3_4B, gpu.FAST, tokens, fuse) for fuse in (False, True)
        )
        for what, before in plain.items():
            if what == DECODING and tokens != FORWARDS[0]:
                continue  # the same whatever a forward holds
            of = "" if what == DECODING else f", forwards of {tokens:,} tokens"
            after = with_kernels[what]
            figures.append(
                Figure(f"{what}{of}", f"without fused blocks: {_shown(before)}", _shown(after))
            )
    return page(figures, f"{gpu.FAST}, Qwen3-4B's shapes, bf16, counted on the meta device.")


def _shown(count: Count) -> str:
    return f"{count.launches:,} launches, {count.bytes / 1e9:,.1f} GB"
