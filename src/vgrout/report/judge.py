"""Verdicts by a user's file: `vgrout report FOLDER --judge FILE.py`.

FILE.py has a function `judge(conditions)` that returns `Verdict`s, and may have `tables(conditions)` that returns
`ReportTable`s. A condition is the runs that differ by their seed alone; `vgrout.report.tables` has its numbers
(`level`, `compare`). Modules beside FILE.py can be imported.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """The file's own tables, and that of its verdicts. Raises Refused, one line, if the file cannot be imported, has
    no `judge`, raises, or returns anything else."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look up annotations that are strings
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    try:
        spec.loader.exec_module(module)
        verdicts, own = module.judge(found), getattr(module, "tables", lambda _: ())(found)
        rows = [
            {"hypothesis": v.id, "about": v.about, "verdict": v.outcome, "numbers": v.numbers}
            for v in verdicts
        ]
        own = [ReportTable(t.name, t.caption, t.rows) for t in own]
    except Exception as e:  # whatever a user's file may raise
        raise Refused(f"--judge {file}: {type(e).__name__}: {e}") from e
    digest = preregistered(file.resolve().parent) or ""
    recorded = [(r.record.get("hashes") or {}).get("preregistered") for c in found for r in c.runs]
    standing = (
        f"Of {len(recorded)} runs {recorded.count(digest)} were started under these very rules and statistics "
        f"({digest[:12]}), {len(recorded) - recorded.count(digest) - recorded.count(None)} under others, "
        f"{recorded.count(None)} under none."
    )
    return [*own, ReportTable("Verdicts", standing, rows)]
