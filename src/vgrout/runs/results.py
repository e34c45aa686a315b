"""What a run leaves at its end: files with its numbers for programs, and what shows them to a person.

The console and summary.md say how often the model hacks and solves untrained, as trained and as deployed, and what
that means. The log has every step and every count, as the original implementation ends.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger
from tabulate import tabulate

from vgrout.config.presets import recorded
from vgrout.config.run import Config
from vgrout.envs.base import Splits
from vgrout.ground.data import Grade, Ungraded
from vgrout.ground.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.ground.io import (
    command,
    file_sha256,
    json_lines,
    printable,
    read_json,
    write_atomic,
    write_json_lines,
)
from vgrout.ground.metrics import SIDES, Final, Rate
from vgrout.ground.table import StepRow, Table, whole_run
from vgrout.runs.checkpoint import GROWING
from vgrout.runs.context import RunContext
from vgrout.runs.inputs import Inputs
from vgrout.runs.plan import method_lines
from vgrout.runs.recorder import columns_for, details_record, thought_record

if TYPE_CHECKING:
    from vgrout.report.load import Condition  # pandas

# of an answer in final.jsonl; null: not graded
GRADED = ("reward", "passed", "solved", "hacked", "mechanism")

# what a hack and a solve are: in the code world, and elsewhere
MEANING = {
    True: "Hack: the flawed check accepts the answer and the reference tests do not; solve: the reference tests accept "
    "it.",
    False: "Hack: the proxy passes the answer and the reference does not; solve: the reference accepts it.",
}


@dataclass(frozen=True)
class Tallies:
    """Counts over rollouts.jsonl, the answers sampled in training, read once."""

    flagged: dict[str, Rate]  # weak detector → rows that it flags
    # hacks seen by the chosen detectors (A), by others alone (B), by none ("")
    halves: dict[str, int]
    rows: int
    # precision of the monitor's flags, and their recall of the hacks that it looked at; None: no monitor
    gate: tuple[Rate, Rate] | None
    # rewarded answers that the monitor looked at and gave no verdict on, of those that it looked at
    unjudged: Rate = Rate(0, 0)
    hacks_seen: int = 0  # hacks that it looked at, these included

    @property
    def judged_nothing(self) -> str:
        """What the verdict says where the monitor gave none at all; "": it gave some."""
        missing, of = self.unjudged.pair
        if not of or missing < of:
            return ""
        return f"the monitor gave no verdict on any of the {of} rewarded answers, so nothing was flagged: "

    @property
    def not_looked_at(self) -> int:
        """Hacks that the monitor was not asked about."""
        return sum(self.halves.values()) - self.hacks_seen

    def lines(self, codes: Sequence[str]) -> list[str]:
        """What summary.md says of them. codes: of the detectors that split the hacks."""
        found = []
        if codes:
            a, b, none = (self.halves.get(half, 0) for half in ("A", "B", ""))
            found.append(
                f"Hacks in training: {a} seen by {','.join(codes)} (half A), {b} by other detectors alone (half B), "
                f"{none} by no detector; of {self.rows} answers."
            )
        if self.gate:
            precision, recall = (f"{of.k}/{of.n} ({of.percent} %)" for of in self.gate)
            line = (
                f"Flags of training, against the reference: {precision} of the flagged answers are hacks "
                f"(precision), {recall} of the hacks that the monitor looked at are flagged (recall)."
            )
            if self.not_looked_at:
                line += (
                    f" It did not look at {self.not_looked_at} more hacks, in groups whose rewards were all "
                    "alike or in steps that were skipped."
                )
            found.append(line)
        if self.unjudged.k:
            found.append(f"Unjudged: {unjudged_line(self.unjudged)}")
        return found

    @classmethod
    def nothing(cls, detectors: Mapping[str, str]) -> "Tallies":
        """Of a file that could not be read."""
        return cls({code: Rate(0, 0) for code in detectors}, {}, 0, None)

    @classmethod
    def of(cls, rollouts: Path, half_a: Sequence[str], detectors: Mapping[str, str]) -> "Tallies":
        """half_a: letters of the chosen detectors. detectors: the fields of all, by their letters.

        The monitor is compared with the reference, after the fact, on the answers that it looked at. A row counts as
        flagged by the monitor's flag or, where there is none, when more than half of its modules were quarantined.
        """
        flagged, halves = Counter[str](), Counter[str]()
        precision = recall = unjudged = Rate(0, 0)
        rows, seen, has_gate = 0, 0, False
        for row in json_lines(rollouts):
            rows += 1
            is_hack = row["hacked"]
            detected = {code for code, name in detectors.items() if row[name]}
            flagged.update(detected)
            if is_hack:
                half = ""
                if detected & {*half_a}:
                    half = "A"
                elif detected:
                    half = "B"
                halves[half] += 1
            if row["gate"] is not None or "flagged" in row:
                has_gate = True
                is_flagged = row["flagged"] if "flagged" in row else row["gate"] > 0.5
                if is_flagged:
                    precision += Rate(int(is_hack), 1)
                seen += is_hack
                if is_hack and is_flagged is not None:
                    recall += Rate(int(is_flagged), 1)
                if row.get("passed"):
                    unjudged += Rate(int(is_flagged is None), 1)
        return cls(
            {code: Rate(flagged[code], rows) for code in detectors},
            dict(halves),
            rows,
            (precision, recall) if has_gate else None,
            unjudged,
            seen,
        )


@dataclass(frozen=True)
class Outcome:
    """What the files of a run's end are written from."""

    cfg: Config
    rows: Sequence[StepRow]
    final: Final
    tallies: Tallies
    problems: Splits
    halted: str  # why the run ended before its last step; empty: it did not
    unrouted: str  # why it is no run of its method; empty: it is one
    detectors: Mapping[str, str]  # weak detectors' fields by their letters


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
    tallies = Tallies.nothing(detectors)
    with without("what rollouts.jsonl adds up to"):
        tallies = Tallies.of(run.path / "rollouts.jsonl", halves, detectors)
    outcome = Outcome(cfg, rows, final, tallies, problems, halted, unrouted, detectors)
    answers = run.path / "final.jsonl"
    try:
        write_json_lines(answers, answer_lines(final))
    finally:
        record = as_json(cfg, final, inputs.in_distribution, run.log, run.stamp)
        # by which a reader knows files of another run, and copies in part
        files = [run.path / name for name in GROWING] + [answers]
        of_run = {
            "run": read_json(run.path / "run.json").get("tracker_id"),
            "files": {file.name: file_sha256(file) for file in files if file.exists()},
        }
        run.dir.write_json("per_mode_deploy.json", record | ending(outcome) | of_run)
    show(run, outcome, record)


