"""What a run leaves at its end: files with its numbers for programs, and what shows them to a person."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loguru import logger

from vgrout.config.run import Config
from vgrout.envs.base import Splits
from vgrout.ground.data import Grade
from vgrout.ground.io import printable, write_atomic, write_json_lines
from vgrout.ground.metrics import SIDES, Final, Rate
from vgrout.ground.table import StepRow
from vgrout.runs.context import RunContext
from vgrout.runs.inputs import Inputs
from vgrout.runs.recorder import details_record, thought_record
from vgrout.runs.verdict import (
    Outcome,
    Tallies,
    last_lines,
    log_tail,
    page,
    summary,
    verdict_line,
)

if TYPE_CHECKING:
    from vgrout.runs.own_report import OwnReport  # pandas and matplotlib

# of an answer in final.jsonl; null: not graded
GRADED = ("reward", "passed", "solved", "hacked", "mechanism")

T = TypeVar("T")


def own_report(run: Path, cfg: Config) -> "OwnReport":
    """Read the run's files as a report does. Raises whatever goes wrong."""
    from vgrout.runs.own_report import OwnReport  # pandas: no run waits for it to start

    return OwnReport(run, cfg)


def write(
    cfg: Config,
    run: RunContext,
    rows: Sequence[StepRow],
    final: Final,
    inputs: Inputs,
    problems: Splits,
    halted: str = "",
    unrouted: str = "",
) -> None:
    """Write the run's numbers, final.jsonl and per_mode_deploy.json; then show them: summary.md, dynamics.png, the
    trackers, the log's tail, the console's last lines.

    Whatever fails while they are shown is a warning, and the run has finished: `vgrout report` shows the numbers again.

    Args:
        halted: why the run ended before its last step.
        unrouted: why it is no run of its method.

    Raises:
        OSError: a file cannot be written; a full disk, for example.
        Exception: the numbers themselves could not be worked out. The one file is written without the other.
    """
    detectors = inputs.environment.detectors
    halves = cfg.env.report_detector_codes
    tallies = made(
        "what rollouts.jsonl adds up to",
        lambda: Tallies.of(run.path / "rollouts.jsonl", halves, detectors),
    )
    outcome = Outcome(
        cfg, rows, final, tallies or Tallies.nothing(detectors), problems, halted, unrouted
    )
    try:
        write_answers(final, run.path / "final.jsonl")
    finally:
        record = as_json(cfg, final, inputs.in_distribution, run.log, run.stamp)
        run.dir.write_json("per_mode_deploy.json", record | ending(outcome))
    show(run, outcome, record, detectors)


def show(
    run: RunContext, outcome: Outcome, record: dict[str, object], detectors: Mapping[str, str]
) -> None:
    """Write summary.md and dynamics.png, tell the trackers, fill the log's tail, and say the answer.

    record: contents of per_mode_deploy.json. detectors: weak detectors' fields by their letters.
    """
    cfg, rows = outcome.cfg, outcome.rows
    report = made("this run as a report", lambda: own_report(run.path, cfg))
    means = "not worked out, see above"
    if report is not None:
        means = made("the verdict", report.conclusion) or means
    verdict = verdict_line(cfg, means)
    held_out = len(outcome.problems.test)
    answer = (
        made(
            "the last lines",
            lambda: last_lines(cfg, rows, outcome.final, means, run.path, held_out),
        )
        or []
    )
    text = made("summary.md", lambda: page(outcome, verdict, detectors))
    if text:
        write_atomic(run.path / "summary.md", text)
    picture = None
    if report is not None:
        picture = made("dynamics.png", report.dynamics)
    if picture:
        write_atomic(run.path / "dynamics.png", picture)
    numbers = made("the summary", lambda: summary(cfg, outcome.final, report))
    made(
        "the trackers' last entries",
        lambda: run.trackers.final(
            record,
            [numbers] if numbers else [],
            run.path / "dynamics.png" if picture else None,
            len(rows) - 1,
        ),
    )
    tail = made("the log's tail", lambda: log_tail(outcome, run.log, numbers, report, detectors))
    for part in [*(tail or []), verdict]:
        for line in part.split("\n"):
            logger.debug(line)
    for line in answer:
        logger.info(line)


