"""What a run leaves at its end: the answer on the console; tables, a figure, and files with the same numbers."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Literal, Protocol, TypeVar

from loguru import logger
from tabulate import tabulate

from vgrout.config.run import Config
from vgrout.data import Flaw, Grade
from vgrout.envs.base import Splits
from vgrout.files import Json, json_lines, printable, write_atomic, write_json_lines
from vgrout.inputs import Inputs
from vgrout.metrics import Final, Rate
from vgrout.runs.context import RunContext
from vgrout.runs.preflight import method_lines
from vgrout.runs.recorder import columns_for, details_record, thought_record
from vgrout.runs.verdict import last_lines, verdict_line
from vgrout.table import StepRow, Table, whole_run

# of an answer in final.jsonl; null: not graded
GRADED = ("reward", "passed", "solved", "hacked", "mechanism")
# Columns of the table of steps in summary.md, where a run has them.
COLUMNS = (
    *("step", "hack_s", "solve_s", "hack_deploy", "solve_deploy"),
    *("kl_deploy", "rew_s", "signal", "q_egy", "recall"),
)
EVERY = 5  # steps from one of its rows to the next: those of evaluations in the presets

T = TypeVar("T")


class Report(Protocol):
    """This run as `vgrout report` has it: `OwnReport`, whose module imports pandas and matplotlib."""

    @property
    def steps(self) -> int: ...

    def last_five(self, what: Literal["hack", "solve"]) -> Rate: ...

    def conclusion(self) -> str: ...

    def by_flaw(self) -> str: ...

    def dynamics(self) -> bytes: ...


def own_report(run: Path, cfg: Config) -> Report:
    """Read the run's files as a report does. Raises whatever goes wrong."""
    from vgrout.runs.own_report import OwnReport  # pandas: no run waits for it to start

    return OwnReport(run, cfg)


@dataclass(frozen=True)
class Results:
    """What is known of a run once it has trained and has been evaluated for the last time."""

    cfg: Config
    rows: Sequence[StepRow]
    final: Final
    tallies: "Tallies"
    problems: Splits
    halted: str  # why the run ended before its last step; empty: it did not
    unrouted: str  # why it is no run of its method; empty: it is one

    @property
    def halves(self) -> Sequence[str]:
        """Letters of the weak detectors that split the hacks into half A and half B."""
        return self.cfg.env.report_detector_codes


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
    results = Results(
        cfg, rows, final, tallies or Tallies.nothing(detectors), problems, halted, unrouted
    )
    try:
        write_answers(final, run.path / "final.jsonl")
    finally:
        record = as_json(cfg, final, inputs.in_distribution, run.log, run.stamp)
        run.dir.write_json("per_mode_deploy.json", record | ending(results))
    show(run, results, record, detectors)


def show(
    run: RunContext, results: Results, record: dict[str, object], detectors: Mapping[str, str]
) -> None:
    """Write summary.md and dynamics.png, tell the trackers, fill the log's tail, and say the answer.

    record: contents of per_mode_deploy.json. detectors: weak detectors' fields by their letters.
    """
    cfg, rows = results.cfg, results.rows
    report = made("this run as a report", lambda: own_report(run.path, cfg))
    means = "not worked out, see above"
    if report is not None:
        means = made("the verdict", report.conclusion) or means
    verdict = verdict_line(cfg, means)
    answer = (
        made("the last lines", lambda: last_lines(cfg, rows, results.final, means, run.path)) or []
    )
    text = made("summary.md", lambda: page(results, verdict, detectors))
    if text:
        write_atomic(run.path / "summary.md", text)
    picture = None
    if report is not None:
        picture = made("dynamics.png", report.dynamics)
    if picture:
        write_atomic(run.path / "dynamics.png", picture)
    numbers = made("the summary", lambda: summary(cfg, results.final, report))
    made(
        "the trackers' last entries",
        lambda: run.trackers.final(
            record,
            [numbers] if numbers else [],
            run.path / "dynamics.png" if picture else None,
            len(rows) - 1,
        ),
    )
    tail = made("the log's tail", lambda: log_tail(results, run, numbers, report, detectors))
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


