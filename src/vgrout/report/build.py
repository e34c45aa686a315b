"""The report of a study as a folder, written atomically: report.md, report.html, tables as CSV, figures."""

import csv
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vgrout.files import read_json, write_atomic
from vgrout.report import html
from vgrout.report.figures import Picture
from vgrout.report.judge import Judge, Judgement
from vgrout.report.runs import Cell, Loaded, cells
from vgrout.report.tables import Table, inert, mode_rows, monitor_rows, one_line, run_rows, tables


@dataclass(frozen=True)
class Study:
    """A sweep among the sources, and the `# H:` lines of its study file."""

    name: str
    hypotheses: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, and a table or lines under it."""

    name: str
    text: str = ""
    table: Table | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The content of a report, before it is rendered as Markdown, HTML or CSV."""

    sources: tuple[str, ...]
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    studies: tuple[Study, ...]
    tables: tuple[Table, ...]
    judgement: Judgement | None
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        return ", ".join(s.name for s in self.studies) or "Report"

    @property
    def lead(self) -> str:
        """What was run, and when it ended."""
        runs, sources = [r for c in self.cells for r in c.runs], ", ".join(self.sources)
        days = sorted({r.finished for r in runs})
        when = f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0]
        left_out = f" Left out: {len(self.left_out)}, named at the end." if self.left_out else ""
        counted = f"{len(runs)} runs of {sources}" if len(runs) > 1 else f"One run, {sources}"
        return f"{counted}, finished {when}.{left_out}"

    def sections(self) -> tuple[list[Section], list[Section]]:
        """The numbers, and what stands below the figures: claims and verdicts, how to read the numbers, their runs."""
        traced = "The run directories behind every number, by the name of its row."
        runs = tuple(f"{c.title}: {', '.join(r.name for r in c.runs)}" for c in self.cells)
        judged = [*self.judgement.tables, self.judgement.table()] if self.judgement else []
        claimed = "What it should show, by the `# H:` lines of its file."
        below = [Section(f"Study {s.name}", claimed, lines=s.hypotheses) for s in self.studies if s.hypotheses]
        below += [Section(t.name, t.caption, t) for t in judged]
        below += [Section("How to read it", lines=self.notes), Section("Runs", traced, lines=runs)]
        below += [Section("Left out", lines=self.left_out)] if self.left_out else []
        return [Section(t.name, t.caption, t) for t in self.tables], below


def compile_report(loaded: Loaded, sources: Sequence[Path], judge: Judge | None) -> Report:
    """Cells, tables, notes and verdicts of the loaded runs. Cells of one seed are not compared."""
    found = cells(loaded.runs)
    return Report(
        sources=tuple(str(s) for s in sources),
        cells=tuple(found),
        left_out=tuple(loaded.left_out),
        studies=tuple(_study(plan) for s in sources if (plan := s / "plan.json").is_file()),
        tables=tuple(tables(found)),
        judgement=judge(found) if judge else None,
        notes=tuple(_notes(found)),
    )


def _study(plan: Path) -> Study:
    """Raises ValueError, one line, where the sweep's plan.json is damaged."""
    data = read_json(plan)
    name, claims = data.get("name", plan.parent.name), data.get("hypotheses", [])
    if not isinstance(claims, list) or not all(isinstance(text, str) for text in (name, *claims)):
        raise ValueError(f"{plan}: damaged (name or hypotheses are no text)")
    return Study(one_line(name), tuple(claims))


def _notes(found: Sequence[Cell]) -> list[str]:
    """How to read the numbers."""
    several = [c for c in found if len(c.runs) > 1]
    notes = ["hack: the flawed check accepted the answer and the strict oracle did not; solve: the oracle accepted it."]
    if not several:
        alone = "One run" if len(found) == 1 else "One seed a cell"
        return [*notes, f"{alone}: curves and rates; nothing is compared, since n is too small."]
    notes += [
        "[low, high] is a 95 % interval over seeds: a two-level bootstrap (seeds, and held-out problems within each "
        "mode, one draw for all seeds; percentiles expanded for few seeds) from five seeds on; with fewer, n too small "
        "for that, Student's t (marked t), which knows nothing of other problems.",
        "DEGENERATE: every answer of every seed came out the same, so there is no interval; of a p value: no seed "
        "differs at all.",
        "p values and intervals are not corrected for their number.",
    ]
    if len(several) < len(found):
        notes.append("Cells of one seed are in a table of their own, and in no figure.")
    return notes


