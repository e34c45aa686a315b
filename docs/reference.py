"""Writes the documents that are generated from code: `uv run python docs/reference.py` (tests compare).

columns.md: every column of the step table, from `StepRow`. flags.md: the commands, and every flag of the trainer with
its bounds and presets, from the settings classes.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from vgrout.__main__ import COMMANDS
from vgrout.config.checks import flag, legal_values, rule_of
from vgrout.config.presets import PRESETS
from vgrout.config.run import GROUPS, Config
from vgrout.table import StepRow
from vgrout.types import MODE_CODE, MODES

DOCS = Path(__file__).parent
HEAD = "<!-- Generated from code by docs/reference.py; edit there. -->\n\n"
WHEN = {
    "teacher": "demonstrations",
    "modes": "several modes",
    "ablated": "`--rollout-ablate-frac` > 0",
    "route": "a method with a quarantine",
    "gate": "`--monitor gate`",
    "resid": "`--monitor gate` or `band`",
    "direction": "a method with a direction",
    "direction+teacher": "a method with a direction, demonstrations",
    "erase": "`erase`",
    "whole": "a method that routes whole rollouts",
    "flags": "a monitor",
    "flags+teacher": "a monitor, demonstrations",
    "blind": "`--known-modes`",
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
        'pd.read_json("steps.jsonl", lines=True).plot(x="step", y=["hack_s", "solve_s"])',
        "```",
        "",
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


def documented(settings: type) -> dict[str, str]:
    """Field → the string below it."""
    classes = [ast.parse(textwrap.dedent(inspect.getsource(c))).body[0] for c in settings.__mro__ if c is not object]
    return {
        field.target.id: " ".join(text.value.value.split())
        for body in classes
        if isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def legal(field: Field[Any]) -> str:
    """What a flag may be."""
    rule, values = rule_of(field), legal_values(field.type)
    if values:
        return ", ".join(f"`{value}`" for value in values)
    if rule.words:
        return "a list of " + ", ".join(f"`{word}`" for word in rule.words)
    low = f"≥ {rule.low:g}" if rule.low is not None else f"> {rule.above:g}" if rule.above is not None else ""
    top = rule.high if rule.high is not None else rule.below
    if top is None or top == math.inf:
        return low
    high = f"`{flag(top)}`" if isinstance(top, str) else f"{top:g}"
    return f"{low}, {'≤' if rule.high is not None else '<'} {high}".removeprefix(", ")


def flags() -> str:
    """flags.md."""
    lines = [
        "# Commands and flags",
        "",
        "`vgrout NAME …` is `python -m vgrout.NAME …`.",
        "",
        "| command | what |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {what} |" for name, what in COMMANDS.items()]
    lines += [
        *("", "## Flags of the trainer", ""),
        "`python -m vgrout.train PRESET [--flag value …]`. Where a preset has a value of its own it is named.",
        "A flag that the chosen method never reads is refused.",
    ]
    for group in GROUPS:
        settings = type(getattr(Config(), group))
        texts = documented(settings)
        lines += [
            "",
            f"### {settings.__name__}",
            "",
            str(settings.__doc__),
            "",
            "| flag | default | legal | what |",
            "|---|---|---|---|",
        ]
        for f in fields(settings):
            at = {name: getattr(getattr(cfg, group), f.name) for name, (_, cfg) in PRESETS.items()}
            usual = "".join(f"; {name}: {shown(value)}" for name, value in at.items() if value != f.default)
            what = texts.get(f.name) or next(m.help for m in f.type.__metadata__ if m.help)  # from a registry
            lines.append(f"| `{flag(f.name)}` | {shown(f.default)}{usual} | {legal(f)} | {what.replace('|', '·')} |")
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    return {None: "none", "": "''"}.get(value, f"`{value}`")  # ty: ignore[no-matching-overload]


PAGES: dict[str, Callable[[], str]] = {"columns.md": columns, "flags.md": flags}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(HEAD + page(), encoding="utf-8")
