"""Rounds of DPO before a model is loaded.

Finds and checks the files and the scorer, and makes the plan, which never changes once it is
written. No torch.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vgrout.config.groups import ORGANISM
from vgrout.config.run import Config
from vgrout.ground.data import Grade, Task
from vgrout.ground.errors import Refused
from vgrout.ground.files import Json, file_sha256, read_json, require_own, to_json, write_atomic
from vgrout.ground.scoring import scorer
from vgrout.imitation.settings import PROCESS, DpoSettings
from vgrout.model.load.saved import FoundModel, find_source
from vgrout.runs.inputs import Inputs
from vgrout.runs.plan import preflight

# Settings of the process and the guard are not part of the plan.
UNPLANNED = PROCESS | {"guard", "decline_patience", "max_proxy_real_gap"}
Score = Callable[[Task, str, Grade], float]
Plan = dict[str, Json]  # plan.json


@dataclass(frozen=True)
class DpoTask:
    """Settings and files of a run of rounds, found and checked."""

    settings: DpoSettings
    cfg: Config  # the trainer's configuration, with every default resolved
    inputs: Inputs
    base: FoundModel
    score: Score

    def plan(self) -> Plan:
        """The plan: every setting, file and round that the numbers depend on, JSON-ready."""
        settings, cfg = self.settings, self.cfg
        embedded = cfg.scale.problems == ORGANISM
        planned = {name: v for name, v in asdict(settings).items() if name not in UNPLANNED}
        planned["max_new"] = cfg.scale.max_new
        planned["optimiser"] = asdict(cfg.opt)
        planned["rewards"] = [cfg.env.compile_reward, cfg.env.pass_reward]
        plan = {
            "schema": "dpo_plan_v1",
            "base_model": {"given": self.base.given, **self.base.identity()},
            "prompts": {
                "file": cfg.scale.problems if embedded else str(cfg.problems_path),
                "sha256": file_sha256(cfg.problems_path),
            },
            "scorer": {"name": settings.scorer, "sha256": source_sha256(settings.scorer)},
            "settings": planned,
            "rounds": [self.planned_round(k) for k in range(1, settings.rounds + 1)],
        }
        return json.loads(json.dumps(plan, default=str))

    def planned_round(self, number: int) -> dict[str, Json]:
        """The plan's entry of a round: which models it answers with, starts from and refers to.

        Adapters are named by the round that has made them, or "base".
        """
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
    return DpoTask(settings, cfg, inputs, base, scoring(settings.scorer, first))


def scoring(name: str, first: Task) -> Score:
    """The function that --scorer names; the user's own is tried on the `first` problem.

    Raises:
        Refused: one line, if it cannot be found or fails on that problem.
    """
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
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    return file_sha256(Path(spec.origin))


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
    now, frozen = _by_name(plan), _by_name(read_json(file))
    differ = sorted(
        name for name in now.keys() | frozen.keys() if now.get(name) != frozen.get(name)
    )
    if differ:
        raise Refused(
            f"--output-dir {folder}: its plan.json was frozen with another {', '.join(differ)}; "
            "give the same flags, or another folder"
        )
    return plan


def _by_name(plan: Plan) -> Plan:
    """A plan's entries, and its settings among them."""
    return {**plan.get("settings", {}), **plan, "settings": None}
