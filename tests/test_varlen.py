"""A varlen kernel in the hot path, by a stand-in on the CPU: packed rows, prompts shared, gradients, a whole run."""

import contextlib

import pytest
import torch

import tiny
from live import Live
from pretended_gpu import varlen_on_cpu
from vgrout.model import attention
from vgrout.model.attention import _PaddedRuns
from vgrout.model.layout import batches, pack, packed_hidden
from vgrout.model.logprobs import backbone, collate, completion_logprobs

PROMPTS = [(3, 4, 5, 6), (3, 4, 5, 6), (3, 4, 5, 6), (7, 8), (9, 10, 11)]
# the first two begin alike
COMPLETIONS = [(8, 9, 3, 1), (8, 9, 5, 1), (4,), (4, 4, 4), (6, 1, 2, 3, 4)]
TOKENS = {True: 7 + 1 + 0 + 4 + 7, False: 7 + 7 + 4 + 4 + 7}  # read, with and without sharing


@pytest.mark.parametrize("share", [True, False])
def test_same_logprobs_and_gradients_as_padded_rows(share, monkeypatch):
    policy = tiny.policy("qwen2-bias")
    weights = [p.requires_grad_(True) for p in policy.model.parameters() if p.ndim == 2]

    def gradient(packed):
        batch = collate(PROMPTS, COMPLETIONS, policy.device)
        if packed:
            batch = pack(
                [0] * 5 if share else range(5), PROMPTS, COMPLETIONS, policy.device, torch.float32
            )
            assert batch.tokens == TOKENS[share]
        logp = completion_logprobs(policy.model, batch)
        grads = torch.autograd.grad((logp * batch.mask).sum(), weights)
        return logp.detach(), torch.cat([g.flatten() for g in grads])

    want, by_sdpa = gradient(False), gradient(True)
    queries = varlen_on_cpu(monkeypatch)
    got = gradient(True)
    layers = policy.model.config.num_hidden_layers
    assert (len(queries), sum(queries)) == (layers * (2 if share else 1), layers * TOKENS[share])
    for w, *others in zip(want, got, by_sdpa, strict=True):
        for other in others:
            torch.testing.assert_close(other, w, rtol=1e-4, atol=1e-5 * float(w.abs().max()))


@pytest.mark.parametrize("shared", [True, False])
def test_half_precision_on_a_cpu_has_the_gradients_of_sdpa(shared):
    """In bf16, against fp64."""
    draw = torch.Generator().manual_seed(0)
    lengths, paths = (
        [5, 9, 3],
        [[0, 1, *range(3, 8)], [0, 1, 2, *range(8, 17)], [*range(17, 20)]] if shared else None,
    )
    wide = [
        torch.randn(n, heads, 16, generator=draw).double()
        for n, heads in ((17, 4), (20, 2), (20, 2), (17, 4))
    ]
    *given, dy = [x[3:] if not shared and len(x) == 20 else x for x in wide]

    def gradients(dtype):
        qkv = [x.to(dtype).requires_grad_() for x in given]
        y = _PaddedRuns.of(lengths, paths, torch.device("cpu"), dtype).attend(*qkv, None)
        return [y, *torch.autograd.grad(y, qkv, dy.to(dtype))]

    for exact, got in zip(gradients(torch.float64), gradients(torch.bfloat16), strict=True):
        assert (got.double() - exact).norm() <= 0.015 * exact.norm()


def test_copies_of_what_leads_to_a_branch_do_not_wait_for_backward(monkeypatch):
    """A long prompt, whose copy every branch has in every layer."""
    policy, prompt, queries = (
        tiny.policy("qwen3"),
        (3, 4, 5, 6, 7, 8) * 40,
        varlen_on_cpu(monkeypatch),
    )

    def kept():
        batch = pack(
            [0] * 9, [prompt] * 9, [(10 + i, 9, 3) for i in range(9)], policy.device, torch.float32
        )
        with Live() as live:
            out = packed_hidden(policy.model, backbone(policy.model), batch)
            return live.now if out.requires_grad else 0

    policy.model.requires_grad_(True)
    few = kept()
    monkeypatch.setattr(attention, "_copied_again", lambda *_: contextlib.nullcontext())
    c = policy.model.config
    copies = c.num_hidden_layers * 8 * 242 * 2 * c.num_key_value_heads * c.head_dim * 4
    assert len(queries) == 2 * c.num_hidden_layers
    assert kept() - few == pytest.approx(copies, rel=0.02)


def test_answers_that_begin_alike_do_not_fill_the_memory_with_copies():
    """A policy that collapsed: 300 answers share all but their last ten tokens, and one is another."""
    budget, same, cpu = 512, tuple(range(100, 290)), torch.device("cpu")
    completions = [(*same, *(300 + i,) * 10) for i in range(300)] + [tuple(range(400, 600))]
    prompts = [(3, 4, 5)] * len(completions)
    parts = batches([0] * len(completions), prompts, completions, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(completions)))
    for part in parts:
        batch = pack(
            [0] * len(part),
            [prompts[i] for i in part],
            [completions[i] for i in part],
            cpu,
            torch.float32,
        )
        assert batch.tokens <= budget
        if branches := batch.attention.branches:
            assert branches.keys.numel() <= 16 * budget
            assert branches.bias.numel() <= 4 * budget**2
    assert len(parts) < 20, "and share what they can"
