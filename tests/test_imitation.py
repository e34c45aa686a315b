"""Losses of imitation and preference against closed forms, sums over every sequence, and finite differences in fp64."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import tiny
from organisms.language.corpus import Shares, corpus_sample
from organisms.language.tasks import split_compositions
from organisms.tokenizer import train_tokenizer
from vgrout.ground import embedded
from vgrout.imitation.losses import dpo, future, minillm, reverse_kl, topk_distance, wasserstein
from vgrout.imitation.token_alignment import TokenBytes, aligned, nearest_tokens, token_bytes

F64 = torch.float64


def logits(*shape, seed=0):
    return 2 * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def log(*p):
    return torch.tensor([p], dtype=F64).log()


# ── MiniLLM


def test_reverse_kl():
    got = reverse_kl(log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5))
    assert float(got) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    y = logits(1, 7)
    assert float(reverse_kl(y, y)) == 0
    x = logits(3, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: reverse_kl(s, logits(3, 7, seed=1)), (x,))


def test_future_rewards_of_three_tokens():
    r = torch.tensor([[1.0, 2.0, 4.0, 9.0]], dtype=F64)
    mask = torch.tensor([[True, True, True, False]])
    assert future(r, mask, False).tolist() == [[6.0, 4.0, 0.0, 0.0]]
    assert future(r, mask, True).tolist() == [[3.0, 4.0, 0.0, 0.0]]


@pytest.mark.parametrize(("α", "T"), [(0.0, 3), (0.3, 1), (1.0, 1)])
def test_minillm_gradient_is_that_of_the_sequence_kl(α, T):
    """Summed over every sequence of T tokens, weighted with how often it is sampled. Off policy the paper's weight is
    one token's, so there the sum is exact for one token."""
    V = 3
    first = [sum(V**i for i in range(t)) for t in range(T + 1)]
    table = logits(first[T], V).requires_grad_()  # a row of logits for each prefix
    teacher = logits(first[T], V, seed=1)
    q, p = table.log_softmax(-1), teacher.log_softmax(-1)
    mask = torch.ones(1, T, dtype=torch.bool)
    exact, expected = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    for y in itertools.product(range(V), repeat=T):
        rows = [first[t] + sum(c * V**i for i, c in enumerate(reversed(y[:t]))) for t in range(T)]
        logq, logp = q[rows, list(y)][None], p[rows, list(y)][None]
        mixed_model = ((1 - α) * logq.detach().exp() + α * logp.exp()).log()
        exact = exact + logq.sum().exp() * (logq - logp).sum()
        loss = minillm(
            logq, logp, mixed_model, reverse_kl(table[rows], teacher[rows])[None], mask, False
        )
        expected = expected + mixed_model.sum().exp() * loss.sum()
    (want,) = torch.autograd.grad(exact, table, retain_graph=True)
    (got,) = torch.autograd.grad(expected, table)
    assert want.abs().max() > 0.05
    assert torch.allclose(got, want, atol=1e-12)


def test_padding_is_ignored():
    mask = torch.tensor([[True, True, False]])
    fine = logits(1, 3, seed=4).log_softmax(-1)
    wild = fine.clone()
    wild[0, 2] = -torch.inf
    for x in (fine, wild):
        x.requires_grad_()
    a, b = (
        minillm(x, x.detach() - 0.1, x.detach(), torch.ones(1, 3, dtype=F64), mask, True)
        for x in (fine, wild)
    )
    assert torch.equal(a, b)
    b.sum().backward()
    assert wild.grad.isfinite().all()


# ── ULD


def test_wasserstein_of_small_vectors():
    assert float(wasserstein(log(0.1, 0.6, 0.3), log(0.5, 0.5))) == pytest.approx(0.1 + 0.2 + 0.1)
    y = logits(1, 9)
    assert float(wasserstein(y, y.flip(-1))) == pytest.approx(0)  # it compares shapes, not tokens
    x = logits(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: wasserstein(s, logits(2, 8, seed=1)), (x,))


def test_topk_of_small_vectors():
    student, teacher = log(0.5, 0.2, 0.3), log(0.1, 0.6, 0.2, 0.1)
    student_of = torch.tensor([-1, 0, 1, -1])
    # the teacher's two likeliest, .6 and .2, are the student's .5 and .2; what remains is .2
    # against .3
    assert float(topk_distance(student, teacher, 2, student_of)) == pytest.approx(0.1 + 0.0 + 0.1)
    assert float(topk_distance(student, teacher, 1, student_of)) == pytest.approx(0.1 + 0.1)
    nothing = torch.full((4,), -1)
    assert float(topk_distance(student, teacher, 3, nothing)) == 0  # all is in the bucket
    x = logits(3, 6).requires_grad_()
    own = torch.tensor([3, -1, 0, 5, 2, 1, 4])
    assert torch.autograd.gradcheck(lambda s: topk_distance(s, logits(3, 7, seed=1), 4, own), (x,))


def test_a_vocabulary_of_262144_fits():
    student = torch.randn(2, 262_144, generator=torch.Generator().manual_seed(0))
    assert wasserstein(student, student[:, :150_000]).isfinite().all()
    assert topk_distance(student, student, 64, torch.arange(262_144)).abs().max() < 1e-6


# ── token alignment


def shipped():
    tok = AutoTokenizer.from_pretrained(embedded.MODEL_DIR)
    return token_bytes(tok, tok.eos_token_id)