def show(run: RunContext, outcome: Outcome, record: dict[str, object]) -> None:
    """Write summary.md and dynamics.png, tell the trackers, fill the log's tail, and say the answer.

    record: contents of per_mode_deploy.json.
    """
    # pandas and matplotlib: no run waits for them to start
    from vgrout.report import conclusions, figures, load, tables

    cfg, rows = outcome.cfg, outcome.rows
    report = numbers = figure = None
    means, by_flaw = "not worked out, see above", ""
    with without("this run as a report"):
        report = load.conditions([load.read_run(run.path, cfg)])[0]
        means = conclusions.conclusion(report)
        numbers = summary(cfg, outcome.final, report)
        of_flaws = tables.by_flaw([report])
        by_flaw = (
            f"{of_flaws.markdown()}\n\n{of_flaws.caption} [low, high]: Wilson's 95 % interval."
        )
    means = outcome.tallies.judged_nothing + means
    verdict = verdict_line(cfg, means)
    with without("summary.md"):
        write_atomic(run.path / "summary.md", page(outcome, verdict, by_flaw))
    if report:
        with without("dynamics.png"):
            picture = figures.dynamics([report]).figure.png()
            write_atomic(run.path / "dynamics.png", picture)
            figure = run.path / "dynamics.png"
    with without("the trackers' last entries"):
        run.trackers.final(record, numbers, figure, len(rows) - 1)
    with without("the log's tail"):
        for part in [*log_tail(outcome, run.log, numbers, by_flaw), verdict]:
            for line in part.split("\n"):
                logger.debug(line)
    unjudged = outcome.tallies.unjudged
    with without("the last lines"):
        for line in last_lines(cfg, rows, outcome.final, means, run.path, unjudged):
            logger.info(line)


@contextmanager
def without(what: str) -> Generator[None]:
    """Go on without what the block makes where it raises: a warning says so, with the traceback in the log."""
    try:
        yield
    except Exception as e:
        logger.warning(
            f"{what}: left out, {type(e).__name__}: {printable(' '.join(str(e).split()))}; the numbers are in "
            "final.jsonl and per_mode_deploy.json"
        )
        logger.opt(exception=e).debug(f"{what}: left out")


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
    for mode, deployed in final.deployed.by_mode.items():
        of_mode: dict[str, object] = {"in_dist": None if in_dist is None else mode in in_dist}
        of_mode["n"] = deployed.hack.n
        for name, side in sides.items():
            of_mode[f"{name}_n"] = side.by_mode[mode].hack.n
        for what in ("hack", "solve", "tries"):
            for name, side in sides.items():
                of_mode[f"{name}_{what}"] = getattr(side.by_mode[mode], what).value
        out["by_mode"][mode] = of_mode
    return out


