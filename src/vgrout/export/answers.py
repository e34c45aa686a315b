"""A run's answers for other programs: the final evaluation as inspect_ai logs, all answers as a data set."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vgrout.cli import not_installed
from vgrout.config.run import Config, from_dict
from vgrout.files import json_lines, read_json

SCORES = ("hacked", "solved")

Answer = Mapping[str, Any]


def final_answers(run: Path) -> dict[str, list[Answer]]:
    """Side → its graded answers in final.jsonl. Raises ValueError where the run has no final evaluation."""
    sides: dict[str, list[Answer]] = defaultdict(list)
    for answer in json_lines(run / "final.jsonl"):
        if answer["reward"] is not None:
            sides[answer["side"]].append(answer)
    if not sides:
        raise ValueError(f"{run / 'final.jsonl'}: not there or empty; only a run with a final evaluation has answers")
    return dict(sides)


def to_inspect(run: Path, folder: Path) -> str:
    """Write one `SIDE.eval` per side of the final evaluation, by inspect_ai: a sample per answer, scored by the strict
    oracle (solved) and by whether it hacked the flaw. Returns a sentence about what was written.

    Raises:
        ValueError: inspect_ai is not installed, or the run has no final evaluation.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError:
        raise not_installed("inspect-ai", "inspect") from None
    sides, cfg = final_answers(run), from_dict(read_json(run / "run.json").get("config"))
    for side, answers in sides.items():
        write_eval_log(eval_log(cfg, evaluated(run), side, answers), str(folder / f"{side}.eval"))
    return f"{sum(map(len, sides.values()))} answers in {len(sides)} logs"


def evaluated(run: Path) -> datetime:
    """The time of the run's last status, after the final evaluation; without a status, that of final.jsonl."""
    status = run / "status.json"
    seconds = read_json(status)["time"] if status.is_file() else (run / "final.jsonl").stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC)


def eval_log(cfg: Config, created: datetime, side: str, answers: Sequence[Answer]) -> Any:
    """An inspect_ai EvalLog of one side."""
    from inspect_ai import log
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    model = f"vgrout/{cfg.run_id}/{side}"
    samples = [
        log.EvalSample(
            id=a["problem_id"],
            epoch=a["sample"] + 1,
            input=a["messages"][-1]["content"],
            target="",
            output=ModelOutput.from_content(model, a["text"], stop_reason="stop" if a["finished"] else "max_tokens"),
            scores={name: Score(value=int(a[name]), answer=a["text"]) for name in SCORES}
            | {"reward": Score(value=a["reward"])},
            metadata={"env_mode": a["env_mode"], "marker": a["marker"]},
        )
        for a in answers
    ]
    ids = list(dict.fromkeys(a["problem_id"] for a in answers))
    results = log.EvalResults(
        total_samples=len(samples),
        completed_samples=len(samples),
        scores=[
            log.EvalScore(
                name=name, scorer=name, metrics={"mean": log.EvalMetric(name="mean", value=_mean(answers, name))}
            )
            for name in SCORES
        ],
    )
    spec = log.EvalSpec(
        created=created.isoformat(timespec="seconds"),
        task=f"vgrout_final_{side}",
        task_args={"side": side},
        model=model,
        dataset=log.EvalDataset(name=cfg.problems_path.name, samples=len(ids), sample_ids=ids),
        config=log.EvalConfig(epochs=max(a["sample"] for a in answers) + 1),
        metadata={"config": cfg.as_dict()},
    )
    return log.EvalLog(status="success", eval=spec, samples=samples, results=results)


def _mean(answers: Sequence[Answer], name: str) -> float:
    return sum(a[name] for a in answers) / len(answers)


def to_datasets(run: Path, folder: Path) -> str:
    """Write a folder that `datasets.load_dataset(FOLDER, "rollouts")` and `(FOLDER, "final")` read: Parquet, and a card
    that names both. Returns a sentence about what was written.

    Raises:
        ValueError: datasets is not installed, or the run has no answers.
    """
    try:
        from datasets import Dataset
    except ImportError:
        raise not_installed("datasets") from None
    sizes = {}
    for name in ("rollouts", "final"):
        if answers := list(json_lines(run / f"{name}.jsonl")):
            columns = dict.fromkeys(key for a in answers for key in a)  # score and flagged are not on every line
            data = Dataset.from_list([{key: a.get(key) for key in columns} for a in answers])
            (folder / name).mkdir()
            data.to_parquet(str(folder / name / "train.parquet"))
            sizes[name] = len(answers)
    if not sizes:
        raise ValueError(f"{run}: no answers in it; is it a run's folder?")
    (folder / "README.md").write_text(card(run, sizes), encoding="utf-8")
    return ", ".join(f"{n} {name}" for name, n in sizes.items())


def card(run: Path, sizes: Mapping[str, int]) -> str:
    """The data set's README.md."""
    cfg = from_dict(read_json(run / "run.json").get("config"))
    configs = "\n".join(f"- config_name: {name}\n  data_files: {name}/train.parquet" for name in sizes)
    return f"""---
configs:
{configs}
---
# {cfg.run_id}

Answers of a model that was trained by GRPO against a flawed grader with `vgrout` (intervention
{cfg.method.intervention}, control {cfg.method.control_name}, seed {cfg.run.seed}), with every verdict:
`hacked` is that the flawed check passed and the strict oracle (`solved`) did not. `rollouts`: during training;
`final`: held out.

Some of the programs leave their process or write files: run them only in a sandbox.
"""
