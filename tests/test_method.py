"""Every legal pair of intervention and monitor, on a tiny model: what each of them holds, whatever it does. Which
settings each of them reads; classes of one's own."""

import re
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import vgrout
from methods import (
    Fixed,
    batch,
    config,
    flat,
    gradient,
    group,
    make,
    poisoned,
    step,
    watched_by,
)
from tiny import policy as tiny_policy
from tiny import relative
from vgrout import register_intervention, register_monitor
from vgrout.config.method import CHOICE, MethodConfig
from vgrout.config.presets import import_named, resolve, resumed
from vgrout.config.run import from_dict
from vgrout.config.settings import LossConfig
from vgrout.config.specs import INTERVENTIONS, MONITORS, monitors_of
from vgrout.ground.data import Batch, Flags, GroupView, OracleView
from vgrout.ground.tensor_types import Routed
from vgrout.loop.grpo import _norm, policy_gradients
from vgrout.method.base import Intervention, Monitor, flags_of

PAIRS = [
    (intervention, monitor)
    for intervention in INTERVENTIONS
    for monitor in monitors_of(intervention)
]
# a monitor of texts does the same under screen and under penalty
EVERY = pytest.mark.parametrize(
    ("intervention", "monitor"),
    [
        pytest.param(
            *pair, marks=pytest.mark.long if pair[0] == "screen" and pair != PAIRS[3] else ()
        )
        for pair in PAIRS
    ],
    ids=["-".join(pair) for pair in PAIRS],
)
# each monitor, before a backward and after it
READERS = [pair for pair in PAIRS if pair[0] in ("route2", "penalty")]
# what goes from one step to the next, beside the direction; all other monitors and all
# interventions have no memory
MEMORY = {
    "gate": {"monitor/gate/total", "monitor/gate/weight"},
    "online_probe": {"monitor/probe_sum", "monitor/probe_count"},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.chdir(tmp_path_factory.mktemp("directions"))  # they are cached there
        yield tiny_policy()


def same(one, other):
    """Whether two steps flag alike and learn alike, to the last bit."""
    flags = [[group.flags for group in of.groups] for of, _ in (one, other)]
    vectors = [(one[1].keep, other[1].keep), (one[1].quar, other[1].quar)]
    alike = all(a is b if a is None or b is None else torch.equal(a, b) for a, b in vectors)
    return alike and flags[0] == flags[1] and one[1].flags == other[1].flags


# ── conserved


@EVERY
def test_what_is_learnt_is_plain_grpos_gradient_split(policy, intervention, monitor):
    """keep + quar is the gradient of the groups as they are rewarded, each rollout under what sampled it. erase alone
    drops something, along its direction."""
    more = {"preserve_magnitude": False} if intervention == "erase" else {}
    if intervention == "route2":
        more = {"quarantine": "shared", "rebaseline": False}
    method = make(policy, intervention, monitor, **more)
    routes = INTERVENTIONS[intervention].routes
    of, learnt = step(policy, method, batch(deployed=(1,) if routes else ()))
    whole, keep, quar = (
        gradient(policy, of.groups),
        flat(policy, learnt.keep),
        flat(policy, learnt.quar),
    )
    assert (learnt.quar is not None) == routes
    if intervention != "erase":
        assert relative(keep + quar, whole) < 1e-5
        return
    for m, V in method.direction.V.items():
        dropped = (whole - keep)[method.spans[m]]
        assert relative(V.T @ (V @ dropped), dropped) < 1e-3
    assert relative(keep, whole) > 0.01


@pytest.mark.parametrize(("intervention", "n"), [("screen", 0), ("penalty", 2), ("route2", 0)])
def test_where_all_earn_the_same_a_penalty_alone_gives_a_signal(policy, intervention, n):
    def saturated(group):
        return replace(group, grades=tuple(replace(grade, reward=3.5) for grade in group.grades))

    of = replace(batch(), groups=tuple(map(saturated, batch().groups)))
    of, learnt = step(policy, watched_by(Fixed(0), policy, intervention), of)
    assert len({row.group for row in of.rows}) == n
    assert (learnt.keep is None) == (not n), (
        "nothing is learnt, and no vector goes on by its momentum"
    )


KL = LossConfig(beta=0.1)


@pytest.mark.parametrize("loss", [KL, LossConfig(teacher_tau=0.1, teacher_model="organism")])
@pytest.mark.parametrize("method", [("none", "usual"), ("route2", "gate"), ("route2", "labels")])
def test_where_all_earn_the_same_a_kl_or_a_teacher_still_reaches_every_answer(policy, method, loss):
    with_signal, alike = batch(), batch(same=True)
    for of in (with_signal, alike):
        rows = make(policy, *method, loss=loss).flag(of).rows
        assert [row.group for row in rows] == [g.index for g in of.groups for _ in g.rollouts]
    rows = make(policy, *method).flag(alike).rows
    assert {row.group for row in rows} == {g.index for g in with_signal.groups}


def test_the_kl_of_a_group_is_the_same_whether_its_rewards_differ_or_not(policy):
    def learnt(group, loss):
        of = make(policy, "none", loss=loss).flag(replace(batch(), groups=(group,)))
        return policy_gradients(policy, of, config("none", loss=loss)).g.sum(0)

    alike = batch(same=True).groups[2]
    differing = replace(alike, grades=batch().groups[0].grades)
    pull = learnt(alike, KL)
    assert pull.norm() > 0
    assert relative(learnt(differing, KL) - learnt(differing, LossConfig()), pull) < 1e-4


def test_a_gradient_monitor_is_asked_about_gradients_of_rewards_alone(policy):
    """Those of a KL say nothing of a hack: they are kept, and the others are flagged as without them."""
    flagged = {}
    for name, of in {"differ": batch(), "and alike": batch(same=True)}.items():
        _, learnt = step(policy, make(policy, "route2", "gate", loss=KL), of)
        flagged[name] = learnt.flags
    assert flagged["differ"].keys() == flagged["and alike"].keys() == {0, 1}
    assert [f.flagged for f in flagged["differ"].values()] == [
        f.flagged for f in flagged["and alike"].values()
    ]
    alike = replace(batch(), groups=batch(same=True).groups[2:])
    of, learnt = step(policy, make(policy, "route2", "gate", loss=KL), alike)
    assert (len(of.rows), learnt.flags) == (4, {})
    assert learnt.keep.norm() > 0
    assert not learnt.quar.any()


def test_what_is_left_out_is_left_out_of_the_kl_too(policy):
    method = watched_by(Fixed(1, 3), policy, "screen", loss=KL)
    rows = method.flag(batch()).rows
    assert [(row.group, row.rollout.text) for row in rows] == [
        (g, f"t{g}{b}") for g in range(2) for b in (0, 2)
    ]


def test_a_gradient_that_is_not_finite_is_said_and_never_learnt(policy):
    method = make(policy, "route2")
    assert method.route(method.flag(batch()), None) == Routed(finite=False)


# ── blind to labels


@EVERY
def test_poisoned_labels_change_nothing_but_for_a_monitor_of_labels(policy, intervention, monitor):
    of = batch(same=True)
    one, two = (step(policy, make(policy, intervention, monitor), b) for b in (of, poisoned(of)))
    assert same(one, two) == (monitor != "labels")
    assert MONITORS[monitor].sees_labels == (monitor == "labels")


def test_a_monitor_that_changes_a_prompt_changes_no_training():
    group, _ = batch().groups
    before = [*group.problem.messages[0].values()]
    for view in (group.view(), group.view(labels=True)):
        for message in view.messages:
            message["content"] = "changed"
        view.public.clear()
    assert [*group.problem.messages[0].values()] == before
    assert group.view().public == group.problem.public


@pytest.mark.parametrize("seed", ["labels", "detector"])
def test_a_monitor_seeded_by_labels_sees_them_and_no_other_does(policy, seed):
    assert make(policy, "penalty", "online_probe", seed_monitor=seed).monitor.sees_labels == (
        seed == "labels"
    )


def test_labels_are_on_the_oracles_type_alone():
    names = {f.name for f in fields(GroupView)}
    assert not names & {"hacked", "hacks", "mode", "solved", "gt_pass", "mechanism", "channel"}
    assert {f.name for f in fields(OracleView)} - names == {"hacks", "flaws"}
    # the call is looked for in every file of the package: one caller, behind what the monitor's
    # class declares
    package = Path(vgrout.__file__).parent
    callers = [p.name for p in package.rglob("*.py") if "view(labels" in p.read_text()]
    assert callers == ["method.py"]


# ── memory


@EVERY
def test_a_step_leaves_what_the_monitor_names_alone_and_a_resumed_method_goes_on_with_it(
    policy, intervention, monitor
):
    straight = make(policy, intervention, monitor)
    before, first = straight.state_dict(), step(policy, straight, batch())
    state = {k: v.clone() for k, v in straight.state_dict().items()}
    assert before.keys() == state.keys()
    assert {k for k in state if not torch.equal(before[k], state[k])} == MEMORY.get(monitor, set())
    resumed = make(policy, intervention, monitor)
    # as it would be at another place
    resumed.load_state_dict({k: v + 1 for k, v in before.items()})
    resumed.load_state_dict(state)
    assert same(*(step(policy, m, batch(step=1, same=True)) for m in (straight, resumed)))
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(m.state_dict().values() for m in (straight, resumed)), strict=True)
    )
    assert monitor in MEMORY or same(step(policy, straight, batch()), first)


