"""The varlen kernel in the hot path, by a stand-in that counts: packed rows, prompts shared, gradients, a whole run."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from runs import flags, rows, run
from vgrout.model import packing
from vgrout.model.logprobs import completion_logprobs
from vgrout.model.packing import batches, flash_kernel, pack

PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (3, 4, 5, 6), (7, 8), (9, 10, 11)]
COMPLETIONS = [(8, 9, 3, 1), (8, 9, 5, 1), (4,), (4, 4, 4), (6, 1, 2, 3, 4)]  # the first two begin alike
TOKENS = {True: 7 + 1 + 0 + 4 + 7, False: 7 + 7 + 4 + 4 + 7}  # read, with and without sharing


class Counting:
    """flash_attn_varlen_func as its documentation has it, row by row and in the inputs' own precision."""

    def __init__(self) -> None:
        self.calls, self.queries = 0, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, **how: Any
    ) -> Tensor:
        assert how.pop("causal") is True
        scale = how.pop("softmax_scale")
        assert not how
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
        assert most_q == int(cu_q.diff().max())
        assert most_k == int(cu_k.diff().max())
        self.calls, self.queries = self.calls + 1, self.queries + len(q)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = []
        for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))  # aligned at the end
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[c:d]))
        return torch.cat(out)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-bias"])
@pytest.mark.parametrize("share", [True, False])
def test_same_logprobs_and_gradients_as_padded_sdpa(family, share, monkeypatch):
    policy = tiny.policy(family)
    weights = [p.requires_grad_(True) for p in policy.model.parameters() if p.ndim == 2]
    counting = Counting()

    def gradient() -> tuple[Tensor, Tensor]:
        batch = pack([0] * 5, PROMPTS, COMPLETIONS, policy.device, torch.float32, share)
        assert batch.tokens == TOKENS[share]
        logp = completion_logprobs(policy.model, batch).full
        grads = torch.autograd.grad((logp * batch.mask).sum(), weights)
        return logp.detach(), torch.cat([g.flatten() for g in grads])

    want = gradient()
    assert counting.calls == 0
    monkeypatch.setattr(packing, "flash_kernel", lambda *_: counting)
    got = gradient()
    layers = policy.model.config.num_hidden_layers
    assert (counting.calls, counting.queries) == (layers * (2 if share else 1), layers * TOKENS[share])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5 * float(w.abs().max()))


@pytest.mark.slow
def test_a_run_with_the_kernel_is_the_run_without(shared_run, tmp_path, monkeypatch):
    """Every update of route2 goes through it, and the rows are those of SDPA."""
    argv, kernel = flags("route2"), Counting()
    monkeypatch.setattr(packing, "flash_kernel", lambda *_: kernel)
    path = run(shared_run.warm(tmp_path), *argv, stop_after=1)
    assert kernel.calls > 0
    monkeypatch.undo()
    for by_kernel, by_sdpa in zip(rows(path), rows(shared_run(*argv)), strict=False):
        assert by_kernel["hack_s"] == by_sdpa["hack_s"]
        assert by_kernel["gn"] == pytest.approx(by_sdpa["gn"], rel=1e-4)


def test_answers_that_begin_alike_do_not_fill_the_memory_with_copies():
    """A policy that collapsed: 300 answers share all but their last ten tokens, and one is another."""
    budget, same, cpu = 512, tuple(range(100, 290)), torch.device("cpu")
    completions = [(*same, *(300 + i,) * 10) for i in range(300)] + [tuple(range(400, 600))]
    prompts = [(3, 4, 5)] * len(completions)
    parts = batches([0] * len(completions), prompts, completions, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(completions)))
    for part in parts:
        batch = pack([0] * len(part), [prompts[i] for i in part], [completions[i] for i in part], cpu, torch.float32)
        assert batch.tokens <= budget
        if branches := batch.layout.branches:
            assert branches.keys.numel() <= 16 * budget
            assert branches.bias.numel() <= 4 * budget**2
    assert len(parts) < 20, "and share what they can"
    assert flash_kernel(cpu, torch.bfloat16) is flash_kernel(torch.device("cuda"), torch.float32) is None
