"""`python studies/probe_mixed.py [RUN]`: is a study on a pool worthwhile?

A short run of plain GRPO tells.

Go: student rows hack in the second half of the run, after a few steps of learning from the pool.
Exit codes: 0 go · 1 no-go · 2 no such run.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from vgrout.config.cli import cli_exit, parse_args
from vgrout.ground.io import json_lines
from vgrout.ground.metrics import Rate
from vgrout.ground.table import counted

Row = dict[str, Any]


def verdict(rows: list[Row]) -> tuple[bool, str]:
    """Return whether it is go, and the line that says why.

    rows: of steps.jsonl, at least 2.
    """
    half = len(rows) // 2
    before, after = rows[:half], rows[half:]
    first, second = pooled(before, "hack_s"), pooled(after, "hack_s")
    demonstrated = pooled(rows, "hack_t")
    why = (
        f"student hacks {first.k}/{first.n} in steps 0-{half - 1}, {second.k}/{second.n} after; "
        f"demonstrations that hack {demonstrated.k}/{demonstrated.n}; "
        f"log-prob a token {mean(before, 'lp_t')}, then {mean(after, 'lp_t')}"
    )
    if second.k > 0 and demonstrated.k > 0:
        return True, f"GO: {why}"
    if not demonstrated.n:
        return False, f"NO-GO: {why}; no demonstration was mixed in"
    return False, f"NO-GO: {why}; raise --mix-ratio or --lr, or look at the pool"


def pooled(rows: list[Row], column: str) -> Rate:
    """Return a share over all these steps."""
    total = Rate(0, 0)
    for row in rows:
        total += counted(row, column) or Rate(0, 0)
    return total


def mean(rows: list[Row], column: str) -> str:
    """Return a column's mean as text; ·: it was never measured."""
    known = [row[column] for row in rows if row[column] is not None]
    return f"{sum(known) / len(known):.2f}" if known else "·"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 go · 1 no-go · 2 no such run."""

    def command(run: Annotated[Path | None, tyro.conf.Positional] = None) -> int:
        """Do hacks appear from the pool?

        Args:
            run: run directory; none: the newest whose id ends with _probe.
        """
        path = run or max(Path("out/runs").glob("*_probe"), default=None)
        if path is None or not (path / "steps.jsonl").is_file():
            where = path or "out/runs"
            print(f"E {where}: no run with steps.jsonl; run `just probe-mixed`", file=sys.stderr)
            return 2
        rows = list(json_lines(path / "steps.jsonl"))
        if len(rows) < 2:
            print(f"E {path}: {len(rows)} steps; at least 2 are needed", file=sys.stderr)
            return 2
        go, line = verdict(rows)
        print(line)
        return 0 if go else 1

    return cli_exit(lambda: parse_args(command, argv, "python studies/probe_mixed.py"))


if __name__ == "__main__":
    sys.exit(main())
