"""The report as one page that opens from disk, with figures and rollouts inside it: no server, no network."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from vgrout.errors import Refused
from vgrout.files import LEFT, printable, read_json, write_atomic
from vgrout.metrics import percent
from vgrout.report.figures import pictures
from vgrout.report.load import WHATS, Condition
from vgrout.report.rollouts import embedded
from vgrout.report.tables import ReportTable, conclusion, csv_tables, level

# … the last two of older ones
FILES = ("report.html", "runs.csv", "monitors.csv", "figures", "report.md", "modes.csv")


def studies(sources: Sequence[Path]) -> tuple[str, list[str]]:
    """The names of the sweeps among the sources, and the `# H:` lines of their study files."""
    plans = [read_json(plan) for source in sources if (plan := source / "plan.json").is_file()]
    run = sources[0].name if len(sources) == 1 and (sources[0] / "run.json").is_file() else "Report"
    claims = [str(h) for p in plans if isinstance(of := p.get("hypotheses"), list) for h in of]
    return ", ".join(str(p.get("name")) for p in plans) or run, claims


def conclusions(found: Sequence[Condition]) -> list[str]:
    """A line for each condition: its final evaluation, and what that means."""

    def rates(c: Condition, side: str) -> str:
        of = (f"{percent(level(c, side, what).value)} % {what}" for what in WHATS)
        return " and ".join(of)

    return [
        f"{c.title}: {conclusion(c)}. Deployed {rates(c, 'deploy')}; untrained {rates(c, 'base')}."
        for c in found
    ]


def write(
    out: Path,
    found: Sequence[Condition],
    sources: Sequence[Path],
    tables: Sequence[ReportTable],
    left_out: Sequence[str],
    rollouts: Mapping[str, Any],
) -> None:
    """Draw the figures and write the folder `out`, replacing an older report. rollouts: from `rollouts.pack`.

    Raises:
        Refused: one line, where it cannot be written, or holds anything but a report.
    """
    inside = [*out.iterdir(), *(out / "figures").glob("*")] if out.exists() else []
    killed = {p for p in inside if LEFT.fullmatch(p.name)}  # what a killed report was writing
    if (
        other := {
            p for p in inside if (p.name not in FILES if p.parent == out else p.suffix != ".png")
        }
        - killed
    ):
        raise Refused(f"--out {out}: is no report, it holds {min(other).name}; name another folder")
    drawn = {p.name: (p.caption, p.png()) for p in pictures(found)}
    title, claims = studies(sources)
    template = Environment(
        loader=PackageLoader("vgrout.report", ""),
        autoescape=True,
        # what would act in text of unknown origin
        finalize=lambda x: printable(x) if type(x) is str else x,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")
    page = template.render(
        title=title,
        sources=", ".join(map(str, sources)),
        conclusions=conclusions(found),
        conditions=found,
        tables=tables,
        figures=[(caption, base64.b64encode(png).decode()) for caption, png in drawn.values()],
        claims=claims,
        left_out=left_out,
        rollouts=rollouts,
        data=embedded(rollouts),
        anchor=lambda text: re.sub(r"\W+", "-", text),
    )
    files = (
        {"report.html": page}
        | csv_tables(found)
        | {f"figures/{name}.png": png for name, (_, png) in drawn.items()}
    )
    try:
        for name, data in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(out / name, data)
    except OSError as e:
        raise Refused(f"--out {out}: cannot be written ({e.strerror})") from None
    for stale in {p for p in inside if p.is_file()} - {out / name for name in files}:
        stale.unlink()