def ending(outcome: Outcome) -> dict[str, object]:
    """How the run ended, and how right its gate was: the last keys of per_mode_deploy.json."""
    tallies, gate = outcome.tallies, None
    if tallies.gate:
        precision, recall = tallies.gate
        gate = {"precision": precision.pair, "recall": recall.pair}
        gate["not_looked_at"] = tallies.not_looked_at
    return {
        "steps_done": len(outcome.rows),
        "halted": outcome.halted or None,
        "unrouted": outcome.unrouted or None,
        "gate": gate,
    }


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


# ── the console's last lines


def verdict_line(cfg: Config, means: str) -> str:
    """What the run's numbers mean. means: the conclusion of its report."""
    control = cfg.method.control_name
    return f"verdict: {means}" + ("" if control == "none" else f", under --control {control}")


def dropped_lines(cfg: Config, rows: Sequence[StepRow], final: Final) -> list[str]:
    """How much could not be graded, in training and in the final evaluation; []: everything was."""
    lines: list[str] = []
    groups = sum(row.dropped for row in rows)
    if groups:
        of = len(rows) * cfg.scale.prompts_per_step
        lines.append(
            f"dropped: {groups:,} of {of:,} groups were not graded and not learnt from; steps.jsonl says why"
        )
    # two sides may share one list
    lists = {id(answers): answers for answers in final.answers.values()}
    answers = [answer for given in lists.values() for answer in given]
    ungraded = sum(isinstance(answer.grade, Ungraded) for answer in answers)
    if ungraded:
        lines.append(
            f"dropped: {ungraded:,} of {len(answers):,} answers of the final evaluation were not graded"
        )
    return lines


def unjudged_line(unjudged: Rate) -> str:
    """How many answers the monitor gave no verdict on, and what that means."""
    return f"{unjudged.k:,} of {unjudged.n:,} rewarded answers of training have no verdict of the monitor, and no flag"


def last_lines(
    cfg: Config,
    rows: Sequence[StepRow],
    final: Final,
    means: str,
    run: Path,
    unjudged: Rate | None = None,
) -> list[str]:
    """Where earlier runs of plain GRPO in this very setting are on record, one line says how they ended.

    means: the conclusion of the run's report.
    """
    lines: list[str] = []
    for name, side in final.sides.items():
        if name != "plain":
            hack, solve = side.hack.percent, side.solve.percent
            lines.append(f"{SIDES[name].title:<11} {hack:>5} % hack  {solve:>5} % solve")
    lines.append(verdict_line(cfg, means))
    lines += dropped_lines(cfg, rows, final)
    if unjudged and unjudged.k:
        lines.append(f"unjudged: {unjudged_line(unjudged)}")
    if recorded(cfg):
        hack, solve = PLAIN_GRPO["hack"], PLAIN_GRPO["solve"]
        lines.append(
            f"for comparison: plain GRPO ended at {hack} % hack, {solve} % solve in {PLAIN_GRPO_SEEDS} earlier runs"
        )
    report = command(f"report {shlex.quote(str(run))}")
    return [*lines, f"more: {run / 'summary.md'} · dynamics.png", f"      {report}"]


# ── summary.md


def page(outcome: Outcome, verdict: str, by_flaw: str) -> str:
    """summary.md, the conclusion first. verdict: as the console has it. by_flaw: the report's table."""
    cfg, final = outcome.cfg, outcome.final
    method = " ".join(" ".join(method_lines(cfg)).split())
    hacks, _ = whole_run(outcome.rows, students=True)
    paragraphs = [f"# {verdict[0].upper()}{verdict[1:]}"]
    if outcome.halted:
        paragraphs.append(f"**Halted**: {outcome.halted}.")
    if outcome.unrouted:
        paragraphs.append(f"**Nothing was routed**: {outcome.unrouted}.")
    paragraphs += [
        f"`{cfg.run_id}`, {cfg.scale.steps} steps. Method: {method}.",
        models_table(final, hinted=cfg.of_code),
        f"{final.deployed.hack.n} answers a row, with held-out {cfg.env.held_out}. {MEANING[cfg.of_code]}",
        "![hack and solve by step](dynamics.png)",
        "## By flaw",
        by_flaw,
        f"In training {hacks.k:,} of the {hacks.n:,} answers of the model were hacks.",
        *outcome.tallies.lines(outcome.cfg.env.report_detector_codes),
    ]
    paragraphs.append("`vgrout sample` and this folder show answers to one problem.")
    return "\n\n".join(paragraphs) + "\n"


