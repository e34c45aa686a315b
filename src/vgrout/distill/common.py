"""Settings that distillation and iterative DPO share. Torch-free."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

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
from vgrout.data import organism
from vgrout.model.source import Source
from vgrout.modes import EnvMode
from vgrout.problems import Row, assigned
from vgrout.types import Problem

LEETCODE = Path(BENCHMARK_TRAIN)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Settings of the training and of the prompts."""

    env_mode: EnvMode = "own"
    """Which flawed grader's hint stands in the prompts: one of the seven, or 'own' (each problem's, else in turn)."""
    n_problems: int = 1000
    """Training problems used, at most."""
    max_new: int | None = None
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
    workers: int | None = None
    """Grading processes; none: one a core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""
    plan_only: bool = False
    """Print the resolved settings and the plan, train nothing."""

    def __post_init__(self) -> None:
        at_least(self, 1, "n_problems", "max_new", "workers")
        EnvConfig(env_mode=self.env_mode, mix_ratio=0.0)
        RunConfig(seed=self.seed, threads=self.threads)
        self.optimiser(1.0 if self.lr is None else self.lr)

    def optimiser(self, usual: float) -> OptConfig:
        """The optimiser's settings; `usual`: the peak learning rate where none is given."""
        # what only a quarantine has (second_moment) is no setting here
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(OptConfig) if hasattr(self, f.name)}
        own["lr"] = usual if self.lr is None else self.lr
        return OptConfig(**own)

    def tokens(self, small: bool) -> int:
        """Longest answer. small: of a miniature."""
        return self.max_new or (organism.MAX_NEW if small else 512)

    def torch_threads(self, small: bool) -> int:
        """Threads on a CPU. small: of a miniature."""
        return self.threads or (1 if small else os.cpu_count() or 1)


def at_least(group: Any, low: int, *names: str) -> None:
    """Raises ValueError naming the first of these fields that is given and smaller."""
    for name in names:
        if (value := getattr(group, name)) is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value}: at least {low}")


def problems_path(given: str, base: Source) -> Path:
    """The problem file that a flag names. "": the benchmark's file, the organism's for a miniature."""
    name = given or (ORGANISM if base.small else str(LEETCODE))
    return organism.PROBLEMS if name == ORGANISM else Path(name)


def trainer_config(
    base: Source,
    problems: Path,
    *,
    preset: str,
    scale: dict[str, int],
    opt: OptConfig,
    env_mode: EnvMode,
    evaluation: EvalConfig,
    seed: int,
    tag: str = "",
) -> Config:
    """The trainer's configuration that an adapter's file carries, so that `vgrout.evaluate`, `vgrout.export` and every
    flag that takes an adapter can read it."""
    own = base.name == ORGANISM and problems == organism.PROBLEMS
    return Config(
        preset=preset,
        method=MethodConfig(intervention="none"),
        scale=replace(
            ScaleConfig(
                model=ORGANISM if own else str(base.folder) if base.name == ORGANISM else base.name,
                problems=ORGANISM if own else str(problems),
            ),
            **scale,
        ),
        opt=opt,
        env=EnvConfig(env_mode=env_mode, mix_ratio=0.0),
        eval=evaluation,
        guard=GuardConfig(guard="log"),
        run=RunConfig(seed=seed, out_tag=tag),
    )


def problems_by_split(rows: list[Row], env_mode: EnvMode, path: Path) -> dict[str, list[Problem]]:
    """Every split's problems; raises ValueError where one that is needed has none."""
    parts = assigned(rows, env_mode)
    for split in ("train", "val", "test"):
        if not parts[split]:
            raise ValueError(f"--env-mode {env_mode}: no problem of it in the {split} split of {path}")
    return parts
