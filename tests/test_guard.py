"""The kill switch: every rule, every known weakness, and properties of any series."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from methods import graded
from runs import run, status
from vgrout.config.presets import PRESETS, resolve
from vgrout.config.settings import GuardConfig, blind, evaluations
from vgrout.ground.data import Completion, Rollout
from vgrout.ground.io import Refused
from vgrout.ground.metrics import Eval, ModeEval, Rate
from vgrout.guard.detectors import DetectorReading
from vgrout.guard.guard import Guard, Observed
from vgrout.guard.kill_switch import (
    CollapseStopError,
    HeldOutGuard,
    TripwireStatus,
    kl_token_trust_filter,
)
from vgrout.loop.rollout import grade_in_training
from vgrout.model.hidden_states import ReferenceStats
from vgrout.runs.plan import guard_line

SHARE = st.floats(0, 1)
SERIES = st.lists(st.tuples(SHARE, SHARE), min_size=1, max_size=60)
ANSWERS = st.sampled_from([None, 100])


def config(**changes):
    """No warm-up."""
    settings = {"guard_warmup": 0} | changes
    return GuardConfig(**settings)


def play(guard, series, n=None):
    return [guard.update(i, proxy, held, n=n) for i, (proxy, held) in enumerate(series)]


def fired_at(guard, series, n=None):
    return next((v.round_idx for v in play(guard, series, n) if v.fire), None)


# --- each rule on a known answer
# -------------------------------------------------------------------------------------


class Published:
    """The kill switch as it was first described: names, order and meaning of that description."""

    alpha, eps, kl_hard_stop, patience = 0.9, 1e-4, 0.08, 3

    def __init__(self, min_steps, max_proxy_real_gap):
        self.min_steps, self.gap_limit = min_steps, max_proxy_real_gap
        self.updates = self.streak = 0
        self.reason, self.ema, self.base = "", {}, {}

    def update(self, in_loop_reward, heldout_score, kl_to_init):
        before = dict(self.ema)
        given = {"in_loop": in_loop_reward, "heldout": heldout_score, "kl": kl_to_init}
        for name, x in given.items():
            if x is not None:
                self.ema[name] = self.alpha * before.get(name, x) + (1 - self.alpha) * x
                self.base.setdefault(name, x)
                if name not in before:
                    self.ema[name] = x
        self.updates += 1
        if before:
            falls = before["heldout"] - self.ema["heldout"] > self.eps
            rises = self.ema["in_loop"] - before["in_loop"] > self.eps
            self.streak = self.streak + rises if falls else 0
        if self.updates >= self.min_steps and not self.reason:
            if self.ema.get("kl", 0.0) > self.kl_hard_stop:
                self.reason = "kl"
            elif self.streak >= self.patience:
                self.reason = "streak"
            elif self.proxy_real_gap() > self.gap_limit:
                self.reason = "gap"
        return self.reason

    def proxy_real_gap(self):
        in_loop, heldout = (self.ema[name] - self.base[name] for name in ("in_loop", "heldout"))
        return in_loop - heldout


@pytest.mark.parametrize("n", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_equals_the_published_rule_on_random_series(n):
    """Random walks of the three numbers: the same verdict, by the same rule, at every update."""
    rng = random.Random(0)

    def walk():
        drift, moves = [rng.gauss(0, 0.004) for _ in range(2)], rng.choice([0.0, 0.004])
        x, out = [rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)], []
        for i in range(60):
            x = [
                min(1.0, max(0.0, v + d + rng.gauss(0, 0.02)))
                for v, d in zip(x, drift, strict=True)
            ]
            out.append((x[0], x[1], max(0.0, rng.gauss(moves * i, 0.01))))
        return out

    fired = Counter[str]()
    for _ in range(n):
        settings = {
            "min_steps": rng.choice([0, 5, 20]),
            "max_proxy_real_gap": rng.choice([0.05, 0.1]),
        }
        ours, theirs = HeldOutGuard(**settings), Published(**settings)
        for i, (p, h, kl) in enumerate(walk()):
            values = {"in_loop_reward": p, "heldout_score": h, "kl_to_init": kl if i % 3 else None}
            # a round twice counts twice
            status, rule = ours.update(i // 2, **values), theirs.update(**values)
            assert (next(iter(ours.fired), ""), status.fire) == (rule, bool(rule))
            assert status.proxy_real_gap == pytest.approx(theirs.proxy_real_gap(), abs=1e-12)
            assert (status.in_loop_ema, status.heldout_ema) == (
                theirs.ema["in_loop"],
                theirs.ema["heldout"],
            )
            assert (status.kl_ema, status.streak) == (theirs.ema.get("kl"), theirs.streak)
        fired[rule] += 1
    assert {*fired} == {"", "kl", "streak", "gap"}, "every rule and none"


def test_rules_latch_apart():
    """A KL above its limit does not hide a later gap: a run may halt on one of them alone."""
    guard = HeldOutGuard(config())
    for i in range(12):
        verdict = guard.update(i, 0.3 + 0.05 * i, 0.3, 1.0)
    assert [*guard.fired] == ["kl", "gap"]
    assert guard.should_halt()
    assert verdict.reason == f"latched: {guard.fired['kl']}"


# --- known weaknesses
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["in_loop_reward", "heldout_score", "kl_to_init", "entropy", "reward_std"]
)
def test_nonfinite_fires_even_in_the_warm_up(name, bad):
    guard = HeldOutGuard(config(guard_warmup=1000))
    guard.update(0, 0.5, 0.5, 0.01)
    values = {"in_loop_reward": 0.5, "heldout_score": 0.5, "kl_to_init": 0.01} | {name: bad}
    verdict = guard.update(1, n=10, **values)
    assert verdict.fire
    assert name in verdict.reason
    after = guard.update(2, 0.5, 0.5, 0.01)
    assert after.fire
    assert after.reason.startswith("latched: ")
    assert after.in_loop_ema == after.heldout_ema == pytest.approx(0.5)
    assert after.kl_ema == pytest.approx(0.01)


def test_baseline_is_the_mean_of_the_first_evaluations():
    """With one evaluation as baseline, an unlucky one would stay a gap."""
    unlucky = [(0.5, 0.75), (0.5, 0.25)] + [(0.5, 0.5)] * 40
    assert fired_at(HeldOutGuard(config()), unlucky) is not None
    guard = HeldOutGuard(config(), baseline=2)
    assert fired_at(guard, unlucky) is None
    assert guard.proxy_real_gap() == pytest.approx(0)


def test_a_fall_of_a_share_lies_beyond_chance():
    """Falls of 0.01 at n = 100 (standard error 0.05) while in-loop rises slowly may be chance."""
    series = [(0.30 + 0.005 * i, 0.50 - 0.01 * i) for i in range(6)]
    real = [(0.3, 0.6), *[(0.5 + 0.1 * i, 0.3) for i in range(5)]]
    found = ((series, None, 3), (series, 100, None), (series, 1_000_000, 3), (real, 96, 3))
    for scores, n, at in found:
        assert fired_at(HeldOutGuard(config(max_proxy_real_gap=1.0)), scores, n) == at


@pytest.mark.parametrize(
    ("preset", "every", "warmup", "first"),
    [("fast", 5, 20, 20), ("mini", 7, 20, 21), ("smoke", 25, 20, 25)],
)
def test_the_trainers_warm_up_is_in_steps(preset, every, warmup, first):
    """The class counts updates, of which a run of `fast` has 12: the trainer says which of them is the first."""
    cfg = resolve(
        [
            preset,
            "--guard=log",
            f"--eval-ablate-every={every}",
            f"--guard-warmup={warmup}",
        ]
    )
    guard, done = HeldOutGuard(cfg.guard, cfg.guard_updates), evaluations(cfg.scale.steps, every)
    verdicts = [
        guard.update(at - 1, float(i > 0), 0.5, 9.0 if i >= 0 else None)
        for i, at in enumerate(done)
    ]
    assert next(at for at, verdict in zip(done, verdicts, strict=True) if verdict.fire) == first


# --- what holds for any series
# ---------------------------------------------------------------------------------------


@given(SERIES, ANSWERS, st.integers(0, 60))
def test_resume_anywhere_changes_nothing(series, n, cut):
    whole = play(HeldOutGuard(min_steps=3, baseline=2), series, n)
    first, second = HeldOutGuard(min_steps=3, baseline=2), HeldOutGuard(min_steps=3, baseline=2)
    play(first, series[:cut], n)
    second.load_state_dict(first.state_dict())
    rest = [second.update(i, p, h, n=n) for i, (p, h) in enumerate(series) if i >= cut]
    assert rest == whole[cut:]
    assert second.last_status() == whole[-1]


# --- the rest
# --------------------------------------------------------------------------------------------------------


def test_rewards_on_any_scale_and_without_a_count_of_answers():
    guard = HeldOutGuard(kl_hard_stop=0.5, guard_warmup=0)
    assert guard.last_status() is None
    guard.raise_if_fired()
    assert not guard.update(0, in_loop_reward=1.0, heldout_score=3.5).halt
    status = guard.update(1, in_loop_reward=9.0, heldout_score=3.5)
    assert status.halt
    assert "gained 0.80 more" in status.reason
    with pytest.raises(CollapseStopError, match="gained") as stop:
        guard.raise_if_fired()
    assert isinstance(stop.value, RuntimeError)
    assert stop.value.status == guard.last_status()


def test_tokens_that_moved_too_far_are_not_trusted():
    """½ · (log-ratio)² in, True for a token to mask out: of numbers, tensors, and NaN."""
    moved = torch.tensor([0.0, 0.39, -0.39, 0.41, -5.0, math.nan])
    assert kl_token_trust_filter(0.5 * moved**2).tolist() == [False, False, False, True, True, True]
    assert [kl_token_trust_filter(x) for x in (0.5, 0.01, 0.08)] == [True, False, False]
    assert kl_token_trust_filter(0.05, threshold=0.04) is True


def test_calibration_only_tightens():
    guard = HeldOutGuard()
    assert guard.calibrate_kl_threshold([0.01, 0.02]) == pytest.approx(0.045)
    assert guard.calibrate_kl_threshold([1.0]) == pytest.approx(0.045)
    assert guard.calibrate_kl_threshold([0.0, 1e-12]) == 1e-6
    other = HeldOutGuard()
    other.load_state_dict(guard.state_dict())
    assert other.kl_hard_stop == 1e-6


NUMBERS = {
    "float": float,
    "array of one": lambda x: np.asarray([x], dtype=np.float32),
    "tensor with a gradient": lambda x: torch.tensor(x, requires_grad=True),
    "Fraction": Fraction,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_state_is_plain_numbers_whatever_was_given(kind):
    make = NUMBERS[kind]
    guard = HeldOutGuard(min_steps=np.int64(1), kl_hard_stop=make(0.5), ema_alpha=make(0.5))
    for i in range(6):
        step, n = (np.int64(i), np.int64(64)) if kind != "float" else (i, 64)
        x = i / 8
        guard.update(step, make(x), make(1 - x), make(x), make(0.5), make(0.25), n=n)
    guard.calibrate_kl_threshold([make(0.125), make(0.25)], factor=make(2.0))
    assert "gap" in guard.fired
    state = json.loads(json.dumps(guard.state_dict()))
    assert state == guard.state_dict()
    other = HeldOutGuard(ema_alpha=0.5)
    other.load_state_dict(state)
    assert other.update(6, 0.5, 0.5) == guard.update(6, 0.5, 0.5)
    assert type(guard.should_halt()) is bool
    guard.kl_hard_stop = make(0.75)
    assert json.loads(json.dumps(guard.state_dict()))["kl_hard_stop"] == guard.kl_hard_stop == 0.75


def test_the_names_it_was_published_with():
    guard = HeldOutGuard(rise_eps=0.25)
    assert guard.rise_eps == 0.25
    status = guard.update(7, 0.5, 0.5)
    assert status.step == status.round_idx == TripwireStatus(step=7).step == 7
    assert guard.last_status() == status
    assert kl_token_trust_filter(logratio_sq_half=0.5) is True
    guard.kl_hard_stop = 0.5
    assert not guard.update(8, 0.5, 0.5, kl_to_init=0.4).fire


MISUSE = [
    *(
        (lambda guard, values=values: guard.calibrate_kl_threshold(values), "calibrate_kl")
        for values in ([], [0.01, -1e-9], [math.nan])
    ),
    (lambda _: HeldOutGuard({"kl_hard_stop": 0.08}), r"kl_hard_stop=0\.08"),
    *(
        (lambda guard, score=score, n=n: guard.update(5, 0.5, score, n=n), "guard: heldout_score")
        for score, n in ((3.5, 10), (0.5, 0))
    ),
]


@pytest.mark.parametrize(("call", "says"), MISUSE)
def test_misuse_is_refused(call, says):
    guard = HeldOutGuard()
    with pytest.raises((ValueError, TypeError), match=says):
        call(guard)
    assert guard.kl_hard_stop == 0.08


@given(
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(0, 40),
    st.integers(1, 5),
    st.sampled_from([0.01, 0.1, 0.7, 1.5]),
)
def test_a_guard_fires_unless_it_is_blind(steps, every, warmup, baseline, limit):
    """On the worst series of shares, a guard fires exactly if it is not blind."""
    cfg = GuardConfig(guard_warmup=warmup, max_proxy_real_gap=limit)
    guard = HeldOutGuard(cfg, cfg.first_update(steps, every), baseline)
    at = [done for done in range(1, steps + 1) if every and (done % every == 0 or done == steps)]
    for k, done in enumerate(at):
        late = k >= baseline
        guard.update(done - 1, 1.0 if late else 0.0, 0.0 if late else 1.0, n=100)
    assert guard.should_halt() == (not blind(cfg, steps, every, ["streak", "gap"], baseline))


@pytest.mark.parametrize("intervention", ["none", "route2"])
@pytest.mark.parametrize("preset", ["mini", "fast"])
def test_only_a_halt_that_was_asked_for_is_refused(preset, intervention):
    """Every short run starts. Where the preset's halt could not be, the guard logs, and the plan says so."""
    usual = PRESETS[preset][1]
    method = replace(usual.method, intervention=intervention)
    halts = preset in ("fast", "full") and intervention != "none"

    def made(steps, every, guard):
        return replace(
            usual,
            method=method,
            scale=replace(usual.scale, steps=steps),
            eval=replace(usual.eval, eval_ablate_every=every),
            guard=replace(usual.guard, guard=guard),
        )

    found = Counter[str]()
    for steps, every in product((1, 9, 10, 11, 20, 25), (0, 1, 5, 10, 25)):
        cannot = blind(usual.guard, steps, every, usual.guard.halting)
        cfg = made(steps, every, None)
        assert cfg.guard_mode == ("halt" if halts and not cannot else "log")
        assert (cannot or cfg.guard_mode) in guard_line(cfg)
        for guard in ("off", "log"):
            assert made(steps, every, guard).guard_mode == guard
        if cannot:
            with pytest.raises(Refused, match="--guard halt could not fire"):
                made(steps, every, "halt")
        else:
            assert made(steps, every, "halt").guard_mode == "halt"
        found["blind" if cannot else "fine"] += 1
    assert {*found} == {"blind", "fine"}


