"""The report as one page that opens from disk, with figures and rollouts inside it.

It needs no server and no network.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template

from vgrout.errors import Refused
from vgrout.files import LEFT, printable, read_json, write_atomic
from vgrout.metrics import percent
from vgrout.report.figures import pictures
from vgrout.report.load import Condition
from vgrout.report.rollouts import embedded
from vgrout.report.tables import ReportTable, answered, conclusion, csv_tables, level

# What a report's folder holds; the last two are of older reports.
FILES = ("report.html", "runs.csv", "monitors.csv", "figures", "report.md", "modes.csv")


def studies(sources: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the names of the sweeps among the sources, and the `# H:` lines of their study files.

    Without a sweep the name is that of the only run, or "Report".
    """
    names: list[str] = []
    claims: list[str] = []
    for source in sources:
        plan_file = source / "plan.json"
        if not plan_file.is_file():
            continue
        plan = read_json(plan_file)
        names.append(str(plan.get("name")))
        hypotheses = plan.get("hypotheses")
        if isinstance(hypotheses, list):
            claims += [str(claim) for claim in hypotheses]
    is_one_run = len(sources) == 1 and (sources[0] / "run.json").is_file()
    without_sweep = sources[0].name if is_one_run else "Report"
    return ", ".join(names) or without_sweep, claims


def hypotheses(sources: Sequence[Path], found: Sequence[Condition]) -> list[str]:
    """Return the sweeps' hypotheses, each with what was measured: `H: … — route2: Δ hack -80.5 …`."""
    _, claims = studies(sources)
    lines = []
    for claim in claims:
        measured = answered(claim, found)
        lines.append(f"H: {claim} — {'; '.join(measured) or 'not measured here'}")
    return lines


def conclusions(found: Sequence[Condition]) -> list[str]:
    """Return a line for each condition: what its final evaluation means, and its numbers."""
    lines = []
    for c in found:
        deployed, untrained = _rates(c, "deploy"), _rates(c, "base")
        lines.append(f"{c.title}: {conclusion(c)}. Deployed {deployed}; untrained {untrained}.")
    return lines


def _rates(c: Condition, side: str) -> str:
    hack = percent(level(c, side, "hack").value)
    solve = percent(level(c, side, "solve").value)
    return f"{hack} % hack and {solve} % solve"


def write(
    out: Path,
    found: Sequence[Condition],
    sources: Sequence[Path],
    tables: Sequence[ReportTable],
    left_out: Sequence[str],
    rollouts: Mapping[str, object],
) -> None:
    """Draw the figures and write the folder `out`, replacing an older report.

    Args:
        out: the folder.
        found: the conditions.
        sources: the folders that they were loaded from.
        tables: what the page shows.
        left_out: the runs that are not in it, with reasons.
        rollouts: from `rollouts.pack`.

    Raises:
        Refused: one line, if the folder cannot be written, or holds anything but a report.
    """
    older = _older_files(out)
    figures = [(picture.name, picture.caption, picture.png()) for picture in pictures(found)]
    title, _ = studies(sources)
    page = _template().render(
        title=title,
        sources=", ".join(map(str, sources)),
        conclusions=conclusions(found),
        conditions=found,
        tables=tables,
        figures=[(caption, base64.b64encode(png).decode()) for _, caption, png in figures],
        claims=hypotheses(sources, found),
        left_out=left_out,
        rollouts=rollouts,
        data=embedded(rollouts),
        anchor=lambda text: re.sub(r"\W+", "-", text),
    )
    files: dict[str, str | bytes] = {"report.html": page, **csv_tables(found)}
    for name, _, png in figures:
        files[f"figures/{name}.png"] = png
    try:
        for name, data in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(out / name, data)
    except OSError as e:
        raise Refused(f"--out {out}: cannot be written ({e.strerror})") from None
    written = {out / name for name in files}
    for file in older - written:
        file.unlink()


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("vgrout.report", ""),
        autoescape=True,
        # Text of unknown origin may hold characters that act.
        finalize=lambda x: printable(x) if type(x) is str else x,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _older_files(out: Path) -> set[Path]:
    """Return the files of an older report in `out`. Raises Refused if it holds anything else."""
    if not out.exists():
        return set()
    inside = [*out.iterdir(), *(out / "figures").glob("*")]
    foreign = [path for path in inside if not _is_of_a_report(path, out)]
    if foreign:
        holds = min(foreign).name
        raise Refused(f"--out {out}: is no report, it holds {holds}; name another folder")
    return {path for path in inside if path.is_file()}


def _is_of_a_report(path: Path, out: Path) -> bool:
    if LEFT.fullmatch(path.name):  # what a killed report was writing
        return True
    if path.parent == out:
        return path.name in FILES
    return path.suffix == ".png"
