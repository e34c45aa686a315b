"""The controls are what their names say: on plain tensors, with a tiny model, then as options of the whole program."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from files import loaded
from methods import (
    PLACEBO_PAIRS,
    TOY_PAIRS,
    TWO_GROUPS,
    Fixed,
    batch,
    config,
    draw,
    group,
    poisoned,
    routed,
    rows,
    scores,
    setup,
    total,
    toy,
    toy_direction,
    watched_by,
)
from runs import SMALL, once
from runs import rows as step_rows
from runs import run as program
from tiny import policy as tiny_policy
from tiny import shake
from vgrout.config.method import MethodConfig
from vgrout.config.presets import resolve
from vgrout.config.run import PLACEBOS
from vgrout.config.specs import CONTROLS, INTERVENTIONS
from vgrout.direction.controls import cosine_to_real, haar_like, overlap
from vgrout.direction.extract import extract, save
from vgrout.direction.pairs import load_pairs
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.ground.data import Refresh
from vgrout.ground.embedded import COMPILE_REWARD, PASS_REWARD
from vgrout.ground.io import Diverged, Refused, json_lines
from vgrout.method import live_direction
from vgrout.method.gates import permuted
from vgrout.method.method import make_method
from vgrout.train import main

ALONG = ("erase", "route", "route2")


@given(st.integers(0, 10_000))
@settings(max_examples=15)
def test_permuted_moves_the_same_shares_among_live_rollouts(seed):
    draw = torch.Generator().manual_seed(seed)
    live = torch.rand(12, generator=draw) > 0.3
    share = torch.where(live, torch.rand(3, 12, generator=draw), 0.0)
    moved = permuted(share, live, torch.Generator().manual_seed(seed))
    assert not moved[:, ~live].any()
    for before, after in zip(share, moved, strict=True):
        assert before.sort().values.tolist() == after.sort().values.tolist()
    columns = {tuple(c) for c in share.T.tolist()}
    assert {tuple(c) for c in moved.T.tolist()} <= columns  # rollouts move, not single modules
    assert torch.equal(moved, permuted(share, live, torch.Generator().manual_seed(seed)))


class Scored(Fixed):
    """Gives scores besides."""

    def flag(self, views, step):
        return [replace(f, scores=(0.0, 1.0, 2.0, 3.0)) for f in super().flag(views, step)]


@pytest.mark.parametrize("intervention", ["screen", "route2"])
def test_random_flags_are_as_many_among_rewarded_answers_by_seed_and_step(policy, intervention):
    def flags(seed, of):
        method = watched_by(Scored(0), policy, intervention, seed=seed, random_flags=True)
        return [group.flags for group in method.flag(of).groups]

    drawn = [flags(s, batch(step=n)) for s in (0, 1) for n in range(5)]
    assert {sum(sum(f.flagged) for f in of) for of in drawn} == {2}
    assert [any(f.flagged[b] for of in drawn for f in of) for b in range(4)] == [
        True,
        True,
        False,
        True,
    ]
    assert len({tuple(f.flagged for f in of) for of in drawn}) > 3
    assert flags(0, batch(step=1)) == flags(0, poisoned(batch(step=1))) == drawn[1]
    assert {f.scores for of in drawn for f in of} == {(0.0, 1.0, 2.0, 3.0)}, (
        "scores stay where they were"
    )


@pytest.mark.parametrize("monitor", ["gate", "band"])
def test_random_flags_route_the_same_share_in_every_step_to_others(monitor):
    real, moved, again = (
        toy("route2", monitor=monitor, gate_vote="module", random_flags=on)
        for on in (False, True, True)
    )
    for n in range(3):
        groups = [(rows(6, 10 * n + i, (i, 3)), group(6, 1, (i,), i)) for i in range(3)]
        a, b, c = (routed(method, *groups, step=n) for method in (real, moved, again))
        assert b.measured["routed"] == pytest.approx(a.measured["routed"], rel=1e-6)
        assert sorted(scores(a)) == pytest.approx(sorted(scores(b)), rel=1e-6)
        assert scores(a) != scores(b) == scores(c)
        assert torch.allclose(b.keep + b.quar, total(*groups), atol=1e-5)
    assert scores(routed(moved, *TWO_GROUPS, step=0)) != scores(routed(moved, *TWO_GROUPS, step=1))


def test_haar_is_random_per_module_independent_of_the_others_and_may_route_nothing():
    V = toy_direction().select(5, 0.25)
    drawn = haar_like(V, 3)
    assert torch.equal(drawn["m.up_proj"], haar_like({"m.up_proj": V["m.up_proj"]}, 3)["m.up_proj"])
    assert not torch.equal(drawn["m.up_proj"], haar_like(V, 4)["m.up_proj"])
    for m, rows_ in drawn.items():
        assert rows_.shape == V[m].shape
        assert torch.allclose(rows_ @ rows_.T, torch.eye(len(rows_)), atol=1e-5)
    # negative cosines only, no known hacks: an empty quarantine is what the control found
    method = toy("route2", control="haar", monitor="band")
    got = routed(method, (-torch.cat([*method.direction.V.values()], 1).repeat(4, 1), group(4)))
    assert got.measured["routed"] == 0
    assert not got.quar.any()


@pytest.mark.parametrize("intervention", ALONG)
def test_haar_is_never_refreshed_keeps_the_shapes_and_reads_chance(intervention):
    """Over many modules the root mean square cosine with the real rows is √(k/r). The seed is the run's or a flag's."""
    sizes = {f"m{i}": 128 for i in range(60)}
    direction = toy_direction(sizes=sizes)
    real, haar, by_flag, other = (
        toy(intervention, direction, sizes=sizes, **of)
        for of in (
            {},
            {"control": "haar"},
            {"route2_random_v_seed": 7},
            {"route2_random_v_seed": 8},
        )
    )  # toy: the run's seed is 7
    close = cosine_to_real(haar.direction.V, real.direction.V)
    assert close.rms == pytest.approx(close.chance, rel=0.15)
    assert {m: V.shape for m, V in real.direction.V.items()} == {
        m: V.shape for m, V in haar.direction.V.items()
    }
    assert 0 < (overlap(real.direction.V, haar.direction.V) or 0) < 0.5
    assert (haar.refresh(9).overlap, haar.refresh(9).age) == (None, 10)
    for m, V in haar.direction.V.items():
        assert torch.equal(V, by_flag.direction.V[m])
        assert not torch.allclose(V, other.direction.V[m])


def test_haar_under_the_pair_band_is_signed_in_its_favour_and_only_the_band_is_refreshed():
    direction = toy_direction()
    flags = {"route2_random_v_seed": 5, "monitor": "band", "vhack_refresh_every": 2}
    method = toy("route2", direction, again=lambda: toy_direction(seed=50), **flags)
    lo, hi = direction.band(method.direction.V)
    assert (hi >= lo).all()
    unsigned = toy("route2", direction, route2_random_v_seed=5).direction.V
    assert {m: V.abs().sum().item() for m, V in method.direction.V.items()} == {
        m: V.abs().sum().item() for m, V in unsigned.items()
    }
    V, before = method.direction.V, method.state_dict()
    assert method.refresh(0).age == 1
    refreshed = method.refresh(1)
    assert (refreshed.age, refreshed.overlap) == (0, pytest.approx(1))
    for m, v in method.direction.V.items():
        assert torch.equal(v.abs(), V[m].abs())
    lo, hi = method.direction.latest.band(method.direction.V)
    assert (hi >= lo).all(), "signed by the pairs as they are read now"
    assert not torch.equal(before["monitor/gate/lo"], method.state_dict()["monitor/gate/lo"])


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.chdir(tmp_path_factory.mktemp("directions"))  # they are cached there
        yield tiny_policy()


@pytest.mark.parametrize("intervention", ALONG)
def test_refresh_extracts_again_when_due_and_reports_the_overlap(policy, intervention):
    method = make_method(setup(config(intervention, vhack_refresh_every=3), policy))
    ages = []
    with torch.no_grad():
        for n in range(6):
            ages.append(method.refresh(n))
            policy.adapter.δS.add_(0.02 * torch.randn(len(policy.adapter), generator=draw(n)))
            policy.adapter.merge()
    shake(policy.adapter, 0.0)
    assert [a.age for a in ages] == [1, 2, 0, 1, 2, 0]
    assert [a.overlap is None for a in ages] == [True, True, False, True, True, False]
    assert 0.05 < ages[2].overlap < 0.9999
    V = method.direction.V
    assert (ages[-1].modules, ages[-1].axes) == (len(V), sum(map(len, V.values())))
    assert make_method(setup(config("none"), policy)).refresh(0) == Refresh()


def without(direction, module):
    """The same, as if the pairs of this module had no mean and no axis."""
    nothing = {
        name: torch.zeros_like(getattr(direction.axes[module], name)) for name in ("V", "mean")
    }
    return replace(
        direction,
        axes=direction.axes | {module: replace(direction.axes[module], **nothing)},
    )


@pytest.mark.parametrize("control", ["none", "placebo"])
def test_a_direction_is_extracted_again_as_it_was_at_first(policy, control, monkeypatch):
    """On the pairs that it is of: a placebo's stays one."""
    asked = []

    def recorded(name):
        real = getattr(live_direction, name)

        def asking(policy, pairs, *more):
            asked.append((name, pairs, more))
            return real(policy, pairs, *more)

        return asking

    for name in ("extract", "obtain"):
        monkeypatch.setattr(live_direction, name, recorded(name))
    flags = {"v_hack_extract_top_k": 6, "v_hack_tau_axis": 0.25, "vhack_refresh_every": 2}
    method = make_method(setup(config("erase", control=control, **flags), policy))
    method.refresh(0)
    method.refresh(1)
    own = PLACEBO_PAIRS if control == "placebo" else TOY_PAIRS
    first = [("obtain", pairs, (None, 6, 0.25)) for pairs in dict.fromkeys((TOY_PAIRS, own))]
    assert asked == [*first, ("extract", own, (6, 0.25))]


