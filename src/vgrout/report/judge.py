"""Verdicts by a user's file: `vgrout report FOLDER --judge FILE.py`.

FILE.py has a function `judge(conditions)` that returns `Verdict`s, and may have
`tables(conditions)` that returns `ReportTable`s. A condition is the runs that differ by their seed
alone; `vgrout.report.tables` has its numbers (`level`, `compare`). Modules beside FILE.py can be
imported.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vgrout.errors import Refused
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
    """Return the file's own tables, and the table of its verdicts.

    Raises:
        Refused: one line: the file cannot be imported (from what it raised), has no `judge`, or
            returns anything else.
        Exception: whatever its functions raise; `SystemExit` too.
    """
    try:
        module = _import(file)
        judge = module.judge
    except KeyboardInterrupt:
        raise
    # whatever a user's file may raise; no function of that name
    except BaseException as e:
        raise Refused(f"--judge {file}: {type(e).__name__}: {e}") from e
    verdicts = _returned(file, judge, found)
    own_tables = _returned(file, module.tables, found) if hasattr(module, "tables") else []
    rows: list[dict[str, str]] = []
    tables: list[ReportTable] = []
    try:
        for v in verdicts:
            row = {"hypothesis": v.id, "about": v.about}
            rows.append(row | {"verdict": v.outcome, "numbers": v.numbers})
        for table in own_tables:
            tables.append(ReportTable(table.name, table.caption, table.rows))
    except AttributeError as e:  # other things than verdicts and tables
        raise Refused(f"--judge {file}: {type(e).__name__}: {e}") from e
    return [*tables, ReportTable("Verdicts", _standing(file, found), rows)]


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


def _returned(file: Path, function: Callable[..., object], found: Sequence[Condition]) -> list[Any]:
    """What a function of the file returns for the conditions, as a list.

    Raises Refused, one line, where it takes other arguments or returns no list; else whatever it
    raises.
    """
    try:
        inspect.signature(function).bind(found)
    except (TypeError, ValueError) as e:  # no function; or one whose arguments are not known
        raise Refused(f"--judge {file}: {e}; it should take the conditions alone") from None
    returned = function(found)
    if not isinstance(returned, Iterable):
        raise Refused(f"--judge {file}: returned {type(returned).__name__}, which is no list")
    return [*returned]  # a generator runs its code here
