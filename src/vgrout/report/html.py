"""The report as one self-contained HTML page, with figures and rollouts inside it: no server, no network."""

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape as escaped
from importlib import resources
from typing import Any

from tabulate import tabulate

from vgrout.files import printable
from vgrout.report.rollouts import embedded
from vgrout.report.tables import Table, one_line

TEMPLATE = "page.html"


def escape(text: str) -> str:
    """Text of unknown origin."""
    return escaped(printable(text))


def page(title: str, body: Sequence[str], rollouts: Mapping[str, Any]) -> str:
    """The template with its four placeholders filled, in one pass: placeholders in an answer's text are left alone."""
    n, total, every = len(rollouts["columns"]["run"]), rollouts["total"], rollouts["every"]
    share = f"All {n} rollouts." if n == total else f"{n} of {total} rollouts: one step in {every}, whole."
    filled = {
        "TITLE": escape(title),
        "BODY": "\n".join(body),
        "SHARE": escape(share if n else "Left out of this page; they are in each run's rollouts.jsonl."),
        "DATA": embedded(dict(rollouts)),
    }
    template = resources.files("vgrout.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return re.sub(r"%(TITLE|BODY|SHARE|DATA)%", lambda place: filled[place[1]], template)


def heading(text: str, level: int = 2) -> str:
    return f'<h{level} id="{_anchor(text)}">{escape(text)}</h{level}>'


def _anchor(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def links(names: Sequence[str]) -> str:
    """To headings of these names, and to the rollout reader."""
    items = [f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name in (*names, "rollouts")]
    return f"<nav>{' '.join(items)}</nav>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table(of: Table, kind: str = "wide") -> str:
    """A table; tabulate escapes every cell. kind: "wide", cells that do not wrap, or "prose"."""
    rows = [{one_line(str(k)): one_line(str(v)) for k, v in row.items()} for row in of.rows]
    cells = tabulate(rows, headers="keys", tablefmt="html", disable_numparse=True)
    return f'<div class="{kind}">{cells}</div>'


def figure(png: bytes, caption: str) -> str:
    data = base64.b64encode(png).decode()
    text = escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
