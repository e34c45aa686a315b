"""`vgrout report DIR|SWEEP…`: a page on finished runs.

It has tables with intervals, figures, and a reader of the runs' rollouts; with `--judge FILE.py`,
that file's verdicts. Runs that are not finished are named and left out.
"""

import sys
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit
from vgrout.config.names import parse_command
from vgrout.errors import Refused, nearest, refuse
from vgrout.files import printable, require_own


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
    rollouts: int = 50_000
    """Approximate number of rollouts in report.html, as evenly spaced whole steps; 0: none."""

    def __post_init__(self) -> None:
        refuse(self.rollouts < 0, f"--rollouts {self.rollouts}: should be 0 or more")
        if self.judge is None:
            return
        is_python = self.judge.is_file() and self.judge.suffix == ".py"
        refuse(
            not is_python,
            f"--judge {self.judge}: no such file of Python; "
            "give one with a function judge(conditions)",
        )


def command(cli: Cli) -> int:
    """Write the report and print its tables. Raises Refused, one line."""
    for source in cli.sources:
        _require_folder(source)
    out = cli.out or cli.sources[0] / "report"
    require_own(out, "--out", "report.html", "report")
    # Here and not above: scipy, pandas and matplotlib take seconds to import, and a wrong flag
    # never waits for them.
    from vgrout.report import judge, load, page, rollouts, tables

    runs, left_out = load.load(cli.sources, cli.tag)
    if not runs:
        raise Refused(_nothing_found(cli, left_out))
    found = load.conditions(runs)
    shown = [tables.methods(found), tables.by_flaw(found), tables.monitors(found)]
    shown = [table for table in shown if table.rows]
    of_judge = judge.judged(cli.judge, found) if cli.judge else []
    shown += of_judge
    progress = partial(tqdm, desc="rollouts", unit="run", disable=None)
    packed = rollouts.pack(found, cli.rollouts, progress)
    left_out += packed["left_out"]
    page.write(out, found, cli.sources, shown, left_out, packed)

    parts = [*page.conclusions(found), *page.hypotheses(cli.sources, found)]
    parts = [textwrap.fill(part, 80, subsequent_indent="  ") for part in parts]
    for table in (tables.decisive(found), tables.recalls(found)):
        if table.rows:
            caption = textwrap.fill(f"{table.name}: {table.caption}", 80)
            parts.append(f"{caption}\n\n{table.plain()}")
    for table in of_judge:
        parts.append(f"{table.name}: {table.caption}\n\n{table.markdown()}")
    if left_out:
        parts.append(f"left out: {', '.join(left_out)}")
    print(printable("\n\n".join(parts)))
    print(f"\n-> {out / 'report.html'}")
    return 0


def _require_folder(source: Path) -> None:
    """Raises Refused, one line, if a source is no folder."""
    if source.is_dir():
        return
    if source.suffix == ".toml":
        why = f"is a study's file; its runs are in the folder out/sweeps/{source.stem}"
    else:
        why = "no folder" if source.exists() else "no such folder"
        near = nearest(source.name, _with_runs(source.parent))
        newest = _newest_run(Path("out/runs"))
        if near:
            why += f"; did you mean {source.with_name(near)}?"
        elif source.name == "latest" and newest:
            why += f"; the newest run is {newest}"
        else:
            why += ", give that of a run, of runs or a sweep"
    raise Refused(f"{source}: {why}")


def _with_runs(folder: Path) -> list[str]:
    """Return the names of the folders in `folder` that a report can be made of."""
    names = []
    for path in folder.glob("*/"):
        marks = ("run.json", "runs.json", "*/run.json")
        if any(True for mark in marks for _ in path.glob(mark)):
            names.append(path.name)
    return names


def _newest_run(folder: Path) -> Path | None:
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    return runs[-1] if runs else None


def _nothing_found(cli: Cli, left_out: list[str]) -> str:
    message = f"{', '.join(map(str, cli.sources))}: no finished run"
    if cli.tag:
        message += f" named *{cli.tag}"
    if left_out:
        message += f" but {', '.join(left_out)}"
    return message


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return cli_exit(lambda: command(parse_command(Cli, argv, "vgrout report")))


if __name__ == "__main__":
    sys.exit(main())
