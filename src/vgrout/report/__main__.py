"""`vgrout report DIR|SWEEP…`: finished runs as a page with tables, intervals, figures, and a reader of their
rollouts; with `--judge FILE.py`, that file's verdicts. Runs that are not finished are named and left out."""

import difflib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from vgrout.cli import cli_exit, parse_args
from vgrout.errors import refuse
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
        wrong = self.judge is not None and not (self.judge.is_file() and self.judge.suffix == ".py")
        refuse(
            wrong,
            f"--judge {self.judge}: no such file of Python; give one with a function judge(conditions)",
        )


def command(cli: Cli) -> int:
    """Write the report. Raises Refused, one line."""
    for source in cli.sources:
        near = difflib.get_close_matches(source.name, [p.name for p in source.parent.glob("*/")], 1)
        instead = (
            f"; did you mean {source.with_name(near[0])}?"
            if near
            else ", give that of a run, of runs or a sweep"
        )
        toml = f"is a study's file; its runs are in the folder out/sweeps/{source.stem}"
        why = (
            toml
            if source.suffix == ".toml"
            else f"no {'folder' if source.exists() else 'such folder'}{instead}"
        )
        refuse(not source.is_dir(), f"{source}: {why}")
    require_own(out := cli.out or cli.sources[0] / "report", "--out", "report.html", "report")
    # Here and not above: scipy, pandas and matplotlib take seconds to import, and a wrong flag
    # never waits for them.
    from vgrout.report import page
    from vgrout.report.judge import judged
    from vgrout.report.load import conditions, load
    from vgrout.report.rollouts import pack
    from vgrout.report.tables import by_flaw, methods, monitors

    runs, left_out = load(cli.sources, cli.tag)
    but = f" but {', '.join(left_out)}" if left_out else ""
    refuse(
        not runs,
        f"{', '.join(map(str, cli.sources))}: no finished run{f' named *{cli.tag}' * bool(cli.tag)}{but}",
    )
    found = conditions(runs)
    shown = [t for t in (methods(found), by_flaw(found), monitors(found)) if t.rows]
    shown += judged(cli.judge, found) if cli.judge else []
    rollouts = pack(found, cli.rollouts, partial(tqdm, desc="rollouts", unit="run", disable=None))
    left_out += rollouts["left_out"]
    page.write(out, found, cli.sources, shown, left_out, rollouts)
    said = [*page.conclusions(found), *(f"H: {claim}" for claim in page.studies(cli.sources)[1])]
    said += [f"{t.name}: {t.caption}\n\n{t.markdown()}" for t in shown]
    said += [f"left out: {', '.join(left_out)}"] * bool(left_out)
    print(printable("\n\n".join(said)))
    print(f"-> {out}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return cli_exit(lambda: command(parse_args(Cli, argv, "vgrout report")))


if __name__ == "__main__":
    sys.exit(main())