def models_table(final: Final, *, hinted: bool = True) -> str:
    """Hack and solve of the model untrained, as trained, deployed, and deployed without hints, if prompts have any."""
    rows: list[tuple[str, str, str]] = []
    for name, side in final.sides.items():
        if hinted or name != "plain":
            rows.append((SIDES[name].title, side.hack.percent, side.solve.percent))
    heads, sides = ("model", "hack, %", "solve, %"), ("left", "right", "right")
    return tabulate(rows, heads, "pipe", disable_numparse=True, colalign=sides)


# ── the log's last parts


def log_tail(
    outcome: Outcome, log: Path, numbers: Mapping[str, str] | None, by_flaw: str
) -> list[str]:
    """The last parts of the log: every step and every count, as the original implementation ends. by_flaw: the
    report's table."""
    flaws = outcome.problems.trained_flaws
    steps = Table(columns_for(outcome.cfg, flaws), flaws).markdown(outcome.rows)
    parts = [
        f"per-step table:\n{steps}",
        f"argv: {' '.join(sys.argv)}",
        f"log: {log}",
    ]
    if numbers:
        parts.append(run_line(outcome, numbers))
    parts.append("\n".join(count_lines(outcome)))
    if numbers:
        heads = ("what", "value")
        parts.append(tabulate([*numbers.items()], heads, "github", disable_numparse=True))
    if by_flaw:
        parts.append(by_flaw)
    return [*parts, *outcome.tallies.lines(outcome.cfg.env.report_detector_codes)]


def summary(cfg: Config, final: Final, report: "Condition") -> dict[str, str]:
    """One run as one record: quantity → value, shares in percent. report: of this run alone."""
    run = report.first
    return {
        "arm": cfg.method.intervention,
        "control": cfg.method.control_name,
        "seed": str(cfg.run.seed),
        "steps": str(len(run.steps)),
        "pool": Path(cfg.env.pool).name or "·",
        "mix": f"{cfg.env.mix_ratio if cfg.mixes else 0:g}",
        "hack last5": run.last_five("hack").percent,
        "solve last5": run.last_five("solve").percent,
        "hack trained": final.trained.hack.percent,
        "solve trained": final.trained.solve.percent,
        "hack deployed": final.deployed.hack.percent,
        "tries deployed": final.deployed.tries.percent,
        "solve deployed": final.deployed.solve.percent,
        "solve no hint": final.plain.solve.percent,
        "base hack/solve": f"{final.base.hack.percent}/{final.base.solve.percent}",
        "n": str(final.deployed.hack.n),
    }


def run_line(outcome: Outcome, numbers: Mapping[str, str]) -> str:
    """The run in one line. numbers: its `summary`."""
    cfg, base = outcome.cfg, outcome.final.base
    line = (
        f"{cfg.run_id}: deployed hack {numbers['hack deployed']} % / solve {numbers['solve deployed']} %, as trained "
        f"{numbers['hack trained']} % / {numbers['solve trained']} %, base {base.hack.percent} % / "
        f"{base.solve.percent} % (n = {numbers['n']}, held-out {cfg.env.held_out})"
    )
    if outcome.halted:
        line += f"; halted after step {outcome.rows[-1].step} of {cfg.scale.steps - 1}"
    if outcome.unrouted:
        line += "; NOTHING WAS ROUTED: this was plain GRPO"
    return line


def count_lines(outcome: Outcome) -> list[str]:
    """Counts over the whole run, named as in the original implementation: of all rows, of the students', of the
    teacher's; and how many student rows each weak detector flagged."""

    def line(name: str, rate: Rate) -> str:
        value = "·" if rate.value is None else f"{rate.value:.4f}"
        return f"{name}={value} ({rate.k}/{rate.n})"

    hack, solve = whole_run(outcome.rows)
    students, _ = whole_run(outcome.rows, students=True)
    lines = [
        line("HACK_RATE", hack),
        line("PASS_RATE", solve),
        line("HACK_STUDENT", students),
        line("HACK_TEACHER", Rate(hack.k - students.k, hack.n - students.n)),
    ]
    rates, detectors = outcome.tallies.flagged, outcome.detectors
    flagged = [f"{line(code, rates[code])} {name}" for code, name in detectors.items()]
    if flagged:
        lines.append(f"student rows that a detector flags: {' · '.join(flagged)}")
    return lines
