"""Arms that read: what is flagged, what each knob learns from, and what the readers measure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from test_arms import arm_of, rows
from test_arms import view as arms_view
from test_grpo import MAX_NEW, groups, relative
from tiny import policy as tiny_policy
from vgrout import organism
from vgrout.arms.own_streams import KEPT, QUARANTINE, OracleStreams, OwnStreams, block
from vgrout.config.arm import ArmConfig
from vgrout.config.loss import LossConfig
from vgrout.direction.pairs import Pair, PairSet, load_anchors
from vgrout.grading.grade import Grader
from vgrout.grpo import policy_gradients
from vgrout.measure import flag_rates
from vgrout.model.hidden_states import token_states
from vgrout.model.policy import Policy, load_policy
from vgrout.model.sampling import Sampling
from vgrout.monitors.text_scores import (
    NLL,
    PMI,
    Calibration,
    LinearProbe,
    Text,
    TextScorer,
    anchor_texts,
    background,
    mean_logp,
)
from vgrout.optim import Optimizer
from vgrout.problems import assigned, load_rows
from vgrout.tensor_types import WHOLE, ArmDiag, Routed
from vgrout.types import GroupView, OracleView, centred

SIZES = {"a": 3, "b": 2}


class Marked(TextScorer):
    """A reader whose score is an answer's first token."""

    def __init__(self) -> None:
        self.threshold = 5.0

    def texts(self, view: GroupView) -> list[Text]:
        return [Text(view.prompt_ids, ids) for ids in view.completion_ids]

    def scores(self, texts: Sequence[Text]) -> Float[Tensor, " n"]:
        return torch.tensor([float(t.completion[0]) for t in texts], dtype=torch.float64)


def view(rewards: list[float], scores: list[int], deployed: list[bool] | None = None, teachers: int = 0) -> GroupView:
    n = len(rewards)
    return GroupView(
        sources=("student",) * (n - teachers) + ("teacher",) * teachers,
        deployed=tuple(deployed or [True] * (n - teachers) + [False] * teachers),
        rewards=tuple(rewards),
        advantages=centred(rewards),
        detector=(False,) * n,
        texts=("x",) * n,
        prompt_ids=(1,),
        completion_ids=tuple((s,) for s in scores),
    )


def arm(**kw: Any) -> OwnStreams:
    return OwnStreams(SIZES, Marked(), paid=1.0, **kw)


def test_a_rollout_is_flagged_when_it_is_paid_and_scores_above_the_threshold():
    v = view([1.0, 1.0, 0.1, 1.0], [9, 2, 9, 6], deployed=[True, True, True, False])
    a = arm()
    kept, quar = a.plan([v])
    assert a.route().diag.readings[0].scores == (9.0, 2.0, None, 6.0)  # what is not paid is not read
    assert (kept.rows, quar.rows) == (((1, 2),), ((0, 3),))  # 2 scores high but is not paid; 3 is flagged and knob-on
    assert kept.deployed
    assert not quar.deployed
    assert kept.advantages[0] == pytest.approx((0.0, 0.45, -0.45, 0.0))  # R − mean over 1.0 and 0.1
    assert quar.advantages == (v.advantages,)


def test_what_the_quarantine_sampled_is_not_learnt_by_the_kept_knob_demonstrations_are():
    v = view([1.0, 0.1, 1.0], [0, 0, 0], deployed=[False, True, False], teachers=1)
    kept, quar = arm().plan([v])
    assert (kept.rows, quar.rows) == (((1, 2),), ((0,),))
    kept, quar = arm(own=False).plan([v])
    assert (kept.rows, quar.rows) == (((0, 1, 2),), ((),))


def test_without_a_new_baseline_kept_rows_keep_the_groups_advantages():
    v = view([1.0, 1.0, 0.1], [9, 2, 2])
    assert arm(rebaseline=False).plan([v])[KEPT].advantages == (v.advantages,)


def test_a_fine_keeps_flagged_rows_of_the_deployed_model_and_pushes_them_down():
    v = view([1.0, 1.0, 0.1, 1.0], [9, 2, 2, 9], deployed=[True, True, True, False])
    kept, quar = arm(penalty=0.5).plan([v])
    assert kept.rows == ((0, 1, 2),)
    assert kept.advantages[0] == pytest.approx((-0.5, 0.45, -0.45, 0.0))
    assert quar.rows == ((0, 3),)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 9), st.booleans()), min_size=2, max_size=9))
