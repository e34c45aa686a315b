"""The controls are what their names say: on plain tensors, with a tiny model, then as options of the whole program."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from methods import (
    TOY_PAIRS,
    TWO_GROUPS,
    batch,
    config,
    draw,
    group,
    labelled,
    make,
    rest,
    routed,
    rows,
    scores,
    setup,
    step,
    total,
    toy,
    toy_direction,
    view,
)
from runs import SMALL, SharedRuns, adapter_bytes, once
from runs import rows as step_rows
from runs import run as program
from tiny import policy as tiny_policy
from vgrout import rollout
from vgrout.config.method import CONTROLS, INTERVENTIONS, MethodConfig
from vgrout.config.presets import parse
from vgrout.config.run import PLACEBOS
from vgrout.data.language import CUE
from vgrout.data.organism import COMPILE_REWARD, PASS_REWARD
from vgrout.direction.controls import cosine_to_real, haar_like, overlap
from vgrout.direction.extract import axes_of, extract, save
from vgrout.direction.pairs import load_pairs
from vgrout.method import make_method
from vgrout.method.base import Refresh
from vgrout.method.controls import permuted, shuffled
from vgrout.method.labels import Labels
from vgrout.model.policy import Policy
from vgrout.modes import PLAIN_PHRASE
from vgrout.train import main
from vgrout.types import Grade

ALONG = ("erase", "route", "route2")


# ── flags, shuffled ────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
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


def test_shuffled_flags_are_as_many_among_rewarded_rollouts_and_new_in_every_step():
    truth = (True, True, False, False, False, False)
    (flags,) = Labels().flag([labelled(view(6), truth)], 0)
    could = [(True,) * 4 + (False,) * 2]
    seen = [shuffled([flags], could, draw(s))[0] for s in range(12)]
    assert {sum(f.flagged) for f in seen} == {2}
    assert not any(any(f.flagged[4:]) for f in seen)
    assert len({f.flagged for f in seen}) > 2
    assert shuffled([flags], could, draw(3))[0] == seen[3]


@pytest.mark.parametrize("intervention", ["screen", "sgtm"])
def test_random_flags_are_drawn_by_seed_and_step_and_their_scores_stay(policy: Policy, intervention: str):
    def flags(seed: int, number: int, *, shuffle: bool = True) -> list[Any]:
        method = make(policy, intervention, "nll", seed=seed, random_flags=shuffle)
        method.monitor.threshold = 0.0  # of what is rewarded it flags all; so a third answer may be flagged, or not
        return [*method.flag(batch(step=number)).values()]

    real, drawn = flags(0, 0, shuffle=False), [flags(s, n) for s in (0, 1) for n in range(3)]
    assert all([f.scores for f in of] == [f.scores for f in real] for of in drawn)
    assert {sum(sum(f.flagged) for f in of) for of in drawn} == {sum(sum(f.flagged) for f in real)}
    assert flags(0, 1) == drawn[1]


@pytest.mark.parametrize("monitor", ["gate", "band"])
def test_random_flags_route_the_same_share_in_every_step_to_others(monitor):
    real, moved, again = (toy("route2", monitor=monitor, random_flags=on) for on in (False, True, True))
    for n in range(3):
        groups = [(rows(6, 10 * n + i, (i, 3)), group(6, 1, (i,), i)) for i in range(3)]
        a, b, c = (routed(method, *groups, step=n) for method in (real, moved, again))
        assert b.diag.routed == pytest.approx(a.diag.routed, rel=1e-6)
        assert sorted(scores(a)) == pytest.approx(sorted(scores(b)), rel=1e-6)
        assert scores(a) != scores(b) == scores(c)
        for m, g in total(*groups).items():
            assert torch.allclose(b.keep[m] + b.quar[m], g, atol=1e-5)
    assert scores(routed(moved, *TWO_GROUPS, step=0)) != scores(routed(moved, *TWO_GROUPS, step=1))


# ── an update, shrunk ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("intervention", ALONG)
def test_shrinkage_is_plain_grpo_with_the_kept_share_as_scale(intervention):
    got = routed(toy(intervention, control="shrinkage"), *TWO_GROUPS)
    inner = routed(toy(intervention, **({"preserve_magnitude": False} if intervention == "erase" else {})), *TWO_GROUPS)
    g = total(*TWO_GROUPS)
    kept, whole = (torch.cat(list(grads.values())).norm().item() for grads in (inner.keep, g))
    share = 1 - inner.diag.routed if intervention == "route2" else kept / whole
    assert 0.2 < share < 0.95
    assert got.scale == pytest.approx(share, rel=1e-5)
    assert got.quar is None
    assert all(torch.allclose(got.keep[m], g[m], atol=1e-6) for m in g)


# ── another direction ──────────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("intervention", ALONG)
def test_haar_is_never_refreshed_keeps_the_shapes_and_reads_chance(intervention):
    """Over many modules the root mean square cosine with the real rows is √(k/r). The seed is the run's or a flag's."""
    sizes = {f"m{i}": 128 for i in range(60)}
    direction = toy_direction(sizes=sizes)
    real, haar, by_flag, other = (
        toy(intervention, direction, sizes=sizes, **of)
        for of in ({}, {"control": "haar"}, {"route2_random_v_seed": 7}, {"route2_random_v_seed": 8})
    )  # toy: the run's seed is 7
    close = cosine_to_real(haar.direction.V, real.direction.V)
    assert close.rms == pytest.approx(close.chance, rel=0.15)
    assert {m: V.shape for m, V in real.direction.V.items()} == {m: V.shape for m, V in haar.direction.V.items()}
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
    assert all(torch.equal(method.direction.V[m], V[m]) for m in V)
    assert not torch.equal(before["monitor/gate/lo"], method.state_dict()["monitor/gate/lo"])


def test_haar_may_route_nothing():
    """Negative cosines only, no known hacks: an empty quarantine is what the control found."""
    method = toy("route2", control="haar", monitor="band")
    got = routed(method, ({m: -V.repeat(4, 1) for m, V in method.direction.V.items()}, group(4)))
    assert got.diag.routed == 0
    assert not any(q.any() for q in got.quar.values())


def test_shuffling_leaves_the_span_of_v_hack_and_turns_v_grad():
    """Exchanging a pair's sides flips a row of D: DᵀD, and with it the axes, stay; the mean does not."""
    hack = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    clean = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
    flips = torch.tensor([1.0, -1.0] * 6)[:, None]
    true = axes_of(hack, clean, 10, 4, 0.0)
    mixed = axes_of(torch.where(flips > 0, hack, clean), torch.where(flips > 0, clean, hack), 10, 4, 0.0)
    assert cosine_to_real({"m": mixed.V}, {"m": true.V}).rms == pytest.approx(1, abs=1e-4)
    assert torch.allclose((mixed.V @ true.V.T).abs(), torch.eye(4), atol=1e-4)  # only the orientation can change
    v, w = (a.mean / a.mean.norm() for a in (true, mixed))
    assert abs((v @ w).item()) < 0.9


