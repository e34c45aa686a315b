"""`python -m vgrout.report DIR|SWEEP…`: finished runs as a report of tables, intervals, figures, verdicts and a page to
read rollouts in. Runs that are not finished are named and left out. Of runs.csv files it prints the cells."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.files import printable, read_json
from vgrout.report.build import Report, compile_report, refuse_other, verdict_table, write
from vgrout.report.figures import pictures
from vgrout.report.recorded import cells_table
from vgrout.report.rollouts import pack
from vgrout.report.runs import load
from vgrout.report.tables import Table
from vgrout.report.verdicts import Preregistered
from vgrout.runs.preflight import hypotheses_file

ON_SCREEN = (
    "Arms",
    "Deployed model against that of the arm none",
    "Arms and controls",
    "Losses",
    "One seed only",
    "Across organisms",
)
_OF_FOLDERS = ("out", "strict", "hypotheses", "rollouts")  # flags that CSV files have no use for


@dataclass(frozen=True)
class Cli:
    """Finished runs as a report over seeds: report.md, report.html, runs.csv, modes.csv and figures."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("out/runs"),)
    """Folders of runs, single runs, or sweeps (out/sweeps/NAME); or runs.csv files (docs/runs), whose cells are
    printed."""
    out: Path | None = None
    """Folder to write; none: report/ in the first source."""
    tag: str = ""
    """Take only runs whose name ends with this."""
    strict: bool = False
    """Refuse if any run is not finished."""
    hypotheses: Path | None = None
    """Text of the preregistered hypotheses, with their numbers in the .toml beside it; none: for a sweep whose study
    declares hypotheses (its `# H:` lines) docs/hypotheses.md of this checkout or here, else no verdicts."""
    rollouts: int = 50_000
    """Rollouts in report.html, about: of more, evenly spaced whole steps; 0: none."""

    def __post_init__(self) -> None:
        if self.rollouts < 0:
            raise ValueError(f"--rollouts {self.rollouts}: 0 or more")
        if self.of_csv and not all(p.suffix == ".csv" for p in self.sources):
            raise ValueError("CSV files and folders of runs: give one of the two")
        if self.of_csv and (unread := [f"--{k}" for k in _OF_FOLDERS if getattr(self, k) != getattr(Cli, k)]):
            raise ValueError(f"{', '.join(unread)}: not read with CSV files, whose cells are printed")

    @property
    def of_csv(self) -> bool:
        return any(p.suffix == ".csv" for p in self.sources)


def command(cli: Cli) -> int:
    """Write the report, or print the cells of CSV files. Raises ValueError, one line."""
    if cli.of_csv:
        print(printable(_titled(cells_table(cli.sources, cli.tag))))
        return 0
    refuse_other(out := cli.out or cli.sources[0] / "report")
    loaded = load(cli.sources, cli.tag)
    if cli.strict and loaded.left_out:
        raise ValueError(f"--strict: left out: {', '.join(loaded.left_out)}")
    if not loaded.runs:
        among = f" among {', '.join(loaded.left_out)}" if loaded.left_out else ""
        named = f" whose name ends with {cli.tag!r}" if cli.tag else ""
        raise ValueError(f"{', '.join(map(str, cli.sources))}: no finished run{named}{among}")
    path = cli.hypotheses or (hypotheses_file() if any(map(declares, cli.sources)) else None)
    report = compile_report(loaded, cli.sources, Preregistered.read(path) if path else None)
    bar = partial(tqdm, desc="rollouts", unit="run", disable=None)
    write(report, pictures(report.cells), pack(report.cells, cli.rollouts, bar), out)
    print(printable("\n\n".join(on_screen(report))))
    print(f"-> {out}")
    return 0


def declares(source: Path) -> bool:
    """Whether it is a sweep whose study declares hypotheses."""
    plan = source / "plan.json"
    return plan.is_file() and bool(read_json(plan).get("hypotheses"))


def on_screen(report: Report) -> list[str]:
    """The summary for a terminal."""
    shown = [*report.tables, *([verdict_table(report)] if report.verdicts else [])]
    parts = [_titled(t) for t in shown if t.name in (*ON_SCREEN, "Verdicts")]
    if report.left_out:
        parts.append(f"left out: {', '.join(report.left_out)}")
    return parts


def _titled(t: Table) -> str:
    return f"{t.name}: {t.caption}\n\n{t.markdown()}"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return cli_exit(lambda: command(parse_args(Cli, argv, "python -m vgrout.report")))


if __name__ == "__main__":
    sys.exit(main())
