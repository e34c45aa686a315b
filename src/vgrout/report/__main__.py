"""`python -m vgrout.report DIR|SWEEP…`: finished runs as a report of tables, intervals, figures and a page to read
rollouts in; with `--judge FILE.py`, that file's verdicts. Runs that are not finished are named and left out."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import refuse
from vgrout.files import printable, require_own
from vgrout.report.rollouts import pack
from vgrout.report.runs import load

if TYPE_CHECKING:
    import vgrout.report.build
    import vgrout.report.tables

ON_SCREEN = (
    "Methods",
    "Deployed models against plain GRPO's",
    "Methods and controls",
    "What the monitors of text flagged",
    "What the monitors flagged over time",
    "Losses",
    "One seed only",
)


@dataclass(frozen=True)
class Cli:
    """Finished runs as a report over seeds: report.md, report.html, tables as CSV, and figures."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("out/runs"),)
    """Folders of runs, single runs, or sweeps (out/sweeps/NAME)."""
    out: Path | None = None
    """Folder to write; none: report/ in the first source."""
    tag: str = ""
    """Take only runs whose name ends with this."""
    strict: bool = False
    """Refuse if any run is not finished."""
    judge: Path | None = None
    """A file of Python with a function `judge(cells)`, whose verdicts the report shows (docs/guide.md)."""
    rollouts: int = 50_000
    """Approximate number of rollouts in report.html, as evenly spaced whole steps; 0: none."""

    def __post_init__(self) -> None:
        refuse(self.rollouts < 0, f"--rollouts {self.rollouts}: should be 0 or more")
        wrong = self.judge is not None and not (self.judge.is_file() and self.judge.suffix == ".py")
        refuse(wrong, f"--judge {self.judge}: no such file of Python; give one with a function judge(cells)")


def command(cli: Cli) -> int:
    """Write the report. Raises ValueError, one line."""
    require_own(out := cli.out or cli.sources[0] / "report", "--out", "report.md", "report")
    from vgrout.report.tables import examine  # scipy takes seconds to import, and a wrong path never waits for it

    loaded = load(cli.sources, cli.tag, examine)
    if cli.strict and loaded.left_out:
        raise ValueError(f"--strict: left out: {', '.join(loaded.left_out)}")
    if not loaded.runs:
        among = f" among {', '.join(loaded.left_out)}" if loaded.left_out else ""
        named = f" whose name ends with {cli.tag!r}" if cli.tag else ""
        raise ValueError(f"{', '.join(map(str, cli.sources))}: no finished run{named}{among}")
    # Here and not above: scipy and matplotlib take seconds to import, and a wrong path never waits for them.
    from vgrout.report.build import compile_report, refuse_other, write
    from vgrout.report.figures import pictures
    from vgrout.report.judge import Judge

    refuse_other(out)
    judge = Judge.load(cli.judge) if cli.judge else None
    report = compile_report(loaded, cli.sources, judge)
    rollouts = pack(report.cells, cli.rollouts, partial(tqdm, desc="rollouts", unit="run", disable=None))
    report = replace(report, left_out=(*report.left_out, *rollouts["left_out"]))
    write(report, pictures(report.cells), rollouts, out)
    print(printable("\n\n".join(on_screen(report))))
    print(f"-> {out}")
    return 0


def on_screen(report: "vgrout.report.build.Report") -> list[str]:
    """The summary for a terminal: the numbers, then the claims made beforehand and their verdicts."""

    def titled(table: "vgrout.report.tables.Table") -> str:
        return f"{table.name}: {table.caption}\n\n{table.markdown()}"

    parts = [titled(t) for t in report.tables if t.name in ON_SCREEN]
    parts += ["\n".join([f"study {s.name}", *(f"H: {h}" for h in s.hypotheses)]) for s in report.studies]
    if report.judgement:
        parts += map(titled, (*report.judgement.tables, report.judgement.table()))
    if report.left_out:
        parts.append(f"left out: {', '.join(report.left_out)}")
    return parts


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return cli_exit(lambda: command(parse_args(Cli, argv, "python -m vgrout.report")))


if __name__ == "__main__":
    sys.exit(main())