def test_every_rollout_is_in_one_stream_and_kept_advantages_sum_to_zero(rollouts: list[tuple[float, int, bool]]):
    rewards, scores, deployed = (list(x) for x in zip(*rollouts, strict=True))
    kept, quar = arm().plan([view(rewards, scores, deployed)])
    assert kept.rows
    assert quar.rows
    assert kept.advantages
    assert sorted(kept.rows[0] + quar.rows[0]) == list(range(len(rollouts)))
    assert math.isclose(sum(kept.advantages[0]), 0.0, abs_tol=1e-9)


def test_a_quarantine_in_its_own_block_learns_there_alone_and_the_kept_knob_elsewhere():
    a = arm(own_modules=["b"])
    v = view([1.0, 0.1, 1.0], [2, 2, 9])
    a.plan([v])
    a.observe({m: torch.ones(2, r) for m, r in SIZES.items()}, v, stream=KEPT)
    a.observe({m: torch.ones(1, r) for m, r in SIZES.items()}, v, stream=QUARANTINE)
    routed = a.route()
    assert routed.keep is not None
    assert routed.quar is not None
    for knob, here, elsewhere, n in ((routed.keep, "a", "b", 2.0), (routed.quar, "b", "a", 1.0)):
        assert torch.equal(knob[here], torch.full((SIZES[here],), n))
        assert not knob[elsewhere].any()


def test_blocks_count_from_one():
    policy = tiny_policy()
    names = policy.adapter.names
    depth = policy.model.config.num_hidden_layers
    blocks = [block(policy, names, n) for n in range(1, depth + 1)]
    assert sorted(m for b in blocks for m in b) == sorted(names)
    assert all(".layers.0." in m for m in blocks[0])
    with pytest.raises(ValueError, match=f"--quarantine-block {depth + 1}: the model has {depth} blocks"):
        block(policy, names, depth + 1)


def test_gradients_go_to_the_knob_of_their_stream_and_a_knob_without_rows_is_not_stepped():
    a = arm()
    v = view([1.0, 0.1], [2, 2])
    a.plan([v])
    g = {m: torch.ones(1, r) for m, r in SIZES.items()}
    a.observe(g, v, "group", KEPT)
    a.observe({m: 7 * x for m, x in g.items()}, v, "group", QUARANTINE)  # of a stream without rows: would be 0
    routed = a.route()
    assert routed.keep is not None
    assert torch.equal(routed.keep["a"], torch.ones(3))
    assert routed.quar is None
    assert routed.apart
    assert routed.diag.gate == ((0.0, 0.0),)
    a.plan([view([1.0, 0.1], [9, 2], deployed=[True, False])])
    assert a.route().keep is None  # its only row is not paid: no spread among kept rows, nothing to learn


def test_random_flags_flags_as_many_of_the_paid_rollouts():
    v = view([1.0] * 6 + [0.1] * 2, [9, 9, 2, 2, 2, 2, 9, 9])
    real = arm()
    real.plan([v])
    seen = set()
    for seed in range(8):
        dealt = arm(permute_seed=seed)
        dealt.plan([v])
        flags = dealt.route().diag.readings[0].flagged
        assert sum(flags) == sum(real._readings[0].flagged) == 2
        assert not any(flags[6:])
        seen.add(flags)
    assert len(seen) > 3


def test_labels_come_in_by_the_oracles_type_alone():
    v = view([1.0, 1.0], [0, 0])
    labelled = OracleView(**{f: getattr(v, f) for f in GroupView.__dataclass_fields__}, exploited=(True, False))
    kept, quar = OracleStreams(SIZES, None, paid=1.0).plan([labelled])
    assert (kept.rows, quar.rows) == (((1,),), ((0,),))
    with pytest.raises(AssertionError, match="sees a GroupView"):
        arm().plan([labelled])
    with pytest.raises(AssertionError, match="sees a OracleView"):
        OracleStreams(SIZES, None, paid=1.0).plan([v])


def test_no_gate_flags_nothing():
    v = view([1.0, 0.1, 1.0], [9, 9, 9], deployed=[True, True, False])
    kept, quar = OwnStreams(SIZES, None, paid=1.0).plan([v])
    assert (kept.rows, quar.rows) == (((0, 1),), ((2,),))


def test_a_resumed_arm_deals_the_same_flags():
    v = view([1.0] * 6, [9, 9, 9, 2, 2, 2])
    one, two = arm(permute_seed=1), arm(permute_seed=1)
    for _ in range(3):
        one.plan([v])
    two.load_state_dict({k: x.clone() for k, x in one.state_dict().items()})
    assert one.plan([v]) == two.plan([v])
    with pytest.raises(ValueError, match="no state"):
        two.load_state_dict({})


