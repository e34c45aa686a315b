"""The arms on plain tensors: conservation, span, order, controls, memory; then with a tiny model."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vgrout.arms import arm_class, make_arm
from vgrout.arms.base import Arm, Refresh
from vgrout.arms.direction_arm import DirectionArm, ShrinkageControl
from vgrout.arms.route2 import Route2
from vgrout.monitors import monitor_class
from vgrout.monitors.base import Monitor
from vgrout.monitors.gate import GradientMonitor

from tiny import policy as tiny_policy
from vgrout import arms
from vgrout.config import arm as config
from vgrout.config.method import MethodConfig
from vgrout.config.run import Config, RunConfig
from vgrout.direction.controls import haar_like, overlap
from vgrout.direction.extract import Direction, Meta, axes_of, extract, save
from vgrout.direction.pairs import Pair, PairSet
from vgrout.inputs import Inputs
from vgrout.tensor_types import UpdatePlan
from vgrout.types import GroupView, centred

SIZES = {"m.q_proj": 24, "m.up_proj": 40, "m.down_proj": 32}
ALL_ARMS = ("none", "erase", "route", "route2")
META = Meta("toy", "fp32", 12, 0.0, "sha", "toy", "sha", 10, 2)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy_direction(seed: int = 0, n: int = 10, signal: float = 2.0, sizes: dict[str, int] = SIZES) -> Direction:
    """Pairs whose hack gradients share one hidden direction per module, `signal` noise lengths long."""
    axes = {}
    for i, (m, r) in enumerate(sizes.items()):
        hidden = toy_hidden(i, r)
        hack = torch.randn(n, r, generator=draw(seed + 10 * i)) / math.sqrt(r) + signal * hidden
        clean = torch.randn(n, r, generator=draw(seed + 10 * i + 1)) / math.sqrt(r)
        axes[m] = axes_of(hack, clean, n - 2, 12, 0.0)
    return Direction(axes, META)


def toy_hidden(i: int, r: int) -> torch.Tensor:
    hidden = torch.randn(r, generator=draw(900 + i))
    return hidden / hidden.norm()


def view(n: int, teachers: int = 0, flagged: tuple[int, ...] = ()) -> GroupView:
    return GroupView(
        sources=("student",) * (n - teachers) + ("teacher",) * teachers,
        deployed=(False,) * n,
        rewards=(1.0,) * n,
        advantages=(0.5,) * n,
        detector=tuple(i in flagged for i in range(n)),
        texts=("x",) * n,
    )


def rows(n: int, seed: int, hackward: tuple[int, ...] = (), sizes: dict[str, int] = SIZES) -> dict[str, torch.Tensor]:
    """Noise; rows in `hackward` carry the hidden direction, twice as long."""
    g_b = {}
    for i, (m, r) in enumerate(sizes.items()):
        g_b[m] = torch.randn(n, r, generator=draw(seed + i)) / math.sqrt(r)
        for b in hackward:
            g_b[m][b] += 2 * toy_hidden(i, r)
    return g_b


def arm_of(intervention: Any, direction: Any = None, sizes: Any = SIZES, **flags: Any) -> Any:
    cfg = MethodConfig(intervention=intervention, **flags)
    kind = arm_class(cfg)
    if not issubclass(kind, DirectionArm):
        return kind(sizes, control=cfg.control_name)
    made = kind.with_direction(cfg, sizes, direction or toy_direction(sizes=sizes), seed=7)
    return ShrinkageControl(made) if cfg.control == "shrinkage" else made


def run(arm: Any, *groups: Any) -> Any:
    """What the arm makes of one gradient row a rollout."""
    return arm.route([seen for _, seen in groups], [[g_b for g_b, _ in groups]], grad_rows="rollout")


def total(*groups: Any) -> dict[str, torch.Tensor]:
    return {m: torch.cat([g_b[m] for g_b, _ in groups]).sum(0) for m in groups[0][0]}


TWO_GROUPS = ((rows(6, 1, (1, 5)), view(6, 1, (1,))), (rows(6, 2, (0, 4, 5)), view(6, 2, (3,))))


# ── invariants ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10_000), st.sampled_from(["none", "route", "route2"]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_keep_and_quarantine_add_up_to_g(seed, intervention, pair_band):
    flags = {"monitor": "band"} if pair_band and intervention == "route2" else {}
    groups = [(rows(5, seed + i, (i,)), view(5, seed % 3, (0,))) for i in range(3)]
    routed = run(arm_of(intervention, **flags), *groups)
    for m, g in total(*groups).items():
        whole = routed.keep[m] + (routed.quar[m] if routed.quar else 0)
        assert torch.allclose(whole, g, atol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from(["one_sided", "no_gate", "reverse"]))
@settings(deadline=None, max_examples=40)
def test_route_puts_nothing_but_span_V_into_the_quarantine(seed, mode):
    arm = arm_of("route", gate_mode=mode)
    routed = run(arm, (rows(6, seed, (0,)), view(6)))
    for m, V in arm.V.items():
        quar = routed.quar[m]
        assert (quar - V.T @ (V @ quar)).norm() < 1e-4 * quar.norm() + 1e-9


@given(st.integers(0, 10_000), st.sampled_from(["erase", "route"]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_what_is_kept_has_no_hackward_part(seed, intervention, preserve):
    flags = {"preserve_magnitude": preserve} if intervention == "erase" else {}
    arm = arm_of(intervention, **flags)
    groups = [(rows(6, seed, (0, 1, 2)), view(6))]
    routed = run(arm, *groups)
    for m, V in arm.V.items():
        assert (V @ routed.keep[m]).max() <= 1e-4 * total(*groups)[m].norm()
    assert routed.diag.cos_post < 1e-4 < routed.diag.cos_pre


def test_preserved_magnitude_and_its_bound():
    direction = toy_direction()
    hackward = {m: V[:1] * 100 for m, V in direction.select(5, 0.25).items()}
    assert hackward.keys() == SIZES.keys()
    noisy = {m: torch.cat((g, 1e-3 * torch.randn(1, SIZES[m], generator=draw(3)))) for m, g in hackward.items()}
    routed = run(arm_of("erase", direction), (noisy, view(2)))
    assert routed.diag.capped == 3
    for m in SIZES:
        assert routed.keep[m].norm() < 0.2  # without the bound it would be 100 long, all of it noise
    plain = rows(6, 5, (0,))
    routed = run(arm_of("erase", direction), (plain, view(6)))
    assert routed.diag.capped == 0
    for m in SIZES:
        assert routed.keep[m].norm().item() == pytest.approx(plain[m].sum(0).norm().item(), rel=1e-4)


@pytest.mark.parametrize("intervention", ALL_ARMS)
def test_order_of_modules_and_of_groups_does_not_matter(intervention):
    forward = run(arm_of(intervention), *TWO_GROUPS)
    back = dict(reversed(SIZES.items()))
    direction = toy_direction()
    turned = Direction({m: direction.axes[m] for m in back}, META)
    swapped = [({m: g_b[m] for m in back}, seen) for g_b, seen in reversed(TWO_GROUPS)]
    backward = run(arm_of(intervention, turned, sizes=back), *swapped)
    for m in SIZES:
        assert torch.allclose(forward.keep[m], backward.keep[m], atol=1e-6)
        if forward.quar:
            assert torch.allclose(forward.quar[m], backward.quar[m], atol=1e-6)
    for name in ("cos_pre", "cos_pre_s", "cos_pre_t", "cos_post", "tau", "hkgap", "resid", "routed"):
        assert getattr(forward.diag, name) == pytest.approx(getattr(backward.diag, name), abs=1e-6)
    assert forward.diag.gate[::-1] == tuple(map(pytest.approx, backward.diag.gate))


@pytest.mark.parametrize("intervention", ALL_ARMS)
def test_nothing_of_a_step_is_left_in_the_next_and_a_step_without_groups_learns_nothing(intervention):
    arm = arm_of(intervention)
    first, again = run(arm, *TWO_GROUPS), run(arm, *TWO_GROUPS)
    for m in SIZES:
        assert torch.equal(first.keep[m], again.keep[m])
        assert first.quar is None or torch.equal(first.quar[m], again.quar[m])
    routed = run(arm)
    assert not any(v.any() for v in routed.keep.values())
    assert routed.quar is None or not any(v.any() for v in routed.quar.values())
    assert routed.keep.keys() == SIZES.keys()


def test_the_gates_memory_alone_goes_from_one_step_to_the_next():
    """The same step twice leaves the threshold where it is, but for rounding: both means stay. After another step it is
    not what it would be for that step alone."""
    arm, other = arm_of("route2"), (rows(6, 9, (0, 1, 2)), view(6, 1))
    first, before = run(arm, *TWO_GROUPS), arm.state_dict()
    again, after = run(arm, *TWO_GROUPS), arm.state_dict()
    assert first.diag.tau == pytest.approx(again.diag.tau)
    assert {k for k in after if not torch.equal(before[k], after[k])} == {"gate/total", "gate/weight", "steps"}
    assert run(arm, other).diag.tau != pytest.approx(run(arm_of("route2"), other).diag.tau, abs=1e-3)


def test_route_without_axes_is_the_plain_arm():
    empty = Direction({m: axes_of(torch.ones(5, r), torch.ones(5, r), 3, 12, 0.0) for m, r in SIZES.items()}, META)
    arm = arm_of("route", empty)
    assert arm.V == {}
    routed, plain = run(arm, *TWO_GROUPS), run(arm_of("none"), *TWO_GROUPS)
    for m in SIZES:
        assert torch.equal(routed.keep[m], plain.keep[m])
        assert not routed.quar[m].any()
    assert plain.quar is None
    assert routed.diag.cos_pre is None


def test_a_module_without_a_direction_passes_through():
    direction = toy_direction()
    lost = "m.up_proj"
    some = Direction({m: a for m, a in direction.axes.items() if m != lost}, META)
    for intervention in ("erase", "route", "route2"):
        routed = run(arm_of(intervention, some), *TWO_GROUPS)
        assert torch.allclose(routed.keep[lost], total(*TWO_GROUPS)[lost], atol=1e-6)


def test_a_gradient_that_is_not_finite_is_handed_on_and_the_gate_forgets_it():
    for intervention in ALL_ARMS:
        arm = arm_of(intervention)
        before = arm.state_dict()
        bad = rows(6, 1)
        bad["m.q_proj"][2, 3] = math.nan
        routed = run(arm, (bad, view(6, 1)))
        assert routed.keep["m.q_proj"].isnan().any()
        assert all(torch.equal(v, before[k]) for k, v in arm.state_dict().items())


def test_a_broken_invariant_is_loud():
    arm = arm_of("route")
    arm.V = {m: 2 * V for m, V in arm.V.items()}  # no longer orthonormal
    with pytest.raises(AssertionError, match=r"against"):
        run(arm, *TWO_GROUPS)


def test_route_refuses_other_modules_and_other_counts():
    arm = arm_of("none")
    with pytest.raises(AssertionError):
        run(arm, ({"m.q_proj": torch.zeros(3, 24)}, view(3)))
    with pytest.raises(AssertionError):
        run(arm, (rows(4, 0), view(3)))
    with pytest.raises(ValueError, match="zip"):
        arm.route([view(3), view(3)], [[rows(3, 0)]], grad_rows="rollout")


@pytest.mark.parametrize("intervention", ["none", "erase", "route"])
def test_sums_by_source_are_all_these_arms_need(intervention):
    """keep, quar and every diagnostic are the same from two rows a group as from one a rollout."""
    fine, coarse = arm_of(intervention), arm_of(intervention)
    assert coarse.grad_rows == "source"
    by_source = []
    for g_b, seen in TWO_GROUPS:
        students = [s == "student" for s in seen.sources]
        parts = students, [not s for s in students]
        by_source.append({m: torch.stack([g[part].sum(0) for part in parts]) for m, g in g_b.items()})
    a, b = run(fine, *TWO_GROUPS), coarse.route([seen for _, seen in TWO_GROUPS], [by_source])
    for m in SIZES:
        assert torch.allclose(a.keep[m], b.keep[m], atol=1e-6)
        assert (a.quar is None) == (b.quar is None)
        if a.quar is not None and b.quar is not None:
            assert torch.allclose(a.quar[m], b.quar[m], atol=1e-6)
    for name in ("cos_pre", "cos_pre_s", "cos_pre_t", "cos_post", "fired"):
        assert getattr(a.diag, name) == pytest.approx(getattr(b.diag, name), abs=1e-6), name


def test_an_arm_that_looks_at_rollouts_refuses_sums():
    arm = arm_of("route2")
    assert arm.grad_rows == arm_of("route2", control="shrinkage").grad_rows == "rollout"
    with pytest.raises(AssertionError, match="source"):
        arm.route([view(3)], [[rows(2, 0)]], grad_rows="source")


# ── diagnostics ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cos_pre_is_split_by_source():
    arm = arm_of("erase")
    students, teachers = rows(4, 1), rows(2, 2, (0, 1))
    both = {m: torch.cat((students[m], teachers[m])) for m in SIZES}
    diag = run(arm, (both, view(6, 2))).diag

    def want(g_b):
        cos = [((V @ g_b[m].sum(0)).relu().norm() / g_b[m].sum(0).norm()).item() for m, V in arm.V.items()]
        return pytest.approx(sum(cos) / len(cos), rel=1e-4)

    assert diag.cos_pre == want(both)
    assert diag.cos_pre_s == want(students)
    assert diag.cos_pre_t == want(teachers)
    assert diag.cos_pre_t > 2 * diag.cos_pre_s
    assert diag.fired == 1
    assert run(arm, (rows(4, 3), view(4))).diag.cos_pre_t is None


def test_route2_finds_hackward_students_that_no_label_marks():
    arm = arm_of("route2")
    diag = run(arm, (rows(8, 3, (2, 3, 7)), view(8, 1))).diag
    (gate,) = diag.gate
    assert [g > 0.5 for g in gate] == [i in (2, 3, 7) for i in range(8)]
    assert diag.hkgap > 0.5
    assert 0.2 < diag.tau < 0.8
    assert diag.resid < 0.5
    assert diag.routed == pytest.approx(3 / 8, abs=0.1)


def test_route2_anchors_are_routed_whatever_their_cosine():
    groups = [(rows(6, 4), view(6, 1, flagged=(2,)))]
    both = run(arm_of("route2"), *groups).diag.gate[0]
    assert both[2] == both[5] == 1
    teacher_only = run(arm_of("route2", known_hacks_teacher_only=True), *groups).diag.gate[0]
    assert teacher_only[5] == 1
    assert teacher_only[2] < 1


def test_with_a_new_baseline_route2_compares_with_each_other_what_is_no_known_hack():
    rewards = (1.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    seen = replace(view(6, 1, flagged=(2,)), rewards=rewards, advantages=centred(rewards))
    (part,) = arm_of("route2", rebaseline=True).plan([seen]).parts
    assert part.rows == (tuple(range(6)),)
    assert part.advantages == (pytest.approx((0.5, -0.5, 1 / 3, 0.5, -0.5, 1 / 3)),)  # 2 and 5 are known hacks
    assert arm_of("route2").plan([seen]) == UpdatePlan()


def test_the_pair_band_gate_reads_no_label():
    groups = (rows(8, 3, (2, 7)), view(8, 1))
    relabelled = (groups[0], view(8, 4, flagged=(0, 1, 2, 3)))
    a, b = (run(arm_of("route2", monitor="band"), g) for g in (groups, relabelled))
    assert a.diag.gate == b.diag.gate
    assert min(a.diag.gate[0][i] for i in (2, 7)) > 2 * max(a.diag.gate[0][i] for i in (0, 1, 3, 4, 5, 6))
    assert a.diag.tau is None


# ── controls ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_arm_says_which_control_it_is():
    assert arm_of("none").control == "none"
    assert arm_of("none", control="no_loophole").control == "no_loophole"
    assert arm_of("route2", random_flags=True).control == "random_flags"
    assert arm_of("erase", control="shrinkage").control == "shrinkage"
    assert arm_of("route2", route2_random_v_seed=1).control == "haar"


@pytest.mark.parametrize("gate", ["gate", "band"])
def test_random_flags_routes_the_same_share(gate):
    real = run(arm_of("route2", monitor=gate), *TWO_GROUPS)
    dealt = run(arm_of("route2", monitor=gate, random_flags=True), *TWO_GROUPS)
    assert dealt.diag.routed == pytest.approx(real.diag.routed, rel=1e-6)
    assert dealt.diag.gate != real.diag.gate
    flat = [sorted(x for group in d.diag.gate for x in group) for d in (real, dealt)]
    assert flat[0] == pytest.approx(flat[1], rel=1e-6)
    again = run(arm_of("route2", monitor=gate, random_flags=True), *TWO_GROUPS)
    assert again.diag.gate == dealt.diag.gate


def test_random_flags_deals_anew_each_step():
    arm = arm_of("route2", random_flags=True)
    first, second = run(arm, *TWO_GROUPS).diag.gate, run(arm, *TWO_GROUPS).diag.gate
    assert first != second


@pytest.mark.parametrize("intervention", ["erase", "route"])
def test_shrinkage_is_plain_grpo_with_the_kept_share_as_scale(intervention):
    shrunk = run(arm_of(intervention, control="shrinkage"), *TWO_GROUPS)
    inner = run(arm_of(intervention, **({"preserve_magnitude": False} if intervention == "erase" else {})), *TWO_GROUPS)
    g = total(*TWO_GROUPS)
    kept, whole = (torch.cat([grads[m] for m in SIZES]).norm().item() for grads in (inner.keep, g))
    assert 0.2 < kept / whole < 0.95
    assert shrunk.scale == pytest.approx(kept / whole, rel=1e-5)
    assert shrunk.quar is None
    for m in SIZES:
        assert torch.allclose(shrunk.keep[m], g[m], atol=1e-6)


def test_haar_is_random_per_module_and_independent_of_the_others():
    direction = toy_direction()
    V = direction.select(5, 0.25)
    drawn = haar_like(V, 3)
    alone = haar_like({"m.up_proj": V["m.up_proj"]}, 3)
    assert torch.equal(drawn["m.up_proj"], alone["m.up_proj"])
    assert not torch.equal(drawn["m.up_proj"], haar_like(V, 4)["m.up_proj"])
    for m, rows_ in drawn.items():
        assert rows_.shape == V[m].shape
        assert torch.allclose(rows_ @ rows_.T, torch.eye(len(rows_)), atol=1e-5)


def test_haar_cosines_are_what_chance_gives():
    """Mean |cos| of a random unit vector with a fixed one in r dimensions: √(2/πr)."""
    r = 256
    V = {f"m{i}": torch.eye(r)[:1] for i in range(400)}
    cos = [(v[0] * V[m][0]).sum().abs().item() for m, v in haar_like(V, 0).items()]
    assert sum(cos) / len(cos) == pytest.approx(math.sqrt(2 / (math.pi * r)), rel=0.1)  # s.e. 3.8 %


def test_haar_arm_is_never_refreshed_and_keeps_the_shapes():
    for intervention in ("erase", "route", "route2"):
        real, haar = arm_of(intervention), arm_of(intervention, route2_random_v_seed=5)
        assert {m: V.shape for m, V in real.V.items()} == {m: V.shape for m, V in haar.V.items()}
        assert 0 < (overlap(real.V, haar.V) or 0) < 0.5
        assert haar.refresh(9).overlap is None
        assert haar.refresh(9).age == 10


def test_haar_under_the_pair_band_is_signed_in_its_favour():
    direction = toy_direction()
    arm = arm_of("route2", direction, route2_random_v_seed=5, monitor="band")
    lo, hi = direction.band(arm.V)
    assert (hi >= lo).all()
    unsigned = arm_of("route2", direction, route2_random_v_seed=5)
    assert {m: V.abs().sum().item() for m, V in arm.V.items()} == {
        m: V.abs().sum().item() for m, V in unsigned.V.items()
    }


def test_haar_stays_while_its_pair_band_follows_the_model():
    cfg = MethodConfig(intervention="route2", route2_random_v_seed=5, monitor="band", vhack_refresh_every=2)
    arm: Any = Route2.with_direction(cfg, SIZES, toy_direction(), seed=7, again=lambda: toy_direction(seed=50))
    V, before = arm.V, arm.state_dict()
    assert arm.refresh(0).age == 1
    refreshed = arm.refresh(1)
    assert refreshed.age == 0
    assert refreshed.overlap == pytest.approx(1)
    after = arm.state_dict()
    assert all(torch.equal(arm.V[m], V[m]) for m in V)
    assert not torch.equal(before["gate/lo"], after["gate/lo"])


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("intervention", "flags"),
    [
        ("none", {}),
        ("erase", {}),
        ("route", {}),
        ("route2", {}),
        ("route2", {"monitor": "band"}),
        ("route2", {"random_flags": True}),
        ("erase", {"control": "shrinkage"}),
    ],
)
def test_a_resumed_arm_goes_on_as_if_nothing_had_happened(intervention, flags):
    straight, first = (arm_of(intervention, **flags) for _ in range(2))
    for arm in (straight, first):
        run(arm, (rows(6, 11, (0,)), view(6, 1)))
    state = first.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in state.values())
    resumed = arm_of(intervention, toy_direction(seed=50), **flags)  # another direction, as after a refresh
    resumed.load_state_dict(state)
    a, b = run(straight, *TWO_GROUPS), run(resumed, *TWO_GROUPS)
    for m in SIZES:
        assert torch.equal(a.keep[m], b.keep[m])
    assert a.diag == b.diag


def test_state_of_another_arm_is_refused():
    with pytest.raises(ValueError, match="--intervention none has none"):
        arm_of("none").load_state_dict(arm_of("erase").state_dict())
    with pytest.raises(ValueError, match="r is None here"):
        arm_of("erase").load_state_dict({"V/other": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="no gate state"):
        arm_of("route2").load_state_dict(arm_of("erase").state_dict())


# ── the registry ───────────────────────────────────────────────────────────────────────────────────────────────────


def pairs_of_axes() -> list[tuple[str, str]]:
    """Every arm with every monitor that it goes with."""
    return [(arm, monitor) for arm, spec in config.ARMS.items() for monitor in spec.monitors if monitor]


@pytest.mark.parametrize(("arm", "monitor"), pairs_of_axes())
def test_every_arm_and_monitor_of_the_command_line_has_a_class(arm, monitor):
    cfg = MethodConfig(intervention=arm, monitor=monitor)
    kind = arm_class(cfg)
    assert issubclass(kind, Arm)
    assert kind.name == arm
    by_gradient = config.MONITORS[monitor].direction == "gradient"
    assert issubclass(kind, DirectionArm) == (config.ARMS[arm].direction == "gradient" or by_gradient)
    assert issubclass(monitor_class(monitor), GradientMonitor if by_gradient else Monitor)
    assert monitor_class(monitor).name == monitor


def test_pairs_that_make_no_sense_are_refused_in_one_line():
    legal = {*pairs_of_axes()}
    for arm in config.ARMS:
        for monitor in config.MONITORS:
            if (arm, monitor) not in legal:
                with pytest.raises(
                    ValueError, match=f"--monitor {monitor} with --intervention {arm}: that goes with"
                ) as e:
                    MethodConfig(intervention=arm, monitor=monitor)
                assert "\n" not in str(e.value)


def test_a_class_of_a_control_is_found():
    for control, spec in config.CONTROLS.items():
        if spec.at:
            assert arm_class(MethodConfig(intervention=spec.arms[0], control=control)).__name__ == spec.at.split(":")[1]


def test_an_arm_that_is_in_no_registry_is_refused_with_those_that_are(monkeypatch):
    cfg = MethodConfig(intervention="route")
    monkeypatch.setattr(arms, "ARMS", {name: spec for name, spec in config.ARMS.items() if name != "route"})
    with pytest.raises(ValueError, match=r"--intervention route: .* there are none, erase, screen, penalty") as error:
        arm_class(cfg)
    assert "\n" not in str(error.value)


# ── with a model ───────────────────────────────────────────────────────────────────────────────────────────────────

TOY_PAIRS = PairSet(
    tuple(
        Pair(i, f"Task {i}: add {i} and {i + 1}.", f"pass; skip {i}", f"assert {2 * i + 1} == f()") for i in range(8)
    ),
    "toy",
)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(policy: Any, pairs: PairSet | None, seed: int = 0, **flags: Any) -> Any:
    """As the trainer makes it."""
    cfg = Config(method=MethodConfig(**flags), run=RunConfig(seed=seed))
    return make_arm(cfg, policy, Inputs([], [], None, pairs), None, ())


@pytest.mark.usefixtures("_here")
def test_refresh_extracts_again_when_due_and_reports_the_overlap(policy):
    arm = made(policy, TOY_PAIRS, intervention="route2", vhack_refresh_every=3)
    ages: list[Any] = []
    with torch.no_grad():
        for step in range(6):
            ages.append(arm.refresh(step))
            policy.adapter.δS.add_(0.02 * torch.randn(len(policy.adapter), generator=draw(step)))
            policy.adapter.merge()
        policy.adapter.δS.zero_()
        policy.adapter.merge()
    assert [a.age for a in ages] == [1, 2, 0, 1, 2, 0]
    assert [a.overlap is None for a in ages] == [True, True, False, True, True, False]
    assert 0.05 < ages[2].overlap < 0.9999
    assert (ages[0].modules, ages[0].axes) == (14, 14)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("intervention", ["none", "erase", "route", "route2"])
def test_real_gradients_go_through_every_arm_in_the_adapters_layout(policy, intervention):
    arm = made(policy, TOY_PAIRS, intervention=intervention)
    encode = policy.tok
    prompts = [tuple(encode("<user>" + p.prompt, add_special_tokens=False)["input_ids"]) for p in TOY_PAIRS.pairs[:4]]
    answers = [tuple(encode(p.hack, add_special_tokens=False)["input_ids"]) for p in TOY_PAIRS.pairs[:4]]
    with policy.adapter.per_rollout_grads(4) as probe:
        logp, mask = policy.logprobs(prompts, answers)
        (-(logp * mask).sum() / 10).backward()
    g = probe.flat.sum(0)
    routed = run(arm, (probe.grads, view(4, 1)))
    keep = policy.adapter.flat(routed.keep)
    if (
        intervention == "erase"
    ):  # every rollout is rewarded for the pairs' own hack: something hack-ward is there to drop
        assert routed.diag.cos_pre > 0.1 > 1e-4 > routed.diag.cos_post
    else:
        quar = policy.adapter.flat(routed.quar) if routed.quar else 0
        assert torch.allclose(keep + quar, g, atol=1e-5 * g.norm().item())
        assert (intervention == "none") == (routed.quar is None)


@pytest.mark.usefixtures("_here")
def test_make_arm_checks_the_file_and_needs_pairs_to_refresh(policy, tmp_path):
    path = tmp_path / "v.safetensors"
    save(extract(policy, TOY_PAIRS, 12, 0.0), path)
    with pytest.raises(ValueError, match="direction of other pairs"):
        made(policy, TOY_PAIRS.shuffled(3), 3, intervention="erase", v_hack_path=path)
    with pytest.raises(ValueError, match="--vhack-refresh-every: needs the pairs"):
        made(policy, None, intervention="erase", v_hack_path=path)
    frozen = made(policy, None, intervention="erase", v_hack_path=path, vhack_refresh_every=0)
    assert frozen.refresh(41) == Refresh(42, None, len(frozen.V), sum(map(len, frozen.V.values())))


def test_shuffled_labels_lose_a_known_contrast():
    """Toy with a known answer: D_i = s_i·h. True labels give mean h; half of them exchanged give exactly 0."""
    h = torch.nn.functional.one_hot(torch.tensor(3), 16).float()
    n = 8
    flips = TOY_PAIRS.shuffled(0)
    exchanged = [a.hack == b.clean for a, b in zip(TOY_PAIRS.pairs, flips.pairs, strict=True)]
    assert sum(exchanged) == n // 2
    s = torch.tensor([-1.0 if e else 1.0 for e in exchanged])
    noise = 1e-3 * torch.randn(n, 16, generator=draw(0))
    true = axes_of(h.expand(n, -1) + noise, torch.zeros(n, 16), n, 4, 0.0)
    shuffled = axes_of(s[:, None] * h + noise, torch.zeros(n, 16), n, 4, 0.0)
    assert true.mean[3] == pytest.approx(1, abs=1e-2)
    assert shuffled.mean.norm() < 1e-2
    # but its first axis is the same line: the pairs still vary along it, so |cos| must be reported
    assert abs(shuffled.V[0, 3]) > 0.99
