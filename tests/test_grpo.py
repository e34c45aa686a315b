import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import tiny
from methods import relative, shake
from vgrout.config.loss import LossConfig, LossName
from vgrout.grpo import Row, as_batch, micro_batches, packed_batches, policy_gradients
from vgrout.model import logprobs
from vgrout.model.logprobs import collate, completion_logprobs
from vgrout.model.policy import Policy
from vgrout.model.sampler import sample
from vgrout.model.sampling import Sampling
from vgrout.model.svd_adapter import SvdAdapter
from vgrout.tensor_types import UpdatePart, UpdatePlan
from vgrout.types import CachedGrade, Group, Problem, Rollout

LOSSES = get_args(LossName)
MAX_NEW = 12
PROBLEM = Problem(0, "run_tests", "", (), (), (), "", "", "f")
PROMPTS = ((2, 79, 76, 83, 1, 4), (2, 40, 41, 42, 43, 44, 45, 46, 1, 4))


@pytest.fixture
def policy() -> Policy:
    policy = tiny.policy()
    shake(policy, 0.05)
    return policy


def roll(policy: Policy, n: int = 3, seed: int = 0) -> list[list[Rollout]]:
    answers = sample(policy, PROMPTS, n, Sampling(), MAX_NEW, torch.Generator().manual_seed(seed))
    return [
        [
            Rollout(PROBLEM, "student", False, prompt, a.ids, a.text, a.finished, a.logp_full, a.logp_sampled)
            for a in of_prompt
        ]
        for prompt, of_prompt in zip(PROMPTS, answers, strict=True)
    ]


def group(rollouts: list[Rollout], rewards: list[float]) -> Group:
    return Group(PROBLEM, tuple(rollouts), tuple(CachedGrade(r, False, False, True, "test") for r in rewards))


def groups(policy: Policy) -> list[Group]:
    """Two groups of students and a teacher; rewards chosen so that every advantage differs."""
    out = []
    for rollouts, rewards in zip(roll(policy), ([3.5, 0.5, 0.0, 1.0], [0.0, 3.5, 1.0, 0.25]), strict=True):
        teacher = Rollout(PROBLEM, "teacher", False, rollouts[0].prompt_ids, (50, 51, 52, 1), "", True)
        out.append(group([*rollouts, teacher], rewards))
    return out


def run(
    policy: Policy, of: list[Group], cfg: LossConfig | None = None, part: UpdatePart | None = None, **kw: Any
) -> tuple[list[Tensor], Any]:
    settings: dict[str, Any] = {"max_new": MAX_NEW, "prompts_per_step": 2} | kw
    plan = UpdatePlan(tuple(of), (part or UpdatePart(),))
    (grads,), metrics = policy_gradients(policy, plan, cfg or LossConfig(), **settings)
    return [torch.cat(list(g.values()), 1) for g in grads], metrics


def textbook(policy: Policy, of: Group, b: int, β: float = 0.0, P: int = 2) -> Tensor:
    """∂/∂δS of one rollout's Dr. GRPO loss, token by token, through an explicit W + U diag(δ) Vh and plain logits."""
    adapter, r = policy.adapter, of.rollouts[b]
    δ = (adapter.δS + adapter.δS_hack).detach().clone().requires_grad_()
    names = {f"{n}.weight": s.W + (s.U * δ[s.span]) @ s.Vh for n, s in adapter.sites.items()}
    ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
    logp = functional_call(policy.model, names, (ids,)).logits[0].log_softmax(-1)
    with adapter.reference(), torch.no_grad():
        ref = policy.model(ids).logits[0].log_softmax(-1)
    loss = torch.zeros(())
    for t, token in enumerate(r.completion_ids):
        at = len(r.prompt_ids) - 1 + t
        ρ = (logp[at, token] - logp[at, token].detach()).exp()
        d = ref[at, token] - logp[at, token]
        loss = loss - ρ * of.advantages[b] + β * (d.exp() - d - 1)
    (g,) = torch.autograd.grad(loss / (len(of) * MAX_NEW * P), δ)
    return g


