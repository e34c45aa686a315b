"""`python studies/bf16_products.py small --dtype bf16 …`: the trainer on a processor that cannot multiply in bf16.

Products and attention get fp32 copies of their bf16 inputs, and what comes out is rounded to bf16: a product with fp32
sums, as AVX-512 BF16, AMX and GPUs have it, in a third more time than fp32 instead of ten times as much. Attention
rounds once, not between its two products.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from vgrout import train
from vgrout.model import decoder

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
INTO = {aten.mm.out: aten.mm.default, aten.addmm_.default: aten.addmm.default}
PRODUCTS = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, FLASH, *INTO),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    *(aten.matmul.default, aten.linear.default, aten.scaled_dot_product_attention.default),  # whole, in inference mode
}


def _to(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class Bf16Products(TorchDispatchMode):
    """Inside, every product with a bf16 input is one in fp32 whose result is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or not any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in args):
            return func(*args, **kwargs)
        into = kwargs.pop("out", args[0])
        args, kwargs = tree_map(partial(_to, torch.float32), (args, kwargs))
        y = INTO.get(func, func)(*args, **kwargs)
        if func in INTO:
            return into.copy_(y)
        if func is FLASH:
            return y[0].to(torch.bfloat16), y[1]  # the logarithm of the sums is fp32 in either
        return tree_map(partial(_to, torch.bfloat16), y)


def _wide_once(linears: Sequence[nn.Linear], fuse: bool) -> decoder._Plain:
    """The decoder's weights in fp32 at once, not again for every token: the same numbers."""
    plain = _of(linears, fuse)
    return decoder._Plain([(W.float(), None if b is None else b.float()) for W, b in plain.parts])


_of = decoder._Plain.of

if __name__ == "__main__":
    with mock.patch.object(decoder._Plain, "of", _wide_once), Bf16Products():
        sys.exit(train.main())