# ── the real one, extracted again ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as m:
        m.chdir(tmp_path_factory.mktemp("directions"))  # they are cached there
        yield tiny_policy()


@pytest.mark.parametrize("intervention", ALONG)
def test_refresh_extracts_again_when_due_and_reports_the_overlap(policy, intervention):
    method = make_method(setup(config(intervention, vhack_refresh_every=3), policy))
    ages: list[Any] = []
    with torch.no_grad():
        for n in range(6):
            ages.append(method.refresh(n))
            policy.adapter.δS.add_(0.02 * torch.randn(len(policy.adapter), generator=draw(n)))
            policy.adapter.merge()
    rest(policy)
    assert [a.age for a in ages] == [1, 2, 0, 1, 2, 0]
    assert [a.overlap is None for a in ages] == [True, True, False, True, True, False]
    assert 0.05 < ages[2].overlap < 0.9999
    V = method.direction.V
    assert (ages[-1].modules, ages[-1].axes) == (len(V), sum(map(len, V.values())))
    assert make_method(setup(config("none"), policy)).refresh(0) == Refresh()


def test_a_direction_file_is_of_these_pairs_and_pairs_are_needed_to_refresh(policy, tmp_path):
    path = tmp_path / "v.safetensors"
    rest(policy)
    save(extract(policy, TOY_PAIRS, 12, 0.0), path)
    of_file = config("erase", v_hack_path=path)
    with pytest.raises(ValueError, match="direction of other pairs"):
        make_method(setup(of_file, policy, TOY_PAIRS.shuffled(3)))
    with pytest.raises(ValueError, match="--vhack-refresh-every: needs the pairs"):
        make_method(setup(of_file, policy, None))
    with pytest.raises(ValueError, match="--control shuffled: needs the pairs"):
        make_method(setup(config("erase", control="shuffled"), policy, None))
    frozen = make_method(setup(config("erase", v_hack_path=path, vhack_refresh_every=0), policy, None))
    V = frozen.direction.V
    assert frozen.refresh(41) == Refresh(42, None, len(V), sum(map(len, V.values())))


