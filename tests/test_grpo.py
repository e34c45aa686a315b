"""Rows → gradients: each row is its rollouts' own, however they are batched, packed, shared and sampled."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.func import functional_call

import tiny
from quick import first_quick
from tiny import relative, shake, step_of
from vgrout.config.run import Config
from vgrout.config.settings import LossConfig, LossName, Sampling, ScaleConfig
from vgrout.envs.code.modes import Problem
from vgrout.ground.data import CachedGrade, Group, Rollout
from vgrout.loop.grpo import policy_gradients
from vgrout.loop.micro_batches import as_batch, micro_batches, prompts_apart
from vgrout.model import logprobs
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.sampling.sampler import sample
from vgrout.model.svd_adapter import SvdAdapter

LOSSES = get_args(LossName)
MAX_NEW, P = 12, 2
PROBLEM = Problem(0, "run_tests", "", (), (), (), "", "", "f")
PROMPTS = ((2, 79, 76, 83, 1, 4), (2, 40, 41, 42, 43, 44, 45, 46, 1, 4))
REWARDS = ((3.5, 0.5, 0.0, 1.0), (0.0, 3.5, 1.0, 0.25))  # every advantage differs
TEACHES = {"teacher_tau": 0.5, "teacher_model": "t"}


@pytest.fixture
def policy():
    policy = tiny.policy()
    shake(policy.adapter, 0.05)
    return policy


def answers(policy, n, seed):
    return sample(policy, PROMPTS, n, Sampling(), MAX_NEW, torch.Generator().manual_seed(seed))


def written(prompt, ids, source="student"):
    """An answer that was not sampled here."""
    return Rollout(ids, "", True, prompt_ids=prompt, source=source)


def group(rollouts, rewards):
    return Group(
        PROBLEM,
        tuple(rollouts),
        tuple(CachedGrade(r, r >= 1, False, False, True, "test") for r in rewards),
    )


def groups(policy):
    """Two groups: two students of the trained model, one of the deployed one, and a teacher."""
    trained = answers(policy, 2, 0)
    with policy.adapter.deployed():
        deployed = answers(policy, 1, 1)
    return [
        group(
            [
                *(Rollout.of(prompt, a) for a in trained[p]),
                Rollout.of(prompt, deployed[p][0], deployed=True),
                written(prompt, (50, 51, 52, 1), "teacher"),
            ],
            REWARDS[p],
        )
        for p, prompt in enumerate(PROMPTS)
    ]


def config(max_new=MAX_NEW, **loss):
    return Config(
        loss=LossConfig(**loss), scale=replace(ScaleConfig(), max_new=max_new, prompts_per_step=P)
    )


def run(policy, of, cfg=None, row="rollout", **how):
    made = policy_gradients(policy, step_of(of, row), cfg or config(), **how)
    return made.g, made.metrics


def within(policy, tokens):
    """The same with so many tokens in a forward."""
    return replace(policy, budget=replace(policy.budget, tokens=tokens))


def textbook(policy, of, b, β=0.0):
    """∂/∂δS of one rollout's Dr. GRPO loss, token by token, through an explicit W + U diag(δ) Vh and plain logits."""
    adapter, r = policy.adapter, of.rollouts[b]
    δ = (adapter.δS + (0 if r.deployed else adapter.δS_hack)).detach().clone().requires_grad_()
    names = {f"{n}.weight": s.W + (s.U * δ[s.span]) @ s.Vh for n, s in adapter.sites.items()}
    ids = torch.tensor([[*r.prompt_ids, *r.ids]])
    logp = functional_call(policy.model, names, (ids,)).logits[0].log_softmax(-1)
    with adapter.reference(), torch.no_grad():
        ref = policy.model(ids).logits[0].log_softmax(-1)
    loss = torch.zeros(())
    for t, token in enumerate(r.ids):
        at = len(r.prompt_ids) - 1 + t
        ρ = (logp[at, token] - logp[at, token].detach()).exp()
        d = ref[at, token] - logp[at, token]
        loss = loss - ρ * of.advantages[b] + β * (d.exp() - d - 1)
    (g,) = torch.autograd.grad(loss / (len(of) * MAX_NEW * P), δ)
    return g


