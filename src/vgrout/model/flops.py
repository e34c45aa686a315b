"""FLOPs and bytes of a forward, a backward and a decoding step, from shapes alone. Torch-free."""

from collections.abc import Sequence

from vgrout.model.shapes import Shapes

Lengths = tuple[int, Sequence[int]]  # tokens of one prompt, and of each of its completions


def attention_flops(s: Shapes, queries: int, before: int) -> int:
    """FLOPs of `queries` tokens in a row after `before` others, in all layers.

    A pair of tokens costs 4·H·D: its score, and its part of the weighted sum.
    """
    pairs = queries * before + queries * (queries + 1) // 2
    return 4 * s.layers * s.heads * s.head_dim * pairs


def forward_flops(s: Shapes, groups: Sequence[Lengths], share: bool) -> int:
    """FLOPs of the backbone on every token once; the last token of a completion is never read.

    share: the prompt of a group is read once, not once for every completion.
    """
    total = 0
    for prompt, completions in groups:
        copies = 1 if share else len(completions)
        total += copies * (2 * s.adapted * prompt + attention_flops(s, prompt, 0))
        for n in completions:
            total += 2 * s.adapted * (n - 1) + attention_flops(s, n - 1, prompt)
    return total


def head_flops(s: Shapes, groups: Sequence[Lengths]) -> int:
    """FLOPs of the logits at every completion token."""
    return 2 * s.hidden * s.vocab * sum(sum(completions) for _, completions in groups)


def update_flops(s: Shapes, groups: Sequence[Lengths], share: bool) -> int:
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
    linears = 2 * s.adapted * tokens
    attention = forward_flops(s, groups, share) - linears
    return (
        forward_flops(s, groups, True)
        + 2 * linears
        + attention * 5 // 2
        + 2 * head_flops(s, groups)
    )


def weight_bytes(s: Shapes, itemsize: int) -> int:
    """Bytes of the weights that a decoding step reads: the adapted Linears and the head."""
    return (s.adapted + s.hidden * s.vocab) * itemsize


def decode_bytes(s: Shapes, itemsize: int, rows: int, context: int) -> int:
    """Bytes that one decoding step must read: every weight once, every row's keys and values.

    itemsize: bytes of a weight, and of a number in the cache.
    context: tokens of a row.
    """
    return weight_bytes(s, itemsize) + rows * context * s.kv_bytes(itemsize)
