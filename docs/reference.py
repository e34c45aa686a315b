"""Writes the documents that are generated from code: `uv run python docs/reference.py` (tests compare).

columns.md: every column of the step table, from `StepRow`.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from vgrout.table import StepRow
from vgrout.types import MODE_CODE, MODES

DOCS = Path(__file__).parent
HEAD = "<!-- Generated from code by docs/reference.py; edit there. -->\n\n"
WHEN = {
    "teacher": "demonstrations",
    "modes": "several modes",
    "ablated": "`--rollout-ablate-frac` > 0",
    "route": "an arm with a quarantine",
    "route2": "`route2`",
    "direction": "an arm with a direction",
    "direction+teacher": "an arm with a direction, demonstrations",
    "erase": "`erase`",
    "whole": "an arm that routes whole rollouts",
    "reads": "an arm that reads",
    "reads+teacher": "an arm that reads, demonstrations",
    "halves": "`--report-detectors`",
    "beta": "`--beta` > 0",
    "drops": "a loss that drops tokens",
    "file": "the file alone",
    "always": "",
}


def columns() -> str:
    """columns.md."""
    lines = [
        "# Columns",
        "",
        "`steps.jsonl` has one JSON object a step, of scalars; the printed table and the trackers say the same names.",
        "A share `x` stands beside its counts, `x_k` of `x_n`. `null` is not measured in this step; NaN never occurs.",
        "",
        "```python",
        'pd.read_json("steps.jsonl", lines=True).plot(x="step", y=["hack_s", "gt_s"])',
        "```",
        "",
        "Runs from before the counts had columns of their own have `[k, n]`; the report and `--resume` read both.",
        "`watch`, where it is there, holds what guard and detectors saw in the step, and `refresh` the overlap of a",
        "direction with the one before it.",
        "",
        "| column | type | what | should | measured with |",
        "|---|---|---|---|---|",
    ]
    for f in fields(StepRow):
        about = f.metadata
        kind = {"frac": "share", "hk": "share", "d": "integer", "s": "string"}.get(about["fmt"], "number")
        named = [(f.name, about["legend"])]
        if f.name == "hk":
            named = [(f"hk_{MODE_CODE[m]}", f"{about['legend']}: `{m}`") for m in MODES]
        for name, what in named:
            lines.append(f"| `{name}` | {kind} | {what} | {about['should']} | {WHEN[about['when']]} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {"columns.md": columns}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(HEAD + page(), encoding="utf-8")
