"""Runs the planned cells as a sweep, and shows the table: as text of 80 columns, and as a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader

from vgrout.ground.io import (
    Refused,
    file_sha256,
    make_folder,
    one_line,
    probe_writable,
    write_atomic,
)
from vgrout.ground.machine import cores, visible
from vgrout.report import load, page
from vgrout.report.stats import Estimate
from vgrout.runs.context import FINISHED
from vgrout.runs.run_dir import RUNS
from vgrout.scorecard.battery import FILE, IDLE, Battery, Key, Plan, needs
from vgrout.scorecard.outcome import Cell, Outcome, cells, cost, read, read_run, write
from vgrout.sweep.entry import FINAL
from vgrout.sweep.runner import Sweep
from vgrout.sweep.study_file import StudyFile
from vgrout.sweep.workers import Local

Place = tuple[str, str]  # row, setting
MARKS = {"holds": "+", "breaks": "×", "undecided": "?", "idle": "○", "": " "}
# the words of long heads, one above the other
HEADS = {
    "unannounced": ("unan-", "nounced"),
    "attempts": ("at-", "tempts"),
    "look-alike": ("look-", "alike"),
}
TRIVIAL = ("penalty · syntax", "penalty · unread")  # rules of a line or two that know no hack
LEGEND = (
    "Deployed hack / solve in percent, means over seeds. + holds: hack at most 5 points above the ceiling's and "
    "solve at most 10 under it, by 95 % intervals; × breaks; ? undecided; ○ flags nothing. * a trivial rule holds "
    "in this setting. – cannot be run; · not run."
)
RUN_S = 75  # seconds of one core that a run takes

__all__ = ["Scorecard", "run", "write"]


def run(
    planned: Plan, jobs: int | None, dry_run: bool
) -> tuple[int, dict[Key, Outcome], dict[Place, str]]:
    """Run what has not been run here; dry_run: say which runs there are and what is missing, and start nothing.

    Returns:
        The exit code, the outcomes of finished cells, and why others failed.
    """
    if not planned.runs:
        return FINISHED, {}, {}
    sha256 = file_sha256(FILE)
    sweep = Sweep.of(StudyFile(FILE, "scorecard", sha256, (), planned.once), dry_run)
    workers = Local(jobs, visible())
    probe_writable(sweep.folder / "logs")
    minutes = len(sweep.left) * RUN_S / min(workers.slots, cores()) / 60
    pace = f"{workers.slots} at a time, about {minutes:.0f} min"
    code = FINISHED
    if dry_run:
        print("\n".join(sweep.plan(pace)))
    else:
        print(f"{len(sweep.left)} runs left, {pace}; logs: {sweep.folder / 'logs'}")
        code = sweep.run(workers, replan=True)
    outcomes: dict[Key, Outcome] = {}
    failed: dict[Place, str] = {}
    entries = {entry.planned.identity: entry for entry in sweep.entries}
    for (row, setting, seed), of_cell in planned.runs.items():
        entry = entries[of_cell.identity]
        if entry.state == "finished" and entry.run:
            try:
                outcomes[row, setting, seed] = read_run(row, setting, seed, entry.run)
            except Refused as e:  # a damaged file
                failed[row, setting] = f"{e}; move {entry.run} away to make it again"
        elif entry.state in (*FINAL, "failed"):
            failed[row, setting] = f"{entry.state}: {entry.reason} [{sweep.log(entry)}]"
    return code, outcomes, failed


@dataclass(frozen=True)
class Scorecard:
    """The recorded cells, and those that were run here in their place."""

    battery: Battery
    here: Mapping[Key, Outcome]
    recorded: Mapping[Key, Outcome]
    cells: Mapping[Place, Cell]
    cannot: Mapping[Place, str]  # cells without a number → why
    own_needs: Mapping[str, str]  # what a row of one's own has to be given

    @classmethod
    def of(
        cls,
        battery: Battery,
        here: Mapping[Key, Outcome],
        planned: Plan,
        failed: Mapping[Place, str],
    ) -> "Scorecard":
        recorded: dict[Key, Outcome] = {}
        for outcome in read():
            recorded[outcome.row, outcome.setting, outcome.seed] = outcome
        own_needs: dict[str, str] = {}
        for (row, setting, _), run in planned.runs.items():
            if setting != IDLE:  # whose grader has no flaw
                own_needs[row] = needs(run.cfg.method)
        merged = {**recorded, **here}
        return cls(
            battery,
            here,
            recorded,
            cells=cells([*merged.values()]),
            cannot={**planned.cannot, **failed},
            own_needs=own_needs,
        )

    @property
    def outcomes(self) -> list[Outcome]:
        """All, in the order of the battery."""
        merged = {**self.recorded, **self.here}
        settings = [*self.battery.settings]
        rows = [*self.battery.rows]

        def place(key: Key) -> tuple[int, int, int]:
            row, setting, seed = key
            of_row = len(rows)
            if row in rows:
                of_row = rows.index(row)
            return settings.index(setting), of_row, seed

        return [merged[key] for key in sorted(merged, key=place)]

    def won(self, setting: str) -> bool:
        """Whether a trivial rule holds in it."""
        for row in TRIVIAL:
            cell = self.cells.get((row, setting))
            if cell is not None and cell.verdict == "holds":
                return True
        return False

    # ── as text

    def text(self, settings: Sequence[str], rows: Sequence[str]) -> str:
        """The table of marks and two numbers, and what each row needs and costs."""
        width = max(map(len, rows))
        above = [" " * width]
        below = [" " * width]
        for setting in settings:
            first, second = HEADS.get(setting, ("", setting))
            if self.won(setting):
                first += "*"
            above.append(f"{first:>7}")
            below.append(f"{second:>7}")
        lines = [" ".join(above).rstrip(), " ".join(below)]
        for row in rows:
            words = [f"{row:<{width}}"]
            for setting in settings:
                cell = self.short((row, setting))
                words.append(f"{cell:>7}")
            lines.append(" ".join(words).rstrip())
        lines.append("")
        lines.append(f"{'':<{width}} seconds ÷ none's   needs")
        for row in rows:
            lines.append(f"{row:<{width}} {self.cost(row):>16}   {self.needs(row)}")
        return "\n".join(lines)

    def short(self, place: Place) -> str:
        """A cell as `80/3×`."""
        found = self.cells.get(place)
        if found is not None:
            hack = points(found.hack.value, 0)
            solve = points(found.solve.value, 0)
            return f"{hack}/{solve}{MARKS[found.verdict]}"
        if place in self.cannot:
            return "– "
        return "· "

    def cost(self, row: str) -> str:
        ratio = cost(row, self.outcomes)
        if ratio is None:
            return "·"
        return f"{ratio:.2f}"

    def needs(self, row: str) -> str:
        return self.battery.needs.get(row) or self.own_needs.get(row, "")

    def notes(self, settings: Sequence[str]) -> list[str]:
        """What the table's marks mean, and what is not in it."""
        lines = ["", LEGEND]
        seeds: set[int] = set()
        for (_, setting), cell in self.cells.items():
            if setting in settings:
                seeds.add(len(cell.outcomes))
        if seeds != {len(self.battery.seeds)}:
            fewer = " or ".join(map(str, sorted(seeds)))
            lines.append(f"Seeds of a cell: {fewer}; below five all are undecided.")
        n = as_recorded = 0
        places: dict[str, None] = {}  # in the order of their runs, each once
        for key, outcome in self.here.items():
            recorded = self.recorded.get(key)
            if recorded is None:
                continue
            n += 1
            as_recorded += digits(outcome) == digits(recorded)
            places[f"{outcome.row} in {outcome.setting}"] = None
        if n:
            lines.append(
                f"{as_recorded} of {n} recorded runs came out here to the digit "
                f"({', '.join(places)})."
            )
        for (row, setting), why in self.cannot.items():
            lines.append(f"{row} in {setting}: {one_line(why, 300)}")
        return lines

    # ── as a page

    def page(self, out: Path, settings: Sequence[str], rows: Sequence[str]) -> Path:
        """Write a folder with the table, with intervals, and a report on each cell that was run here."""
        make_folder(out)
        environment = Environment(
            loader=PackageLoader("vgrout.scorecard", ""), autoescape=True, trim_blocks=True
        )
        html = environment.get_template("page.html").render(
            board=self,
            rows=rows,
            settings=settings,
            links=self._reports(out),
            interval=interval,
            legend=LEGEND,
        )
        write_atomic(out / "scorecard.html", html)
        return out / "scorecard.html"

    def _reports(self, out: Path) -> dict[Place, str]:
        """Write a report on each cell's runs. Returns where it is, from the page."""
        runs: dict[Place, list[Path]] = {}
        for (row, setting, _), outcome in self.here.items():
            runs.setdefault((row, setting), []).append(RUNS / outcome.run)
        links: dict[Place, str] = {}
        for number, (place, sources) in enumerate(runs.items()):
            loaded, left_out = load.load(sources)
            found = load.conditions(loaded)
            page.write(out / f"cell{number}", found, sources, [], left_out)
            links[place] = f"cell{number}/report.html"
        return links


def digits(outcome: Outcome) -> tuple[float, float]:
    return round(outcome.hack, 5), round(outcome.solve, 5)


def points(share: float | None, decimals: int = 1) -> str:
    if share is None:
        return "·"
    return f"{100 * share:.{decimals}f}"


def interval(estimate: Estimate) -> str:
    """A mean with its interval, in points."""
    mean = points(estimate.value)
    if estimate.low is None:
        return mean
    return f"{mean} [{points(estimate.low)}, {points(estimate.high)}]"