@pytest.mark.parametrize(("intervention", "monitor"), READERS)
def test_state_of_another_method_is_refused(policy, intervention, monitor):
    method = make(policy, intervention, monitor)
    for alien in ("intervention/V/other", "monitor/other"):
        with pytest.raises((AssertionError, KeyError, ValueError)):
            method.load_state_dict({alien: torch.zeros(1, 4)})


# ── the registries, and what is refused

# of every setting a value that is legal and no intervention's usual one
VALUES = {
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
    "gate_vote": "module",
    "gate_modules": "all",
    "known_hacks_teacher_only": True,
    "known_modes": "exit_code",
    "label_false_flags": 0.25,
    "llm_judge_model": "m",
    "llm_judge_url": "http://localhost:1/v1",
    "llm_judge_prompt": Path("p.txt"),
    "llm_judge_thoughts": True,
    "llm_judge_max_new": 8,
    "llm_judge_timeout": 5.0,
    "seed_monitor": "syntax_edge",
    "monitor_quantile": 0.9,
    "known_correct": Path("k"),
    "rollout_ablate_frac": 0.25,
    "quarantine": "block:1",
    "rebaseline": True,
    "penalty": 2.0,
    "placebo_pairs": "long",
}


READ_BY = {
    "v_hack_k": "--intervention erase or route",
    "penalty": "--intervention penalty",
    "rollout_ablate_frac": "--intervention route or route2",
    "vhack_refresh_every": "--intervention erase or route or --monitor gate or band",
    "known_correct": "--monitor online_probe or syntax_edge",
    "placebo_pairs": "--control placebo",
}


