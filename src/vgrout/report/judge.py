"""Verdicts by a user's file: `vgrout report FOLDER --judge FILE.py`.

FILE.py has a function `judge(conditions)` that returns `Verdict`s, and may have `tables(conditions)` that returns
`ReportTable`s. A condition is the runs that differ by their seed alone; `vgrout.report.tables` has its numbers
(`level`, `compare`). Modules beside FILE.py can be imported.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """The file's own tables, and that of its verdicts.

    Raises:
        Refused: one line: the file cannot be imported (from what it raised), has no `judge`, or
            returns anything else.
        Exception: whatever its functions raise; `SystemExit` too.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look up annotations that are strings
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
        judge = module.judge
    except (
        Exception,
        SystemExit,
    ) as e:  # whatever a user's file may raise; no function of that name
        raise Refused(f"--judge {file}: {type(e).__name__}: {e}") from e
    verdicts = _returned(file, judge, found)
    own = _returned(file, module.tables, found) if hasattr(module, "tables") else []
    try:
        rows = [
            {"hypothesis": v.id, "about": v.about, "verdict": v.outcome, "numbers": v.numbers}
            for v in verdicts
        ]
        own = [ReportTable(t.name, t.caption, t.rows) for t in own]
    except AttributeError as e:  # other things than verdicts and tables
        raise Refused(f"--judge {file}: {type(e).__name__}: {e}") from e
    digest = preregistered(file.resolve().parent) or ""
    recorded = [(r.record.get("hashes") or {}).get("preregistered") for c in found for r in c.runs]
    standing = (
        f"Of {len(recorded)} runs {recorded.count(digest)} were started under these very rules and statistics "
        f"({digest[:12]}), {len(recorded) - recorded.count(digest) - recorded.count(None)} under others, "
        f"{recorded.count(None)} under none."
    )
    return [*own, ReportTable("Verdicts", standing, rows)]


def _returned(file: Path, function: Callable[..., Any], found: Sequence[Condition]) -> list[Any]:
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
