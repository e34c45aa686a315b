"""Every legal pair of intervention and monitor, on a tiny model: what each of them holds, whatever it does."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vgrout
from methods import Fixed, batch, config, flat, gradient, make, of_parts, poisoned, relative, step
from tiny import policy as tiny_policy
from vgrout.config.loss import LossConfig
from vgrout.config.method import INTERVENTIONS, MONITORS, Choice, MethodConfig, methods
from vgrout.method import INTERVENTIONS as ARMS
from vgrout.method import MONITORS as FLAGGERS
from vgrout.method import Method
from vgrout.method.gates import Band, BandGate
from vgrout.model.policy import Policy
from vgrout.tensor_types import Routed, UpdatePart
from vgrout.types import Batch, Group, GroupView, OracleView, ProblemView

PAIRS = list(methods())
EVERY = pytest.mark.parametrize(("intervention", "monitor"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
# what goes from one step to the next, beside the direction; all other monitors and all interventions have no memory
MEMORY = {
    "gate": {"monitor/gate/total", "monitor/gate/weight"},
    "quarantine": {"monitor/known_correct_scores"},
    "online_probe": {"monitor/probe_sum", "monitor/probe_count"},
    "fingerprint": {"monitor/probe_sum", "monitor/probe_count"},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    with pytest.MonkeyPatch.context() as m:
        m.chdir(tmp_path_factory.mktemp("directions"))  # they are cached there
        yield tiny_policy()


def learnt(policy: Policy, of: Routed) -> tuple[Tensor, Tensor]:
    return flat(policy, of.keep), flat(policy, of.quar)


def same(policy: Policy, one: Routed, other: Routed) -> bool:
    vectors = zip(learnt(policy, one), learnt(policy, other), strict=True)
    return one.flags == other.flags and one.scale == other.scale and all(torch.equal(a, b) for a, b in vectors)


# ── conserved ──────────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
def test_what_is_learnt_is_plain_grpos_gradient_split(policy: Policy, intervention: str, monitor: str):
    """keep + quar is the gradient of the groups as they are rewarded, each row under what sampled it. erase alone drops
    something, along its direction; sgtm teaches both vectors what is neither flagged nor the deployed model's own, and
    what is flagged with the quarantine on; a quarantine that is the monitor's learns beside the deployed model."""
    more = {"preserve_magnitude": False} if intervention == "erase" else {}
    method = make(policy, intervention, monitor, **more)
    routes = INTERVENTIONS[intervention].routes
    of = batch(deployed=(1,) if routes else ())
    flags, _, routed = step(policy, method, of)
    keep, quar = learnt(policy, routed)
    groups = of.groups
    if INTERVENTIONS[intervention].acts_on == "rewards":
        groups = tuple(shaped(method, g, routed) for g in groups)
        assert [g.shaped_rewards for g in groups] != [g.rewards for g in groups] or not caught(routed)
    if routes:
        own = [() if intervention == "sgtm" and flags[g.index].flagged[1] else (1,) for g in groups]
        quiet, loud = tuple(own), tuple(tuple({*range(4)} - {*rows}) for rows in own)
        whole = gradient(policy, groups, UpdatePart(quiet, deployed=True), UpdatePart(loud))
    else:
        whole = gradient(policy, groups, UpdatePart(deployed=MONITORS[monitor].owns_quarantine))
    if intervention == "sgtm":
        shared = tuple(tuple(b for b in (0, 2, 3) if not flags[g.index].flagged[b]) for g in groups)
        whole = whole + gradient(policy, groups, UpdatePart(shared))
    if MONITORS[monitor].owns_quarantine:
        taught = tuple(flags[g.index].teaches for g in groups)
        assert any(map(any, taught))
        assert relative(quar, gradient(policy, groups, UpdatePart(advantages=taught))) < 1e-5
        assert relative(keep, whole) < 1e-5
    elif intervention == "erase":
        dropped = policy.adapter.by_module(whole - keep)
        assert method.direction is not None
        for m, V in method.direction.V.items():
            assert relative(V.T @ (V @ dropped[m]), dropped[m]) < 1e-3
        assert float((whole - keep).norm() / whole.norm()) > 0.01
    else:
        assert relative(keep + quar, whole) < 1e-5
        assert (routed.quar is not None) == routes
    assert routed.apart == (intervention == "sgtm" or MONITORS[monitor].owns_quarantine)