@pytest.mark.parametrize("intervention", ["erase", "route2"])
def test_a_module_that_loses_its_direction_keeps_the_old_one_under_a_gate_alone(
    policy, intervention, monkeypatch
):
    """The gate's running means are of these modules. The overlap is of all that there was: what is lost counts as 0."""
    flags = {"v_hack_drop_bottom_frac": 0.0} if intervention == "erase" else {}
    method = make_method(setup(config(intervention, vhack_refresh_every=1, **flags), policy))
    of = method.direction
    before = dict(of.V)
    lost, *others = before
    shake(policy.adapter, 0.3)
    again = extract(policy, TOY_PAIRS, 12, 0.0)
    monkeypatch.setattr(of, "_again", lambda: without(again, lost))
    refreshed = method.refresh(0)
    shake(policy.adapter, 0.0)
    kept = intervention == "route2"
    assert [*of.V] == ([lost, *others] if kept else others)
    for m in others:
        assert not torch.allclose(of.V[m], before[m])
    if kept:
        assert torch.equal(of.V[lost], before[lost])
    assert of.latest.axes[lost].mean.any() == 0
    by_module = [overlap({m: of.V[m]}, {m: before[m]}) for m in of.V]
    assert refreshed.overlap == pytest.approx(sum(by_module) / len(before))
    assert (refreshed.modules, refreshed.axes) == (len(of.V), sum(map(len, of.V.values())))


