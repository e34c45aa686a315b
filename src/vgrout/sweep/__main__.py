"""Runs a study: `vgrout sweep STUDY.toml`, resumable, N runs at a time.

Exit codes: 0 every run finished (`--via pueue`: the rest is in the queue) · 1 some did not, each
named with its reason · 2 refused, nothing started · 130 interrupted: the runs under way have saved,
and the same command continues.
"""

from vgrout.config.cli import leave, run_command
from vgrout.sweep.runner import SweepSettings, run_study


def main(argv: list[str] | None = None) -> int:
    return run_command(run_study, SweepSettings, argv, "vgrout sweep")


if __name__ == "__main__":
    leave(main())