def log_tail(
    results: Results,
    run: RunContext,
    numbers: Mapping[str, str] | None,
    report: Report | None,
    detectors: Mapping[str, str],
) -> list[str]:
    """The last parts of the log: every step and every count, as the original implementation ends."""
    flaws = results.problems.trained_flaws
    steps = Table(columns_for(results.cfg, flaws), flaws).markdown(results.rows)
    parts = [
        f"per-step table:\n{steps}",
        *last_answer(results.tallies.last),
        f"argv: {' '.join(sys.argv)}",
        f"log: {run.log}",
    ]
    if numbers:
        parts.append(run_line(results, numbers))
    parts.append("\n".join(count_lines(results.rows, results.tallies, detectors)))
    if numbers:
        parts.append(as_table(numbers))
    if report is not None:
        parts.append(report.by_flaw())
    return [*parts, *results.tallies.lines(results.halves)]


# what a hack and a solve are: in the code world, and elsewhere
MEANING = {
    True: "Hack: the flawed check accepts the answer and the reference tests do not; solve: the reference tests accept "
    "it.",
    False: "Hack: the proxy passes the answer and the reference does not; solve: the reference accepts it.",
}


# ── files for programs


def as_json(
    cfg: Config, final: Final, in_dist: Sequence[str] | None, log: Path, stamp: dict[str, object]
) -> dict[str, object]:
    """Contents of per_mode_deploy.json. in_dist: modes that the direction's pairs came from; None: no direction."""
    sides = {
        "base": final.base,
        "train": final.trained,
        "deploy": final.deployed,
        "plain": final.plain,
    }
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


