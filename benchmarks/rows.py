"""A benchmark's result: rows with a figure, a goal and a verdict. Without torch: grading's peers are forked."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

HEAD = ("bench", "what", "against", "figure", "goal", "")


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    bench: str
    what: str
    against: str
    figure: str
    goal: str = ""  # "" where there is none: the row informs
    reached: bool | None = None  # None: no goal, or not measured

    @property
    def verdict(self) -> str:
        """Of a row with a goal: reached or missed; "" without one."""
        return {True: "reached", False: "missed", None: ""}[self.reached]

    def cells(self) -> tuple[str, ...]:
        """In the order of HEAD."""
        return self.bench, self.what, self.against, self.figure, self.goal, self.verdict


@dataclass(frozen=True)
class Report:
    """Rows of one bench and what a reader should know about them."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A GitHub table, then the notes."""
        table = tabulate([row.cells() for row in self.rows], headers=HEAD, tablefmt="github")
        return "\n\n".join([table, *self.notes])
