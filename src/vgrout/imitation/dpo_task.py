"""Rounds of DPO before a model is loaded: the checked files, the scorer, and the plan, which is frozen. No torch."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vgrout.config.run import ORGANISM, Config
from vgrout.data import Grade, Task
from vgrout.errors import Refused
from vgrout.files import file_sha256, read_json, require_own, to_json, write_atomic
from vgrout.imitation.settings import PROCESS, DpoSettings
from vgrout.inputs import Inputs
from vgrout.model.source import FoundModel, find_source
from vgrout.runs.preflight import preflight
from vgrout.scoring import scorer

SCHEMA = "dpo_plan_v1"
# of the process and the guard
UNPLANNED = PROCESS | {"guard", "guard_rule", "decline_patience", "max_proxy_real_gap"}
Score = Callable[[Task, str, Grade], float]


@dataclass(frozen=True)
class DpoTask:
    """Settings and files of a run of rounds, found and checked."""

    settings: DpoSettings
    cfg: Config  # the trainer's, with every default resolved
    inputs: Inputs
    base: FoundModel
    score: Score

    def folder(self, number: int) -> Path:
        """A round's folder."""
        return self.settings.output_dir / folder_name(number)

    def plan(self) -> dict[str, Any]:
        """The plan: every setting, file and round that the numbers depend on, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        flags = {name: value for name, value in asdict(settings).items() if name not in UNPLANNED}
        rewards = [cfg.env.compile_reward, cfg.env.pass_reward]

        def before(k: int) -> str:
            return folder_name(k - 1) if k > 1 else "base"

        plan = {
            "schema": SCHEMA,
            "base_model": {"given": self.base.given, **self.base.identity()},
            "prompts": {
                "file": cfg.scale.problems
                if cfg.scale.problems == ORGANISM
                else str(cfg.problems_path),
                "sha256": file_sha256(cfg.problems_path),
                **{split: len(part) for split, part in self.inputs.environment.tasks().items()},
            },
            "scorer": {"name": settings.scorer, "sha256": source_sha256(settings.scorer)},
            "settings": flags
            | {"max_new": cfg.scale.max_new, "optimiser": asdict(cfg.opt), "rewards": rewards},
            "rounds": [
                {
                    "round": k,
                    "folder": folder_name(k),
                    "pairs": settings.pairs_per_round,
                    "seed": settings.seed,
                    "answers_from": before(k),
                    "starts_from": "base" if settings.fresh_rounds else before(k),
                    "reference": before(k) if settings.dpo_reference == "previous" else "base",
                }
                for k in range(1, settings.rounds + 1)
            ],
        }
        return json.loads(json.dumps(plan, default=str))


def folder_name(number: int) -> str:
    """Name of a round's folder."""
    return f"round-{number:02d}"


def prepare(settings: DpoSettings) -> DpoTask:
    """Find and check everything. Raises Refused, one line, for every mistake that shows without a model."""
    require_own(settings.output_dir, "--output-dir", "plan.json", "folder of rounds")
    base = find_source(settings.base_model, "--base-model")
    cfg = settings.config(base)
    inputs = preflight(cfg, settings.output_dir)
    first = inputs.environment.tasks()["train"][0]
    return DpoTask(settings, cfg, inputs, base, scoring(settings.scorer, first))


# ── the scorer


def scoring(name: str, first: Task) -> Score:
    """The function that --scorer names; one's own is tried on the `first` problem. Raises Refused, one line."""
    if name == "flawed":
        return lambda problem, text, grade: grade.reward
    if name == "strict":
        return lambda problem, text, grade: grade.reward_of_reference
    own = scorer(name, "--scorer")
    own(first, first.right_answer)
    return lambda problem, text, grade: own(problem, text)


def source_sha256(scorer: str) -> str | None:
    """sha256 of the file that defines a --scorer module:function; None for the built-in scorers."""
    if ":" not in scorer:
        return None
    spec = importlib.util.find_spec(scorer.partition(":")[0])
    return (
        file_sha256(Path(spec.origin))
        if spec and spec.origin and Path(spec.origin).is_file()
        else None
    )


# ── the frozen plan


def freeze(task: DpoTask) -> dict[str, Any]:
    """Write the plan, or compare it with the one in the folder.

    Raises:
        Refused: the plan in the folder differs, or is damaged.
    """
    plan, file = task.plan(), task.settings.output_dir / "plan.json"
    if not file.exists():
        write_atomic(file, to_json(plan))
    elif differ := sorted(difference(plan, read_json(file))):
        raise Refused(
            f"--output-dir {task.settings.output_dir}: its plan.json was frozen with another {', '.join(differ)}; give "
            "the same flags, or another folder"
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