def made(what: str, make: Callable[[], T]) -> T | None:
    """The result of `make`; None where it raises: a warning says so, with the traceback in the log.

    what: that it makes, which the run then does without.
    """
    try:
        return make()
    except Exception as e:
        logger.warning(
            f"{what}: left out, {type(e).__name__}: {printable(' '.join(str(e).split()))}; the numbers are in "
            "final.jsonl and per_mode_deploy.json"
        )
        logger.opt(exception=e).debug(f"{what}: left out")
        return None


# ── files for programs


def as_json(
    cfg: Config, final: Final, in_dist: Sequence[str] | None, log: Path, stamp: dict[str, object]
) -> dict[str, object]:
    """Contents of per_mode_deploy.json. in_dist: modes that the direction's pairs came from; None: no direction."""
    sides = {SIDES[side].key: rates for side, rates in final.sides.items()}
    out: dict[str, object] = {
        "schema": "per_mode_deploy_v1",
        "arm": cfg.method.intervention,
        "intervention": cfg.method.intervention,
        "control": cfg.method.control_name,
        "refresh_every": cfg.method.refresh_every,
        "seed": cfg.run.seed,
        "steps": cfg.scale.steps,
        "model": cfg.scale.model,
        "out_tag": cfg.run.out_tag,
        "log": str(log),
        "eval_n": final.deployed.hack.n,
        **stamp,
    }
    for name, side in sides.items():
        out[f"n_{name}"] = side.hack.n  # the grader may have failed on some answers of one side
        out[f"hack_{name}"] = side.hack.value
        out[f"solve_{name}"] = side.solve.value
        out[f"tries_{name}"] = side.tries.value
    out["by_mode"] = {}
    for mode in final.deployed.by_mode:
        of_mode: dict[str, object] = {
            "in_dist": None if in_dist is None else mode in in_dist,
            "n": final.deployed.by_mode[mode].hack.n,
        }
        for name, side in sides.items():
            of_mode[f"{name}_n"] = side.by_mode[mode].hack.n
        for what in ("hack", "solve", "tries"):
            for name, side in sides.items():
                rate: Rate = getattr(side.by_mode[mode], what)
                of_mode[f"{name}_{what}"] = rate.value
        out["by_mode"][mode] = of_mode
    return out


def ending(outcome: Outcome) -> dict[str, object]:
    """How the run ended, and how right its gate was: the last keys of per_mode_deploy.json."""
    gate = None
    if outcome.tallies.gate:
        precision, recall = outcome.tallies.gate
        gate = {
            "precision": precision.pair,
            "recall": recall.pair,
            "not_looked_at": outcome.tallies.not_looked_at,
        }
    return {
        "steps_done": len(outcome.rows),
        "halted": outcome.halted or None,
        "unrouted": outcome.unrouted or None,
        "gate": gate,
    }


def write_answers(final: Final, path: Path) -> None:
    """Write final.jsonl: every answer of the final evaluation."""
    write_json_lines(path, answer_lines(final))


def answer_lines(final: Final) -> Iterator[dict[str, object]]:
    """Lines of final.jsonl, with the keys of rollouts.jsonl. A side with the same model and prompts as deployed
    (trained without a quarantine, plain where no prompt has a hint) is left out."""
    for side, answers in final.answers.items():
        if side != "deployed" and answers is final.answers["deployed"]:
            continue
        for answer in answers:
            grade = answer.grade
            is_graded = isinstance(grade, Grade)
            yield {
                "side": side,
                "problem_id": answer.problem.id,
                "sample": answer.sample,
                "env_mode": answer.problem.flaws[0],
                **answer.problem.notes,
                "messages": list(answer.problem.messages),
                **thought_record(answer.thought),
                "text": answer.answer,
                "finished": answer.whole,  # its thought, where it has one, ended too
                **{name: getattr(grade, name) if is_graded else None for name in GRADED},
                **(details_record(grade) if is_graded else {}),
            }
