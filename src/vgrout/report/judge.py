"""Verdicts by a user's file: `python -m vgrout.report FOLDER --judge FILE.py`.

FILE.py has a function `judge(cells)` that returns `Verdict`s, and may have `tables(cells)` that returns `Table`s. A
cell is the runs that differ by their seed alone; `vgrout.report.tables` has its numbers (`level`, `compare`). Modules
beside FILE.py can be imported.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vgrout.report.runs import Cell
from vgrout.report.tables import Table
from vgrout.runs.preflight import preregistered


@dataclass(frozen=True)
class Verdict:
    """One row of the table of verdicts."""

    id: str  # of the hypothesis
    about: str  # method or comparison that it judges
    outcome: str  # SUPPORTED, NOT SUPPORTED, UNDECIDED, REFUSED, or the file's own word
    numbers: str
    absent: bool = False  # it is about methods that the study has no runs of: counted, not shown


@dataclass(frozen=True)
class Judgement:
    """A judge file's verdicts and tables on a report's cells."""

    standing: str  # how many runs were started with this very file
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]

    def table(self) -> Table:
        rows = [
            {"hypothesis": v.id, "about": v.about, "verdict": v.outcome, "numbers": v.numbers}
            for v in self.verdicts
            if not v.absent
        ]
        more = len(self.verdicts) - len(rows)
        return Table(
            "Verdicts", self.standing + (f"; {more} more are about methods that are not here" if more else ""), rows
        )


@dataclass(frozen=True)
class Judge:
    """A judge file, imported."""

    file: Path
    module: ModuleType

    @classmethod
    def load(cls, file: Path) -> "Judge":
        """Raises ValueError, one line, if the file is missing, cannot be imported, or has no `judge`."""
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if not file.is_file() or spec is None or spec.loader is None:
            raise ValueError(f"--judge {file}: no such file of Python")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
        try:
            spec.loader.exec_module(module)
        except Exception as e:  # whatever a user's file may raise
            raise ValueError(f"--judge {file}: cannot be imported: {type(e).__name__}: {e}") from e
        if not callable(getattr(module, "judge", None)):
            raise ValueError(f"--judge {file}: has no function judge(cells)")
        return cls(file, module)

    def __call__(self, cells: Sequence[Cell]) -> Judgement:
        """Raises ValueError, one line, if the file raises or returns anything but verdicts and tables."""
        verdicts = self._returned("judge", cells, Verdict)
        tables = self._returned("tables", cells, Table) if hasattr(self.module, "tables") else ()
        return Judgement(self._standing(cells), verdicts, tuple(t for t in tables if t.rows))

    def _returned(self, name: str, cells: Sequence[Cell], kind: type[Any]) -> tuple[Any, ...]:
        function: Callable[[Sequence[Cell]], Any] = getattr(self.module, name)
        try:
            found = tuple(function(cells))
        except Exception as e:
            raise ValueError(f"--judge {self.file}: {name}(cells) raised {type(e).__name__}: {e}") from e
        if other := [x for x in found if not isinstance(x, kind)]:
            raise ValueError(f"--judge {self.file}: {name}(cells) should return {kind.__name__}s, not {other[0]!r}")
        return found

    def _standing(self, cells: Sequence[Cell]) -> str:
        """How many of the runs were started while the judging files had these very bytes."""
        digest = preregistered(self.file.resolve().parent) or ""
        of_runs = [r.preregistered for c in cells for r in c.runs]
        same, none = of_runs.count(digest), of_runs.count("")
        if same == len(of_runs):
            return f"preregistered: all {same} runs carry the hash of claims, rules and statistics ({digest[:12]})"
        return (
            f"not preregistered by hash: of {len(of_runs)} runs {same} carry that of claims, rules and statistics "
            f"({digest[:12]}), {len(of_runs) - same - none} that of another version, {none} none"
        )