def shaped(method: Method, of: Group, routed: Routed) -> Group:
    return replace(of, shaped=method.intervention.reward(method.view(of), routed.flags[of.index]))


def caught(routed: Routed) -> bool:
    return any(any(f.flagged) for f in routed.flags.values())


# ── gradients that are read first, rewards that are shaped afterwards ──────────────────────────────────────────────

AFTERWARDS = [(i, m) for i, m in PAIRS if MONITORS[m].needs == "gradients" and INTERVENTIONS[i].acts_on == "rewards"]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(("intervention", "monitor"), AFTERWARDS)
def test_rewards_shaped_after_the_backward_are_learnt_as_if_known_before(
    policy: Policy, intervention: str, monitor: str, loss: Any
):
    """From gradients at advantage 1, without a second backward: as `policy_gradients` on the shaped groups. In the
    third group all earn the same, and a penalty gives it a signal; dapo divides by the tokens of groups with one."""
    method = make(policy, intervention, monitor, loss=LossConfig(loss=loss))
    if isinstance(method.monitor, Band):  # flagged where the mean cosine is above 0: about every second one
        end = torch.full((len(method.monitor.direction.V),), 0.3)
        method.monitor.gate = BandGate(-end, end)
    of = batch(same=True)
    _, plan, routed = step(policy, method, of)
    assert plan.unit
    assert not of.groups[2].has_signal
    groups = [shaped(method, g, routed) for g in of.groups]
    assert caught(routed)
    assert groups[2].has_signal == (intervention == "penalty")
    want = gradient(policy, groups, loss=method.cfg.loss)
    assert relative(flat(policy, routed.keep), want) < 1e-5
    assert routed.quar is None


def test_these_four_pairs_are_all_of_them():
    assert AFTERWARDS == [("screen", "gate"), ("screen", "band"), ("penalty", "gate"), ("penalty", "band")]


@pytest.mark.parametrize(("intervention", "monitor"), AFTERWARDS)
@pytest.mark.parametrize("more", [{"beta": 0.1}, {"teacher_tau": 0.1, "teacher_model": "organism"}])
def test_a_loss_that_is_not_linear_in_the_advantage_is_refused(intervention: str, monitor: str, more: dict[str, Any]):
    name = next(iter(more)).replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name} 0.1: --monitor {monitor} flags after the backward") as error:
        config(intervention, monitor, loss=LossConfig(**more))
    assert "\n" not in str(error.value)
    assert config(intervention, "detector", loss=LossConfig(**more)).loss == LossConfig(**more)


# ── blind to labels ────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
def test_poisoned_labels_change_nothing_but_for_a_monitor_of_labels(policy: Policy, intervention: str, monitor: str):
    of = batch(same=True)
    one, two = (step(policy, make(policy, intervention, monitor), b) for b in (of, poisoned(of)))
    assert same(policy, one[2], two[2]) == (FLAGGERS[monitor].sees is not OracleView)
    assert (one[0] == two[0]) == (FLAGGERS[monitor].sees is not OracleView)
    assert [m for m in FLAGGERS if FLAGGERS[m].sees is OracleView] == ["labels"]


@EVERY
def test_a_view_of_another_type_is_refused(policy: Policy, intervention: str, monitor: str):
    method, (group, _) = make(policy, intervention, monitor), batch().groups
    own = method.view(group)
    assert type(own) is FLAGGERS[monitor].sees
    for other in (group.view(), group.oracle_view(), group.problem_view()):
        if type(other) is not type(own):
            method.view = lambda *_, other=other: other
            message = f"sees a {type(own).__name__}, got {type(other).__name__}"
            with pytest.raises(AssertionError, match=message):
                step(policy, method, batch())


@pytest.mark.parametrize("learner", [name for name, row in MONITORS.items() if row.learns])
def test_a_monitor_seeded_by_labels_sees_them_and_no_other_does(policy: Policy, learner: str):
    by_label, by_detector = (
        make(policy, "penalty", learner, seed_monitor=seed).monitor.sees for seed in ("labels", "detector")
    )
    assert (by_label, by_detector) == (OracleView, GroupView)