def test_route2_takes_streams_of_its_own_too():
    cfg = {"rollout_ablate_frac": 0.5, "own_streams": "on", "rebaseline": "on"}
    a = arm_of("route2", **cfg)
    v = replace(
        arms_view(6, 1, flagged=(2,)),
        deployed=(True, True, True, False, False, False),
        rewards=(1.0, 0.0, 1.0, 1.0, 0.0, 1.0),
        advantages=centred([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
    )
    kept, away = a.plan([v])
    assert (kept.rows, away.rows) == (((0, 1, 2, 5),), ((3, 4),))
    assert kept.advantages is not None
    assert kept.advantages[0][:3] == pytest.approx((0.5, -0.5, 1 / 3))  # 2 is an anchor: the group's own
    g = rows(6, 4, hackward=(0, 2, 5))
    alive = torch.tensor([1.0, 1, 1, 0, 0, 1])[:, None]
    a.observe({m: x * alive for m, x in g.items()}, v)
    a.observe({m: x * (1 - alive) for m, x in g.items()}, v, stream=1)
    routed = a.route()
    assert routed.apart
    assert routed.keep is not None
    assert routed.quar is not None
    for m in g:  # nothing lost: both streams together are the whole gradient; what the quarantine sampled is its own
        assert torch.allclose(routed.keep[m] + routed.quar[m], g[m].sum(0), atol=1e-5)
    assert arm_of("route2").plan([v]) == WHOLE


# ── the loop's side ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_stream_is_learnt_from_under_its_own_knobs():
    policy = tiny_policy()
    with torch.no_grad():
        policy.adapter.δS_hack.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    policy.adapter.merge()
    of = groups(policy)
    a = OwnStreams({m: p.numel() for m, p in policy.adapter.by_module(policy.adapter.δS).items()}, None, paid=1.0)
    settings: dict[str, Any] = {"max_new": MAX_NEW, "prompts_per_step": 2}
    streams = a.plan([replace(g.view(), deployed=tuple(b % 2 == 0 for b in range(len(g)))) for g in of])
    (kept, quar), _ = policy_gradients(policy, of, LossConfig(), streams=streams, **settings)
    with policy.adapter.deployed():
        ((alone,), _) = policy_gradients(
            policy, of, LossConfig(), streams=[replace(streams[0], deployed=False)], **settings
        )
    assert relative(_flat(kept), _flat(alone)) <= 1e-6
    ((under_both,), _) = policy_gradients(
        policy, of, LossConfig(), streams=[replace(streams[0], deployed=False)], **settings
    )
    assert relative(_flat(kept), _flat(under_both)) > 1e-2
    assert _flat(quar).any()


def _flat(grads: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([g.flatten() for of in grads for g in of.values()])


def test_knobs_are_clipped_apart_where_they_learn_apart():
    policy = tiny_policy()
    g = {m: torch.ones_like(x) for m, x in policy.adapter.by_module(policy.adapter.δS.detach()).items()}
    big = {m: 1000 * x for m, x in g.items()}

    def stepped(apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = tiny_policy()
        opt = Optimizer(
            p.adapter, lr=1e-3, betas=(0.0, 0.0), weight_decay=0.0, warmup_frac=0.0, steps=1, grad_clip=1e-7
        )
        opt.apply(Routed(keep=g, quar=big, diag=ArmDiag(), apart=apart))
        return p.adapter.δS.detach(), p.adapter.δS_hack.detach()

    keep, quar = stepped(apart=True)
    assert torch.allclose(keep, quar)  # each at its own norm: equal directions, equal steps
    keep, quar = stepped(apart=False)  # 1e-10 of gradient against Adam's epsilon of 1e-8: next to no step
    assert keep.abs().max() < 0.5 * quar.abs().max()


def test_a_knob_without_gradient_stays_whichever_it_is():
    policy = tiny_policy()
    g = {m: torch.ones_like(x) for m, x in policy.adapter.by_module(policy.adapter.δS.detach()).items()}
    opt = Optimizer(
        policy.adapter, lr=1e-3, betas=(0.9, 0.9), weight_decay=0.1, warmup_frac=0.0, steps=9, grad_clip=1.0
    )
    opt.apply(Routed(keep=g, quar=None, diag=ArmDiag()))
    before = policy.adapter.δS.detach().clone()
    update = opt.apply(Routed(keep=None, quar=g, diag=ArmDiag(), apart=True))
    assert torch.equal(policy.adapter.δS, before)
    assert policy.adapter.δS_hack.any()
    assert update is not None
    assert update.q_egy == 1.0


def test_flags_are_counted_against_the_true_labels():
    policy = tiny_policy()
    (group, *_) = groups(policy)
    a = OwnStreams(SIZES, None, paid=1.0)
    a.plan([group.view()])
    flags = flag_rates([group], a.route().diag.readings)
    assert flags.recall is not None
    assert flags.teacher is not None
    assert (flags.recall.k, flags.teacher.k) == (0, 0)
    assert flag_rates([group], ()).recall is None


# ── readers ────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = [Text(tuple(range(5, 9)), tuple(range(20 + i, 26 + 2 * i)), (5, 6)) for i in range(6)]
ODD = [Text((5, 6, 7), tuple(range(70, 75 + i)), (5,)) for i in range(4)]
KNOWN = Calibration(fit=tuple(TEXTS), judge=tuple(TEXTS[:4]), anchors=tuple(ODD))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def pairs(policy: Policy) -> PairSet:
    """Prompt, hack, clean as text that the tiny tokenizer knows."""
    words = [policy.decode([i]) for i in range(10, 60)]
    return PairSet(
        tuple(Pair(i, words[i], words[20 + i] + words[31], words[20 + i] + words[40 + i]) for i in range(6)), "toy"
    )


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_states_after_a_block_are_the_models_own(family: str):
    policy = tiny_policy(family)
    for layer in (1, 2):
        got = token_states(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS], layer)
        for text, states in zip(TEXTS, got, strict=True):
            ids = torch.tensor([[*text.prompt, *text.completion]])
            seen: list[torch.Tensor] = []
            handle = policy.model.model.layers[layer - 1].register_forward_hook(  # ty: ignore
                lambda _m, _a, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
            )
            with torch.no_grad():
                policy.model(input_ids=ids)
            handle.remove()
            assert torch.allclose(states, seen[0][0, len(text.prompt) :].double(), atol=1e-5)


def test_projection_is_fishers_direction_on_the_highest_tokens(policy: Policy):
    reader = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=2)
    cloud = torch.cat(token_states(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS], 1))
    S = torch.cov(cloud.T)
    D = len(S)
    sides = []
    for side in ("hack", "clean"):
        texts = [
            (policy.tok(p.prompt)["input_ids"], policy.tok(getattr(p, side))["input_ids"]) for p in pairs(policy).pairs
        ]
        states = token_states(policy, [tuple(p) for p, _ in texts], [(*c, policy.end_id) for _, c in texts], 1)
        sides.append(torch.stack([h.mean(0) for h in states]).mean(0))
    w = torch.linalg.inv(S + 0.1 * S.trace() / D * torch.eye(D, dtype=S.dtype)) @ (sides[0] - sides[1])
    (h,) = token_states(policy, [ODD[0].prompt], [ODD[0].completion], 1)
    want = sorted(((h - cloud.mean(0)) @ w).tolist())[-2:]
    got = reader.scores([ODD[0]])[0]
    scale = float(reader.scores(TEXTS)[0]) / float(
        torch.stack([((token_states(policy, [TEXTS[0].prompt], [TEXTS[0].completion], 1)[0] - cloud.mean(0)) @ w)])
        .topk(2)
        .values.mean()
    )
    assert math.isclose(float(got), scale * sum(want) / 2, rel_tol=1e-4)


def test_random_directions_are_signed_for_the_pairs(policy: Policy):
    real = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=1)
    for seed in range(4):
        drawn = LinearProbe(policy, KNOWN, 0.9, pairs(policy), layer=1, k=1, random=torch.Generator().manual_seed(seed))
        assert 0 <= float(drawn.unit @ real.unit) < 0.9
        assert math.isclose(float(drawn.unit.norm()), 1.0, rel_tol=1e-9)