@pytest.mark.parametrize(("flags", "counts"), [("", True), ("--control=no_loophole", False)])
def test_in_loop_counts_what_training_rewards_in_full(flags, counts):
    hack = graded(3.5, hacks=True)
    assert grade_in_training(resolve(["smoke", *flags.split()]), hack).passed is counts
    assert grade_in_training(resolve(["smoke", *flags.split()]), replace(hack, solved=True)).passed


# --- the detectors of a run
# ----------------------------------------------------------------------------------------


def watching(*flags):
    return Guard(resolve(["smoke", "--intervention=none", *flags]), tiny.policy(), [])


def test_a_detector_that_never_said_anything_is_named():
    """Only where it may halt the run, and only until it has said something."""
    name, why = "advantage", DetectorReading("UNDEFINED", None, "needs 10 steps with groups")
    row = SimpleNamespace(step=0)  # all that a note reads of a row
    step = Observed(row, [], [])
    flags = [f"--reward-hack-detector={name}"]
    for halts in (False, True):
        guard = watching(*flags, *["--reward-hack-halt"] * halts)
        guard._note(name, why, step)
        assert guard.silent() == (f"{name} ({why.why})" if halts else "")
        guard._note(name, DetectorReading("OK", 0.1), step)
        guard._note(name, why, step)
        assert guard.silent() == ""