def test_labels_are_on_the_oracles_type_alone():
    names = {f.name for f in fields(GroupView)}
    assert not names & {"hacked", "hacks", "mode", "solved", "gt_pass", "mechanism", "channel"}
    assert {f.name for f in fields(OracleView)} - names == {"hacks", "flaws"}
    assert {f.name for f in fields(ProblemView)} - names == {"problem"}
    # the name is looked for in every file of the package: one caller, behind the type that the monitor's class names
    package = Path(vgrout.__file__).parent
    callers = [p.name for p in package.rglob("*.py") if "oracle_view" in p.read_text(encoding="utf-8")]
    assert sorted(callers) == ["method.py", "types.py"]


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
def test_only_what_the_monitor_names_is_left_of_a_step_in_the_next(policy: Policy, intervention: str, monitor: str):
    method = make(policy, intervention, monitor)
    before, (_, _, first), after = method.state_dict(), step(policy, method, batch()), method.state_dict()
    assert before.keys() == after.keys()
    changed = {k for k in after if before[k].shape != after[k].shape or not torch.equal(before[k], after[k])}
    assert changed == MEMORY.get(monitor, set())
    step(policy, method, batch(step=1, same=True))
    if not changed:
        assert same(policy, step(policy, method, batch())[2], first)


@EVERY
def test_a_resumed_method_continues_the_same(policy: Policy, intervention: str, monitor: str):
    straight = make(policy, intervention, monitor)
    step(policy, straight, batch())
    state = {k: v.clone() for k, v in straight.state_dict().items()}
    resumed = make(policy, intervention, monitor)
    resumed.load_state_dict({k: v + 1 for k, v in resumed.state_dict().items()})  # as it would be at another place
    resumed.load_state_dict(state)
    shake_on = batch(step=1, same=True)
    assert same(policy, *(step(policy, m, shake_on)[2] for m in (straight, resumed)))
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in (straight, resumed)), strict=True))


@EVERY
def test_state_of_another_method_is_refused_in_one_line(policy: Policy, intervention: str, monitor: str):
    method = make(policy, intervention, monitor)
    for alien in ({"intervention/V/other": torch.zeros(1, 4)}, {"monitor/other": torch.zeros(1)}):
        state = method.state_dict() if MEMORY.get(monitor) == {"monitor/other"} else {}
        with pytest.raises(ValueError, match="checkpoint") as error:
            method.load_state_dict(state | alien)
        assert "\n" not in str(error.value)


# ── the registries, and what is refused ────────────────────────────────────────────────────────────────────────────

# of every setting a value that is legal and not its default
VALUES: dict[str, Any] = {
    "v_hack_path": Path("v"),
    "vhack_refresh_every": 3,
    "route2_random_v_seed": 4,
    "vhack_pairs_path": Path("p"),
    "v_hack_extract_top_k": 9,
    "v_hack_k": 3,
    "v_hack_tau_axis": 0.1,
    "v_hack_drop_bottom_frac": 0.1,
    "gate_mode": "reverse",
    "preserve_magnitude": False,
    "project_overshoot": 1.5,
    "gate_vote": "rollout",
    "gate_modules": "apart",
    "known_hacks_teacher_only": True,
    "label_accuracy": 0.9,
    "label_false_positives": 0.1,
    "known_modes": "exit_code",
    "seed_monitor": "twin",
    "monitor_quantile": 0.8,
    "known_correct": Path("k"),
    "monitor_threshold": "known_correct",
    "monitor_prompts": 9,
    "quarantine_threshold": 0.2,
    "quarantine_diet": "random",
    "quarantine_start": "random",
    "probe_layer": 1,
    "probe_diet": "random",
    "rollout_ablate_frac": 0.25,
    "quarantine": "block:1",
    "rebaseline": True,
    "penalty": 2.0,
    "inoculation_prompt": "Go.",
    "placebo_pairs": "long",
}
IDLE = {"gate_vote": AFTERWARDS, "vhack_pairs_path": [(i, "quarantine") for i in ("screen", "penalty")]}