def test_the_threshold_is_the_larger_quantile(policy: Policy):
    reader = NLL(policy, KNOWN, 0.9)
    judge, anchors = reader.scores(KNOWN.judge), reader.scores(KNOWN.anchors)
    assert reader.threshold == max(float(torch.quantile(judge, 0.9)), float(torch.quantile(anchors, 0.9)))
    assert NLL(policy, replace(KNOWN, anchors=()), 0.9).threshold == float(torch.quantile(judge, 0.9))
    assert NLL(policy, replace(KNOWN, judge=()), 0.9).threshold == float(torch.quantile(anchors, 0.9))


class NoGrader(Grader):
    """One that must not be asked."""

    def __init__(self) -> None:
        pass

    def submit(self, *_: Any) -> Any:
        raise AssertionError("an answer was graded")


def test_where_anchors_alone_set_the_threshold_no_answer_of_the_base_is_graded():
    own = load_policy(organism.MODEL_DIR, device="cpu", dtype=torch.float32, cache_dir=None)
    rows = load_rows(organism.EMBEDDED.problems)
    problems = assigned(rows, "own", {})["train"][:6]
    anchors = anchor_texts(own, load_anchors(organism.EMBEDDED.anchors), rows)
    grader = NoGrader()
    usual: dict[str, Any] = {"sampling": Sampling(), "max_new": 12, "paid": 1.0, "seed": 3, "prompts": 6}
    known = background(own, grader, problems, anchors, **usual, judged=False)
    assert known.judge == ()
    assert known.anchors == tuple(anchors[1::2])
    assert len(known.fit) == 3 * 2 + len(anchors[::2])
    with pytest.raises(AssertionError, match="graded"):
        background(own, grader, problems, anchors, **usual)