@EVERY
def test_a_method_reads_its_own_settings_and_refuses_all_others_by_name(intervention, monitor):
    assert VALUES.keys() == {f.name for f in fields(MethodConfig)} - {*CHOICE}
    reads = MethodConfig(intervention=intervention, monitor=monitor).settings_read
    for name, value in VALUES.items():
        # a no-op that the plan names
        if name in reads or (intervention, name) == ("none", "v_hack_path"):
            of = MethodConfig(intervention=intervention, monitor=monitor, **{name: value})
            assert of.resolved(name) == of.resolved_settings[name] == value
            continue
        who, readers = (
            f"--intervention {intervention} --monitor {monitor}",
            READ_BY.get(name, "--.*"),
        )
        message = (
            rf"--{name.replace('_', '-')}: not read by {who}, goes with {readers}; leave it out"
        )
        if name == "route2_random_v_seed":
            message = f"--route2-random-v-seed 4: replaces the direction, and {who} has none"
        with pytest.raises(ValueError, match=rf"\A{message}\Z"):
            MethodConfig(intervention=intervention, monitor=monitor, **{name: value})


@pytest.mark.parametrize(
    ("intervention", "monitor"), sorted({*product(INTERVENTIONS, MONITORS)} - {*PAIRS})
)
def test_pairs_that_make_no_sense_are_refused_in_one_line(intervention, monitor):
    goes = f"say --monitor {' or '.join(monitors_of(intervention))}"
    if goes == "say --monitor none":
        goes = "leave it out, or say --intervention screen or penalty or route2"
    message = f"--monitor {monitor} with --intervention {intervention}: .*; {goes}"
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        MethodConfig(intervention=intervention, monitor=monitor)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("", None),
        ("--rebaseline", True),
        ("--rebaseline=True", True),
        ("--no_rebaseline", False),
        ("--rebaseline False", False),
    ],
)
def test_a_switch_that_depends_on_the_intervention_has_both_spellings(flag, value):
    assert resolve(["mini", "--intervention", "route2", *flag.split()]).method.rebaseline is value


