"""Each rollout's own gradient on δS, collected in the backward of ordinary forwards.

In one adapted Linear, y = W' x, the gradient of a loss on its part of δS is the sum over tokens t

    g = Σ_t (Vh x_t) ⊙ (Uᵀ ∂L/∂y_t)

Hooks give every adapted Linear a backward that computes these products beside ∂L/∂x, and adds those
of each token to the *row of g* that the token was assigned to. So one backward through a batch of
many rollouts leaves each one's gradient in a row of its own. The gradient is exact at δS = 0:
nothing is divided by δS. Where ranks hold one model together, each one's g is a summand (`Shard`).

    with per_rollout_grads(adapter, N) as collected:
        collected.announce(pieces, n)  # the row of g that each token of the next batch adds to
        forward(…).backward()
    collected.flat                     # g [N, R]

Several batches may add to the same rows of g. A forward may also be gone back through several
times, once for each of the rows that share its tokens (`model/prefixes.py`): `announce(…,
again=True)` returns a function by which the tokens are assigned to other rows before the next
backward.

Index letters: R = Σ r over the adapted modules, N rows of g (one a rollout, or one for
several), n tokens of a batch, padding included, row by row: a packed one is a row.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vgrout.ground import ranks
from vgrout.model.attention import uploaded
from vgrout.model.prefixes import Pieces
from vgrout.model.svd_adapter import Active, AdaptedLinear, SvdAdapter, Vector

Gradients = Float[Tensor, "N R"]  # row i: Σ ∂L/∂δS over the rollouts that add to it


@contextmanager
def per_rollout_grads(adapter: SvdAdapter, N: int) -> Generator["PerRolloutGrads"]:
    """Collect N rows of gradients on δS in the backward of every forward in this context.

    Forward and backward both belong inside, under one set of weights.
    """
    collected = PerRolloutGrads(adapter, N)
    handles = []
    for site in adapter.sites.values():
        hook = partial(collected.after_forward, site)
        handles.append(site.linear.register_forward_hook(hook))
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


class PerRolloutGrads:
    """g [N, R] while it is collected, in `flat`. Before each forward call `announce`."""

    def __init__(self, adapter: SvdAdapter, N: int) -> None:
        assert adapter.is_merged(), "δS or δS_hack was changed, and not merged into the weights"
        self.adapter = adapter
        δS = adapter.δS
        self.flat: Gradients = δS.new_zeros(N, len(adapter))
        # S + δ of all modules, for each choice of active vectors that was needed so far.
        self._singular_values: dict[Active, Vector] = {}
        # The graph starts here and not at the embedding: layer 0's q/k/v then need no ∂L/∂x.
        self._root = torch.zeros((), device=δS.device, requires_grad=True)
        # Where ranks hold one model together: the input whose ∂L/∂x is summed over them, once all
        # Linears that read it have added theirs.
        self._hooked: Tensor | None = None
        # Which token of the batch that was announced last adds to which row of g.
        self.assigned: AssignedTokens

    def announce(self, pieces: Pieces, n: int, again: bool = False) -> Callable[[Pieces], None]:
        """Announce a batch of n tokens, those of padding included.

        pieces: (row of g, slice of the tokens that add to it).
        again: the next forward will be backpropagated several times, each time for other rollouts.

        Returns a function that assigns the tokens anew. With `again`, call it with the next pieces
        before each further backward.
        """
        dtype = next(iter(self.adapter.sites.values())).W.dtype
        assigned = AssignedTokens(self.flat, pieces, n, dtype, again)
        self.assigned = assigned
        return assigned.assign

    def after_forward(
        self,
        site: AdaptedLinear,
        _module: nn.Module,
        args: tuple[Tensor, ...],
        y: Tensor,
    ) -> Tensor:
        """Forward hook of one Linear: returns its output with a backward of our own."""
        x = args[0]
        # Reentrant checkpointing runs the first forward without a graph; its second one counts.
        if not torch.is_grad_enabled():
            return y
        if (
            site.shard is not None
            and site.shard.dim == 0
            and x.requires_grad
            and x is not self._hooked
        ):
            self._hooked = x
            x.register_hook(ranks.sum_shards)
        return _CollectingLinear.apply(y.detach(), x, self._root, self, site)

    def input_gradient(self, site: AdaptedLinear, dy: Tensor, dy_U: Tensor | None) -> Tensor:
        """∂L/∂x = W'ᵀ ∂L/∂y.

        dy_U: ∂L/∂y in U's basis, where it has been computed. From there on Vhᵀ diag(S + δ) is less
            work than W'ᵀ if d_out > d_in.
        """
        d_out, d_in = site.W.shape
        if dy_U is None or d_out <= d_in:
            return dy @ site.linear.weight
        return (dy_U * self._singular_values_now(dy.dtype)[site.span]) @ site.Vh

    def _singular_values_now(self, dtype: torch.dtype) -> Vector:
        """S + δ of all modules, under the active vectors."""
        active = self.adapter.active
        if active not in self._singular_values:
            S = torch.cat([site.S for site in self.adapter.sites.values()])
            S = S + self.adapter.δS * active.δS + self.adapter.δS_hack * active.δS_hack
            self._singular_values[active] = S.to(dtype)
        return self._singular_values[active]


class AssignedTokens:
    """Which row of g each token of a batch adds to.

    Kept as slices, and as a matrix of 0 and 1 [rows, n]: one product with it adds up all rows
    faster than a sum each.

    again: the forward is backpropagated several times, so Vh x is computed once and kept.
    """

    def __init__(
        self,
        gradients: Gradients,
        pieces: Pieces,
        n: int,
        dtype: torch.dtype,
        again: bool,
    ) -> None:
        self.gradients = gradients
        self.n = n
        self.dtype = dtype
        self.again = again
        # Of the backward that is under way: what it will add to `rows` of the gradients.
        self._sums: Tensor | None = None
        self.assign(pieces)

    def assign(self, pieces: Pieces) -> None:
        """Let each piece (row of g, slice of tokens) add to its row in the next backward."""
        n_rows = len(self.gradients)
        self.slices: dict[int, list[slice]] = {}
        for row, tokens in pieces:
            assert 0 <= row < n_rows, (row, n_rows)
            self.slices.setdefault(row, []).append(tokens)
        self.rows = uploaded(list(self.slices), self.gradients.device)
        shape = len(self.slices), self.n
        self.is_token_of = self.gradients.new_zeros(shape, dtype=self.dtype)
        for is_own, own_slices in zip(self.is_token_of, self.slices.values(), strict=True):
            for tokens in own_slices:
                is_own[tokens] = 1

    def add(
        self,
        site: AdaptedLinear,
        x: Float[Tensor, "*n d_in"],
        dy: Float[Tensor, "*n d_out"],
        ctx: Any,
    ) -> Float[Tensor, "*n r"] | None:
        """Add one Linear's share; returns dy in U's basis where it was computed.

        The cheaper of two orders of the same product is taken. Tokens first, Vh x and Uᵀ dy, costs
        2·n·r·(d_in + d_out). The weight's gradient M = Σ_t dy_t x_tᵀ of each row of g first, and
        then diag(Uᵀ M Vhᵀ), costs 2·n·d_in·d_out + 2·r·d_in·d_out a row: that is less as soon as a
        row has more than max(d_in, d_out) tokens. With `again` tokens come first whatever their
        number, since half of that is kept.

        ctx: of this Linear's forward, where it is kept.
        """
        shape = x.shape[:-1]
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        if self.again or len(x) <= len(self.slices) * max(site.W.shape):
            dy_U = dy @ site.U
            products = dy_U * self._input_in_basis(site, x, ctx)
            self._sums_of(site).addmm_(self.is_token_of, products)
            return dy_U.unflatten(0, shape)
        into = self.gradients[:, site.span]
        U, Vh = site.U, site.Vh
        for row, (first, *others) in self.slices.items():
            M = dy[first].mT @ x[first]
            for tokens in others:
                M.addmm_(dy[tokens].mT, x[tokens])
            M_V = (M @ Vh.mT).to(into.dtype)
            into[row].add_((M_V * U).sum(0))  # += would also copy the row to itself
        return None

    def _sums_of(self, site: AdaptedLinear) -> Float[Tensor, "rows r"]:
        """Where one Linear's sums go; all are added to the gradients when this backward ends."""
        if self._sums is None:
            self._sums = self.is_token_of.new_zeros(len(self.rows), self.gradients.shape[1])
            torch.autograd.Variable._execution_engine.queue_callback(self._add_sums)
        return self._sums[:, site.span]

    def _add_sums(self) -> None:
        """One cast and one sum for all Linears, where each would launch two kernels of its own.

        Called by autograd when the backward ends, before the tokens are assigned to other rows.
        """
        assert self._sums is not None
        self.gradients.index_add_(0, self.rows, self._sums.to(self.gradients.dtype))
        self._sums = None

    def _input_in_basis(
        self, site: AdaptedLinear, x: Float[Tensor, "n d_in"], ctx: Any
    ) -> Float[Tensor, "n r"]:
        """Vh x."""
        if not self.again:
            return x @ site.Vh.mT
        if ctx.x_V is None:
            ctx.x_V = x @ site.Vh.mT
        return ctx.x_V