def texts(n):
    rng = random.Random(0)
    of = split_compositions(0)["train"]
    return [corpus_sample(of, Shares(), rng, pieces=()).text for _ in range(n)]


def test_equal_tokenizers_align_token_by_token():
    tok, s = AutoTokenizer.from_pretrained(embedded.MODEL_DIR), shipped()
    for text in [*texts(20), "naïve Ünïcode 文字\n\n"]:
        ids = [*tok(text, add_special_tokens=False).input_ids, tok.eos_token_id]
        assert s.text(ids).decode() == text
        assert aligned(s, ids, s, ids) == [(i, i) for i in range(len(ids))]
    of = nearest_tokens(s, s, len(tok))
    spelled = torch.tensor([bool(b) for b in s.of])
    assert torch.equal(of[spelled], torch.arange(len(tok))[spelled])
    assert of[tok.eos_token_id] == tok.eos_token_id


def test_two_tokenizers_align_where_both_start_a_token():
    tok, big = AutoTokenizer.from_pretrained(embedded.MODEL_DIR), shipped()
    some = texts(60)
    other = train_tokenizer(some, 400)
    small = token_bytes(other, other.eos_token_id)
    for text in some[:20]:
        a = [*tok(text, add_special_tokens=False).input_ids, big.end_id]
        b = [*other(text, add_special_tokens=False).input_ids, small.end_id]
        pairs = aligned(small, b, big, a)
        assert len(pairs) > len(b) // 4
        assert len(b) > len(a)
        for i, j in pairs:
            assert small.text(b[:i]) == big.text(a[:j])
        assert pairs[0] == (0, 0)
        assert pairs[-1] == (len(b) - 1, len(a) - 1)  # both ends
    student_of = nearest_tokens(small, big, len(tok))
    for j, i in enumerate(student_of.tolist()):
        if i >= 0 and j != big.end_id:
            assert small.of[i] == big.of[j]
    known = student_of[student_of >= 0].tolist()
    assert len(known) == len(set(known)) > 256
    for i, j in aligned(small, b[1:], big, a):  # not the same text
        assert small.text(b[1:][:i]) == big.text(a[:j])


# a student without a newline and without a blank; a teacher that has all, and longer tokens
STUDENT = TokenBytes((b"a", b"b", b"", b"c", b"ab", b""), 5)  # 2: unknown, 5: the end
TEACHER = TokenBytes((b"a", b"b", b"\n", b"c", b" ", b"bc", b""), 6)


@pytest.mark.parametrize(
    ("ids", "teacher_ids", "pairs"),
    [
        # ab?c  ab\nc: at the newline each begins a token, and the prefixes are the same
        ([0, 1, 2, 3], [0, 1, 2, 3], [(0, 0), (1, 1), (2, 2)]),
        # the last one, before the end
        ([0, 1, 2, 5], [0, 1, 2, 6], [(0, 0), (1, 1), (2, 2)]),
        # a longer token across the place where the other has two
        ([4, 2, 3], [0, 1, 2, 3], [(0, 0), (1, 2)]),
        # a token of the teacher's that holds more than the student could say
        ([0, 1, 3, 2], [0, 5, 2], [(0, 0), (1, 1), (3, 2)]),
        # one is cut short
        ([0, 1], [0, 1, 3, 6], [(0, 0), (1, 1)]),
    ],
)
def test_texts_are_aligned_up_to_where_they_differ(ids, teacher_ids, pairs):
    assert aligned(STUDENT, ids, TEACHER, teacher_ids) == pairs


@given(st.text("ab\nc ", max_size=12), st.sampled_from(["", "\n", "b\n", "ab\nc "]))
def test_aligned_tokens_have_one_prefix(text, unknown):
    """Whatever the student cannot spell: all that comes before it is aligned, and nothing after it."""
    full = TokenBytes(tuple(c.encode() for c in "ab\nc "), 9)
    poor = TokenBytes(tuple(b"" if c in unknown else c.encode() for c in "ab\nc "), 9)
    ids = ["ab\nc ".index(c) for c in text]
    if text.startswith(" "):
        return  # a leading blank is ignored where the other text has none
    known = next((n for n, c in enumerate(text) if c in unknown), len(text))
    assert aligned(poor, ids, full, ids) == [(i, i) for i in range(min(known + 1, len(text)))]


def test_bytes_of_sentencepiece_and_byte_tokens():
    s = TokenBytes((b" a", b"b", b"", b"a"), 2)
    # a leading space is forgiven
    assert aligned(s, [0, 1, 2], s, [3, 1, 2]) == [(0, 0), (1, 1), (2, 2)]
    char = tiny.tokenizer()
    assert token_bytes(char, 1).text(char("ab c").input_ids) == b"ab c"


# ── DPO


def test_dpo_of_one_pair():
    a = [torch.tensor([x], dtype=F64) for x in (-1.0, -3.0, -2.0, -2.0)]
    loss, margin = dpo(*a, beta=0.5)
    assert float(margin) == 2.0
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1.0)))
    assert float(dpo(a[0], a[0], a[2], a[2], 0.1)[0]) == pytest.approx(math.log(2))
    far, _ = dpo(a[0] - 1e5, a[0], a[2], a[2], 1.0)
    assert far.isfinite().all()
    x, y = (logits(4, seed=s).requires_grad_() for s in (5, 6))
    assert torch.autograd.gradcheck(
        lambda c, r: dpo(c, r, logits(4, seed=7), logits(4, seed=8), 0.3)[0], (x, y)
    )