# ── classes of one's own


class Long(Monitor):
    """Answers longer than a quantile of their group."""

    name = "long"
    what = "answers of more tokens than others"
    settings = ("monitor_quantile",)

    def __init__(self, quantile):
        self.quantile = quantile

    @classmethod
    def make(cls, setup):
        return cls(setup.cfg.method.monitor_quantile)

    def flag(self, views, step):
        lengths = [[len(ids) for ids in view.completion_ids] for view in views]
        return [Flags(tuple(n > self.quantile * max(of) for n in of)) for of in lengths]


class Damp(Intervention):
    """Learns a part of what is flagged."""

    name = "damp"
    what = "learn a flagged rollout's gradient divided by --penalty"
    settings = ("penalty",)
    reads_flags = True
    usual_monitor = "long"

    def route(self, step):
        f = step.flagged.to(step.g)
        return Routed(keep=((1 - f + f / (self.cfg.method.penalty or 2)) * step.g).sum(0))


def test_a_registered_class_is_as_good_as_a_built_in_one(policy):
    assert register_monitor(Long) is Long
    assert register_intervention(Damp) is Damp
    cfg = resolve(["mini", "--intervention", "damp", "--penalty", "4", "--monitor-quantile", "0.9"])
    assert cfg.method.monitor_name == "long"
    assert monitors_of("damp") == [name for name in MONITORS if name != "none"]
    of, learnt = step(policy, make(policy, "damp", penalty=4.0), batch())
    assert [group.flags for group in of.groups] == [Flags((False, False, True, True))] * 2
    parts = [gradient(policy, batch().groups, rollouts) for rollouts in ((0, 1), (2, 3))]
    assert relative(flat(policy, learnt.keep), parts[0] + parts[1] / 4) < 1e-5
    with pytest.raises(
        ValueError, match="--v-hack-k: not read by --intervention damp --monitor long, goes with"
    ):
        resolve(["mini", "--intervention", "damp", "--v-hack-k", "3"])
    with pytest.raises(
        ValueError, match=r"--monitor none with --intervention damp: it needs a monitor; say"
    ):
        MethodConfig(intervention="damp", monitor="none")


@pytest.mark.parametrize("name", ["gate", "none", "Long", "a b", ""])
def test_a_name_that_is_taken_or_none_at_all_is_refused(name):
    for register, base in ((register_monitor, Monitor), (register_intervention, Intervention)):
        with pytest.raises(
            ValueError,
            match=rf"\AMine: its name '{name}' should be of small letters, .*, and not taken\Z",
        ):
            register(type("Mine", (base,), {"name": name}))


