"""The configuration of a run, `Config`: frozen groups with flat flags, what is derived from several of them, and what
may not come together.

Torch-free, so that a wrong flag is refused in a fraction of a second. `__post_init__` only checks and never changes:
tyro may run it twice. Derived numbers are properties.
"""

import json
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from vgrout.config.checks import flag, listed, require_words
from vgrout.config.method import MethodConfig, require_judge
from vgrout.config.settings import (
    BENCHMARK_TEST,
    BENCHMARK_TRAIN,
    DetectorConfig,
    EnvConfig,
    EvalConfig,
    GuardConfig,
    LossConfig,
    OptConfig,
    RunConfig,
    Sampling,
    ScaleConfig,
    blind,
    evaluations,
)
from vgrout.config.specs import CLASSES, MONITORS, admit
from vgrout.config.world_names import CODE_FLAWS, OF_ORGANISMS, ORGANISM
from vgrout.ground import embedded
from vgrout.ground.io import Json, Refused, refuse, text_sha256

# contrasts of --control placebo that pairs exist for
PLACEBOS = ("flawed", "commented", "long", "laid_out")

POOL_PAIRS = "pairs.json"  # in the folder of a pool that has contrastive pairs of its own


@dataclass(frozen=True)
class Config:
    """One run, resolved."""

    method: MethodConfig = field(default_factory=MethodConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    sampling: Sampling = field(default_factory=Sampling)
    opt: OptConfig = field(default_factory=OptConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    detectors: DetectorConfig = field(default_factory=DetectorConfig)
    run: RunConfig = field(default_factory=RunConfig)
    preset: Annotated[str, tyro.conf.Suppress] = "fast"
    # what was typed on the command line, by settings: beside --resume these have to be the run's
    typed: Annotated[Mapping[str, str], tyro.conf.Suppress] = field(
        default_factory=dict, compare=False
    )

    def __post_init__(self) -> None:
        # the run's own configuration is checked; flags beside --resume have to equal it
        if self.run.resume:
            return
        self._check_demonstrations()
        if self.of_code:
            for name, given in self.flaws_named.items():
                require_words(name, given, CODE_FLAWS, "flaw")
        tau, teacher = self.loss.teacher_tau, self.loss.teacher_model
        refuse(
            bool(tau) != bool(teacher),
            f"--teacher-tau {tau} with --teacher-model {teacher!r}: one is not read without the other; both or neither",
        )
        self._check_world()
        self._check_monitors()
        refuse(
            self.guard.guard == "halt" and bool(self.guard_cannot_halt),
            f"--guard halt could not fire ({self.guard_cannot_halt}); or choose --guard log",
        )

    def _check_demonstrations(self) -> None:
        """Raises Refused where the share of demonstrations, or of answers without the quarantine, comes to none, and
        where demonstrations are labelled by another grader."""
        refuse(
            self.mixes and not 0 < self.n_teacher < self.scale.group,
            f"--mix-ratio {self.env.mix_ratio} with --group {self.scale.group}: rounds to {self.n_teacher} teacher rows"
            f" in a group; there should be 1 to {self.scale.group - 1}, or --mix-ratio 0",
        )
        refuse(
            self.mixes
            and bool(self.env.reward or self.env.unannounced_modes)
            and not self.env.reference,
            f"{'--reward' if self.env.reward else '--unannounced-modes'}: the pool's prompts and labels are of another "
            "grader; add --mix-ratio 0",
        )
        refuse(
            self.method.known_hacks_teacher_only
            and (not self.mixes or self.env.teacher_off_step == 0),
            "--known-hacks-teacher-only: no demonstration is ever mixed in, so nothing could be flagged; leave it out, "
            "or mix some in (--teacher-pool-dir, --mix-ratio)",
        )
        frac, students = self.method.ablate_frac, self.scale.group - self.n_teacher
        refuse(
            frac > 0 and round(frac * students) == 0,
            f"--rollout-ablate-frac {frac}: rounds to none of {students} student rows; raise it or --group",
        )

    def _check_world(self) -> None:
        """Raises Refused where what belongs to an organism is given to another model, or to another world."""
        # the preset's own folder, which no flag gave
        usual = {"small": embedded.SMALL_DIR, "sums": embedded.SUMS_DIR}.get(self.preset)
        of_organism = {
            "--problems organism": self.scale.problems == ORGANISM,
            "--teacher-pool-dir organism": self.env.pool == ORGANISM,
            f"--organism {self.scale.organism}": self.scale.organism not in (None, usual),
        }
        given = [name for name, there in of_organism.items() if there]
        own = f"{', '.join(given)}: only with --model organism; with another model give your own, or start from full"
        refuse(bool(given) and self.scale.model != ORGANISM, own)
        refuse(
            self.scale.model == ORGANISM
            and self.env.environment in OF_ORGANISMS
            and (self.scale.problems != ORGANISM or bool(self.scale.test_problems)),
            "--model organism: only with --problems organism, and without --test-problems",
        )
        refuse(
            self.env.environment == "text" and self.scale.problems == ORGANISM,
            "--problems organism: these are of the code world; give a file of your own rows beside --reference",
        )

    def _check_monitors(self) -> None:
        """Raises Refused where a monitor is of another world, or lacks what it reads."""
        for name in self.method.watching:
            world = MONITORS[name].of
            refuse(
                world not in ("", self.env.environment),
                f"--monitor {name}: it reads answers of the {world} world alone; name another",
            )
        at_hand = bool(self.method.known_correct) or self.scale.model == ORGANISM
        refuse(
            self.of_code and bool(self.method.needs_known_correct) and not at_hand,
            f"{self.method.needs_known_correct}: it reads correct answers; give --known-correct FILE",
        )
        if "llm_judge" in self.method.watching:
            require_judge(self.method, self.env.thinking)

    @property
    def of_code(self) -> bool:
        """Whether it runs in the code world, whose problems, pairs and right answers are at hand."""
        return self.env.environment == "code"

    @property
    def guard_mode(self) -> Literal["off", "log", "halt"]:
        """What a verdict of the kill switch does. A guard that nobody asked for only logs where no rule could ever halt
        the run: a short run needs no flag."""
        if self.guard.guard:
            return self.guard.guard
        watched = (
            self.preset in ("smoke", "mini", "small", "sums") or self.method.intervention == "none"
        )
        return "log" if watched or self.guard_cannot_halt else "halt"

    @property
    def guard_cannot_halt(self) -> str:
        """Why no rule could ever halt this run; "": one could."""
        if not self.guard.halting:
            return "--guard-halt-on is empty: name a rule"
        every = self.eval.eval_ablate_every
        return blind(self.guard, self.scale.steps, every, self.guard.halting)

    @property
    def guard_updates(self) -> int:
        """The kill switch's first update, one an evaluation, that may fire: --guard-warmup in its own unit."""
        return self.guard.first_update(self.scale.steps, self.eval.eval_ablate_every)

    @property
    def flaws_named(self) -> dict[str, list[str]]:
        """Settings that name flaws, each with those that it names."""
        return {
            "known_modes": listed(self.method.known_modes, CODE_FLAWS),
            "teacher_modes": self.env.demo_modes,
            "unannounced_modes": listed(self.env.unannounced_modes, CODE_FLAWS),
        }

    @property
    def mixes(self) -> bool:
        """Whether demonstrations are mixed in at all. Never under no_loophole: cached labels are a flawed grader's."""
        return (
            bool(self.env.pool) and self.env.mix_ratio > 0 and not self.method.control_spec.strict
        )

    @property
    def plain_prompts(self) -> bool:
        """Whether prompts announce no flawed check: under unannounced flaws, or under a user's reward function, which
        does not read what the hint names."""
        return bool(self.env.unannounced_modes or self.env.reward)

    @property
    def n_teacher(self) -> int:
        """G_t: teacher rows in a group that has demonstrations."""
        return round(self.scale.group * self.env.mix_ratio) if self.mixes else 0

    def evaluates(self, step: int) -> bool:
        """Whether the deployed model is evaluated after this step: every N steps and at the last."""
        return step + 1 in evaluations(self.scale.steps, self.eval.eval_ablate_every)

    @property
    def generations(self) -> int:
        return self.scale.group * self.scale.prompts_per_step

    def seeded(self, seed: int) -> "Config":
        """The same run from another seed."""
        return replace(self, run=replace(self.run, seed=seed))

    @property
    def files(self) -> embedded.Files:
        """What 'organism' means in this run."""
        return embedded.Files(self.scale.organism) if self.scale.organism else embedded.EMBEDDED

    @property
    def model_path(self) -> str:
        return str(self.files.model) if self.scale.model == ORGANISM else self.scale.model

    @property
    def teacher_model_path(self) -> str:
        return (
            str(self.files.model)
            if self.loss.teacher_model == ORGANISM
            else self.loss.teacher_model
        )

    @property
    def problems_path(self) -> Path:
        return self.files.problems if self.scale.problems == ORGANISM else Path(self.scale.problems)

    @property
    def test_problems_path(self) -> Path | None:
        """Problems for evaluation alone; None: those that `problems_path` holds out."""
        given = self.scale.test_problems
        if given is None and self.scale.problems == BENCHMARK_TRAIN:
            given = BENCHMARK_TEST
        return Path(given) if given else None

    @property
    def pool_path(self) -> Path | None:
        if not self.env.pool:
            return None
        return self.files.pool if self.env.pool == ORGANISM else Path(self.env.pool)

    @property
    def run_id(self) -> str:
        """The name of the run's folder: preset, intervention, monitor if it is not the usual one, control if there is
        one, seed, tag."""
        monitor = f"_{self.method.monitor_title}" if self.method.monitor_title else ""
        control = "" if self.method.control_name == "none" else f"_{self.method.control_name}"
        # a user's file name may be in it
        suffix = re.sub(r"[^A-Za-z0-9_.=+-]", "-", monitor + control)[:80]
        intervention = self.method.intervention.rpartition(":")[2]
        return f"{self.preset}_{intervention}{suffix}_seed{self.run.seed}{self.run.out_tag}"

    @property
    def own_code(self) -> tuple[str, ...]:
        """The flags that name functions or classes to import."""
        named = {"rm_ensemble_members": self.detectors.rm_ensemble_members}
        named |= {name: getattr(self.method, name) for name in CLASSES}
        of_others = (f"{flag(name)}={given}" for name, given in named.items() if ":" in given)
        return (*self.env.code, *of_others)

    def as_dict(self) -> dict[str, Json]:
        """JSON-ready, nested by group. A method's settings that are None are stored as the values they stand for."""
        settings = {group: vars(getattr(self, group)) for group in GROUPS}
        settings["method"] = self.method.resolved_settings
        return json.loads(json.dumps({**settings, "preset": self.preset}, default=str))


GROUPS = tuple(f.name for f in fields(Config) if f.name not in ("preset", "typed"))


# ── settings as a run's files have them: read back, compared, and joined with a command line's


# settings of earlier versions, by what they are called now
RENAMED = {"label_recall": "flags_kept"}


def from_dict(data: Json, where: str = "run.json") -> Config:
    """The inverse of `Config.as_dict`. where: the file that holds it, for messages. Classes of somebody's own that it
    names are not imported: such a run can be read, and nothing more.

    Raises:
        Refused: groups or settings unknown to this version, named; or values that it refuses.
    """
    usual = Config()
    groups: dict[str, Json] = {}
    for group in GROUPS:
        of = data.get(group, {})
        groups[group] = {RENAMED.get(name, name): value for name, value in of.items()}
    unknown = data.keys() - {*GROUPS, "preset"}
    for group, of in groups.items():
        unknown |= of.keys() - {f.name for f in fields(getattr(usual, group))}
    if unknown:
        raise Refused(
            f"{where}: unknown settings {', '.join(sorted(unknown))}; the run was made by another version"
        )
    values: dict[str, Any] = {"preset": data["preset"]}
    admit(groups["method"], tuple(f.name for f in fields(MethodConfig)))
    for group, of in groups.items():
        types = {f.name: f.type for f in fields(getattr(usual, group))}
        given = {
            name: Path(value) if isinstance(value, str) and Path in get_args(types[name]) else value
            for name, value in of.items()
        }
        values[group] = replace(getattr(usual, group), **given)
    return Config(**values)


# How a process runs, not what it computes: these settings may differ between a run and its
# resumption.
_PROCESS = {
    *("dry_run", "threads", "memory_gib", "tensor_parallel", "track", "columns"),
    *("checkpoint_every", "checkpoint_keep", "max_error_retries"),
}

_SERVED = {"llm_judge_url", "llm_judge_timeout"}

# taken from the new command line where given there; else the run's own
FREE = {*_PROCESS, *_SERVED, "guard"}

_REQUESTS = {"resume", "trust_code"}  # no part of the run


def merge_flags(
    given: dict[str, object], stored: dict[str, object], typed: Collection[str], free: Set[str]
) -> tuple[dict[str, object], list[str]]:
    """A run's stored settings with those typed now that are `free`, and the flags of others that differ."""
    merged, differing = dict(stored), []
    for name in stored:
        if name not in typed or name in _REQUESTS or given[name] == stored[name]:
            continue
        if name in free:
            merged[name] = given[name]
        else:
            differing.append(f"{flag(name)} {given[name]} (run: {stored[name]})")
    return merged, differing


def settings_sha256(cfg: Config) -> str:
    """sha256 of all settings that the numbers depend on, the seed included: equal for runs that differ by tag or
    process."""
    data = cfg.as_dict()
    data["run"] = {
        k: v
        for k, v in data["run"].items()
        if k not in {*_PROCESS, *_REQUESTS, "out_tag", "output_dir"}
    }
    return text_sha256(json.dumps(data, sort_keys=True))
