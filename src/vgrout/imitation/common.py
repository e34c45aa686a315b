"""Settings and checks shared by distillation and iterative DPO. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tyro

from vgrout.config.checks import Dtype, check, refuse, setting
from vgrout.config.guard import GuardConfig
from vgrout.config.method import MethodConfig
from vgrout.config.run import (
    BENCHMARK_TRAIN,
    ORGANISM,
    Config,
    EnvConfig,
    EvalConfig,
    OptConfig,
    RunConfig,
    ScaleConfig,
)
from vgrout.config.sampling import Sampling
from vgrout.data import organism
from vgrout.grading.grade import Grader, cores
from vgrout.model.source import Source, model_facts
from vgrout.modes import EnvMode
from vgrout.problems import assigned, load_rows, require_fitting, require_solvable
from vgrout.types import Problem


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Settings of training and prompts."""

    env_mode: EnvMode = "own"
    """Which flawed grader's hint stands in the prompts: one of the seven, or 'own' (each problem's, else in turn)."""
    n_problems: int = setting(1000, low=1)
    """Training problems used, at most."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=Sampling)
    max_new: int | None = setting(None, low=1)
    """Longest answer, in tokens; none: 512, a miniature's 128."""
    lr: float | None = None
    """Peak learning rate: linear warm-up, then cosine to 0; none: by the size of the model and by what is trained."""
    adam_beta1: float = 0.5
    """First-moment decay."""
    adam_beta2: float = 0.9
    """Second-moment decay."""
    weight_decay: float = 0.0
    """Decoupled decay."""
    warmup_frac: float = 0.1
    """Share of the steps spent warming up."""
    grad_clip: float = 10.0
    """Largest L2 norm of the gradient."""
    seed: int = 41
    """Every random stream derives from it, by name and step."""
    threads: int = 0
    """Torch threads on a CPU; 0: one per core, one in all for a miniature."""
    dtype: Dtype = "auto"
    """Of the models' weights. auto: bf16 on a GPU and on a CPU that multiplies in it, but fp32 for a miniature on a
    CPU."""
    workers: int | None = setting(None, low=1)
    """Grading processes; none: one a core."""
    track: str = ""
    """Comma list of experiment trackers that get every row and the final numbers: tensorboard, wandb, trackio."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""
    plan_only: bool = False
    """Print the resolved settings and the plan, train nothing."""

    def __post_init__(self) -> None:
        check(self)
        EnvConfig(env_mode=self.env_mode, mix_ratio=0.0)
        RunConfig(seed=self.seed, threads=self.threads, track=self.track)
        self.optimiser(1.0 if self.lr is None else self.lr)

    def optimiser(self, usual: float) -> OptConfig:
        """The optimiser's settings; `usual`: the peak learning rate where none is given."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(OptConfig)}
        return OptConfig(**own | {"lr": usual if self.lr is None else self.lr})

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers."""
        return RunConfig(track=self.track).trackers


# Settings of the process, not of what it computes: they may differ when a run is resumed.
PROCESS = {"threads", "workers", "track", "plan_only", "allow_weak_sandbox"}


@dataclass(frozen=True)
class Task:
    """A run whose input files were all found and checked."""

    cfg: Learning
    source: Source  # of the model that is trained
    problems: Path
    parts: dict[str, list[Problem]]  # by split

    def require_solvable(self, grader: Grader) -> None:
        """Raises ValueError, one line, where no answer can solve one of the problems; the organism's were hashed."""
        require_solvable([] if self.problems == organism.PROBLEMS else load_rows(self.problems), grader)

    @property
    def small(self) -> bool:
        """Whether the model is a miniature."""
        return self.source.small

    @property
    def max_new(self) -> int:
        """Longest answer, in tokens."""
        return self.cfg.max_new or longest(self.small)

    @property
    def threads(self) -> int:
        """Torch threads on a CPU."""
        return self.cfg.threads or (1 if self.small else cores())

    def trainer_config(
        self, preset: str, scale: Mapping[str, int], opt: OptConfig, evaluation: EvalConfig, tag: str = ""
    ) -> Config:
        """The trainer's configuration for a saved file's metadata: with it `vgrout.evaluate`, `vgrout.export` and every
        flag that takes an adapter can read the file."""
        base, cfg = self.source, self.cfg
        own = base.name == ORGANISM and self.problems == organism.PROBLEMS
        names = ScaleConfig(
            model=ORGANISM if own else str(base.folder) if base.name == ORGANISM else base.name,
            problems=ORGANISM if own else str(self.problems),
        )
        return Config(
            preset=preset,
            method=MethodConfig(intervention="none"),
            scale=replace(names, max_new=self.max_new, n_problems=cfg.n_problems, **scale),
            sampling=cfg.sampling,
            opt=opt,
            env=EnvConfig(env_mode=cfg.env_mode, mix_ratio=0.0),
            eval=evaluation,
            guard=GuardConfig(guard="log"),
            run=RunConfig(seed=cfg.seed, dtype=cfg.dtype, out_tag=tag),
        )


def longest(small: bool) -> int:
    """Usual length of an answer, in tokens."""
    return organism.MAX_NEW if small else 512


def find_problems(
    given: str, base: Source, env_mode: EnvMode, max_new: int | None
) -> tuple[Path, dict[str, list[Problem]]]:
    """The problem file that a flag names ("": the benchmark's, the organism's for a miniature) and its splits.

    Raises:
        ValueError: one line: no such file, or a split without a problem.
    """
    name = given or (ORGANISM if base.small else BENCHMARK_TRAIN)
    path = organism.PROBLEMS if name == ORGANISM else Path(name)
    rows, max_new = load_rows(path), max_new or longest(base.small)
    window = model_facts(base.folder).window
    refuse(
        window is not None and window <= max_new,
        f"--max-new {max_new}: the model's window holds {window} tokens, prompt included",
    )
    require_fitting(rows, base.folder, window, max_new)
    parts = assigned(rows, env_mode)
    for split in ("train", "val", "test"):
        if not parts[split]:
            raise ValueError(f"--env-mode {env_mode}: no problem of it in the {split} split of {path}")
    return path, parts
