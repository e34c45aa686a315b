"""A run's answers for other programs: the final evaluation as inspect_ai logs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from vgrout.cli import not_installed
from vgrout.config.run import Config, from_dict
from vgrout.errors import Refused
from vgrout.files import json_lines, read_json

SCORES = ("hacked", "solved")
READ = (
    *SCORES,
    "reward",
    "side",
    "problem_id",
    "sample",
    "messages",
    "text",
    "finished",
    "env_mode",
    "marker",
)

AnswerLine = Mapping[str, Any]


def to_inspect(run: Path, folder: Path) -> str:
    """Write one `SIDE.eval` per side of the final evaluation, by inspect_ai: a sample per answer, scored by the strict
    oracle (solved) and by whether it hacked the flaw. Returns a sentence about what was written.

    Raises:
        Refused: not a run, or one without a sound final evaluation; or inspect_ai is not installed.
    """
    cfg = from_dict(read_json(run / "run.json").get("config"))
    sides: dict[str, list[AnswerLine]] = defaultdict(list)
    try:
        for line in json_lines(run / "final.jsonl"):
            answer = {name: line[name] for name in READ}
            if answer["reward"] is not None:
                sides[answer["side"]].append(answer)
    except (KeyError, TypeError) as e:
        raise Refused(f"{run / 'final.jsonl'}: damaged, or of another version ({e!r})") from None
    if not sides:
        raise Refused(
            f"{run / 'final.jsonl'}: not there or empty; only a run with a final evaluation has answers"
        )
    try:
        from inspect_ai.log import write_eval_log
    except ImportError:
        raise not_installed("inspect-ai", "inspect") from None
    status = run / "status.json"  # written last after the final evaluation
    seconds = (
        read_json(status)["time"] if status.is_file() else (run / "final.jsonl").stat().st_mtime
    )
    for side, answers in sides.items():
        log = eval_log(cfg, datetime.fromtimestamp(seconds, UTC), side, answers)
        write_eval_log(log, str(folder / f"{side}.eval"))
    return f"{sum(map(len, sides.values()))} answers in {len(sides)} logs"


def eval_log(cfg: Config, created: datetime, side: str, answers: Sequence[AnswerLine]) -> Any:
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
            output=ModelOutput.from_content(
                model, a["text"], stop_reason="stop" if a["finished"] else "max_tokens"
            ),
            scores={name: Score(value=int(a[name]), answer=a["text"]) for name in SCORES}
            | {"reward": Score(value=a["reward"])},
            metadata={"env_mode": a["env_mode"], "marker": a["marker"]},
        )
        for a in answers
    ]
    ids = list(dict.fromkeys(a["problem_id"] for a in answers))
    means = {
        name: log.EvalMetric(name="mean", value=fmean(a[name] for a in answers)) for name in SCORES
    }
    scores = [
        log.EvalScore(name=name, scorer=name, metrics={"mean": mean})
        for name, mean in means.items()
    ]
    results = log.EvalResults(
        total_samples=len(samples), completed_samples=len(samples), scores=scores
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
