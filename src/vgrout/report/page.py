"""The report as one page that opens from disk, with figures and rollouts inside it.

It needs no server and no network.
"""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader

from vgrout.ground.io import make_folder, printable, read_json, write_atomic
from vgrout.ground.metrics import percent
from vgrout.report.conclusions import conclusion, from_plain, level
from vgrout.report.figures import pictures
from vgrout.report.load import Condition
from vgrout.report.rollouts import embedded, pack
from vgrout.report.tables import ReportTable, by_flaw, csv_files, methods, monitors

ROLLOUTS = 50_000  # about so many are on a page: as evenly spaced whole steps
# What a report writes where it has the numbers for it.
OPTIONAL = (
    "monitors.csv",
    *(f"figures/{name}.png" for name in ("dynamics", "plane", "flaws")),
)


def studies(sources: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the names of the sweeps among the sources, and the `# H:` lines of their study files.

    Without a sweep the name is that of the only run, or "Report".
    """
    names: list[str] = []
    claims: list[str] = []
    for source in sources:
        if (source / "plan.json").is_file():
            plan = read_json(source / "plan.json")
            names.append(plan["name"])
            claims += plan.get("hypotheses") or []
    is_one_run = len(sources) == 1 and (sources[0] / "run.json").is_file()
    without_sweep = sources[0].name if is_one_run else "Report"
    return ", ".join(names) or without_sweep, claims


def hypotheses(sources: Sequence[Path], found: Sequence[Condition]) -> list[str]:
    """Return the sweeps' hypotheses, each with what was measured: `H: … — route2: Δ hack -80.5 …`.

    What was measured is of the methods whose intervention the claim names, or of all if it names
    none.
    """
    _, claims = studies(sources)
    lines = []
    for claim in claims:
        words = re.findall(r"[\w-]+", claim)
        named = [c for c in found if c.first.cfg.method.intervention in words] or found
        measured = []
        for c in named:
            hack, solve = from_plain(c, found, "hack"), from_plain(c, found, "solve")
            if hack and solve:
                measured.append(f"{c.title}: Δ hack {hack}, Δ solve {solve}")
        lines.append(f"H: {claim} — {'; '.join(measured) or 'not measured here'}")
    return lines


def conclusions(found: Sequence[Condition]) -> list[str]:
    """Return a line for each condition: what its final evaluation means, and its numbers."""
    lines = []
    for c in found:
        line = f"{c.title}: {conclusion(c)}. Deployed {_rates(c, 'deploy')}"
        less = from_plain(c, found, "hack")
        if less:
            line += f" (Δ hack {less} points from plain GRPO)"
        lines.append(f"{line}; untrained {_rates(c, 'base')}.")
    return lines


def _rates(c: Condition, side: str) -> str:
    hack = percent(level(c, side, "hack").value)
    solve = percent(level(c, side, "solve").value)
    return f"{hack} % hack and {solve} % solve"


def write(
    out: Path,
    found: Sequence[Condition],
    sources: Sequence[Path],
    own: Sequence[ReportTable],
    left_out: Sequence[str],
) -> list[str]:
    """Draw the figures and write the folder `out`, replacing an older report.

    Args:
        out: the folder.
        found: the conditions.
        sources: the folders that they were loaded from.
        own: tables of a judge, behind the usual ones.
        left_out: the runs that are not in it, with reasons.

    Returns:
        The runs that are not in it, and those whose rollouts are not.
    """
    rollouts = pack(found, ROLLOUTS)
    out_of_page = [*left_out, *rollouts["left_out"]]
    every = (methods(found), by_flaw(found), monitors(found), *own)
    figures = [(picture.name, picture.caption, picture.figure.png()) for picture in pictures(found)]
    environment = Environment(
        loader=PackageLoader("vgrout.report", ""),
        autoescape=True,
        # Text of unknown origin may hold characters that act.
        finalize=lambda x: printable(x) if type(x) is str else x,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        title=studies(sources)[0],
        sources=", ".join(map(str, sources)),
        conclusions=conclusions(found),
        conditions=found,
        tables=[table for table in every if table.rows],
        figures=[(caption, base64.b64encode(png).decode()) for _, caption, png in figures],
        claims=hypotheses(sources, found),
        left_out=out_of_page,
        rollouts=rollouts,
        data=embedded(rollouts),
        anchor=lambda text: re.sub(r"\W+", "-", text),
    )
    files: dict[str, str | bytes] = {"report.html": page, **csv_files(found)}
    for name, _, png in figures:
        files[f"figures/{name}.png"] = png
    make_folder(out / "figures")
    for name, data in files.items():
        write_atomic(out / name, data)
    for name in OPTIONAL:
        if name not in files:
            (out / name).unlink(missing_ok=True)
    return out_of_page