class _CollectingLinear(torch.autograd.Function):
    """A Linear, whose output y is given, with a backward that collects gradients on δS.

    The backward adds this Linear's share to the gradients of the batch that `collected` had
    announced before the forward. x is saved by autograd, so that checkpointing frees it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        root: Tensor,
        collected: PerRolloutGrads,
        site: AdaptedLinear,
    ) -> Tensor:
        assigned = collected.assigned
        n = x.numel() // x.shape[-1]  # some blocks flatten rows and tokens
        assert n == assigned.n, f"{site.name} sees {n} tokens, {assigned.n} were announced"
        ctx.save_for_backward(x)
        ctx.collected, ctx.site = collected, site
        ctx.assigned, ctx.x_V = assigned, None
        ctx.weights_id = collected.adapter.weights_id
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        collected, site = ctx.collected, ctx.site
        # The weight is read as it is *now*: after a change it would be the wrong one.
        now = collected.adapter.weights_id
        assert ctx.weights_id == now, (
            f"{site.name}: forward under weights {ctx.weights_id}, backward under {now}"
        )
        (x,), dy = ctx.saved_tensors, dys[0]
        dy_U = ctx.assigned.add(site, x, dy, ctx)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = collected.input_gradient(site, dy, dy_U)
        return None, dx, None, None, None
