"""FLOPs and bytes of a forward, a backward and a decoding step, from shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Lengths = tuple[int, Sequence[int]]  # tokens of one prompt, and of each of its completions


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama kind."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    itemsize: int  # bytes of a weight

    @staticmethod
    def of(model: Any) -> "Shape":
        """The shape of a transformers model."""
        c = model.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return Shape(
            layers=c.num_hidden_layers,
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=head_dim,
            vocabulary=c.vocab_size,
            itemsize=model.dtype.itemsize,
        )

    @property
    def linears(self) -> int:
        """Weights of the adapted Linears: q, k, v, o, gate, up, down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    def attention(self, queries: int, before: int) -> int:
        """FLOPs of `queries` tokens in a row after `before` others, in all layers.

        A pair of tokens costs 4·H·D: its score, and its part of the weighted sum.
        """
        pairs = queries * before + queries * (queries + 1) // 2
        return 4 * self.layers * self.heads * self.head_dim * pairs


def forward_flops(s: Shape, groups: Sequence[Lengths], share: bool) -> int:
    """FLOPs of the backbone on every token once; the last token of a completion is never read.

    share: the prompt of a group is read once, not once for every completion.
    """
    total = 0
    for prompt, completions in groups:
        copies = 1 if share else len(completions)
        total += copies * (2 * s.linears * prompt + s.attention(prompt, 0))
        total += sum(2 * s.linears * (n - 1) + s.attention(n - 1, prompt) for n in completions)
    return total


def head_flops(s: Shape, groups: Sequence[Lengths]) -> int:
    """FLOPs of the logits at every completion token."""
    return sum(2 * s.hidden * s.vocabulary * n for _, completions in groups for n in completions)


def update_flops(s: Shape, groups: Sequence[Lengths], share: bool) -> int:
    """FLOPs of a forward and a backward.

    The forward reads a prompt once. The backward goes to activations and to the Linears (δS needs
    their contraction of x with ∂L/∂y), through a prompt once a group (`share`) or once a rollout.
    The head is frozen, so its backward is one product. Attention's is two and a half forwards,
    since the scores are computed again.
    """
    tokens = 0
    for prompt, completions in groups:
        copies = 1 if share else len(completions)
        tokens += copies * prompt + sum(completions) - len(completions)
    linears = 2 * s.linears * tokens
    attention = forward_flops(s, groups, share) - linears
    return (
        forward_flops(s, groups, True)
        + 2 * linears
        + attention * 5 // 2
        + 2 * head_flops(s, groups)
    )


def kv_bytes(s: Shape) -> int:
    """Keys and values of one token."""
    return 2 * s.layers * s.kv_heads * s.head_dim * s.itemsize


def decode_bytes(s: Shape, rows: int, context: int) -> int:
    """Bytes that one decoding step must read: every weight once, every row's keys and values."""
    return (s.linears + s.hidden * s.vocabulary) * s.itemsize + rows * context * kv_bytes(s)
