"""`vgrout scorecard`: how good an intervention or a monitor is, yours beside ours.

Alone it prints the recorded table. With `--intervention` or `--monitor` it runs yours in the battery's settings and
adds its row. The same command continues after any ending.

Exit codes: as `vgrout sweep`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vgrout.config.checks import check, setting
from vgrout.config.cli import leave, run_command
from vgrout.ground.io import printable, probe_writable, refuse, require_own
from vgrout.scorecard.battery import PROOF, PROOF_SETTING, Battery, Key, chosen, plan

CSV_HEAD = b"row,setting,seed,"


@dataclass(frozen=True)
class Cli:
    """How good an intervention or a monitor is: the recorded table of ours, and a row of yours beside it."""

    intervention: str = ""
    """Yours, module:Class, or one of ours; none: penalty, where --monitor is given."""
    monitor: str = ""
    """Yours, module:Class, or one of ours; none: the intervention's usual one."""
    seed_monitor: str = ""
    """What yours learns from, where it does."""
    rows: str = ""
    """Comma list of recorded rows to run again here."""
    settings: str = ""
    """Comma list of settings; none: all."""
    seeds: str = ""
    """Comma list of the seeds 44 to 48; none: all five. Below five a cell is undecided."""
    jobs: int | None = setting(None, low=1)
    """Runs at a time; none: as many as there are GPUs, or else cores."""
    dry_run: bool = False
    """Say which runs are left and how long they take; start nothing. The table has what is finished."""
    html: Path | None = None
    """Folder for a page with the table, from which each cell that was run here leads to its runs."""
    csv: Path | None = None
    """File for the outcomes of the recorded runs, and of those made here. Not one that has something else in it."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def row(self) -> dict[str, object]:
        """The flags of a row of one's own; empty: there is none."""
        flags: dict[str, object] = {}
        if self.intervention:
            flags["intervention"] = self.intervention
        elif self.monitor or self.seed_monitor:
            flags["intervention"] = "penalty"
        if self.monitor:
            flags["monitor"] = self.monitor
        if self.seed_monitor:
            flags["seed-monitor"] = self.seed_monitor
        return flags


def command(cli: Cli) -> int:
    """Run what is asked for, and print the table. Raises Refused, one line, before the first run starts."""
    battery = Battery.load()
    settings = chosen(cli.settings, battery.settings, "setting")
    seeds = [int(seed) for seed in chosen(cli.seeds, map(str, battery.seeds), "seed")]
    again: list[str] = []
    if cli.rows:
        again = chosen(cli.rows, battery.rows, "row")
    if cli.html:
        require_own(cli.html, "--html", "scorecard.html", "scorecard")
    if cli.csv:
        _require_csv(cli.csv)
    rows = dict(battery.rows)
    own = _name(cli.row)
    if own:
        refuse(
            own in rows,
            f"{own}: is a row of ours; --rows '{own}' runs it again, and a class of yours needs another name",
        )
        rows[own] = cli.row
        again.append(own)
    cells: list[Key] = []
    for setting_name in settings:
        for row in again:
            cells += [(row, setting_name, seed) for seed in seeds]
    if own:
        cells += [(row, PROOF_SETTING, battery.seeds[0]) for row in PROOF]
    absent = _absent(battery, cells)
    refuse(bool(cli.settings and absent), "; ".join(absent.values()))
    there = [cell for cell in cells if cell[1] not in absent]
    planned = plan(battery, rows, there)
    from vgrout.scorecard import carry_out  # scipy and pandas take seconds to import

    code, outcomes, failed = carry_out.run(planned, cli.jobs, cli.dry_run)
    board = carry_out.Scorecard.of(battery, outcomes, planned, failed)
    print(printable(board.text(settings, [*rows])))
    for line in (*board.notes(settings), *absent.values()):
        print(textwrap.fill(printable(line), 80, subsequent_indent="  "))
    if cli.csv:
        carry_out.write(cli.csv, board.outcomes)
    if cli.html:
        print(f"\n-> {board.page(cli.html, settings, [*rows])}")
    return code


def _require_csv(path: Path) -> None:
    """Raises Refused, one line, where outcomes cannot be written, or would replace something else."""
    refuse(path.is_dir(), f"--csv {path}: is a folder; name a file")
    probe_writable(path.parent, "--csv")
    if path.exists():
        with open(path, "rb") as file:
            is_own = file.read(len(CSV_HEAD)) == CSV_HEAD
        refuse(not is_own, f"--csv {path}: is there, and no scorecard's; name another file")


def _name(row: Mapping[str, object]) -> str:
    """What a row of one's own is called, after its classes: `penalty · Comparison`; "": there is none."""
    names: list[str] = []
    for value in row.values():
        _, _, name = str(value).rpartition(":")
        names.append(name)
    return " · ".join(names)


def _absent(battery: Battery, cells: Sequence[Key]) -> dict[str, str]:
    """Settings whose starting models are not here, each with a line."""
    absent: dict[str, str] = {}
    for _, name, seed in cells:
        start = battery.start(name, seed)
        if start and not start.is_dir():
            how = "in a clone `studies/prepare.sh scorecard` makes it"
            absent.setdefault(name, f"{name}: not run, {start} is not here; {how}")
    return absent


def main(argv: list[str] | None = None) -> int:
    return run_command(command, Cli, argv, "vgrout scorecard")


if __name__ == "__main__":
    leave(main())
