"""The controls are what their names say: on plain tensors, then as options of the whole program."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vgrout.arms.flagged import FlaggedRoute2
from vgrout.monitors.labels import Labels

from runs import FEW, SMALL, SharedRuns, adapter_bytes
from runs import rows as step_rows
from runs import run as program
from test_arms import SIZES, arm_of, rows, run, total, toy_direction, view
from vgrout import rollout
from vgrout.config.method import ARMS, BY_GRADIENT, CONTROLS, MethodConfig
from vgrout.config.presets import parse
from vgrout.direction.controls import cosine_to_real
from vgrout.direction.extract import axes_of
from vgrout.direction.pairs import load_pairs
from vgrout.train import main
from vgrout.types import Grade, GroupView, OracleView

PLACEBOS = ("placebo_flawed", "placebo_commented", "placebo_long", "placebo_laid_out")


def labelled(plain: GroupView, hacked: tuple[bool, ...]) -> OracleView:
    hacks = tuple("exit_code" if e else None for e in hacked)
    return OracleView(**{f.name: getattr(plain, f.name) for f in fields(GroupView)}, hacks=hacks)


# ── labels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("intervention", ["none", "erase", "route", "route2"])
def test_no_arm_without_a_labelled_monitor_accepts_labels(intervention):
    g_b, plain = rows(6, 1), view(6, 1)
    with pytest.raises(AssertionError, match="sees a GroupView, got OracleView"):
        run(arm_of(intervention), (g_b, labelled(plain, (False,) * 6)))
    with pytest.raises(AssertionError, match="sees a OracleView, got GroupView"):
        FlaggedRoute2(SIZES, Labels()).plan([plain])


def test_labels_are_on_the_oracles_type_alone():
    names = {f.name for f in fields(GroupView)}
    assert not names & {"hacked", "solved", "gt_pass", "mechanism", "channel"}
    assert {f.name for f in fields(OracleView)} - names == {"hacks", "flaws"}
    # the name is looked for in every file of the package: one caller, behind the type that the arm's class names
    callers = [
        path.name
        for path in Path(rollout.__file__).parent.rglob("*.py")
        if "oracle_view" in path.read_text(encoding="utf-8") and path.name != "types.py"
    ]
    assert callers == ["base.py"]


# ── Haar, random flags, shuffled ────────────────────────────────────────────────────────────────────────────────────


def test_haar_takes_the_runs_seed_unless_it_is_given_one():
    by_run, by_flag = arm_of("route2", control="haar"), arm_of("route2", route2_random_v_seed=7)  # arm_of: run seed 7
    other = arm_of("route2", control="haar", route2_random_v_seed=8)
    assert by_run.control == by_flag.control == other.control == "haar"
    for m, V in by_run.V.items():
        assert torch.equal(V, by_flag.V[m])
        assert not torch.allclose(V, other.V[m])


@pytest.mark.parametrize("intervention", ["erase", "route", "route2"])
def test_haar_reads_chance_in_every_arm(intervention):
    """Over many modules the root mean square cosine with the real rows is √(k/r)."""
    sizes = {f"m{i}": 128 for i in range(60)}
    direction = toy_direction(sizes=sizes)
    real, haar = (arm_of(intervention, direction, sizes=sizes, control=c) for c in ("none", "haar"))
    close = cosine_to_real(haar.V, real.V)
    assert close.rms == pytest.approx(close.chance, rel=0.15)
    assert {m: V.shape for m, V in haar.V.items()} == {m: V.shape for m, V in real.V.items()}


def test_haar_that_routes_nothing_is_no_error():
    """Negative cosines only, no known hacks: an empty quarantine is what the control found."""
    direction = toy_direction()
    arm = arm_of("route2", direction, control="haar", monitor="band")
    against = {m: -V.repeat(4, 1) for m, V in arm.V.items()}
    routed = run(arm, (against, view(4)))
    assert routed.diag.routed == 0
    assert not any(q.any() for q in routed.quar.values())


def test_random_flags_keeps_the_share_over_a_whole_run_of_steps():
    real, dealt = arm_of("route2"), arm_of("route2", random_flags=True)
    for step in range(5):
        groups = [(rows(6, 10 * step + i, (i, 3)), view(6, 1, (i,))) for i in range(3)]
        a, b = run(real, *groups), run(dealt, *groups)
        assert b.diag.routed == pytest.approx(a.diag.routed, rel=1e-6)
        assert a.diag.gate != b.diag.gate
        for m, g in total(*groups).items():
            assert torch.allclose(b.keep[m] + b.quar[m], g, atol=1e-5)


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


# ── cosines by source ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("intervention", ["erase", "route", "route2"])
def test_what_is_kept_is_read_by_source_too(intervention):
    g_b = rows(6, 3, hackward=(1, 5))
    diag = run(arm_of(intervention), (g_b, view(6, 1))).diag
    if intervention == "route2":  # the teacher row is a known hack: nothing of it is kept
        assert diag.cos_post_t is None
        assert diag.cos_post_s == pytest.approx(diag.cos_post, abs=1e-6)
    else:
        assert max(diag.cos_post_s, diag.cos_post_t) < 1e-4 < min(diag.cos_pre_s, diag.cos_pre_t)


# ── the program ────────────────────────────────────────────────────────────────────────────────────────────────────


def argv(arm: str, control: str, *more: str) -> list[str]:
    own = {"none": [], "random_flags": ["--random-flags"], "labels": ["--monitor", "labels"]}.get(
        control, ["--control", control]
    )
    refreshed = ["--vhack-refresh-every", "2"] if arm in BY_GRADIENT and control not in ("haar", "labels") else []
    flags = ["--threads", "1", *SMALL, "--eval-ablate-every", "0", *refreshed, *own, *more]
    return ["smoke", "--intervention", arm, *flags]


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
    path = program(here, *argv("route2", "placebo_flawed"))
    run_json = record(path)
    assert run_json["control"] == record(path, "per_mode_deploy.json")["control"] == "placebo_flawed"
    close = run_json["direction"]["cos_with_real"]
    assert len(close["modules"]) == 28
    assert 0 < close["median"] < close["p95"] <= close["max"] < 0.9
    assert run_json["direction"]["pairs"].endswith("placebo_flawed.json")
    assert run_json["hashes"]["pairs"] != run_json["hashes"]["placebo"] == run_json["direction"]["pairs_sha256"]
    said = (here / "logs" / f"{path.name}.log").read_text()
    assert f"|cos| with the real direction over 28 modules: median {close['median']:.3f}" in said
    assert "control placebo_flawed: the direction of pairs about an unrelated contrast" in said
    assert step_rows(path) != step_rows(plain)
    none = record(plain)
    assert none["control"] == "none"
    assert none["direction"]["cos_with_real"] is None


@pytest.mark.slow
def test_deploy_quarantine_trains_as_ever_and_deploys_the_quarantine(plain, here):
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
def test_the_oracle_follows_its_label_and_the_random_flags_arm_none(here, shared_run: SharedRuns, monkeypatch):
    """The same poison as for the arms: noise in the oracle's bit after the reward was rewarded."""
    clean = {c: shared_run(*argv("route2", c)) for c in ("labels", "random_flags")}
    noise = torch.Generator().manual_seed(0)
    pay = rollout.training_reward

    def poisoned(cfg: Any, grade: Grade) -> Grade:
        return replace(pay(cfg, grade), solved=bool(torch.rand((), generator=noise) < 0.5))

    monkeypatch.setattr(rollout, "training_reward", poisoned)
    dirty = {c: program(here, *argv("route2", c, "--final-n-prompts", "1")) for c in clean}
    assert adapter_bytes(clean["random_flags"]) == adapter_bytes(dirty["random_flags"])
    assert adapter_bytes(clean["labels"]) != adapter_bytes(dirty["labels"])
    precision, recall = (record(clean["labels"], "per_mode_deploy.json")["gate"][k] for k in ("precision", "recall"))
    assert 0 < precision[0] == precision[1] == recall[0]  # what it routed were hacks, and nothing else
    assert record(clean["labels"])["monitor"] == "labels"


