"""Rounds of DPO before a model is loaded.

Finds and checks the files and the scorer, and makes the plan, which never changes once it is
written. No torch.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from vgrout.config.groups import ORGANISM
from vgrout.config.run import Config
from vgrout.data import Grade, Task
from vgrout.errors import Refused
from vgrout.files import file_sha256, read_json, require_own, to_json, write_atomic
from vgrout.imitation.settings import PROCESS, DpoSettings
from vgrout.model.saved import FoundModel, find_source
from vgrout.runs.inputs import Inputs
from vgrout.runs.preflight import preflight
from vgrout.scoring import scorer

SCHEMA = "dpo_plan_v1"
# Settings of the process and the guard are not part of the plan.
UNPLANNED = PROCESS | {"guard", "guard_rule", "decline_patience", "max_proxy_real_gap"}
Score = Callable[[Task, str, Grade], float]


class PlannedRound(TypedDict):
    """A round in the plan. Adapters are named by the round that has made them, or "base"."""

    round: int  # its number, from 1
    folder: str
    pairs: int  # wanted
    seed: int
    answers_from: str
    starts_from: str
    reference: str


class Plan(TypedDict):
    """plan.json."""

    schema: str
    base_model: dict[str, object]
    prompts: dict[str, object]
    scorer: dict[str, object]
    settings: dict[str, object]
    rounds: list[PlannedRound]


@dataclass(frozen=True)
class DpoTask:
    """Settings and files of a run of rounds, found and checked."""

    settings: DpoSettings
    cfg: Config  # the trainer's configuration, with every default resolved
    inputs: Inputs
    base: FoundModel
    score: Score

    def folder(self, number: int) -> Path:
        """A round's folder."""
        return self.settings.output_dir / folder_name(number)

    def plan(self) -> Plan:
        """The plan: every setting, file and round that the numbers depend on, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        embedded = cfg.scale.problems == ORGANISM
        prompts: dict[str, object] = {
            "file": cfg.scale.problems if embedded else str(cfg.problems_path),
            "sha256": file_sha256(cfg.problems_path),
        }
        for split, part in self.inputs.environment.tasks().items():
            prompts[split] = len(part)
        planned: dict[str, object] = {}
        for name, value in asdict(settings).items():
            if name not in UNPLANNED:
                planned[name] = value
        planned["max_new"] = cfg.scale.max_new
        planned["optimiser"] = asdict(cfg.opt)
        planned["rewards"] = [cfg.env.compile_reward, cfg.env.pass_reward]
        plan = {
            "schema": SCHEMA,
            "base_model": {"given": self.base.given, **self.base.identity()},
            "prompts": prompts,
            "scorer": {"name": settings.scorer, "sha256": source_sha256(settings.scorer)},
            "settings": planned,
            "rounds": [self.planned_round(k) for k in range(1, settings.rounds + 1)],
        }
        return json.loads(json.dumps(plan, default=str))

    def planned_round(self, number: int) -> PlannedRound:
        """The plan's entry of a round: which models it answers with, starts from and refers to."""
        settings = self.settings
        previous = folder_name(number - 1) if number > 1 else "base"
        return {
            "round": number,
            "folder": folder_name(number),
            "pairs": settings.pairs_per_round,
            "seed": settings.seed,
            "answers_from": previous,
            "starts_from": "base" if settings.fresh_rounds else previous,
            "reference": previous if settings.dpo_reference == "previous" else "base",
        }


def folder_name(number: int) -> str:
    """Name of a round's folder."""
    return f"round-{number:02d}"


def prepare(settings: DpoSettings) -> DpoTask:
    """Find and check everything.

    Raises:
        Refused: one line, for every mistake that shows without a model.
    """
    require_own(settings.output_dir, "--output-dir", "plan.json", "folder of rounds")
    base = find_source(settings.base_model, "--base-model")
    cfg = settings.config(base)
    inputs = preflight(cfg, settings.output_dir)
    if inputs.absent:  # of a plan, which is refused as the run would be
        raise Refused(inputs.absent[0])
    first = inputs.environment.tasks()["train"][0]
    score = scoring(settings.scorer, first)
    return DpoTask(settings, cfg, inputs, base, score)


# ── the scorer


def scoring(name: str, first: Task) -> Score:
    """The function that --scorer names; the user's own is tried on the `first` problem.

    Raises:
        Refused: one line, if it cannot be found or fails on that problem.
    """
    if name == "flawed":

        def flawed(problem: Task, text: str, grade: Grade) -> float:
            return grade.reward

        return flawed

    if name == "strict":

        def strict(problem: Task, text: str, grade: Grade) -> float:
            return grade.reward_of_reference

        return strict

    own = scorer(name, "--scorer")
    own(first, first.right_answer)

    def of_own_function(problem: Task, text: str, grade: Grade) -> float:
        return own(problem, text)

    return of_own_function


def source_sha256(scorer: str) -> str | None:
    """sha256 of the file that defines a --scorer module:function; None for the built-in scorers."""
    if ":" not in scorer:
        return None
    spec = importlib.util.find_spec(scorer.partition(":")[0])
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    return file_sha256(Path(spec.origin))


# ── the frozen plan


def freeze(task: DpoTask) -> Plan:
    """Write the plan, or compare it with the one in the folder.

    Raises:
        Refused: the plan in the folder differs, or is damaged.
    """
    folder = task.settings.output_dir
    plan = task.plan()
    file = folder / "plan.json"
    if not file.exists():
        write_atomic(file, to_json(plan))
        return plan
    differ = sorted(difference(plan, read_json(file)))
    if differ:
        raise Refused(
            f"--output-dir {folder}: its plan.json was frozen with another {', '.join(differ)}; "
            "give the same flags, or another folder"
        )
    return plan


def difference(
    now: Mapping[str, object], before: Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Dotted names of the entries in which two plans differ."""
    names: list[str] = []
    for key in now.keys() | before.keys():
        a, b = now.get(key), before.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += difference(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(f"{prefix}{key}")
    return names


def plan_sha256(plan: Plan) -> str:
    """sha256 of the plan's content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