@EVERY
def test_a_method_reads_its_own_settings_and_refuses_all_others_by_name(intervention: str, monitor: str):
    assert VALUES.keys() == {f.name for f in fields(MethodConfig)} - {f.name for f in fields(Choice)}
    of = MethodConfig(intervention=intervention, monitor=monitor)
    reads = {f.name for group in of.groups for f in fields(group)}
    reads -= {name for name, pairs in IDLE.items() if (intervention, monitor) in pairs}
    for name, value in VALUES.items():
        if name in reads:
            MethodConfig(intervention=intervention, monitor=monitor, **{name: value})
            continue
        message = rf"\A--{name.replace('_', '-')}: .*leave it out\Z"
        if name == "route2_random_v_seed":
            message = r"\A--route2-random-v-seed 4: replaces a direction, and .* has none\Z"
        with pytest.raises(ValueError, match=message):
            MethodConfig(intervention=intervention, monitor=monitor, **{name: value})


@pytest.mark.parametrize("intervention", INTERVENTIONS)
@pytest.mark.parametrize("monitor", MONITORS)
def test_pairs_that_make_no_sense_are_refused_in_one_line(intervention: str, monitor: str):
    if (intervention, monitor) in PAIRS:
        return
    goes = ", ".join(m for i, m in PAIRS if i == intervention)
    message = f"--monitor {monitor} with --intervention {intervention}: .*; that goes with {goes}"
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        MethodConfig(intervention=intervention, monitor=monitor)


def test_every_row_has_its_class_and_every_class_its_row():
    assert ARMS.keys() == INTERVENTIONS.keys()
    assert FLAGGERS.keys() == MONITORS.keys()
    assert all(kind.name == name for of in (ARMS, FLAGGERS) for name, kind in of.items())
    assert all(FLAGGERS[name].owns_quarantine == row.owns_quarantine for name, row in MONITORS.items())


def test_there_are_as_many_legal_pairs_as_the_rows_say():
    assert len(PAIRS) == 3 + 2 * 14 + 13 + 11


# ── the monitor's own quarantine, groups without signal, a block of its own ────────────────────────────────────────


def test_a_monitors_own_quarantine_learns_what_it_names_and_the_kept_part_as_without_it(policy: Policy):
    method = of_parts(policy, "penalty", Fixed(0, teaches=(0, 2)))
    of = batch()
    flags, plan, routed = step(policy, method, of)
    kept, taught = plan.parts
    assert (kept.learns, kept.deployed, taught.learns, taught.deployed) == ("kept", True, "quarantine", False)
    assert taught.rows == ((0, 2), (0, 2))
    assert taught.advantages == ((0.5, 0.0, -0.25, 0.0),) * 2
    with policy.adapter.deployed():
        alone = step(policy, of_parts_in(policy, method, Fixed(0)), of)[2]
    assert alone.quar is None
    assert relative(flat(policy, routed.keep), flat(policy, alone.keep)) < 1e-5
    assert flags[0].flagged == (True, False, False, False)


def of_parts_in(policy: Policy, method: Method, monitor: Any) -> Method:
    """The same with another monitor, on the policy as it is."""
    return Method(method.cfg, method.intervention, monitor, policy=policy)


def saturated() -> Batch:
    of = batch()
    groups = (replace(g, grades=tuple(replace(x, reward=3.5) for x in g.grades)) for g in of.groups)
    return replace(of, groups=tuple(groups))


@pytest.mark.parametrize(
    ("intervention", "monitor", "n"),
    [("screen", Fixed(0), 0), ("screen", Fixed(0, teaches=(0,)), 2), ("penalty", Fixed(0), 2)],
)
def test_a_group_without_signal_is_kept_for_a_penalty_or_a_monitor_that_learns_from_it(
    policy: Policy, intervention: str, monitor: Fixed, n: int
):
    _, plan, routed = step(policy, of_parts(policy, intervention, monitor), saturated())
    assert len(plan.groups) == n
    if monitor.owns_quarantine:
        assert routed.keep is None, "all advantages are 0: nothing for δS, and no step by its momentum"
        assert flat(policy, routed.quar).any()


@pytest.mark.parametrize("intervention", ["route2", "sgtm"])
def test_in_a_block_of_its_own_the_quarantine_learns_there_alone(policy: Policy, intervention: str):
    method = of_parts(policy, intervention, Fixed(0, 2), quarantine="block:2")
    routed = step(policy, method, batch())[2]
    assert routed.keep is not None
    assert routed.quar is not None
    for m in routed.keep:
        assert bool(routed.keep[m].any()) == (".layers.1." not in m), m
        assert bool(routed.quar[m].any()) == (".layers.1." in m), m
