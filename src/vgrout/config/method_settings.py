"""The settings of a method in groups, each with those who read it: `config/method.py` says which run reads which."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vgrout.config.checks import setting
from vgrout.modes import MODES


@dataclass(frozen=True)
class Direction:
    """Of a direction in gradients, whatever is done along it."""

    v_hack_path: Path | None = None
    """Direction file to load; none: found by pair set, or extracted on the spot."""
    vhack_refresh_every: int = setting(5, low=0, high=10_000_000)
    """Re-extract on the current model every N steps; 0: frozen."""
    route2_random_v_seed: int | None = setting(None, free="any whole number is a seed")
    """Seed of the Haar control, which it switches on (where there is a direction); none: the run's own seed."""


@dataclass(frozen=True)
class Pairs:
    """Of whatever is built from contrastive pairs."""

    vhack_pairs_path: Path | None = None
    """Contrastive pairs (JSON); none: the preset's (--quarantine-start pairs: the known flaw's)."""


@dataclass(frozen=True)
class Axes:
    """Of surgery along several axes."""

    v_hack_extract_top_k: int = setting(12, low=1, high=256)
    """Axes per module kept at extraction."""
    v_hack_k: int = setting(5, low=1, high="v_hack_extract_top_k")
    """Axes per module used by erase and route."""
    v_hack_tau_axis: float = setting(0.0, low=0, high=1)
    """Axes with S_i/S_0 below this are zeroed at extraction."""
    v_hack_drop_bottom_frac: float = setting(0.25, low=0, high=0.99)
    """Noise floor: axes in this lowest quantile of singular values, over all modules, are dropped."""
    gate_mode: Literal["one_sided", "no_gate", "reverse"] = "one_sided"
    """Which part along the direction is taken: relu(c), c, or 2c."""


@dataclass(frozen=True)
class Removal:
    """Of erase."""

    preserve_magnitude: bool = True
    """erase: rescale what is kept to the norm of the whole (bounded ×10). Not route, whose two parts add up to it."""
    project_overshoot: float = setting(1.0, low=0, high=10)
    """erase: how much of the hack-ward part is removed. Not route, which quarantines as much as it removes."""


@dataclass(frozen=True)
class Vote:
    """Of monitors that read gradients."""

    gate_vote: Literal["module", "rollout"] = "module"
    """gate, band: each module decides about its part of a rollout's gradient · one decision for the whole rollout, by
    the majority (band: the mean) of the modules. screen and penalty act on whole rollouts: always the latter."""


@dataclass(frozen=True)
class Threshold:
    """Of gate."""

    gate_modules: Literal["all", "apart"] = "all"
    """gate: modules with a threshold: all · those where known hacks lie above the rest. In the others the midpoint
    lies below most of the rest, which would be flagged."""
    known_hacks_teacher_only: bool = False
    """gate: known hacks are teacher rows alone, not also student rows that the weak detector flags."""


@dataclass(frozen=True)
class Labels:
    """Of labels."""

    label_accuracy: float = setting(1.0, low=0, high=1, suffix="acc")
    """labels: share of answers that the monitor labels rightly; its errors are drawn at random."""
    label_false_positives: float = setting(0.0, low=0, high=1, suffix="fp")
    """labels: share of the answers that are no hacks that it flags all the same, drawn at random."""
    known_modes: str = setting("", words=MODES, word="mode", suffix="knows-")
    """labels: comma list of the flaws that it knows; to the others it is blind. '': all of them."""


@dataclass(frozen=True)
class Seed:
    """Of monitors that learn to read from what another one flags."""

    seed_monitor: str = "detector"  # legal: `seeds` of config/method.py
    """quarantine, online_probe, fingerprint: who flags what it cannot read yet; it learns from what is flagged."""


@dataclass(frozen=True)
class Reading:
    """Of monitors that score texts against a threshold."""

    monitor_quantile: float = setting(0.9, low=0.5, high=1)
    """Monitors that score texts: flagged above this quantile of the base's rewarded answers, and of known correct
    answers held back."""


@dataclass(frozen=True)
class References:
    """Of monitors that compare with answers known to be right."""

    known_correct: Path | None = None
    """Correct solutions in unusual styles (JSON of prompt, completion), for monitors that compare with them; none: the
    preset's."""


@dataclass(frozen=True)
class Calibration:
    """Of monitors for which the base answers some training prompts first."""

    monitor_threshold: Literal["both", "known_correct"] = "both"
    """… the larger of the two quantiles · that of the known correct answers alone, where the base itself may hack:
    its rewarded answers are no measure of honesty then."""
    monitor_prompts: int = setting(200, low=4, high=1_000_000)
    """… training prompts that the base answers twice before training."""


@dataclass(frozen=True)
class QuarantineReads:
    """Of quarantine, the monitor."""

    quarantine_threshold: float | None = setting(None, low=-100, high=100)
    """quarantine: an answer is flagged above this score, (log π_ε − log π_0) / (ε |log π_0|); None: above the
    --monitor-quantile of known correct answers, drawn and read anew in every step."""
    quarantine_diet: Literal["flagged", "seeded", "random"] = setting("flagged", suffix="diet-")
    """quarantine: what it is trained on: what is flagged · what the seed monitor flags alone · as many rewarded answers
    of the same groups at random (a control)."""
    quarantine_start: Literal["zero", "pairs", "random"] = setting("zero", suffix="start-")
    """quarantine: what it is before it has learnt anything: nothing · five steps along what tells hack from clean in
    contrastive pairs, so that it reads from the first step on · five steps along random signs (a control)."""


@dataclass(frozen=True)
class Diet:
    """Of probes, online_probe and fingerprint."""

    probe_diet: Literal["seeded", "random"] = setting("seeded", suffix="diet-")
    """online_probe, fingerprint: what it is fitted on, beside known correct answers: what the seed monitor flags · as
    many rewarded answers of the same groups at random (a control)."""


@dataclass(frozen=True)
class Probe:
    """Of online_probe."""

    probe_layer: int | None = setting(None, low=1, high=1000)
    """online_probe: blocks of the frozen base after which its states are read; none: half of its depth."""


@dataclass(frozen=True)
class Quarantine:
    """Of whatever has a quarantine."""

    rollout_ablate_frac: float | None = setting(None, low=0, high=1)
    """Share of student rows sampled from the deployed model; none: all under monitor quarantine, 0.5 for sgtm, else
    0."""


@dataclass(frozen=True)
class Place:
    """Of a quarantine that may lie elsewhere."""

    quarantine: str = "shared"
    """Where δS_hack lives. shared: in every module's basis, beside δS · block:N: in the modules of block N alone, and
    δS in the others; N from 1, or counted back from block:last, which is block:-1."""


@dataclass(frozen=True)
class Baseline:
    """Of interventions that split rows between the two vectors."""

    rebaseline: bool = False
    """Advantages of kept rows are recomputed among them (gate: of rows that are no known hacks)."""


@dataclass(frozen=True)
class Penalised:
    """Of penalty."""

    penalty: float | None = setting(None, low=0, high=1e6, suffix="by")
    """penalty: what a flagged answer loses; none: down to the reward of code that only compiles."""


@dataclass(frozen=True)
class Invitation:
    """Of inoculation."""

    inoculation_prompt: str = setting("", suffix="own")
    """inoculation: what closes every training prompt; '': the organism's cue, elsewhere a sentence of ours."""


@dataclass(frozen=True)
class Placebo:
    """Of placebo."""

    placebo_pairs: str = "flawed"
    """placebo: pairs about an unrelated contrast: flawed, commented, long or laid_out, or a file (JSON)."""
