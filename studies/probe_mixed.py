"""`python studies/probe_mixed.py [RUN]`: whether a study on a pool is worthwhile, from a short run of plain GRPO.

Go: student rows hack in the second half of the run, after a few steps of learning from the pool.
Exit codes: 0 go · 1 no-go · 2 no such run.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from vgrout.cli import cli_exit, parse_args
from vgrout.files import json_lines
from vgrout.metrics import Rate
from vgrout.table import counted


def verdict(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Go or no-go, and the line that says why. rows: of steps.jsonl, at least 2."""
    half = len(rows) // 2

    def hacks(part: list[dict[str, Any]]) -> Rate:
        return sum((counted(row, "hack_s") or Rate(0, 0) for row in part), Rate(0, 0))

    def mean(part: list[dict[str, Any]], column: str) -> str:
        known = [row[column] for row in part if row[column] is not None]
        return f"{sum(known) / len(known):.2f}" if known else "·"

    first, second = hacks(rows[:half]), hacks(rows[half:])
    demonstrated = sum((counted(row, "hack_t") or Rate(0, 0) for row in rows), Rate(0, 0))
    go = second.k > 0 and demonstrated.k > 0
    why = (
        f"student hacks {first.k}/{first.n} in steps 0-{half - 1}, {second.k}/{second.n} after; demonstrations that "
        f"hack {demonstrated.k}/{demonstrated.n}; log-prob a token {mean(rows[:half], 'lp_t')}, then "
        f"{mean(rows[half:], 'lp_t')}"
    )
    if go:
        return True, f"GO: {why}"
    help_ = (
        "no demonstration was mixed in"
        if not demonstrated.n
        else "raise --mix-ratio or --lr, or look at the pool"
    )
    return False, f"NO-GO: {why}; {help_}"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 go · 1 no-go · 2 no such run."""

    def command(run: Annotated[Path | None, tyro.conf.Positional] = None) -> int:
        """Do hacks appear from the pool?

        Args:
            run: run directory; none: the newest whose id ends with _probe.
        """
        path = run or max(Path("out/runs").glob("*_probe"), default=None)
        if path is None or not (path / "steps.jsonl").is_file():
            print(
                f"E {path or 'out/runs'}: no run with steps.jsonl; run `just probe-mixed`",
                file=sys.stderr,
            )
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
