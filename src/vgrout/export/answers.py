"""A run's answers for other programs: the final evaluation as inspect_ai logs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from vgrout.cli import cannot_import, not_installed
from vgrout.config.run import Config, from_dict
from vgrout.errors import Refused
from vgrout.files import Json, json_lines, read_json

SCORES = ("hacked", "solved")
# What is read of a line of final.jsonl.
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
)

AnswerLine = Mapping[str, Json]


def to_inspect(run: Path, folder: Path) -> str:
    """Write one `SIDE.eval` per side of the final evaluation, by inspect_ai.

    It has a sample per answer, scored by whether the reference accepts it (solved) and by whether
    it hacked the flaw. Returns a sentence about what was written.

    Raises:
        Refused: not a run, or one without a sound final evaluation; or inspect_ai is not installed.
    """
    cfg = from_dict(read_json(run / "run.json").get("config"))
    final = run / "final.jsonl"
    sides = _read_answers(final)
    if not sides:
        raise Refused(
            f"{final}: not there or empty; only a run with a final evaluation has answers"
        )
    try:
        from inspect_ai.log import write_eval_log
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "inspect_ai":
            raise not_installed("inspect-ai", "inspect") from None
        raise cannot_import("inspect-ai", error) from None
    status = run / "status.json"  # written last after the final evaluation
    seconds = read_json(status)["time"] if status.is_file() else final.stat().st_mtime
    created = datetime.fromtimestamp(seconds, UTC)
    for side, answers in sides.items():
        log = eval_log(cfg, created, side, answers)
        write_eval_log(log, str(folder / f"{side}.eval"))
    return f"{sum(map(len, sides.values()))} answers in {len(sides)} logs"


def _read_answers(final: Path) -> dict[str, list[AnswerLine]]:
    """Return the graded answers of final.jsonl by side."""
    sides: dict[str, list[AnswerLine]] = defaultdict(list)
    try:
        for line in json_lines(final):
            answer = {name: line[name] for name in READ}
            answer["marker"] = line.get("marker")  # of the code world
            answer["thought"] = line.get("thought", "")
            if answer["reward"] is not None:
                sides[answer["side"]].append(answer)
    except (KeyError, TypeError) as e:
        raise Refused(f"{final}: damaged, or of another version ({e!r})") from None
    return sides


def eval_log(cfg: Config, created: datetime, side: str, answers: Sequence[AnswerLine]) -> Any:
    """Return an inspect_ai EvalLog of one side."""
    from inspect_ai import log

    model = f"vgrout/{cfg.run_id}/{side}"
    samples = [_sample(model, answer) for answer in answers]
    scores = []
    for name in SCORES:
        mean = fmean(answer[name] for answer in answers)
        metrics = {"mean": log.EvalMetric(name="mean", value=mean)}
        scores.append(log.EvalScore(name=name, scorer=name, metrics=metrics))
    results = log.EvalResults(
        total_samples=len(samples),
        completed_samples=len(samples),
        scores=scores,
    )
    ids = list(dict.fromkeys(answer["problem_id"] for answer in answers))
    epochs = max(answer["sample"] for answer in answers) + 1
    spec = log.EvalSpec(
        created=created.isoformat(timespec="seconds"),
        task=f"vgrout_final_{side}",
        task_args={"side": side},
        model=model,
        dataset=log.EvalDataset(
            name=cfg.env.taskset or cfg.problems_path.name, samples=len(ids), sample_ids=ids
        ),
        config=log.EvalConfig(epochs=epochs),
        metadata={"config": cfg.as_dict()},
    )
    return log.EvalLog(status="success", eval=spec, samples=samples, results=results)


def _sample(model: str, answer: AnswerLine) -> Any:
    """Return an inspect_ai EvalSample of one answer."""
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ContentReasoning, ContentText, ModelOutput
    from inspect_ai.scorer import Score

    text = answer["text"]
    stop_reason = "stop" if answer["finished"] else "max_tokens"
    scores = {name: Score(value=int(answer[name]), answer=text) for name in SCORES}
    scores["reward"] = Score(value=answer["reward"])
    content = text
    if answer["thought"]:
        content = [ContentReasoning(reasoning=answer["thought"]), ContentText(text=text)]
    return EvalSample(
        id=answer["problem_id"],
        epoch=answer["sample"] + 1,
        input=answer["messages"][-1]["content"],
        target="",
        output=ModelOutput.from_content(model, content, stop_reason=stop_reason),
        scores=scores,
        metadata=_metadata(answer),
    )


def _metadata(answer: AnswerLine) -> dict[str, object]:
    """Return the flaw of an answer's check, and the announced name where there is one."""
    named = {} if answer["marker"] is None else {"marker": answer["marker"]}
    return {"env_mode": answer["env_mode"]} | named