@pytest.mark.parametrize("β", [0.0, 0.5])
def test_every_row_is_the_textbook_gradient_of_its_rollouts(policy, β):
    """Of a rollout alone, under what sampled it; or of the sum of those that share a row."""
    of, cfg = groups(policy), config(beta=β)
    want = torch.stack([textbook(policy, one, b, β) for one in of for b in range(len(one))])
    for row, at in (("rollout", range(8)), ("source", (0, 0, 0, 1, 2, 2, 2, 3))):
        sums = torch.zeros(max(at) + 1, want.shape[1]).index_add(0, torch.tensor(at), want)
        g, metrics = run(policy, of, cfg, row)
        for got, one in zip(g, sums, strict=True):
            assert relative(got, one) <= 2e-5  # fp32, batches of several against batches of 1
        assert ("kl" not in metrics) == (β == 0)


@pytest.mark.parametrize("loss", first_quick(LOSSES))
def test_micro_batches_change_nothing(policy, loss):
    of, cfg = groups(policy), config(loss=loss)
    shake(policy.adapter, 0.1)  # off the sampler's policy: masks take part
    want, one = run(policy, of, cfg)
    for budget in (1, 40):
        got, many = run(within(policy, budget), of, cfg)
        assert relative(got, want) <= 1e-5
        assert many["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert many["lp_s"] == pytest.approx(one["lp_s"], rel=1e-5)


def test_groups_without_signal_cost_nothing_and_change_nothing(policy):
    live = long_group()
    dead = replace(live, grades=(live.grades[0],) * len(live))
    assert forward_tokens(policy, [dead, live]) == forward_tokens(policy, [live])
    assert torch.equal(run(policy, [dead, live])[0], run(policy, [live])[0])
    for nothing in ([dead], []):
        assert forward_tokens(policy, nothing) == []
        g, metrics = run(policy, nothing)
        assert g.numel() == 0
        assert not any(metrics.values())


def test_nothing_is_learnt_where_something_is_not_finite(policy):
    step = step_of(groups(policy))
    first, *others = step.rows
    unmeasured = replace(first.rollout, logp=(math.nan,) * len(first.rollout.ids))
    for bad in (replace(first, advantage=math.nan), replace(first, rollout=unmeasured)):
        made = policy_gradients(policy, replace(step, rows=(bad, *others)), config())
        g, metrics = made.g, made.metrics
        assert g is None
        assert any(x is not None and not math.isfinite(x) for x in metrics.values())


# ── rollouts in a forward: padded, packed, with shared prompts


def long_group(n=6, T=40):
    """Enough tokens for a gradient row that the weight's gradient is formed first; one answer is a single token."""
    noise = torch.Generator().manual_seed(2)
    texts = [
        tuple(torch.randint(7, 97, (T - 3 * b,), generator=noise).tolist()) for b in range(n - 1)
    ] + [(1,)]
    return group([written(PROMPTS[1], ids) for ids in texts], [float(b % 3) for b in range(n)])


def branching_group():
    """Answers that begin alike, some of them equal, one the beginning of another; equal ones of two advantages."""
    texts = [
        (7, 8, 9, 1),
        (7, 8, 9, 1),
        (7, 8, 4, 4, 1),
        (7, 8, 9),
        (7,),
        (5, 6, 1),
        (7, 8, 9, 1),
        (5, 6, 1),
    ]
    rollouts = [
        *(written(PROMPTS[1], ids) for ids in texts),
        written(PROMPTS[1], texts[0], "teacher"),
    ]
    return group(rollouts, [3.0, 3.0, 0.0, 1.0, 0.0, 2.0, 0.0, 2.0, 3.0])


def alike_group():
    """Answers that begin with the same nine tokens: enough for a model of two blocks to read them with the prompt."""
    texts = [(8, 9, 3) * 3 + end for end in ((4, 1), (5, 6, 7, 1), (4, 4, 1))]
    return group([written(PROMPTS[1], ids) for ids in texts], [3.0, 0.0, 1.0])


def forward_tokens(policy, of, row="rollout"):
    """Tokens in each forward."""
    seen = []
    handle = logprobs.backbone(policy.model).register_forward_pre_hook(
        lambda _m, _a, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )
    run(policy, of, row=row)
    handle.remove()
    return seen


def test_what_answers_have_in_common_is_read_once(policy):
    """Tokens in the forward: P + G (R - 1); padded rows have the longest one's. Of a row of several the nodes of its
    answers' tree but the last token of each answer. Of several rows the prompt but for its last token has a forward of
    its own; equal students of equal advantage are one row."""
    of, prompt = long_group(), len(PROMPTS[1])
    lengths = [len(r.ids) for r in of.rollouts]
    assert forward_tokens(replace(policy, packs=False), [of]) == [
        len(lengths) * (prompt + max(lengths))
    ]
    assert forward_tokens(policy, [of]) == [prompt - 1, sum(lengths)]
    assert forward_tokens(policy, [of], "source") == [prompt + sum(lengths) - len(lengths)]
    of = branching_group()
    *students, teacher = of.rollouts
    nodes = {r.ids[:n] for r in students for n in range(1, len(r.ids))}
    own = {(r.source, r.ids, of.advantages[b]) for b, r in enumerate(of.rollouts)}
    assert forward_tokens(policy, [of], "source") == [
        prompt - 1,
        1 + len(nodes) + len(teacher.ids),
    ]
    assert forward_tokens(policy, [of]) == [prompt - 1, sum(len(ids) for _, ids, _ in own)]
    assert (len(nodes), len(own), len(of)) == (7, 7, 9)
    # and all that answers of several rows begin with; every answer has a token left that is its own
    assert forward_tokens(policy, [alike_group()]) == [prompt + 9, 1 + 3 + 2]


@pytest.mark.parametrize("row", ["rollout", "source"])
@pytest.mark.parametrize(
    "family", first_quick(["qwen2-bias", "gemma", "qwen3", "qwen3-tied", "llama"])
)
def test_packed_and_padded_rows_differ_by_rounding_only(family, row):
    policy = tiny.policy(family)
    assert policy.packs
    shake(policy.adapter, 0.05)
    long, branching = long_group(), branching_group()
    # another sampler's answer is another row, whatever it equals
    first, *others = branching.rollouts
    for of, max_new in (
        (groups(policy), MAX_NEW),
        ([long, replace(long, rollouts=long.rollouts[::-1])], 40),
        ([replace(branching, rollouts=(replace(first, deployed=True), *others))], MAX_NEW),
        ([alike_group()], 40),
    ):
        cfg = config(max_new, beta=0.3)
        want, a = run(replace(policy, packs=False), of, cfg, row)
        for budget in (16_384, 60):
            got, b = run(within(policy, budget), of, cfg, row)
            for g, w in zip(got, want, strict=True):
                assert (g - w).norm() <= 1e-5 * w.norm(), budget
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-6)
            assert b["kl"] == pytest.approx(a["kl"], rel=1e-3, abs=1e-6)