def as_markdown(report: Report, pictures: Sequence[Picture] = ()) -> str:
    def rendered(sections: Sequence[Section]) -> Iterator[str]:
        for s in sections:
            bullets = "\n".join(f"- {inert(line)}" for line in s.lines)  # a run's folder may be called anything
            yield from (f"## {inert(s.name)}", inert(s.text), s.table.markdown(inert) if s.table else bullets)

    numbers, below = report.sections()
    drawn = [part for p in pictures for part in (f"![{p.name}](figures/{p.name}.png)", inert(p.caption))]
    parts = [f"# {inert(report.title)}", inert(report.lead), *rendered(numbers), *drawn, *rendered(below)]
    return "\n\n".join(filter(None, parts)) + "\n"


def as_html(report: Report, pictures: Mapping[Picture, bytes], rollouts: Mapping[str, Any]) -> str:
    def rendered(sections: Sequence[Section]) -> Iterator[str]:
        for s in sections:
            kind = "prose" if s.name == "Verdicts" else "wide"
            yield from (html.heading(s.name), html.paragraph(s.text) if s.text else "")
            yield html.table(s.table, kind) if s.table else html.bullets(s.lines)

    numbers, below = report.sections()
    head = html.heading(report.title, 1), html.paragraph(report.lead), html.links([s.name for s in (*numbers, *below)])
    figures = [html.figure(png, p.caption) for p, png in pictures.items()]
    return html.page(f"vgrout: {report.title}", [*head, *rendered(numbers), *figures, *rendered(below)], rollouts)


def as_csv(rows: Sequence[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _no_formula(value: object) -> object:
    """A cell; text that a spreadsheet would take for a formula is quoted as its readers do it, by an apostrophe."""
    if not isinstance(value, str):
        return value
    return f"'{one_line(value)}" if value[:1] in "=+-@\t\r" and value else one_line(value)


def as_png(picture: Picture) -> bytes:
    out = io.BytesIO()
    picture.figure.savefig(out, format="png", bbox_inches="tight")  # a long label or legend of one panel is not cut off
    return out.getvalue()


FILES = ("report.md", "report.html", "runs.csv", "modes.csv", "monitors.csv", "figures")


def refuse_other(out: Path) -> None:
    """Raises ValueError, one line, if `out` holds anything but a report, since the folder would be replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; name a folder")
    inside = sorted([*out.iterdir(), *(out / "figures").glob("*")]) if out.exists() else []
    other = [p for p in inside if p not in {out / name for name in FILES}]
    other = [p for p in other if p.parent != out / "figures" or p.suffix != ".png"]
    if other or (inside and out / "report.md" not in inside):
        raise ValueError(f"--out {out}: is no report, it holds {(other or inside)[0].name}; name another folder")


def write(report: Report, pictures: Sequence[Picture], rollouts: Mapping[str, Any], out: Path) -> None:
    """Write the folder `out`, replacing an older report.

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
        **({"monitors.csv": as_csv(monitors)} if (monitors := monitor_rows(report.cells)) else {}),
        **{f"figures/{p.name}.png": png for p, png in drawn.items()},
    }
    fresh, old = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("tmp", "old"))
    try:
        (fresh / "figures").mkdir(parents=True)
        for name, data in files.items():
            write_atomic(fresh / name, data)
        if out.exists():
            os.replace(out, old)
        os.replace(fresh, out)
    except OSError as e:
        raise ValueError(f"--out {out}: cannot be written ({e.strerror}); name another folder with --out") from None
    finally:
        if old.exists() and not out.exists():
            os.replace(old, out)
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
