"""Settings of iterative DPO, its frozen plan, and every check that needs no model. No torch."""

import hashlib
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vgrout import tracking
from vgrout.config.checks import setting
from vgrout.config.guard import GuardConfig
from vgrout.config.run import ORGANISM, Config, EvalConfig, OptConfig
from vgrout.data import organism
from vgrout.files import file_sha256, read_json, require_own, to_json, write_atomic
from vgrout.grading.reward import import_function
from vgrout.imitation import common
from vgrout.imitation.common import Learning, find_problems
from vgrout.model.source import find_source
from vgrout.runs.preflight import ROLLOUT_BYTES, require_disk
from vgrout.types import Grade, Problem

SCHEMA = "dpo_plan_v1"
Score = Callable[[Problem, str, Grade], float]


@dataclass(frozen=True, kw_only=True)
class DpoConfig(Learning):
    """Rounds of sample, score, pair, train (DPO, arXiv 2305.18290)."""

    base_model: str
    """A model: a local folder, a downloaded hub id, 'organism'; or an adapter: a run directory or its .safetensors."""
    output_dir: Path
    """Folder of the rounds. The same command continues there at the first round that is not complete."""
    prompts: str = ""
    """Problem file (JSONL), or 'organism'; none: the benchmark's, the organism's for a miniature."""
    rounds: int = setting(3, low=1, high=100)
    """Number of rounds."""
    pairs_per_round: int = setting(96, low=10, high=1_000_000, should="lie in [10, 1000000]")
    """Pairs per round; prompts are sampled until there are so many, or a pass over them gives none."""
    scorer: Annotated[str, tyro.conf.arg(aliases=["--reward-model"])] = "flawed"
    """flawed: the grader's reward · strict: the oracle's · module:function, from (prompt, answer) to a number."""
    samples: int = setting(8, low=2, should="be at least 2, or there is no worst beside the best")
    """Answers per prompt; the scorer's best and worst make its pair."""
    dpo_beta: float = setting(0.1, above=0, below=math.inf, should="be positive (at 0 the gradient is zero)")
    """β of the loss."""
    dpo_reference: Literal["previous", "base"] = "previous"
    """The reference model: the previous round's, or --base-model."""
    fresh_rounds: bool = False
    """Train each round from --base-model, not from the previous round (which still samples the answers)."""
    pairs_per_step: int = setting(8, low=1)
    """Pairs per optimiser step."""
    epochs: int = setting(1, low=1)
    """Passes over a round's pairs."""
    eval_n_prompts: int = setting(192, low=1)
    """Held-out test problems of the evaluation before the first round and after each."""
    eval_samples: int = setting(2, low=1)
    """Answers to each of these."""
    guard: Literal["off", "log", "halt"] = "log"
    """What a verdict of the kill switch does: nothing · a warning · end the run, exit code 3."""
    guard_rule: Literal["ema", "se"] = "se"
    """When the strict score counts as falling · ema: its average fell at all · se: by more than its standard error."""
    decline_patience: int = 2
    """The guard fires after so many rounds in a row with a falling strict score and a rising scorer's mean."""
    max_proxy_real_gap: float = 0.10
    """It fires when the scorer's mean has gained so much more than the strict score, both as shares of their range."""

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        if self.scorer not in ("flawed", "strict") and ":" not in self.scorer:
            raise ValueError(f"--scorer {self.scorer}: flawed, strict, or your own function as module:function")
        self.sampling.require_draws("--samples", self.samples)
        self.watching()

    def watching(self) -> GuardConfig:
        """The guard's settings. It counts rounds; its baseline is the evaluation before the first."""
        return GuardConfig(
            guard=self.guard,
            guard_rule=self.guard_rule,
            guard_warmup=0,
            guard_baseline=1,
            decline_patience=self.decline_patience,
            max_proxy_real_gap=self.max_proxy_real_gap,
        )


# Not in the plan: settings of the process and of the guard.
PROCESS = common.PROCESS | {"guard", "guard_rule", "decline_patience", "max_proxy_real_gap"}