def test_a_model_that_no_direction_can_be_extracted_on_has_diverged(policy, monkeypatch):
    """The pairs are the same as before: it is no refusal of theirs."""

    def collapsed():
        raise Refused("pairs: pair 3: its gradient is not finite on this model")

    method = make_method(setup(config("route", vhack_refresh_every=1), policy))
    monkeypatch.setattr(method.direction, "_again", collapsed)
    with pytest.raises(Diverged, match=r"step 4: the policy has collapsed.*pair 3"):
        method.refresh(4)


def test_a_direction_is_in_the_models_order_whatever_its_files():
    """So flags by module are of the module that they stand at."""
    direction = toy_direction()
    backwards = replace(direction, axes=dict(reversed(direction.axes.items())))
    method, usual = toy("route2", backwards), toy("route2", direction)
    assert [*method.direction.V] == [*usual.direction.V] == [*direction.axes]
    state = dict(reversed(usual.direction.state_dict().items()))
    method.direction.load_state_dict(state)
    assert [*method.direction.V] == [*direction.axes]
    for bad in ({"V/other": torch.zeros(1, 24)}, {"V/m.q_proj": torch.zeros(1, 25)}):
        with pytest.raises(ValueError, match=r"checkpoint's direction has .* r is "):
            method.direction.load_state_dict(bad)