def test_a_prompt_of_one_token_leaves_no_prefix_and_may_have_the_most_rows(policy):
    """Its last turns of the prefixes' backward have no token."""
    short = [written((5,), (60 + i, 7 + i, 1)) for i in range(4)]
    long = [written(PROMPTS[1], (60 + i, 7 + i, 1)) for i in range(2)]
    of = [group(short, REWARDS[0]), group(long, [1.0, 0.0])]
    step = step_of(of[:1]), step_of(of[1:])
    rows = [*step[0].rows, *(replace(row, row_of_g=row.row_of_g + 4) for row in step[1].rows)]
    batch = replace(step[0], rows=tuple(rows))
    ((_, read),) = prompts_apart(policy, rows)
    assert len(read.turns) == 4
    assert read.turn_ends[2:] == [2 * len(read.ids)] * 3
    cfg = config()
    got = policy_gradients(policy, batch, cfg).g
    want = policy_gradients(replace(policy, packs=False), batch, cfg).g
    assert relative(got, want) <= 1e-5


@pytest.mark.parametrize("row", ["rollout", "source"])
@pytest.mark.parametrize("packs", [True, False])
def test_batches_keep_every_row_and_the_budget(policy, packs, row):
    rows = step_of(groups(policy), row).rows
    for budget in (1, 30, 64, 10_000):
        seen = []
        lm = replace(within(policy, budget), packs=packs)
        for together, read in prompts_apart(lm, rows) if packs else [(rows, None)]:
            before = 0 if read is None else len(read.ids)
            assert before <= budget // 2 or len({r.rollout.prompt_ids for r in together}) == 1
            parts = micro_batches(lm, together, read)
            for part in parts:
                assert len(part) == 1 or before + as_batch(lm, part, read).tokens <= budget
            assert len(parts) == 1 or budget < 10_000
            seen += [r for part in parts for r in part]
        assert sorted(map(id, seen)) == sorted(map(id, rows))


