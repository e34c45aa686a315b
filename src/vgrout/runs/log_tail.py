"""The last parts of a run's log: every step and every count, as the original implementation ends."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from tabulate import tabulate

from vgrout.config.run import Config
from vgrout.files import Json
from vgrout.metrics import Final, Rate
from vgrout.runs.outcome import Outcome
from vgrout.runs.recorder import columns_for
from vgrout.runs.tallies import Tallies
from vgrout.table import StepRow, Table, whole_run

if TYPE_CHECKING:
    from vgrout.runs.own_report import OwnReport  # pandas and matplotlib


def log_tail(
    outcome: Outcome,
    log: Path,
    numbers: Mapping[str, str] | None,
    report: "OwnReport | None",
    detectors: Mapping[str, str],
) -> list[str]:
    """The last parts of the log: every step and every count, as the original implementation ends."""
    flaws = outcome.problems.trained_flaws
    steps = Table(columns_for(outcome.cfg, flaws), flaws).markdown(outcome.rows)
    parts = [
        f"per-step table:\n{steps}",
        *last_answer(outcome.tallies.last),
        f"argv: {' '.join(sys.argv)}",
        f"log: {log}",
    ]
    if numbers:
        parts.append(run_line(outcome, numbers))
    parts.append("\n".join(count_lines(outcome.rows, outcome.tallies, detectors)))
    if numbers:
        parts.append(as_table(numbers))
    if report is not None:
        parts.append(report.by_flaw())
    return [*parts, *outcome.tallies.lines(outcome.halves)]


def summary(cfg: Config, final: Final, report: "OwnReport | None") -> dict[str, str] | None:
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
    """The pool as a column says it: `organism` for the organism's, else its folder's name; ·: none."""
    pool = cfg.pool_path
    if pool is None:
        return "·"
    if cfg.files.pool == pool:
        return str(cfg.env.teacher_pool_dir)
    return pool.name


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
    rows: Sequence[StepRow], tallies: Tallies, detectors: Mapping[str, str]
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