def test_a_direction_file_is_of_these_pairs_and_pairs_are_needed_to_refresh(policy, tmp_path):
    path = tmp_path / "v.safetensors"
    shake(policy.adapter, 0.0)
    save(extract(policy, TOY_PAIRS, 12, 0.0), path)
    of_file = config("erase", v_hack_path=path)
    with pytest.raises(ValueError, match="direction of other pairs"):
        make_method(setup(of_file, policy, PLACEBO_PAIRS))
    with pytest.raises(ValueError, match="--vhack-refresh-every: needs the pairs"):
        make_method(setup(of_file, policy, None))
    with pytest.raises(ValueError, match="--control placebo: needs the pairs"):
        make_method(setup(config("erase", control="placebo"), policy, None))
    frozen = make_method(
        setup(config("erase", v_hack_path=path, vhack_refresh_every=0), policy, None)
    )
    V = frozen.direction.V
    assert frozen.refresh(41) == Refresh(42, None, len(V), sum(map(len, V.values())))


@pytest.mark.parametrize("control", ["haar", "placebo"])
@pytest.mark.parametrize("intervention", ALONG)
def test_a_control_says_how_far_its_direction_is_the_real_one(policy, intervention, control):
    real, other = (
        make_method(setup(config(intervention, control=c), policy)) for c in ("none", control)
    )
    assert real.provenance.cosine_to_real is None
    close = other.provenance.cosine_to_real
    assert close == cosine_to_real(other.direction.V, real.direction.V)
    assert (other.provenance.pairs_sha256 == real.provenance.pairs_sha256) == (control == "haar")


MONITORED = {"screen": "detector", "penalty": "syntax_edge"}


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_runs_on_every_intervention_that_takes_it(control, shared_run, tmp_path):
    here, more = shared_run.warm(tmp_path), ["--control", control]
    if control == "placebo":
        own, usual = (
            here / "own.json",
            resolve(["smoke", "--control=placebo", "--placebo-pairs=long"]),
        )
        own.write_text(load_pairs(usual.files.pairs / "placebo_long.json").to_json())
        more += ["--placebo-pairs", str(own)]
    for intervention in INTERVENTIONS:
        monitor = MONITORED.get(intervention, "usual")
        try:
            MethodConfig(intervention=intervention, monitor=monitor, control=control)
        except ValueError:
            continue
        flags = ["--threads", "1", *SMALL, "--eval-ablate-every", "0", *more, "--monitor", monitor]
        path = program(here, *once(["smoke", "--intervention", intervention, *flags]))
        run_json, final = (loaded(path / f"{name}.json") for name in ("run", "per_mode_deploy"))
        assert (
            run_json["control"]
            == final["control"]
            == ("placebo_own" if control == "placebo" else control)
        )
        assert len(step_rows(path)) == 5
        assert math.isfinite(final["solve_deploy"])
        close = (run_json["direction"] or {}).get("cos_with_real")
        assert (close is not None) == (control in ("haar", "placebo"))
        if close:
            assert len(close["modules"]) == 28
        if control == "placebo":
            assert run_json["direction"]["pairs"].endswith("own.json")
            assert (
                run_json["hashes"]["pairs"]
                != run_json["hashes"]["placebo"]
                == run_json["direction"]["pairs_sha256"]
            )
        if control != "no_loophole":  # as the flawed grader rewarded, whatever counted
            lines = json_lines(path / "rollouts.jsonl")
            assert {round(line["reward"], 9) for line in lines} <= {
                0.0,
                COMPILE_REWARD,
                COMPILE_REWARD + PASS_REWARD,
            }


def test_each_shipped_placebo_is_found_for_the_organism_and_for_other_models():
    for name in PLACEBOS:
        flags = ["--intervention", "erase", "--control", "placebo", "--placebo-pairs", name]
        shipped = resolve(["smoke", *flags])
        assert len(load_pairs(CodeEnvironment(shipped, []).placebo_path(name))) == 24
        full = CodeEnvironment(resolve(["full", *flags]), [])
        assert full.placebo_path(name) is None  # hand-written
        assert shipped.method.control_name == f"placebo_{name}"


def test_the_placebo_file_must_be_another_contrast(here, capsys):
    same = CodeEnvironment(resolve(["smoke"]), []).pairs_path
    assert main(["smoke", "--control", "placebo", "--placebo-pairs", str(same)]) == 2
    assert "these are the true pairs" in capsys.readouterr().err