def test_models_that_cannot_be_packed_are_padded():
    """Gemma 2 has windows and soft caps."""
    policy = tiny.policy("gemma2")
    assert not policy.packs
    assert len(forward_tokens(policy, [long_group()])) == 1
    assert (
        policy.model.config._attn_implementation == tiny.tiny("gemma2").config._attn_implementation
    ), "put back"


# ── masks, padding, positions


@pytest.mark.parametrize("loss", LOSSES)
def test_eos_is_trained_where_pad_is_eos(loss):
    policy, cfg = tiny.policy(pad=None), config(loss=loss)
    assert policy.pad_id in policy.eos_ids
    whole, cut = (
        [written(PROMPTS[0], ids), written(PROMPTS[0], (60, 61, 62, 63))]
        for ids in ((60, 61, 1), (60, 61))
    )
    of = group(whole, [1.0, 0.0])
    with_eos, _ = run(policy, [of], cfg)
    without, _ = run(policy, [group(cut, [1.0, 0.0])], cfg)
    assert relative(without[0], with_eos[0]) > 0.01
    # ratio 1: every loss is grpo's gradient over its own normaliser, here G · P = 4 rollouts or 7
    # tokens
    want = textbook(policy, of, 0) * (1 if loss == "grpo" else 4 * MAX_NEW / 7)
    assert relative(with_eos[0], want) <= 2e-5


def test_chunked_head_is_the_head(policy, monkeypatch):
    of, cfg = groups(policy), config()
    whole, a = run(policy, of, cfg)
    seen, computes = list[int](), torch.log_softmax
    monkeypatch.setattr(
        torch, "log_softmax", lambda x, *args, **kw: seen.append(len(x)) or computes(x, *args, **kw)
    )
    monkeypatch.setitem(logprobs.HEAD_BUDGET, "cpu", 97 * 5)
    chunked, b = run(policy, of, cfg)
    assert max(seen) == 5
    assert relative(chunked, whole) <= 1e-5
    assert b["loss"] == pytest.approx(a["loss"], abs=1e-6)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("row", ["rollout", "source"])
def test_gradients_in_bf16_are_those_of_fp32(packs, row, monkeypatch):
    """Of the same weights, head in chunks: sums of products that are rounded to 2^-9, through two layers."""
    monkeypatch.setitem(logprobs.HEAD_BUDGET, "cpu", 97 * 5)
    half = replace(tiny.policy(dtype=torch.bfloat16), packs=packs)
    model = tiny.tiny("qwen3", dtype=torch.bfloat16).float()
    full = replace(half, model=model, adapter=SvdAdapter(model, None))
    (want, _), (got, _) = (run(p, groups(full), row=row) for p in (full, half))
    for g, w in zip(got, want, strict=True):
        assert relative(g, w) <= 5e-2


# ── sampler against trainer


# What one token's log-prob may differ by: another order of the same sums in fp32; in bf16 every
# product is rounded to 2^-9, over two layers and logits of a few units.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "lean"),
    first_quick([("qwen3", True), ("gemma2", False), ("qwen3", False), ("llama", True)], 2),
)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1.3, top_k=0, top_p=0.8), Sampling(top_k=7, top_p=0.95)],
    ids=["top_k", "top_p", "both"],
)
def test_the_samplers_log_probs_are_the_trainers(family, lean, dtype, sampling):
    """Both decoders, rows of many lengths, two prompts: each sampled token's log-prob against the training forward."""
    policy = tiny.policy(family, dtype=dtype)
    shake(policy.adapter, 0.05)
    # one token in eight ends a row
    policy = replace(policy, lean=lean, eos_ids=frozenset(range(1, 97, 8)))
    drawn = sample(policy, PROMPTS, 8, sampling, 24, torch.Generator().manual_seed(3))
    pairs = [
        (prompt, a) for prompt, of_prompt in zip(PROMPTS, drawn, strict=True) for a in of_prompt
    ]
    assert len({len(a.ids) for _, a in pairs}) > 2
    batch = collate([p for p, _ in pairs], [a.ids for _, a in pairs], policy.device)
    with torch.no_grad():
        logps = completion_logprobs(policy.model, batch)
    recorded = torch.tensor([x for _, a in pairs for x in a.logp])
    assert (logps[batch.mask] - recorded).abs().max() < TOLERANCE[dtype]