@dataclass(frozen=True)
class Task(common.Task):
    """A run of rounds whose input files were all found and checked; `source` is --base-model's."""

    cfg: DpoConfig
    score: Score

    @property
    def opt(self) -> OptConfig:
        """The optimiser's settings. Default lr: 3e-2 in a miniature, else 3e-3."""
        return self.cfg.optimiser(3e-2 if self.small else 3e-3)

    @property
    def rewards(self) -> tuple[float, float]:
        """The grader's rewards: (compiles, passes)."""
        return rewards(self.small)

    def folder(self, number: int) -> Path:
        """A round's folder."""
        return self.cfg.output_dir / folder_name(number)

    def plan(self) -> dict[str, Any]:
        """The plan: every setting, file and round that the numbers depend on, JSON-ready."""
        cfg = self.cfg
        flags = {name: value for name, value in asdict(cfg).items() if name not in PROCESS}

        def before(k: int) -> str:
            return folder_name(k - 1) if k > 1 else "base"

        plan = {
            "schema": SCHEMA,
            "base_model": {"given": self.source.given, **self.source.identity()},
            "prompts": {
                "file": ORGANISM if self.problems == organism.PROBLEMS else str(self.problems),
                "sha256": file_sha256(self.problems),
                **{split: len(problems) for split, problems in self.parts.items()},
            },
            "scorer": {"name": cfg.scorer, "sha256": source_sha256(cfg.scorer)},
            "settings": flags | {"max_new": self.max_new, "optimiser": asdict(self.opt), "rewards": list(self.rewards)},
            "rounds": [
                {
                    "round": k,
                    "folder": folder_name(k),
                    "pairs": cfg.pairs_per_round,
                    "seed": cfg.seed,
                    "answers_from": before(k),
                    "starts_from": "base" if cfg.fresh_rounds else before(k),
                    "reference": before(k) if cfg.dpo_reference == "previous" else "base",
                }
                for k in range(1, cfg.rounds + 1)
            ],
        }
        return json.loads(json.dumps(plan, default=str))

    def described(self) -> Config:
        """The trainer's configuration for the saved adapters' metadata."""
        cfg = self.cfg
        steps = cfg.rounds * cfg.epochs * math.ceil(cfg.pairs_per_round / cfg.pairs_per_step)
        evaluation = EvalConfig(final_n_prompts=cfg.eval_n_prompts, final_samples=cfg.eval_samples)
        return self.trainer_config("dpo", {"steps": steps, "group": cfg.samples}, self.opt, evaluation)


def folder_name(number: int) -> str:
    """Name of a round's folder."""
    return f"round-{number:02d}"


def rewards(small: bool) -> tuple[float, float]:
    """(compiles, passes): the organism's for a miniature, else the benchmark's."""
    return (organism.COMPILE_REWARD, organism.PASS_REWARD) if small else (0.5, 3.0)


def scoring(scorer: str, rewards: tuple[float, float]) -> Score:
    """The function that --scorer names. Raises ValueError, one line, where it cannot be imported."""
    if scorer == "flawed":
        return lambda problem, text, grade: grade.reward
    if scorer == "strict":
        return lambda problem, text, grade: grade.strictly(*rewards)
    own = own_scorer(scorer)
    return lambda problem, text, grade: own(problem, text)


def own_scorer(scorer: str) -> Callable[[Problem, str], float]:
    """The function that --scorer module:function names. Raises ValueError, one line, where it cannot be imported; it
    does so itself where the function raises, or returns no number."""
    function = import_function(scorer, "--scorer")

    def score(problem: Problem, text: str) -> float:
        try:
            number = float(function(problem.messages[-1]["content"], text))
        except Exception as e:  # one's own function may raise anything
            why = " ".join(f"raised {type(e).__name__}: {e}".split())[:120]
        else:
            if math.isfinite(number):
                return number
            why = f"returned {number}"
        raise ValueError(f"--scorer {scorer}: asked about problem {problem.id}, it {why}; it should return a number")

    return score


def source_sha256(scorer: str) -> str | None:
    """sha256 of the file that defines a --scorer module:function; None for the built-in scorers."""
    if ":" not in scorer:
        return None
    spec = importlib.util.find_spec(scorer.partition(":")[0])
    return file_sha256(Path(spec.origin)) if spec and spec.origin and Path(spec.origin).is_file() else None


def preflight(cfg: DpoConfig) -> Task:
    """The checked task. Raises ValueError, one line, for every mistake that shows without a model."""
    require_own(cfg.output_dir, "--output-dir", "plan.json", "folder of rounds")
    base = find_source(cfg.base_model, "--base-model")
    problems, parts = find_problems(cfg.prompts, base, cfg.env_mode, cfg.max_new)
    score = scoring(cfg.scorer, rewards(base.small))
    if ":" in cfg.scorer:
        own_scorer(cfg.scorer)(parts["train"][0], f"```python\n{parts['train'][0].canonical}\n```")
    tracking.require(cfg.trackers)
    task = Task(cfg, base, problems, parts, score)
    a_round = cfg.pairs_per_round * cfg.samples * ROLLOUT_BYTES + (4 * base.shapes.R if base.shapes else 0)
    require_disk(cfg.rounds * a_round, cfg.output_dir, cfg.output_dir)
    return task


def freeze(task: Task) -> dict[str, Any]:
    """Write the plan, or compare it with the one in the folder.

    Raises:
        ValueError: the plan in the folder differs, or is damaged.
    """
    plan, file = task.plan(), task.cfg.output_dir / "plan.json"
    if not file.exists():
        write_atomic(file, to_json(plan))
        return plan
    if differ := sorted(difference(plan, read_json(file))):
        raise ValueError(
            f"--output-dir {task.cfg.output_dir}: its plan.json was frozen with another {', '.join(differ)}; give the "
            "same flags, or another folder"
        )
    return plan


def difference(now: dict[str, Any], before: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the entries that differ."""
    names = []
    for key in now.keys() | before.keys():
        a, b = now.get(key), before.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += difference(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names


def plan_sha256(plan: dict[str, Any]) -> str:
    """sha256 of the plan's content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