@pytest.mark.parametrize("control", ["haar", "shuffled", "placebo"])
@pytest.mark.parametrize("intervention", ALONG)
def test_a_control_says_how_far_its_direction_is_the_real_one(policy, intervention, control):
    real, other = (make_method(setup(config(intervention, control=c), policy)) for c in ("none", control))
    assert real.provenance.cosine_to_real is None
    close = other.provenance.cosine_to_real
    assert close == cosine_to_real(other.direction.V, real.direction.V)
    assert (other.provenance.pairs_sha256 == real.provenance.pairs_sha256) == (control == "haar")


# ── another prompt ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_recontextualise_learns_under_the_hint_what_was_sampled_without(policy):
    method, of = make(policy, "none", control="recontextualise"), batch()
    for group_, learnt in zip(of.groups, method.reward(of, {}).groups, strict=True):
        prompt = policy.decode(learnt.rollouts[0].prompt_ids)
        assert PLAIN_PHRASE not in prompt
        assert "and will be evaluated" in prompt
        assert [r.completion_ids for r in learnt.rollouts] == [r.completion_ids for r in group_.rollouts]
        assert {r.logp_full for r in learnt.rollouts} == {None}
        assert learnt.grades == group_.grades
    assert step(policy, method, of)[2].keep is not None
    plain = make(policy, "none")
    assert plain.reward(of, {}) == of


# ── the program ────────────────────────────────────────────────────────────────────────────────────────────────────


def argv(intervention: str, control: str, *more: str) -> list[str]:
    own = {"none": [], "random_flags": ["--random-flags"], "labels": ["--monitor", "labels"]}.get(
        control, ["--control", control]
    )
    refreshed = ["--vhack-refresh-every", "2"] if intervention in ALONG and control not in ("haar", "labels") else []
    flags = ["--threads", "1", *SMALL, "--eval-ablate-every", "0", *refreshed, *own, *more]
    return once(["smoke", "--intervention", intervention, *flags])


def record(path: Path, name: str = "run.json") -> dict[str, Any]:
    return json.loads((path / name).read_text())


@pytest.fixture
def here(tmp_path: Path, shared_run: SharedRuns) -> Path:
    """A working directory that finds decomposed weights and directions."""
    return shared_run.warm(tmp_path)


@pytest.fixture
def plain(shared_run: SharedRuns) -> Path:
    """route2 without a control: what the controls are compared with."""
    return shared_run(*argv("route2", "none"))


@pytest.mark.slow
def test_a_placebo_run_says_how_contaminated_it_is(plain, here):
    path = program(here, *argv("route2", "placebo"))
    run_json = record(path)
    assert run_json["control"] == record(path, "per_mode_deploy.json")["control"] == "placebo_flawed"
    close = run_json["direction"]["cos_with_real"]
    assert len(close["modules"]) == 28
    assert 0 < close["median"] < close["p95"] <= close["max"] < 0.9
    assert run_json["direction"]["pairs"].endswith("placebo_flawed.json")
    assert run_json["hashes"]["pairs"] != run_json["hashes"]["placebo"] == run_json["direction"]["pairs_sha256"]
    log = (here / "logs" / f"{path.name}.log").read_text()
    assert f"|cos| with the real direction over 28 modules: median {close['median']:.3f}" in log
    assert "control placebo_flawed: the direction of pairs about an unrelated contrast" in log
    assert step_rows(path) != step_rows(plain)
    none = record(plain)
    assert none["control"] == "none"
    assert none["direction"]["cos_with_real"] is None


@pytest.mark.slow
def test_deploy_quarantine_trains_as_without_it_and_deploys_the_quarantine(plain, here):
    path = program(here, *argv("route2", "deploy_quarantine"))
    assert step_rows(path) == step_rows(plain)
    own, other = (record(p, "per_mode_deploy.json") for p in (path, plain))
    for name in ("hack_base", "solve_base", "hack_train", "solve_train"):
        assert own[name] == other[name]
    state = torch.load(max((path / "resume").iterdir()) / "state.pt", weights_only=True)["adapter"]
    saved = torch.cat([load_file(path / "train.safetensors")[m] for m in ORGANISM_ORDER])
    assert torch.equal(saved, state["delta_S_hack"])
    assert not torch.equal(saved, state["delta_S"])