def test_fresh_sampler_agrees_and_a_stale_one_is_caught(policy):
    """Vectors that moved since are the sampler's mismatch; those that were not merged are a fault."""
    fresh, cfg = groups(policy), config()
    _, m = run(policy, fresh, cfg)
    # fp32: decode and training forward differ by rounding only, |Δ log p| < 1e-4 a token
    assert m["mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert (m["ratio_min"], m["ratio_max"]) == pytest.approx((1, 1), abs=1e-4)
    with torch.no_grad():
        policy.adapter.δS.add_(0.1)
    with pytest.raises(AssertionError, match="not merged into the weights"):
        run(policy, fresh, cfg)
    policy.adapter.merge()
    _, moved = run(policy, fresh, cfg)
    assert moved["mismatch_kl"] > 1e-3
    assert moved["ratio_min"] < 0.9 < 1.1 < moved["ratio_max"]


@pytest.mark.parametrize(("off", "largest"), [(50.0, 1e18), (1e4, 1e200)])
def test_ratios_are_raw_and_finite(policy, off, largest):
    """Not cut at the loss's own bound, e^20."""
    first, *others = groups(policy)[0].rollouts
    far = replace(first, logp=(-off,) * len(first.ids))
    _, m = run(policy, [group([far, *others], REWARDS[0])], config(loss="icepop"))
    assert largest < m["ratio_max"] < math.inf
    tokens = sum(len(r.ids) for r in (far, *others))
    assert m["is_masked_high"] == pytest.approx(len(far.ids) / tokens)


def test_dropped_tokens_are_counted_by_the_advantages_sign(policy):
    fresh = groups(policy)
    shake(policy.adapter, 0.15)
    _, measured = run(
        policy, fresh, config(loss="dppo_tv", dppo_diff_low=0.02, dppo_diff_high=0.02)
    )
    m = {name: x or 0.0 for name, x in measured.items()}
    assert 0 < m["is_masked"] < 1
    assert m["is_masked"] == pytest.approx(m["is_masked_low"] + m["is_masked_high"])
    assert m["masked_mismatch_kl"] > m["unmasked_mismatch_kl"] > 0
    tokens = [
        (A > 0, len(r.ids)) for g in fresh for r, A in zip(g.rollouts, g.advantages, strict=True)
    ]
    total, positive = sum(n for _, n in tokens), sum(n for up, n in tokens if up)
    counted = m["masked_positive"] * positive + m["masked_negative"] * (total - positive)
    assert counted == pytest.approx(m["is_masked"] * total)


# ── teachers


def test_demonstrations_have_ratio_one_and_their_own_log_prob(policy):
    of = groups(policy)
    known = replace(of[0].rollouts[3], logp=(-9.0,) * 4)  # whatever its sampler wrote down
    off = [replace(of[0], rollouts=(*of[0].rollouts[:3], known)), of[1]]
    for loss in LOSSES:
        (g, m), (same, _) = run(policy, of, config(loss=loss)), run(policy, off, config(loss=loss))
        assert torch.equal(g, same)
        assert g[3].norm() > 0
        lps = []
        for one in of:
            with torch.no_grad():
                values, mask = policy.logprobs([one.rollouts[3].prompt_ids], [one.rollouts[3].ids])
            lps += values[mask].tolist()
        assert m["lp_t"] == pytest.approx(sum(lps) / len(lps), rel=1e-5)


def test_teacher_tau_pulls_towards_the_teacher_model(policy):
    of = [long_group()]
    plain, _ = run(policy, of)
    pulled, _ = run(policy, of, config(**TEACHES), teacher_model=tiny.policy(seed=5))
    assert relative(pulled, plain) > 0.05
    same, _ = run(policy, of, config(**TEACHES), teacher_model=policy)
    assert relative(same, plain) < 1e-4, "a teacher equal to the policy adds nothing"
