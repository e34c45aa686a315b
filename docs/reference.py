"""Writes the pages that are generated from code: `uv run python docs/reference.py` (tests compare).

columns.md: every column of the step table, from `StepRow`. flags.md: commands, presets, methods, and every flag of the
trainer with its bounds and defaults, the everyday ones first, from the settings classes.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from vgrout.__main__ import COMMANDS
from vgrout.config.checks import flag, legal_values, rule_of
from vgrout.config.loss import LOSSES
from vgrout.config.names import NAMES, same
from vgrout.config.presets import EVERYDAY, PRESETS
from vgrout.config.run import GROUPS, Config
from vgrout.config.specs import CONTROLS, INTERVENTIONS, MONITORS
from vgrout.envs.code.modes import MODE_CODE, MODE_SPECS, MODES
from vgrout.table import StepRow

DOCS = Path(__file__).parent
HEAD = "<!-- Generated from code by docs/reference.py; edit there. -->\n\n"
LONGEST = 300  # characters of a cell
TITLE = {"opt": "Optimiser", "env": "Environment", "eval": "Evaluation"}
ABOUT = {
    "method": "Settings of monitors, interventions and controls. A flag of one that was not chosen is refused."
}
REGISTRY = {  # flags whose values have a table of their own
    "intervention": "What is done about flagged answers: see Interventions; `module:Class` is one of your own.",
    "monitor": "What flags them: see Monitors. `usual` is the intervention's own (route2: `gate`); `screen` and "
    "`penalty` have none and need one. `module:Class` is one of your own.",
    "control": "The same run under a control: see Controls.",
    "loss": "The policy-gradient loss: see Losses.",
}
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
        "`steps.jsonl` has one JSON object a step, of scalars. The log's table says the same names, and the trackers",
        "under `train/`, `eval/` (the deployed model) and `time/`;",
        "the console's seven columns are `step`, `hack_s`, `solve_s`, `hack_deploy`, `solve_deploy`, `rew_s`, `sec`,",
        "the shares in percent.",
        "A share `x` stands beside its counts, `x_k` of `x_n`; a column without a type is a number. `null` means not",
        "measured in this step; NaN never occurs.",
        "",
        "```python",
        'pd.read_json("steps.jsonl", lines=True).plot(x="step", y=["hack_s", "solve_s"])',
        "```",
        "",
        "`watch`, where present, holds what the guard and the detectors saw in the step; `refresh` the overlap of a",
        "direction with the one before it; `shadow` recall and false flags of each monitor in shadow.",
        "",
        "| column | type | what | should | measured with |",
        "|---|---|---|---|---|",
    ]
    whole = ""  # what the last legend without an ellipsis says, which those with one go on
    for f in fields(StepRow):
        about = f.metadata
        legend, should = about["legend"], about["should"].replace("; ELSE ", "; else ")
        if legend.startswith("…"):
            legend = (
                whole + (": " if legend.startswith("… their") else " ") + legend.removeprefix("… ")
            )
        else:
            whole = legend
        kind = {"frac": "share", "hk": "share", "d": "integer", "s": "string"}.get(about["fmt"], "")
        named = [(f.name, legend)]
        if f.name == "hk":
            named = [(f"hk_{MODE_CODE[m]}", f"student hacks of one flaw: `{m}`") for m in MODES]
        for name, what in named:
            lines.append(row(f"`{name}`", kind, what, should, WHEN[about["when"]]))
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    """A line of a table.

    Raises:
        ValueError: a cell over 300 characters; its text in the code has to be shorter.
    """
    for cell in cells:
        if len(cell) > LONGEST:
            raise ValueError(f"{len(cell)} characters, more than {LONGEST}: {cell}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def documented(settings: type) -> dict[str, str]:
    """Field → the string below it."""
    classes = [
        ast.parse(textwrap.dedent(inspect.getsource(c))).body[0]
        for c in settings.__mro__
        if c is not object
    ]
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
    if {*MODES} <= {*values, *rule.words}:
        others = [f"`{v}`" for v in values if v not in MODES]
        return ", ".join(["a flaw" if values else "a list of flaws", *others])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    if rule.words:
        return "a list of " + ", ".join(f"`{word}`" for word in rule.words)
    top = rule.high if rule.high is not None else rule.below
    low = (
        f"[{rule.low:g}"
        if rule.low is not None
        else f"({rule.above:g}"
        if rule.above is not None
        else "(−∞"
    )
    if top is None or top == math.inf:
        return "" if low == "(−∞" else f"{low}, ∞)"
    high = f"`{flag(top)}`" if isinstance(top, str) else f"{top:g}"
    return f"{low}, {high}{']' if rule.high is not None else ')'}"


def named(title: str, rows: Mapping[str, str], *text: str) -> list[str]:
    """A section with a table of names."""
    return [
        "",
        f"## {title}",
        "",
        *text,
        *([""] if text else []),
        "| name | what |",
        "|---|---|",
    ] + [row(f"`{name}`", what) for name, what in rows.items()]


def flag_row(group: str, f: Field[Any], texts: Mapping[str, str]) -> str:
    at = {name: getattr(getattr(cfg, group), f.name) for name, (_, cfg) in PRESETS.items()}
    usual = "".join(f"; {name}: {shown(value)}" for name, value in at.items() if value != f.default)
    what = (
        REGISTRY.get(f.name)
        or texts.get(f.name)
        or next(m.help for m in f.type.__metadata__ if m.help)
    )
    return row(f"`{flag(f.name)}`", shown(f.default) + usual, legal(f), what)


def flags() -> str:
    """flags.md."""
    head = ["| flag | default | legal | what |", "|---|---|---|---|"]
    groups = {group: type(getattr(Config(), group)) for group in GROUPS}
    settings = {f.name: (group, f) for group, kind in groups.items() for f in fields(kind)}
    texts = {group: documented(kind) for group, kind in groups.items()}
    everyday = [name for name in EVERYDAY if name in settings]
    lines = [
        "# Commands and flags",
        "",
        "`vgrout NAME …` is `python -m vgrout.NAME …`. The flags below are those of `train`; every other command lists",
        "its own with `--help`.",
        *named("Commands", COMMANDS),
        *named(
            "Presets",
            {name: what for name, (what, _) in PRESETS.items()},
            "`vgrout train PRESET [--flag value …]`. A flag that the chosen method never reads is refused.",
        ),
        *named("Interventions", {name: spec.what for name, spec in INTERVENTIONS.items()}),
        *named("Monitors", {name: spec.what for name, spec in MONITORS.items()}),
        *named("Controls", {name: spec.what for name, spec in CONTROLS.items()}),
        *named("Losses", {name: spec.what for name, spec in LOSSES.items()}),
        *named(
            "Flaws",
            {name: spec.should for name, spec in MODE_SPECS.items()},
            "What an answer has to do to hack the grader:",
        ),
        *(
            "",
            "## Everyday flags",
            "",
            "Where a preset has a default of its own, it is named.",
            "",
            *head,
        ),
        *(flag_row(*settings[name], texts[settings[name][0]]) for name in everyday),
        *("", "## All other flags", "", "`--help-all` lists them in a terminal."),
    ]
    for group, kind in groups.items():
        rest = [f for f in fields(kind) if f.name not in EVERYDAY]
        about = ABOUT.get(group) or (inspect.getdoc(kind) or "").splitlines()[0]
        lines += ["", f"### {TITLE.get(group, group.capitalize())}", "", about, "", *head]
        lines += [flag_row(group, f, texts[group]) for f in rest]
    lines += [
        "",
        "## Names from elsewhere",
        "",
        "Taken for our flag where they mean the same, else refused with the answer.",
    ]
    for of, names in NAMES.items():
        lines += ["", f"### {of}", "", "| name | here |", "|---|---|"]
        for answer in dict.fromkeys(names.values()):
            alike = ", ".join(
                f"`{named_flag(name)}`" for name, given in names.items() if given == answer
            )
            lines.append(row(alike, f"`{answer}`, the same" if same(answer) else answer))
    return "\n".join(lines) + "\n"


def named_flag(name: str) -> str:
    """A flag, or a flag and a word of its value."""
    return " ".join([flag(name.partition(" ")[0]), *name.split()[1:]])


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"`{value}`" if value != "" else "''"


PAGES: dict[str, Callable[[], str]] = {"columns.md": columns, "flags.md": flags}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(HEAD + page(), encoding="utf-8")
