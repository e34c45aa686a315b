"""Verdicts by a user's file: `vgrout report FOLDER --judge FILE.py`.

FILE.py has a function `judge(conditions)` that returns `Verdict`s, and may have
`tables(conditions)` that returns `ReportTable`s. A condition is the runs that differ by their seed
alone; `vgrout.report.tables` has its numbers (`level`, `compare`). Modules beside FILE.py can be
imported. What the file raises shows its own traceback.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vgrout.report.load import Condition
from vgrout.report.rules import preregistered
from vgrout.report.tables import ReportTable


@dataclass(frozen=True)
class Verdict:
    """One row of the table of verdicts."""

    id: str  # of the hypothesis
    about: str  # method or comparison that it judges
    outcome: str  # SUPPORTED, NOT SUPPORTED, UNDECIDED, REFUSED, or the file's own word
    numbers: str


def judged(file: Path, found: Sequence[Condition]) -> list[ReportTable]:
    """Return the file's own tables, and the table of its verdicts. Raises whatever it raises."""
    module = _import(file)
    rows: list[dict[str, str]] = []
    for v in module.judge(found):
        row = {"hypothesis": v.id, "about": v.about}
        rows.append(row | {"verdict": v.outcome, "numbers": v.numbers})
    own = list(module.tables(found)) if hasattr(module, "tables") else []
    return [*own, ReportTable("Verdicts", _standing(file, found), rows)]


def _import(file: Path) -> ModuleType:
    """Run the file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up annotations that are strings there.
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    spec.loader.exec_module(module)
    return module


def _standing(file: Path, found: Sequence[Condition]) -> str:
    """Say how many runs were started under the rules by which they are judged."""
    digest = preregistered(file.resolve().parent) or ""
    recorded = [run.hashes.get("preregistered") for c in found for run in c.runs]
    these = recorded.count(digest)
    none = recorded.count(None)
    others = len(recorded) - these - none
    return (
        f"Of {len(recorded)} runs {these} were started under these very rules and statistics "
        f"({digest[:12]}), {others} under others, {none} under none."
    )