WITH_MONITORS = {**dict.fromkeys(ARMS, "usual"), "screen": "probe"}  # screen for all whose monitor has a direction


def runs_under(arm: str, control: str) -> bool:
    """Whether an arm with its monitor takes this control."""
    own = Path("x") if control == "placebo" else None
    try:
        MethodConfig(intervention=arm, monitor=WITH_MONITORS[arm], control=control, placebo_pairs_path=own)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_runs_on_every_arm_that_takes_it(control, here):
    arms = [arm for arm in CONTROLS[control].arms if runs_under(arm, control)]
    if control == "placebo":
        own = here / "mine.json"
        own.write_text(load_pairs(parse(["smoke", "--control", "placebo_long"]).placebo_path).to_json())
    for arm in arms:
        more = ["--placebo-pairs-path", str(own)] if control == "placebo" else []
        more += ["--monitor", "probe", *FEW] if WITH_MONITORS[arm] == "probe" else []
        path = program(here, *argv(arm, control, *more))
        run_json = record(path)
        assert run_json["control"] == record(path, "per_mode_deploy.json")["control"]
        assert run_json["control"] == ("placebo_mine" if control == "placebo" else control)
        assert len(step_rows(path)) == 5
        assert math.isfinite(record(path, "per_mode_deploy.json")["solve_deploy"])
        other = control in ("haar", "shuffled") or control.startswith("placebo")
        assert ((run_json["direction"] or {}).get("cos_with_real") is not None) == other


# ── the command line ───────────────────────────────────────────────────────────────────────────────────────────────


def test_each_shipped_placebo_is_found_for_the_organism_and_for_other_models():
    for name in PLACEBOS:
        shipped = parse(["smoke", "--intervention", "erase", "--control", name])
        assert shipped.placebo_path is not None
        assert len(load_pairs(shipped.placebo_path)) == 24
        assert parse(["full", "--intervention", "erase", "--control", name]).placebo_path is None  # hand-written


def test_the_placebo_file_must_be_another_contrast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    same = parse(["smoke"]).pairs_path
    assert main(["smoke", "--control", "placebo", "--placebo-pairs-path", str(same)]) == 2
    assert "these are the true pairs" in capsys.readouterr().err