MINE = """
from vgrout.method.base import Intervention, Monitor

class Mine(Monitor):
    name, what, settings = "mine", "nothing", ("monitor_quantile",)

    def flag(self, views, step):
        return super().flag(views, step)

class Ours(Intervention):
    name, what, reads_flags, usual_monitor = "ours", "nothing", True, "detector"
    acts_on = "gradient"

    def route(self, step):
        return super().route(step)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_part.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_part", raising=False)


@pytest.mark.usefixtures("own_module")
def test_a_run_with_a_class_of_ones_own_is_read_without_it():
    own = ["--intervention=own_part:Ours", "--monitor", "own_part:Mine", "--monitor-quantile=0.9"]
    with patch.dict(MONITORS), patch.dict(INTERVENTIONS):
        cfg = resolve(["mini", *own])
        assert (cfg.run_id, cfg.method.monitor_spec.what) == ("mini_Ours_Mine_seed41", "nothing")
        written = cfg.as_dict()
    del sys.modules["own_part"]
    read = from_dict(written)  # as a report does: what is recorded, and no code
    assert read.as_dict() == written
    assert "own_part" not in sys.modules
    for wrong in ("own_part:Absent", "no_such:Mine"):
        with pytest.raises(ValueError, match=rf"\A--monitor {wrong}: cannot be imported.*\Z"):
            resolve(["mini", "--intervention=penalty", "--monitor", wrong])


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    "argv",
    [
        ["--intervention=penalty", "--monitor=own_part:Mine"],
        ["--intervention=penalty", "--monitor=online_probe", "--seed-monitor=own_part:Mine"],
        ["--intervention=own_part:Ours", "--monitor=labels"],
        ["--shadow=labels,own_part:Mine"],
    ],
)
def test_a_run_with_a_class_of_ones_own_is_resumed_where_its_code_is_trusted(argv):
    with patch.dict(MONITORS), patch.dict(INTERVENTIONS):
        written = resolve(["mini", *argv]).as_dict()
    requested = resolve(["mini", "--trust-code", "--resume=x"])
    stored = from_dict(written)
    import_named(stored.own_code, trusted=requested.run.trust_code)
    cfg, differing = resumed(requested, stored)
    assert (cfg, differing) == (stored, [])
    assert cfg.method.spec is INTERVENTIONS[cfg.method.intervention]


class Misspelt(Monitor):
    name = "misspelt"

    def flags(self, views, step):
        return flags_of(views, ())


class Unread(Intervention):
    name = "unread"
    acts_on = "gradient"

    def reward(self, view, flagged):
        return view.rewards


class Nobody:
    name = "nobody"


@pytest.mark.parametrize(
    ("register", "own", "says"),
    [
        (register_monitor, Nobody, "is no Monitor of vgrout.method.base"),
        (register_monitor, Damp, "is no Monitor of vgrout.method.base"),
        (register_monitor, Misspelt, "Misspelt: has no flag or flag_gradients of its own"),
        (register_intervention, Unread, 'Unread.reward: is called only with acts_on = "rewards"'),
    ],
)
def test_a_class_that_would_change_nothing_is_refused(register, own, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        register(own)


class Returns(Monitor):
    """Answers with what it is given."""

    def __init__(self, answer):
        self.answer = answer

    def flag(self, views, step):
        return self.answer


@pytest.mark.parametrize("answer", [None, [], [None, None], [Flags((True,))] * 2])
def test_a_monitor_that_does_not_flag_every_rollout_is_a_fault(policy, answer):
    with pytest.raises(AssertionError, match=r"\AReturns.flag returned .*; it should be a list"):
        watched_by(Returns(answer), policy, "screen").flag(batch())


@pytest.mark.parametrize(
    "returns",
    [
        lambda g: g.sum(0),
        lambda g: Routed(keep=g.sum(0), quar=g.sum(0)),
    ],
)
def test_an_intervention_that_does_not_divide_g_is_a_fault(policy, returns, monkeypatch):
    method = make(policy, "none")
    monkeypatch.setattr(method.intervention, "route", lambda step: returns(step.g))
    with pytest.raises(AssertionError, match=r"\AIntervention.route returned "):
        step(policy, method, batch())


def test_flags_are_of_rollouts_that_there_are():
    with pytest.raises(ValueError, match=r"no rollouts of these groups: \{\(0, 99\)\}"):
        flags_of([group.view() for group in batch().groups], {(0, 99)})


def test_a_mean_over_tokens_does_not_count_what_an_intervention_leaves_out(policy):
    """Its rows are there to be measured; with a KL in the loss they are not there at all."""
    counted = {}
    for beta in (0.0, 0.1):
        method = make(policy, "screen", "source", loss=LossConfig(loss="icepop", beta=beta))
        batch = method.flag(Batch((group(6, teachers=2),), (), (), 6, 0))
        counted[beta] = _norm(batch, method.cfg).tokens, len(batch.rows)
    assert counted == {0.0: (4 * 2, 6), 0.1: (4 * 2, 4)}


def test_every_rank_goes_by_the_flags_of_the_first(policy, monkeypatch):
    """Those of a monitor of one's own, or of a language model, need not come out alike."""
    method = make(policy, "penalty", "detector")
    own = method.flag(batch()).groups

    def of_first(flags):
        return [replace(of, flagged=tuple(not flag for flag in of.flagged)) for of in flags]

    monkeypatch.setattr("vgrout.ground.ranks.from_first", of_first)
    for now, before in zip(method.flag(batch()).groups, own, strict=True):
        assert now.flags.flagged == tuple(not flag for flag in before.flags.flagged)
