"""The settings of methods in groups. A class of `vgrout.method` names those that it reads; `MethodConfig` has them all.

A setting whose best value depends on the intervention is None: the intervention's class says what that means.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vgrout.config.checks import setting
from vgrout.environments import CODE_FLAWS


@dataclass(frozen=True)
class DirectionSettings:
    """Of a direction in gradients, whatever is done along it."""

    v_hack_path: Path | None = None
    """Direction file to load; none: found by pair set, or extracted on the spot."""
    vhack_refresh_every: int | None = setting(None, low=0, high=10_000_000)
    """Re-extract on the current model every N steps; 0: frozen; none: 0 under route2, else 5."""
    route2_random_v_seed: int | None = setting(None, free="any whole number is a seed")
    """Seed of the Haar control, which it switches on (where there is a direction); none: the run's own seed."""
    vhack_pairs_path: Path | None = None
    """Contrastive pairs (JSON), or a folder with a file for each flaw, FLAW.json: at most 24 in all, as many by each;
    none: the preset's."""


@dataclass(frozen=True)
class SurgerySettings:
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
class EraseSettings:
    """Of erase."""

    preserve_magnitude: bool = True
    """erase: rescale what is kept to the norm of the whole (bounded ×10). Not route, whose two parts add up to it."""
    project_overshoot: float = setting(1.0, low=0, high=10)
    """erase: how much of the hack-ward part is removed. Not route, which quarantines as much as it removes."""


@dataclass(frozen=True)
class VoteSettings:
    """Of monitors that read gradients."""

    gate_vote: Literal["module", "rollout"] | None = None
    """gate, band: module: each module decides about its part of a rollout's gradient · rollout: one decision for the
    whole rollout, by the majority (band: the mean) of the modules; none: rollout."""


@dataclass(frozen=True)
class GateSettings:
    """Of gate."""

    gate_modules: Literal["all", "apart"] | None = None
    """gate: modules with a threshold: all · apart: those where known hacks lie above the rest, since in the others the
    midpoint lies below most of the rest, which would be flagged; none: apart."""
    known_hacks_teacher_only: bool = False
    """gate: known hacks are teacher rows alone, not also student rows that the weak detector flags."""


@dataclass(frozen=True)
class LabelsSettings:
    """Of labels."""

    known_modes: str = setting("", words=CODE_FLAWS, word="flaw", later=True, suffix="knows-")
    """labels: comma list of the flaws that it knows; to the others it is blind. '': all of them."""


@dataclass(frozen=True)
class SeedSettings:
    """Of monitors that learn to read from what another one flags."""

    seed_monitor: str = "detector"
    """online_probe: who flags what it cannot read yet; it learns from what is flagged."""


@dataclass(frozen=True)
class ReferencesSettings:
    """Of monitors that compare with answers known to be right."""

    known_correct: Path | None = None
    """Correct solutions in unusual styles (JSON of prompt, completion), for monitors that compare with them; none: the
    preset's."""


@dataclass(frozen=True)
class QuantileSettings:
    """Of monitors that score answers against a threshold."""

    monitor_quantile: float = setting(0.8, low=0.5, high=1)
    """online_probe: flagged above this quantile of known correct answers held back."""


@dataclass(frozen=True)
class QuarantineSettings:
    """Of whatever has a quarantine."""

    rollout_ablate_frac: float | None = setting(None, low=0, high=1)
    """Share of student rows sampled from the deployed model; none: all under route2, else 0."""


@dataclass(frozen=True)
class PlaceSettings:
    """Of an intervention that splits rollouts between the two vectors."""

    quarantine: str | None = setting(
        None,
        form=r"shared|block:(last|-?([1-9]\d{0,2}|1000))",
        should="be shared, block:last, block:N or block:-N, N from 1 to 1000",
    )
    """Where δS_hack lives. shared: in every module's basis, beside δS · block:N: in the modules of block N alone, and
    δS in the others; N from 1, or counted back from block:last, which is block:-1; none: block:-2."""
    rebaseline: bool | None = None
    """Advantages of kept rows are recomputed among them (gate: of rows that are no known hacks); none: yes."""


@dataclass(frozen=True)
class PenaltySettings:
    """Of penalty."""

    penalty: float | None = setting(None, low=0, high=1e6, suffix="by")
    """penalty: what a flagged answer loses; none: down to the reward of code that only compiles."""


@dataclass(frozen=True)
class PlaceboSettings:
    """Of placebo."""

    placebo_pairs: str = "flawed"
    """placebo: pairs about an unrelated contrast: flawed, commented, long or laid_out, or a file (JSON)."""