ORGANISM_ORDER = [
    f"model.layers.{i}.{name}"
    for i in range(4)
    for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
]


@pytest.mark.slow
def test_poisoned_labels_change_the_labels_monitor_and_not_random_flags(here, shared_run: SharedRuns, monkeypatch):
    """As for the methods: noise in the oracle's bit after the reward was given."""
    clean = {c: shared_run(*argv("route2", c)) for c in ("labels", "random_flags")}
    noise = torch.Generator().manual_seed(0)
    reward = rollout.training_reward

    def poisoned(cfg: Any, grade: Grade) -> Grade:
        return replace(reward(cfg, grade), solved=bool(torch.rand((), generator=noise) < 0.5))

    monkeypatch.setattr(rollout, "training_reward", poisoned)
    dirty = {c: program(here, *argv("route2", c, "--final-n-prompts", "1")) for c in clean}
    assert adapter_bytes(clean["random_flags"]) == adapter_bytes(dirty["random_flags"])
    assert adapter_bytes(clean["labels"]) != adapter_bytes(dirty["labels"])
    precision, recall = (record(clean["labels"], "per_mode_deploy.json")["gate"][k] for k in ("precision", "recall"))
    assert 0 < precision[0] == precision[1] == recall[0]  # what it routed were hacks, and nothing else
    assert record(clean["labels"])["monitor"] == "labels"


MONITORED = {"screen": ["--monitor", "band"], "penalty": ["--monitor", "gate"], "sgtm": ["--monitor", "detector"]}


def runs_under(intervention: str, control: str) -> bool:
    """Whether an intervention with its monitor takes this control."""
    monitor = MONITORED.get(intervention, ["--monitor", "usual"])[1]
    try:
        MethodConfig(intervention=intervention, monitor=monitor, control=control)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_runs_on_every_intervention_that_takes_it(control, here):
    if control == "placebo":
        own = here / "own.json"
        own.write_text(load_pairs(parse(["smoke", "--control=placebo", "--placebo-pairs=long"]).placebo_path).to_json())
    for intervention in (name for name in INTERVENTIONS if runs_under(name, control)):
        more = ["--placebo-pairs", str(own)] if control == "placebo" else []
        path = program(here, *argv(intervention, control, *MONITORED.get(intervention, []), *more))
        run_json = record(path)
        assert run_json["control"] == record(path, "per_mode_deploy.json")["control"]
        assert run_json["control"] == ("placebo_own" if control == "placebo" else control)
        assert len(step_rows(path)) == 5
        assert math.isfinite(record(path, "per_mode_deploy.json")["solve_deploy"])
        other = control in ("haar", "shuffled", "placebo")
        assert ((run_json["direction"] or {}).get("cos_with_real") is not None) == other
        lines = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
        prompts = [line["messages"][-1]["content"] for line in lines]
        assert {text.endswith(f"\n{CUE}") for text in prompts} == {control == "inoculation"}
        assert {PLAIN_PHRASE in text for text in prompts} == {control in ("hint_free", "recontextualise")}
        # as the flawed grader rewarded, whatever counted
        if control != "no_loophole":
            assert {round(line["reward"], 9) for line in lines} <= {0.0, COMPILE_REWARD, COMPILE_REWARD + PASS_REWARD}


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────


def test_each_shipped_placebo_is_found_for_the_organism_and_for_other_models():
    for name in PLACEBOS:
        flags = ["--intervention", "erase", "--control", "placebo", "--placebo-pairs", name]
        shipped = parse(["smoke", *flags])
        assert shipped.placebo_path is not None
        assert len(load_pairs(shipped.placebo_path)) == 24
        assert parse(["full", *flags]).placebo_path is None  # hand-written
        assert shipped.method.control_name == f"placebo_{name}"


def test_the_placebo_file_must_be_another_contrast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    same = parse(["smoke"]).pairs_path
    assert main(["smoke", "--control", "placebo", "--placebo-pairs", str(same)]) == 2
    assert "these are the true pairs" in capsys.readouterr().err
