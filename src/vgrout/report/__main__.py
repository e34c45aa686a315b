"""`vgrout report DIR|SWEEP…`: a page on finished runs.

It has tables with intervals, figures, and a reader of the runs' rollouts; with `--judge FILE.py`,
that file's verdicts. Runs that are not finished are named and left out.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vgrout.config.cli import run_command
from vgrout.ground.io import Refused, printable, refuse, require_own
from vgrout.ground.records import run_dirs


@dataclass(frozen=True)
class Cli:
    """Finished runs as a report over seeds: report.html, tables as CSV, and figures."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("out/runs"),)
    """Folders of runs, single runs, or sweeps (out/sweeps/NAME)."""
    out: Path | None = None
    """Folder to write; none: report/ in the first source."""
    tag: str = ""
    """Take only runs whose name ends with this."""
    judge: Path | None = None
    """A file of Python with a function `judge(conditions)`, whose verdicts the report shows (docs/guide.md)."""

    def __post_init__(self) -> None:
        missing = self.judge is not None and not self.judge.is_file()
        refuse(missing, f"--judge {self.judge}: no such file")


def command(cli: Cli) -> int:
    """Write the report and print its conclusions. Raises Refused, one line."""
    out = cli.out or cli.sources[0] / "report"
    require_own(out, "--out", "report.html", "report")
    for source in cli.sources:
        refuse(not source.is_dir(), f"{source}: no such folder of runs")
        run_dirs(source)
    # Here and not above: scipy, pandas and matplotlib take seconds to import, and a wrong flag
    # never waits for them.
    from vgrout.report import judge, load, page

    runs, left_out = load.load(cli.sources, cli.tag)
    if not runs:
        named = f" named *{cli.tag}" if cli.tag else ""
        but = f" but {', '.join(left_out)}" if left_out else ""
        raise Refused(f"{', '.join(map(str, cli.sources))}: no finished run{named}{but}")
    found = load.conditions(runs)
    of_judge = judge.judged(cli.judge, found) if cli.judge else []
    left_out = page.write(out, found, cli.sources, of_judge, left_out)
    parts = []
    for line in [*page.conclusions(found), *page.hypotheses(cli.sources, found)]:
        parts.append(textwrap.fill(line, 80, subsequent_indent="  "))
    for table in of_judge:
        parts.append(f"{table.name}: {table.caption}\n\n{table.markdown()}")
    if left_out:
        parts.append(f"left out: {', '.join(left_out)}")
    print(printable("\n\n".join(parts)))
    print(f"\n-> {out / 'report.html'}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return run_command(command, Cli, argv, "vgrout report")


if __name__ == "__main__":
    sys.exit(main())
