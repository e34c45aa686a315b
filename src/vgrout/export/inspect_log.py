"""One side of a run's final evaluation as a log of inspect_ai, which has to be installed for this module."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean

from inspect_ai import log
from inspect_ai.model import ContentReasoning, ContentText, ModelOutput
from inspect_ai.scorer import Score

from vgrout.config.run import Config
from vgrout.ground.io import Json

SCORES = ("hacked", "solved")

AnswerLine = Mapping[str, Json]


def write_log(
    file: Path,
    cfg: Config,
    created: datetime,
    side: str,
    answers: Sequence[AnswerLine],
) -> None:
    """Write one side's answers. created: the time that the log says it was made at."""
    log.write_eval_log(eval_log(cfg, created, side, answers), str(file))


def eval_log(
    cfg: Config, created: datetime, side: str, answers: Sequence[AnswerLine]
) -> log.EvalLog:
    """Make the log of one side."""
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


def _sample(model: str, answer: AnswerLine) -> log.EvalSample:
    """Make the sample of one answer."""
    text = answer["text"]
    stop_reason = "stop" if answer["finished"] else "max_tokens"
    scores = {name: Score(value=int(answer[name]), answer=text) for name in SCORES}
    scores["reward"] = Score(value=answer["reward"])
    content = text
    if "thought" in answer:
        content = [ContentReasoning(reasoning=answer["thought"]), ContentText(text=text)]
    named = {"marker": answer["marker"]} if answer.get("marker") else {}
    return log.EvalSample(
        id=answer["problem_id"],
        epoch=answer["sample"] + 1,
        input=answer["messages"][-1]["content"],
        target="",
        output=ModelOutput.from_content(model, content, stop_reason=stop_reason),
        scores=scores,
        metadata={"env_mode": answer["env_mode"]} | named,
    )
