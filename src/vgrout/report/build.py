"""The report of a study as a folder: report.md, report.html, runs.csv, modes.csv, figures/. Written atomically."""

import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgrout.files import printable, write_atomic
from vgrout.report import html
from vgrout.report.figures import Picture
from vgrout.report.organisms import organisms
from vgrout.report.runs import Cell, Loaded, cells
from vgrout.report.tables import Table, by_problem, mode_rows, run_rows, tables
from vgrout.report.verdicts import Preregistered, Verdict, judge


@dataclass(frozen=True)
class Report:
    """The content of a report, before it is rendered as Markdown, HTML or CSV."""

    sources: tuple[str, ...]
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    standing: str  # how many runs carry the hash of the hypotheses' text; "" without one
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    @property
    def lead(self) -> str:
        n, of = sum(len(c.runs) for c in self.cells), ", ".join(self.sources)
        return f"{n} runs of {of}." if n > 1 else f"One run: {of}."

    @property
    def traces(self) -> list[str]:
        """The run directories of each cell, by its title."""
        return [f"{c.title}: {', '.join(r.name for r in c.runs)}" for c in self.cells]


def compile_report(loaded: Loaded, sources: Sequence[Path], filed: Preregistered | None) -> Report:
    """Cells, tables, notes and verdicts of the loaded runs. Cells of one seed are neither compared nor judged."""
    found = cells(loaded.runs)
    several = [c for c in found if len(c.runs) > 1]
    return Report(
        sources=tuple(str(s) for s in sources),
        cells=tuple(found),
        left_out=tuple(loaded.left_out),
        standing=filed.standing(found) if filed else "",
        verdicts=tuple(judge(filed, several)) if filed else (),
        tables=(*tables(found), *(t for t in [organisms(found)] if t.rows)),
        notes=tuple(_notes(found, several)),
    )


def _notes(found: Sequence[Cell], several: Sequence[Cell]) -> list[str]:
    """How to read the numbers."""
    notes = ["hack: the flawed check accepted the answer and the strict oracle did not; solve: the oracle accepted it."]
    if not several:
        alone = "One run" if len(found) == 1 else "One seed a cell"
        return [*notes, f"{alone}: curves and rates; nothing is compared, since n is too small."]
    notes += [
        "[low, high] is a 95 % interval over seeds: a two-level bootstrap (seeds, and held-out problems within each "
        "mode, one draw for all seeds; percentiles expanded for few seeds) from five seeds on; with fewer, n too small "
        "for that, Student's t (marked t), which knows nothing of other problems.",
        "DEGENERATE: every answer of every seed came out the same, so the statistic could not have come out otherwise; "
        "of a p value: no seed differs at all.",
        "p values and intervals are not corrected for how many of them are here.",
    ]
    if not by_problem(several):
        runs = [r for c in several for r in c.runs]
        notes.append(
            f"{sum(r.problems is None for r in runs)} of {len(runs)} runs have no final.jsonl, so their problems are "
            "not known: their bootstrap resamples answers within a mode as if each were of another problem, and "
            "differences from them are paired by seed alone."
        )
    if len(several) < len(found):
        notes.append("Cells of one seed are in a table of their own, and in no figure and no verdict.")
    return notes


TRACED = "Every number is of these run directories, by the name of its row."


def as_markdown(report: Report, pictures: Sequence[Picture] = ()) -> str:
    def bullets(lines: Sequence[str]) -> str:  # a run's folder may be called anything
        return "\n".join(f"- {html.escape(printable(line).replace(chr(10), ' '))}" for line in lines)

    parts = ["# Report", report.lead, bullets(report.notes)]
    if report.verdicts:
        parts += ["## Verdicts", report.standing, verdict_table(report).markdown()]
    for p in pictures:
        parts += [f"![{p.name}](figures/{p.name}.png)", p.caption]
    for table in report.tables:
        parts += [f"## {table.name}", table.caption, table.markdown()]
    parts += ["## Runs", TRACED, bullets(report.traces)]
    if report.left_out:
        parts += ["## Left out", bullets(report.left_out)]
    return "\n\n".join(parts) + "\n"


def as_html(report: Report, pictures: Mapping[Picture, bytes], rollouts: Mapping[str, Any]) -> str:
    body = [
        html.heading("Report", 1),
        html.paragraph(report.lead),
        '<nav><a href="#rollouts">rollouts</a></nav>',
        html.bullets(report.notes),
    ]
    if report.verdicts:
        body += [html.heading("Verdicts"), html.paragraph(report.standing), html.table(verdict_table(report), "prose")]
    body += [html.figure(png, p.caption) for p, png in pictures.items()]
    for table in report.tables:
        body += [html.heading(table.name), html.paragraph(table.caption), html.table(table)]
    body += [html.heading("Runs"), html.paragraph(TRACED), html.bullets(report.traces)]
    if report.left_out:
        body += [html.heading("Left out"), html.bullets(report.left_out)]
    return html.page("vgrout: report", body, rollouts)


def verdict_table(report: Report) -> Table:
    rows = [{"hypothesis": v.id, "about": v.about, "verdict": v.outcome, "numbers": v.numbers} for v in report.verdicts]
    return Table("Verdicts", report.standing, rows)


def as_csv(rows: Sequence[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_png(picture: Picture) -> bytes:
    out = io.BytesIO()
    picture.figure.savefig(out, format="png", bbox_inches="tight")  # a long label or legend of one panel is not cut off
    return out.getvalue()


FILES = ("report.md", "report.html", "runs.csv", "modes.csv", "figures")


def refuse_other(out: Path) -> None:
    """Raises ValueError, one line, where `out` holds anything but a report, since the folder would be replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; name a folder")
    inside = sorted([*out.iterdir(), *(out / "figures").glob("*")]) if out.exists() else []
    other = [p for p in inside if p not in {out / name for name in FILES}]
    other = [p for p in other if p.parent != out / "figures" or p.suffix != ".png"]
    if other or (inside and out / "report.md" not in inside):
        raise ValueError(f"--out {out}: is no report, it holds {(other or inside)[0].name}; name another folder")


def write(report: Report, pictures: Sequence[Picture], rollouts: Mapping[str, Any], out: Path) -> None:
    """Write the folder `out`, in place of an older report.

    rollouts: from `rollouts.pack`.

    Raises:
        ValueError: one line, where it cannot be written; the older report is still there.
    """
    drawn = {p: as_png(p) for p in pictures}
    files: dict[str, str | bytes] = {
        "report.md": as_markdown(report, pictures),
        "report.html": as_html(report, drawn, rollouts),
        "runs.csv": as_csv(run_rows(report.cells)),
        "modes.csv": as_csv(mode_rows(report.cells)),
        **{f"figures/{p.name}.png": png for p, png in drawn.items()},
    }
    making, old = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("tmp", "old"))
    try:
        (making / "figures").mkdir(parents=True)
        for name, data in files.items():
            write_atomic(making / name, data)
        if out.exists():
            os.replace(out, old)
        os.replace(making, out)
    except OSError as e:
        raise ValueError(f"--out {out}: cannot be written ({e.strerror}); name another folder with --out") from None
    finally:
        if old.exists() and not out.exists():
            os.replace(old, out)
        for folder in (making, old):
            shutil.rmtree(folder, ignore_errors=True)