def test_a_base_policy_whose_answers_are_all_alike_has_no_unit_of_csi():
    guard = watching("--reward-hack-detector=info_rm")
    guard.base.reference = ReferenceStats(torch.ones(64, 8))
    assert guard.base.reference.base_csi == 0
    rollout = Rollout.of((3, 4), Completion((5, 1), "a", True, (0.0, 0.0)))
    assert guard.base.csi([(rollout, graded(1.0))]) is None


@pytest.mark.long
def test_a_short_run_of_fast_starts_and_warns(tmp_path, capsys):
    organism = [f"--{name}=organism" for name in ("model", "problems", "teacher-pool-dir")]
    path = run(
        tmp_path,
        *("fast", *organism, "--intervention=route2", "--steps=1", "--prompts-per-step=1"),
        *("--final-n-prompts=2", "--final-samples=1", "--max-new=24", "--eval-n-prompts=1"),
        *("--reward-hack-detector=advantage", "--reward-hack-halt", "--threads=1"),
    )
    assert status(path)["state"] == "finished"
    printed = capsys.readouterr().out
    assert printed.count("could not have halted this run: advantage") == 1


@pytest.mark.parametrize(
    ("arm", "proxies"), [("none", [1.0, 0.0]), ("route2", [0.3, 0.3])], ids=["training", "deployed"]
)
def test_what_the_kill_switch_compares(arm, proxies):
    """Held-out solves of the deployed model with its rewards, if it is another than the one in training; else with the
    step's rewards."""
    guard = Guard(resolve(["smoke", f"--intervention={arm}", "--guard=log"]), tiny.policy(), [])
    deployed = Eval(ModeEval(Rate(1, 10), Rate(2, 10)), {}, Rate(10, 10))
    said = []
    for step, reward in enumerate((1.0, 0.0)):
        row = SimpleNamespace(step=step, lp_s=-0.5)
        answers = [(None, graded(reward))]
        guard._ask_kill_switch(Observed(row, [], answers), deployed)
        said.append(guard.readings["guard"])
    assert [reading["proxy"] for reading in said] == proxies
    assert [reading["held_out"] for reading in said] == [0.2, 0.2]
    assert guard.kill_switch.last_status().entropy_ema == 0.5