@pytest.mark.parametrize("β", [0.0, 0.5])
def test_every_rows_gradient_is_the_textbook_one(policy: Policy, β: float) -> None:
    of = groups(policy)
    grads, metrics = run(policy, of, LossConfig(beta=β))
    for g, one in zip(grads, of, strict=True):
        for b in range(len(one)):
            assert relative(g[b], textbook(policy, one, b, β)) <= 2e-5  # fp32, batch of 8 against batch of 1
    assert (metrics.kl is None) == (β == 0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("budget", [1, 40])
def test_micro_batches_change_nothing(policy: Policy, budget: int, loss: LossName) -> None:
    of, cfg = groups(policy), LossConfig(loss=loss)
    (a, one), (b, many) = run(policy, of, cfg), run(policy, of, cfg, token_budget=budget)
    assert relative(torch.cat(b), torch.cat(a)) <= 1e-5
    assert many.loss == pytest.approx(one.loss, abs=1e-6)
    assert many.lp_s == pytest.approx(one.lp_s, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_prompts_are_the_sum_of_the_halves(policy: Policy, loss: LossName) -> None:
    """A loss over all the step's tokens divides each half by more tokens in the whole: the sum of two shares."""
    of, cfg = groups(policy), LossConfig(loss=loss)
    shake(policy, 0.1)  # off the sampler's policy: masks take part
    both, metrics = run(policy, of, cfg)
    halves = [run(policy, [one], cfg) for one in of]
    tokens = [sum(len(r.completion_ids) for r in g.rollouts) for g in of]
    by_token = loss not in ("grpo", "dr_grpo", "gspo")
    share = [n / sum(tokens) if by_token else 1.0 for n in tokens]
    for whole, (half, _), part in zip(both, halves, share, strict=True):
        assert relative(part * half[0], whole) <= 1e-5
    want = sum(part * m.loss for (_, m), part in zip(halves, share, strict=True))
    assert metrics.loss == pytest.approx(want, abs=1e-6)


def test_groups_without_signal_cost_nothing_and_change_nothing(policy: Policy) -> None:
    of = groups(policy)
    dead = replace(of[0], grades=tuple(CachedGrade(1.0, False, False, True, "test") for _ in of[0].grades))
    alone, _ = run(policy, [of[1]])
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = policy.model.register_forward_pre_hook(count)
    backbone = logprobs.backbone(policy.model).register_forward_pre_hook(count)
    grads, _ = run(policy, [dead, of[1]])
    assert calls == 1
    assert torch.count_nonzero(grads[0]) == 0
    assert torch.equal(grads[1], alone[0])
    nothing, metrics = run(policy, [dead])
    assert torch.count_nonzero(nothing[0]) == 0
    assert calls == 1
    assert metrics.loss is metrics.lp_s is metrics.mismatch_kl is None
    assert run(policy, [])[0] == []
    handle.remove()
    backbone.remove()


def test_rows_and_advantages_can_be_chosen(policy: Policy) -> None:
    """As a method does that trains its two vectors on different rollouts: two parts, one sum."""
    of = groups(policy)
    whole, _ = run(policy, of)
    a, _ = run(policy, of, part=UpdatePart(rows=((0, 2), (1,))))
    b, _ = run(policy, of, part=UpdatePart(rows=((1, 3), (0, 2, 3))))
    assert a[0].abs().sum(1).nonzero().flatten().tolist() == [0, 2]
    assert relative(a[0] + b[0], whole[0]) <= 1e-5
    doubled, _ = run(policy, of, part=UpdatePart(advantages=tuple(tuple(2 * x for x in g.advantages) for g in of)))
    assert relative(doubled[1], 2 * whole[1]) <= 1e-5
    with policy.adapter.deployed():
        kept, _ = run(policy, of)
    assert relative(kept[0], whole[0]) > 0.01, "another view, another gradient"


def test_coarser_rows_are_sums_of_finer_ones(policy: Policy) -> None:
    of = groups(policy)
    fine, metrics = run(policy, of)
    by_source, _ = run(policy, of, grad_rows="source")
    by_group, same = run(policy, of, grad_rows="group", token_budget=40)
    for g, source, total in zip(fine, by_source, by_group, strict=True):
        assert relative(source, torch.stack([g[:3].sum(0), g[3]])) <= 1e-5
        assert relative(total, g.sum(0, keepdim=True)) <= 1e-5
    assert same.loss == pytest.approx(metrics.loss, abs=1e-6)


def test_one_step_along_minus_g_raises_the_rewarded_answers_log_prob(policy: Policy) -> None:
    """Sign convention: g is a gradient of the loss."""
    of = groups(policy)
    best = of[0].rollouts[max(range(4), key=lambda b: of[0].rewards[b])]

    def logp() -> float:
        with torch.no_grad():
            values, mask = policy.logprobs([best.prompt_ids], [best.completion_ids])
        return float(values[mask].sum())

    before = logp()
    grads, _ = run(policy, of)
    with torch.no_grad():
        policy.adapter.δS.sub_(0.1 * grads[0].sum(0))
    policy.adapter.merge()
    assert logp() > before


# ── rollouts in a forward: padded, packed, with shared prompts ───────────────────────────────────────────────────────


def long_group(n: int = 6, T: int = 40) -> Group:
    """Enough tokens for a gradient row that the weight's gradient is formed first; one answer is a single token."""
    noise = torch.Generator().manual_seed(2)
    completions = [tuple(torch.randint(7, 97, (T - 3 * b,), generator=noise).tolist()) for b in range(n - 1)] + [(1,)]
    rollouts = [Rollout(PROBLEM, "student", False, PROMPTS[1], c, "", True) for c in completions]
    return group(rollouts, [float(b % 3) for b in range(n)])


def branching_group() -> Group:
    """Answers that begin alike, some of them equal, one the beginning of another; equal ones of two advantages."""
    answers = [(7, 8, 9, 1), (7, 8, 9, 1), (7, 8, 4, 4, 1), (7, 8, 9), (7,), (5, 6, 1), (7, 8, 9, 1), (5, 6, 1)]
    rollouts = [Rollout(PROBLEM, "student", False, PROMPTS[1], a, "", True) for a in answers]
    teacher = Rollout(PROBLEM, "teacher", False, PROMPTS[1], answers[0], "", True)
    return group([*rollouts, teacher], [3.0, 3.0, 0.0, 1.0, 0.0, 2.0, 0.0, 2.0, 3.0])


def forward_tokens(policy: Policy, of: Group, *how: dict[str, Any]) -> list[int]:
    """Tokens in the forward of each way to run the group."""
    seen: list[int] = []
    handle = logprobs.backbone(policy.model).register_forward_pre_hook(
        lambda _m, _a, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )
    for settings in how:
        run(policy, [of], **settings)
    handle.remove()
    return seen


def test_what_answers_have_in_common_is_read_once(policy: Policy) -> None:
    """Nodes of the answers' tree but the last token of each answer, and the prompt; equal students are one row."""
    of = branching_group()
    seen = forward_tokens(policy, of, {"grad_rows": "group"}, {"grad_rows": "rollout"})
    P = len(PROMPTS[1])
    nodes = {r.completion_ids[:n] for r in of.rollouts for n in range(1, len(r.completion_ids))}
    apart = {(r.source, r.completion_ids, of.advantages[b]) for b, r in enumerate(of.rollouts)}
    assert seen == [P + len(nodes), sum(P + len(answer) - 1 for _, answer, _ in apart)]
    assert (len(nodes), len(apart), len(of)) == (7, 7, 9)


@pytest.mark.parametrize("grad_rows", ["rollout", "source", "group"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-bias"])
def test_packings_differ_by_rounding_only(family: str, grad_rows: Any) -> None:
    policy = tiny.policy(family)
    assert policy.packs
    shake(policy, 0.05)
    long = long_group()
    for of, max_new in (
        (groups(policy), MAX_NEW),
        ([long, replace(long, rollouts=long.rollouts[::-1])], 40),
        ([branching_group()], MAX_NEW),
    ):
        want, a = run(policy, of, LossConfig(beta=0.3), grad_rows=grad_rows, packing="padded", max_new=max_new)
        for packing in ("packed", "shared"):
            for budget in (16_384, 60):
                got, b = run(
                    policy,
                    of,
                    LossConfig(beta=0.3),
                    grad_rows=grad_rows,
                    packing=packing,
                    max_new=max_new,
                    token_budget=budget,
                )
                for g, w in zip(torch.cat(got), torch.cat(want), strict=True):
                    assert (g - w).norm() <= 1e-5 * w.norm(), (packing, budget)
                assert b.loss == pytest.approx(a.loss, abs=1e-6)
                assert b.kl == pytest.approx(a.kl, rel=1e-3, abs=1e-6)


def test_a_shared_prompt_is_read_once_for_each_gradient_row(policy: Policy) -> None:
    """Tokens in the forward: G (P + R - 1) packed, P + G (R - 1) shared; padded rows have the longest one's."""
    of = long_group()
    lengths, P = [len(r.completion_ids) for r in of.rollouts], len(PROMPTS[1])
    how = (("padded", "group"), ("packed", "group"), ("shared", "rollout"), ("shared", "group"))
    seen = forward_tokens(policy, of, *({"packing": packing, "grad_rows": rows} for packing, rows in how))
    apart = sum(lengths) + len(lengths) * (P - 1)
    assert seen == [len(lengths) * (P + max(lengths)), apart, apart, P + sum(lengths) - len(lengths)]


@pytest.mark.parametrize("packing", ["padded", "packed", "shared"])
def test_batches_keep_every_row_and_the_budget(policy: Policy, packing: Any) -> None:
    rows = [Row(r, 1.0, i // 4) for i, r in enumerate(r for g in groups(policy) for r in g.rollouts)]
    for budget in (1, 30, 64, 10_000):
        parts = micro_batches(rows, budget) if packing == "padded" else packed_batches(rows, budget, packing)
        assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
        assert all(len(part) == 1 or as_batch(policy, part, packing).tokens <= budget for part in parts)
        assert len(parts) == 1 or budget < 10_000


def test_models_that_cannot_be_packed_are_padded() -> None:
    """Gemma 2 has windows and soft caps: its rows are padded under every packing."""
    policy = tiny.policy("gemma2")
    assert not policy.packs
    assert torch.equal(run(policy, [long_group()])[0][0], run(policy, [long_group()], packing="padded")[0][0])
    assert policy.model.config._attn_implementation == tiny.tiny("gemma2").config._attn_implementation, "put back"


# ── masks, padding, positions ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", LOSSES)
def test_eos_is_trained_where_pad_is_eos(loss: LossName) -> None:
    policy = tiny.policy(pad=None)
    assert policy.pad_id in policy.eos_ids
    rollouts = [
        Rollout(PROBLEM, "student", False, PROMPTS[0], ids, "", True) for ids in ((60, 61, 1), (60, 61, 62, 63))
    ]
    cfg = LossConfig(loss=loss)
    with_eos, _ = run(policy, [group(rollouts, [1.0, 0.0])], cfg)
    cut = [replace(rollouts[0], completion_ids=(60, 61)), rollouts[1]]
    without, _ = run(policy, [group(cut, [1.0, 0.0])], cfg)
    assert relative(without[0][0], with_eos[0][0]) > 0.01
    # ratio 1: every loss is grpo's gradient over its own normaliser, here G · P = 4 rollouts and 7 tokens
    over = {"grpo": 4 * MAX_NEW, "dr_grpo": 4 * MAX_NEW, "gspo": 4 * 3}.get(loss, 7)
    want = textbook(policy, group(rollouts, [1.0, 0.0]), 0) * 4 * MAX_NEW / over
    assert relative(with_eos[0][0], want) <= 2e-5


def test_collate_masks_by_length_and_points_one_before(policy: Policy) -> None:
    batch = collate([(5, 6, 7), (8,)], [(1, 1), (9, 1, 1, 1)], policy.device)
    assert batch.ids.tolist() == [[5, 6, 7, 1, 1], [8, 9, 1, 1, 1]]
    assert batch.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.at[batch.mask].tolist() == [2, 3, 0, 1, 2, 3]
    for prompts, completions in (([()], [(1,)]), ([(1,)], [()])):
        with pytest.raises(AssertionError, match="empty"):
            collate(prompts, completions, policy.device)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2-bias"])
def test_log_probs_are_the_models_own_row_by_row(family: str) -> None:
    policy = tiny.policy(family)
    completions = [(50, 51, 1), (60,), (70, 71, 72, 73, 74)]
    prompts = [PROMPTS[0], PROMPTS[1], (9,)]
    got, mask = policy.logprobs(prompts, completions)
    for b, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        logits = policy.model(torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1]
        want = logits.log_softmax(-1).gather(-1, torch.tensor(c)[:, None]).squeeze(-1)
        assert torch.allclose(got[b][mask[b]], want, atol=2e-5), family
        assert torch.count_nonzero(got[b][~mask[b]]) == 0


@pytest.mark.parametrize(
    ("support", "rows"), [("full", (torch, "log_softmax", 0)), ("sampled", (logprobs, "_head", 1))]
)
def test_chunked_head_is_the_head(policy: Policy, support: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of, cfg = groups(policy), LossConfig(ratio_support=support)
    whole, a = run(policy, of, cfg, sampling=Sampling())
    seen: list[int] = []
    owner, name, position = rows
    computes = getattr(owner, name)

    def spy(*args: Any, **kw: Any) -> Any:
        seen.append(len(args[position]))
        return computes(*args, **kw)

    monkeypatch.setattr(owner, name, spy)
    monkeypatch.setitem(logprobs.HEAD_BUDGET, "cpu", 97 * 5)
    chunked, b = run(policy, of, cfg, sampling=Sampling())
    assert max(seen) == 5
    assert relative(torch.cat(chunked), torch.cat(whole)) <= 1e-5
    assert b.loss == pytest.approx(a.loss, abs=1e-6)


@pytest.mark.parametrize("packing", ["padded", "packed", "shared"])
@pytest.mark.parametrize("grad_rows", ["rollout", "group"])
def test_gradients_in_bf16_are_those_of_fp32(packing: Any, grad_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same weights, head in chunks: sums of products that are rounded to 2^-9, through two layers."""
    monkeypatch.setitem(logprobs.HEAD_BUDGET, "cpu", 97 * 5)
    half = tiny.policy(dtype=torch.bfloat16)
    full = replace(half, model=tiny.tiny("qwen3", dtype=torch.bfloat16).float())
    full = replace(full, adapter=SvdAdapter(full.model, None))
    of = groups(full)
    (want, _), (got, _) = (run(p, of, grad_rows=grad_rows, packing=packing) for p in (full, half))
    for g, w in zip(torch.cat(got), torch.cat(want), strict=True):
        assert (g - w).norm() <= 5e-2 * w.norm()


# ── sampler against trainer ─────────────────────────────────────────────────────────────────────────────────────────


# What one token's log-prob may differ by: another order of the same sums in fp32; in bf16 every product is rounded to
# 2^-9, over two layers and logits of a few units.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "lean"), [("qwen3", True), ("qwen3", False), ("llama", True), ("gemma2", False)])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1.3, top_k=0, top_p=0.8), Sampling(top_k=7, top_p=0.95)],
    ids=["top_k", "top_p", "both"],
)
def test_the_samplers_log_probs_are_the_trainers(
    family: str, lean: bool, dtype: torch.dtype, sampling: Sampling
) -> None:
    """Both decoders, rows of many lengths, two prompts: each sampled token's log-prob against the training forward."""
    policy = tiny.policy(family, dtype=dtype)
    shake(policy, 0.05)
    policy = replace(policy, lean=lean, eos_ids=frozenset(range(1, 97, 8)))  # one token in eight ends a row
    answers = sample(policy, PROMPTS, 8, sampling, 24, torch.Generator().manual_seed(3))
    pairs = [(prompt, a) for prompt, of_prompt in zip(PROMPTS, answers, strict=True) for a in of_prompt]
    assert len({len(a.ids) for _, a in pairs}) > 2
    batch = collate([p for p, _ in pairs], [a.ids for _, a in pairs], policy.device)
    with torch.no_grad():
        logps = completion_logprobs(policy.model, batch, sampling)
    assert logps.sampled is not None
    worst = [0.0, 0.0]
    for b, (_, a) in enumerate(pairs):
        for i, (got, sampled) in enumerate(((logps.full, a.logp_full), (logps.sampled, a.logp_sampled))):
            worst[i] = max(worst[i], float((got[b, : len(a.ids)] - torch.tensor(sampled)).abs().max()))
    assert worst[0] < TOLERANCE[dtype]
    if dtype == torch.float32:  # in bf16 a token at the edge of the support may fall on either side of it
        assert worst[1] < TOLERANCE[dtype]


@pytest.mark.parametrize("support", ["full", "sampled"])
def test_fresh_sampler_agrees_and_a_stale_one_is_caught(policy: Policy, support: Any) -> None:
    fresh = groups(policy)
    cfg = LossConfig(ratio_support=support)
    _, metrics = run(policy, fresh, cfg, sampling=Sampling())
    # fp32: decode and training forward differ by rounding only, |Δ log p| < 1e-4 a token
    assert metrics.mismatch_kl < 1e-8
    assert metrics.ratio_min == pytest.approx(1, abs=1e-4)
    assert metrics.ratio_max == pytest.approx(1, abs=1e-4)
    shake(policy, 0.1)
    _, stale = run(policy, fresh, cfg, sampling=Sampling())
    assert stale.mismatch_kl > 1e-3
    assert stale.ratio_min < 0.9 < 1.1 < stale.ratio_max


def test_a_missed_merge_is_the_samplers_mismatch_and_not_the_gradients(policy: Policy) -> None:
    """The vectors moved, the weights did not: the trainer's side follows the vectors, so the row's ratios show it."""
    fresh = groups(policy)
    with torch.no_grad():
        policy.adapter.δS.add_(0.1)
    missed, stale = run(policy, fresh)
    assert stale.mismatch_kl > 1e-3
    assert stale.ratio_min < 0.9 < 1.1 < stale.ratio_max
    policy.adapter.merge()
    merged, metrics = run(policy, fresh)
    assert stale.mismatch_kl == pytest.approx(metrics.mismatch_kl, rel=1e-3)
    assert relative(torch.cat(missed), torch.cat(merged)) < 1e-4


def test_ratios_are_raw_and_of_the_model_as_trained_alone(policy: Policy) -> None:
    rollouts = roll(policy)[0]
    far = replace(rollouts[0], logp_full=tuple(-50.0 - x for x in range(len(rollouts[0].completion_ids))))
    _, m = run(policy, [group([far, *rollouts[1:]], [1.0, 0.0, 0.5])])
    assert m.ratio_max > 1e18, "not cut at the loss's own bound, e^20"
    _, m = run(policy, [group([replace(far, deployed=True), *rollouts[1:]], [1.0, 0.0, 0.5])])
    assert m.ratio_max == pytest.approx(1, abs=1e-4)
    assert m.mismatch_kl < 1e-8
    assert m.mismatch_kl_abl > 1e15, "sampled from another model on purpose: counted apart"
    endless = replace(far, logp_full=(-1e4,) * len(far.completion_ids))
    _, m = run(policy, [group([endless, *rollouts[1:]], [1.0, 0.0, 0.5])], LossConfig(loss="icepop"))
    assert all(x is None or math.isfinite(x) for x in m.columns().values())
    assert m.is_masked_high == pytest.approx(len(far.completion_ids) / sum(len(r.completion_ids) for r in rollouts))


def test_dropped_tokens_are_counted_by_the_advantages_sign(policy: Policy) -> None:
    fresh = groups(policy)
    shake(policy, 0.15)
    _, m = run(policy, fresh, LossConfig(loss="dppo_tv", dppo_diff_low=0.02, dppo_diff_high=0.02))
    assert 0 < m.is_masked < 1
    assert m.is_masked == pytest.approx(m.is_masked_low + m.is_masked_high)
    assert m.masked_mismatch_kl > m.unmasked_mismatch_kl > 0
    total = sum(len(r.completion_ids) for g in fresh for r in g.rollouts)
    positive = sum(len(r.completion_ids) for g in fresh for r, A in zip(g.rollouts, g.advantages, strict=True) if A > 0)
    counted = m.masked_positive * positive + m.masked_negative * (total - positive)
    assert counted == pytest.approx(m.is_masked * total)


# ── teacher rows ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_teacher_rows_have_ratio_one_and_their_own_log_prob(policy: Policy) -> None:
    of = groups(policy)
    for name in ("grpo", "dppo_tv", "icepop"):
        grads, metrics = run(policy, of, LossConfig(loss=name))
        assert grads[0][3].norm() > 0
    lps = []
    for g in of:
        with torch.no_grad():
            values, mask = policy.logprobs([g.rollouts[3].prompt_ids], [g.rollouts[3].completion_ids])
        lps += values[mask].tolist()
    assert metrics.lp_t == pytest.approx(sum(lps) / len(lps), rel=1e-5)


def test_teacher_corrections(policy: Policy) -> None:
    of = groups(policy)
    plain, _ = run(policy, of)
    shaped, _ = run(policy, of, LossConfig(teacher_correction="luffy"))
    assert torch.equal(shaped[0][:3], plain[0][:3]), "students keep their gradient"
    assert shaped[0][3].norm() < plain[0][3].norm()
    # a teacher that is the policy itself has importance weight 1; one that was surer halves it
    for shift, factor in ((0.0, 1.0), (0.7, 0.4966), (-5.0, 2.0)):
        own = []
        for g in of:
            with torch.no_grad():
                values, mask = policy.logprobs([g.rollouts[3].prompt_ids], [g.rollouts[3].completion_ids])
            known = replace(g.rollouts[3], logp_full=tuple((values + shift)[mask].tolist()))
            own.append(replace(g, rollouts=(*g.rollouts[:3], known)))
        corrected, _ = run(policy, own, LossConfig(teacher_correction="tis"))
        assert relative(corrected[0][3], factor * plain[0][3]) < 1e-4


def test_teacher_tau_pulls_towards_the_teacher_model(policy: Policy) -> None:
    of = groups(policy)
    plain, _ = run(policy, of)
    pulled, _ = run(policy, of, LossConfig(teacher_tau=0.5, teacher_model="t"), teacher=tiny.policy(seed=5))
    assert relative(pulled[0], plain[0]) > 0.05
    same, _ = run(policy, of, LossConfig(teacher_tau=0.5, teacher_model="t"), teacher=policy)
    assert relative(same[0], plain[0]) < 1e-4, "a teacher equal to the policy adds nothing"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (LossConfig(ratio_support="sampled"), "needs the sampler's settings"),
        (LossConfig(teacher_tau=0.5, teacher_model="t"), "needs a teacher model"),
        (LossConfig(teacher_correction="tis"), "no teacher log-probs"),
    ],
)
def test_what_a_loss_needs_and_lacks_is_refused(policy: Policy, cfg: LossConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(policy, groups(policy), cfg)