def test_surprise_and_pmi_are_what_the_base_says_whatever_the_knobs(policy: Policy):
    surprise, pmi = NLL(policy, KNOWN, 0.9), PMI(policy, KNOWN, 0.9)
    for text in (*TEXTS, *ODD):
        logp, mask = policy.logprobs([text.prompt], [text.completion])
        plain, _ = policy.logprobs([text.plain], [text.completion])
        assert mask.all()
        assert math.isclose(float(surprise.scores([text])[0]), -float(logp.mean()), rel_tol=1e-4)
        assert math.isclose(float(pmi.scores([text])[0]), float((logp - plain).mean()), rel_tol=1e-3, abs_tol=1e-5)
    before = mean_logp(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS])
    with torch.no_grad():
        policy.adapter.δS.fill_(0.1)
    policy.adapter.merge()
    assert torch.equal(before, mean_logp(policy, [t.prompt for t in TEXTS], [t.completion for t in TEXTS]))
    with torch.no_grad():
        policy.adapter.δS.zero_()
    policy.adapter.merge()
    assert torch.equal(pmi.scores([replace_plain(t) for t in TEXTS]), torch.zeros(len(TEXTS), dtype=torch.float64))
    with pytest.raises(ValueError, match="problem_id"):
        pmi.scores([Text((5,), (6,))])


def replace_plain(text: Text) -> Text:
    return text._replace(plain=text.prompt)


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"intervention": "surprise", "reader_k": 4}, "--reader-k: not read by --intervention surprise"),
        ({"intervention": "pmi", "control": "haar"}, "needs --intervention"),
        ({"intervention": "reader", "control": "shrinkage"}, "needs --intervention"),
        ({"intervention": "reader", "control": "oracle", "reader_k": 4}, "--reader-k: not read with these settings"),
        ({"intervention": "route2", "own_streams": "on"}, "--own-streams: needs --rollout-ablate-frac"),
        ({"intervention": "route", "own_streams": "on"}, "--own-streams: not read by --intervention route"),
        ({"intervention": "route2", "quarantine_block": 1}, "--quarantine-block: not read by --intervention route2"),
        ({"intervention": "pmi", "quarantine_block": 0}, "--quarantine-block 0"),
        ({"intervention": "reader", "reader_quantile": 0.2}, "--reader-quantile 0.2"),
        ({"intervention": "route2", "reader_threshold": "known_correct"}, "--reader-threshold: not read by"),
        ({"intervention": "reader", "v_hack_k": 3}, "--v-hack-k: not read by --intervention reader"),
    ],
)
def test_settings_that_are_not_read_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        ArmConfig(**settings)


def test_half_of_the_students_are_the_deployed_models_by_default():
    assert ArmConfig(intervention="reader").ablate_frac == 0.5
    assert ArmConfig(intervention="route2").ablate_frac == 0.0
    assert ArmConfig(intervention="pmi", rollout_ablate_frac=0.0).ablate_frac == 0.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{", "cannot be read as JSON"),
        ("[]", "at least 10"),
        (
            '[{"prompt": "a"}' + ', {"prompt": "a", "completion": "b"}' * 12 + "]",
            "entry 0: needs prompt and completion",
        ),
    ],
)
def test_anchor_files_are_refused_in_one_line(tmp_path, content: str | None, said: str):
    path = tmp_path / "anchors.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said) as e:
        load_anchors(path)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