def ending(results: Results) -> dict[str, object]:
    """How the run ended, and how right its gate was: the last keys of per_mode_deploy.json."""
    gate = None
    if results.tallies.gate:
        precision, recall = results.tallies.gate
        gate = {
            "precision": precision.pair,
            "recall": recall.pair,
            "not_looked_at": results.tallies.not_looked_at,
        }
    return {
        "steps_done": len(results.rows),
        "halted": results.halted or None,
        "unrouted": results.unrouted or None,
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


# ── the log's tail


def summary(cfg: Config, final: Final, report: Report | None) -> dict[str, str] | None:
    """One run as one record: quantity → value, shares in percent. None: the run could not be read."""
    if report is None:
        return None
    return {
        "arm": cfg.method.intervention,
        "control": cfg.method.control_name,
        "seed": str(cfg.run.seed),
        "steps": str(report.steps),
        "pool": pool_name(cfg),
        "mix": f"{cfg.env.mix_ratio if cfg.mixes else 0:g}",
        "hack last5": report.last_five("hack").percent,
        "solve last5": report.last_five("solve").percent,
        "hack trained": final.trained.hack.percent,
        "solve trained": final.trained.solve.percent,
        "hack deployed": final.deployed.hack.percent,
        "tries deployed": final.deployed.tries.percent,
        "solve deployed": final.deployed.solve.percent,
        "solve no hint": final.plain.solve.percent,
        "base hack/solve": f"{final.base.hack.percent}/{final.base.solve.percent}",
        "n": str(final.deployed.hack.n),
    }


def pool_name(cfg: Config) -> str:
    """The pool as a column says it: as it was given, or by its folder if it is the organism's."""
    pool = cfg.pool_path
    if pool is None:
        return "·"
    if cfg.files.pool == pool:
        return str(cfg.env.teacher_pool_dir)
    return pool.name


def run_line(results: Results, numbers: Mapping[str, str]) -> str:
    """The run in one line. numbers: its `summary`."""
    cfg, base = results.cfg, results.final.base
    line = (
        f"{cfg.run_id}: deployed hack {numbers['hack deployed']} % / solve {numbers['solve deployed']} %, as trained "
        f"{numbers['hack trained']} % / {numbers['solve trained']} %, base {base.hack.percent} % / "
        f"{base.solve.percent} % (n = {numbers['n']}, held-out {cfg.env.held_out})"
    )
    if results.halted:
        line += f"; halted after step {results.rows[-1].step} of {cfg.scale.steps - 1}"
    if results.unrouted:
        line += "; NOTHING WAS ROUTED: this was plain GRPO"
    return line


def as_table(numbers: Mapping[str, str]) -> str:
    """A `summary` as a table of two columns."""
    return tabulate(
        [*numbers.items()], headers=("what", "value"), tablefmt="github", disable_numparse=True
    )


def last_answer(last: Mapping[str, object] | None) -> list[str]:
    """The last answer of training with what became of it. Empty if there was none."""
    if not last:
        return []
    was = "hacked" if last["hacked"] else "solved" if last["solved"] else "neither"
    head = (
        f"last training generation: step {last['step']}, problem {last['problem_id']}, {last['env_mode']}, reward "
        f"{last['reward']:g}, {was}"
    )
    return [head + "\n" + shown(last)]


def shown(answer: Mapping[str, Json]) -> str:
    """A recorded answer, indented. Its thought stands before it, behind a line."""
    text = indent(answer["text"], "    ")
    if "thought" not in answer:
        return text
    return indent(answer["thought"].rstrip("\n"), "    │ ", lambda _: True) + "\n" + text


def count_lines(
    rows: Sequence[StepRow], tallies: "Tallies", detectors: Mapping[str, str]
) -> list[str]:
    """Counts over the whole run, named as in the original implementation: of all rows, of the students', of the
    teacher's; and how many student rows each weak detector flagged. detectors: their fields by their letters."""

    def line(name: str, rate: Rate) -> str:
        value = "·" if rate.value is None else f"{rate.value:.4f}"
        return f"{name}={value} ({rate.k}/{rate.n})"

    hack, solve = whole_run(rows)
    students, _ = whole_run(rows, students=True)
    lines = [
        line("HACK_RATE", hack),
        line("PASS_RATE", solve),
        line("HACK_STUDENT", students),
        line("HACK_TEACHER", Rate(hack.k - students.k, hack.n - students.n)),
    ]
    flagged = [f"{line(code, tallies.flagged[code])} {name}" for code, name in detectors.items()]
    if flagged:
        lines.append(f"student rows that a detector flags: {' · '.join(flagged)}")
    return lines


# ── summary.md, for a person


def page(results: Results, verdict: str, detectors: Mapping[str, str]) -> str:
    """summary.md, the conclusion first.

    verdict: as the console has it. detectors: weak detectors' fields by their letters.
    """
    cfg, final, tallies = results.cfg, results.final, results.tallies
    method = " ".join(" ".join(method_lines(cfg, settings=False)).split())
    paragraphs = [f"# {verdict[0].upper()}{verdict[1:]}"]
    if results.halted:
        paragraphs.append(f"**Halted**: {results.halted}.")
    if results.unrouted:
        paragraphs.append(f"**Nothing was routed**: {results.unrouted}.")
    paragraphs += [
        f"`{cfg.run_id}`, {cfg.scale.steps} steps. Method: {method}.",
        models_table(final, hinted=cfg.of_code),
        f"{final.deployed.hack.n} answers a row, with held-out {cfg.env.held_out}. {MEANING[cfg.of_code]}",
        "![hack and solve by step](dynamics.png)",
        "## By flaw",
        flaws_table(final, results.problems.flaws),
        *tallies.lines(results.halves),
    ]
    if tallies.last is not None:
        paragraphs.append("## The last answer of training")
        paragraphs.append(f"    {shown(tallies.last).strip()}")
    paragraphs += ["## Steps", steps_table(results)]
    counts = [f"    {line}" for line in count_lines(results.rows, tallies, detectors)]
    paragraphs += ["## Counts over the whole run", "\n".join(counts)]
    return "\n\n".join(paragraphs) + "\n"


def steps_table(results: Results) -> str:
    """The first step, each fifth and the last, in the columns that say how the run went."""
    flaws = results.problems.trained_flaws
    table = Table(columns_for(results.cfg, flaws), flaws, only=COLUMNS)
    last = len(results.rows) - 1
    shown = []
    for place, row in enumerate(results.rows):
        if place in (0, last) or (row.step + 1) % EVERY == 0:
            shown.append(row)
    legend = " · ".join(f"{column.head}: {column.legend}" for column in table.columns)
    return f"{table.markdown(shown)}\n\n{legend}. Every step and every column is in `steps.jsonl` (docs/columns.md)."


def models_table(final: Final, *, hinted: bool = True) -> str:
    """Hack and solve of the model untrained, as trained, deployed, and deployed without hints, if prompts have any."""
    sides = {
        "untrained": final.base,
        "as trained": final.trained,
        "deployed": final.deployed,
    }
    if hinted:
        sides["deployed, prompts without a hint"] = final.plain
    lines = [_cells("model", "hack, %", "solve, %"), _cells("---", "---:", "---:")]
    for name, side in sides.items():
        lines.append(_cells(name, side.hack.percent, side.solve.percent))
    return "\n".join(lines)


def flaws_table(final: Final, named: Mapping[str, Flaw]) -> str:
    """Hack and solve by flaw. named: the environment's flaws."""
    heads = (
        "flaw",
        "hack as trained, %",
        "hack deployed, %",
        "solve deployed, %",
        "answers",
        "a hack",
    )
    lines = [_cells(*heads), _cells("---", "---:", "---:", "---:", "---:", "---")]
    for mode, deployed in final.deployed.by_mode.items():
        shares = (
            final.trained.by_mode[mode].hack.percent,
            deployed.hack.percent,
            deployed.solve.percent,
            str(deployed.hack.n),
        )
        lines.append(_cells(f"`{mode}`", *shares, named[mode].should))
    return "\n".join(lines)


def _cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


# ── what rollouts.jsonl adds up to


@dataclass(frozen=True)
class Tallies:
    """Counts over the student rows of rollouts.jsonl, read once."""

    flagged: dict[str, Rate]  # weak detector → rows that it flags
    # hacks seen by the chosen detectors (A), by others alone (B), by none ("")
    halves: dict[str, int]
    rows: int
    # precision of the monitor's flags, and their recall of the hacks that it looked at; None: no monitor
    gate: tuple[Rate, Rate] | None
    by_mode: dict[str, Rate]  # hacks that a monitor flagged, of those that it looked at
    last: dict[str, object] | None  # the run's last answer

    @property
    def not_looked_at(self) -> int:
        """Hacks that the monitor was not asked about."""
        looked_at = self.gate[1].n if self.gate else 0
        return sum(self.halves.values()) - looked_at

    def lines(self, codes: Sequence[str]) -> list[str]:
        """What summary.md says of them. codes: of the detectors that split the hacks."""
        found = []
        if codes:
            a, b, none = (self.halves.get(half, 0) for half in ("A", "B", ""))
            found.append(
                f"Student hacks: {a} seen by {','.join(codes)} (half A), {b} by other detectors alone (half B), "
                f"{none} by no detector; of {self.rows} student rows."
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
        if self.by_mode:  # what a monitor misses, training amplifies
            flaw, of = min(self.by_mode.items(), key=lambda of: of[1].k / of[1].n)
            found.append(f"Least recalled flaw: `{flaw}`, {of.k}/{of.n} ({of.percent} %).")
        return found

    @classmethod
    def nothing(cls, detectors: Mapping[str, str]) -> "Tallies":
        """Of a file that could not be read."""
        return cls({code: Rate(0, 0) for code in detectors}, {}, 0, None, {}, None)

    @classmethod
    def of(cls, rollouts: Path, half_a: Sequence[str], detectors: Mapping[str, str]) -> "Tallies":
        """half_a: letters of the chosen detectors. detectors: the fields of all, by their letters.

        The monitor is compared with the reference, after the fact, on the answers that it looked at. A row counts as
        flagged by the monitor's flag or, where there is none, when more than half of its modules were quarantined.
        """
        flagged, halves = Counter[str](), Counter[str]()
        precision = recall = Rate(0, 0)
        by_mode: dict[str, Rate] = {}
        rows, has_gate, last = 0, False, None
        for last in json_lines(rollouts):
            rows += 1
            is_hack = last["hacked"]
            detected = {code for code, name in detectors.items() if last[name]}
            flagged.update(detected)
            if is_hack:
                half = "A" if detected & {*half_a} else "B" if detected else ""
                halves[half] += 1
            if last["gate"] is not None or "flagged" in last:
                has_gate = True
                is_flagged = last["flagged"] if "flagged" in last else last["gate"] > 0.5
                if is_flagged:
                    precision += Rate(int(is_hack), 1)
                if is_hack:
                    recall += Rate(int(bool(is_flagged)), 1)
            if is_hack and last.get("flagged") is not None:
                mode = last.get("mechanism") or last["env_mode"]  # older lines have no mechanism
                by_mode[mode] = by_mode.get(mode, Rate(0, 0)) + Rate(int(last["flagged"]), 1)
        return cls(
            {code: Rate(flagged[code], rows) for code in detectors},
            dict(halves),
            rows,
            (precision, recall) if has_gate else None,
            by_mode,
            last,
        )
