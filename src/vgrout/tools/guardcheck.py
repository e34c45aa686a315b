"""`python -m vgrout.guardcheck RUNS…`: how well would the kill switch and the detectors have done on recorded runs?

Prints the tables of `vgrout.guard.scorecard`. Exit codes: 0 · 2 a run is not finished, or bad arguments.
"""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from vgrout.cli import cli_exit, parse_args
from vgrout.report.runs import run_dirs
from vgrout.table import ONSET_SHARE


def check(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], onset: float = ONSET_SHARE) -> int:
    """Scorecards of the kill switch and the detectors over finished runs.

    Args:
        runs: run directories (out/runs/…), folders of them or sweeps (out/sweeps/guard): of each arm five hacking runs
            and five of the control no_loophole, or more.
        onset: share of exploits among the students' answers that counts as hacking.
    """
    if not runs:
        raise ValueError("no run given: name run directories below out/runs")
    if not 0 < onset <= 1:
        raise ValueError(f"--onset {onset}: should lie in (0, 1]")
    from vgrout.guard.scorecard import load, report  # scipy takes seconds to import: after the flags are read

    loaded, faults = [], []
    for source in runs:
        try:
            paths, absent = run_dirs(source)
        except ValueError as e:
            paths, absent = [], [str(e)]
        faults += absent
        for path in paths:
            try:
                loaded.append(load(path, onset))
            except ValueError as e:
                faults.append(str(e))
    if faults:
        raise ValueError("; ".join(faults))
    print(report(loaded, onset))
    return 0


def main(argv: list[str] | None = None) -> int:
    return cli_exit(lambda: parse_args(check, argv, "python -m vgrout.guardcheck"))


if __name__ == "__main__":
    sys.exit(main())
