"""Writes the pages that are generated from code: `uv run python docs/reference.py`.

columns.md: every column of the step table, from `StepRow`. flags.md: commands, presets, methods,
and every flag of the trainer with its bounds and defaults, the everyday ones first, from the
settings classes. Tests compare the pages with the code.
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
from vgrout.config.checks import Rule, flag, legal_values, rule_of
from vgrout.config.loss import LOSSES
from vgrout.config.names import KEYS, NAMES, same
from vgrout.config.presets import EVERYDAY, PRESETS
from vgrout.config.run import GROUPS, Config
from vgrout.config.specs import CONTROLS, INTERVENTIONS, MONITORS, line_of
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
    "judge": "monitor llm_judge",
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
    "thinking": "`--thinking`",
    "drops": "a loss that drops tokens",
    "file": "the file alone",
    "always": "",
}


COLUMNS_HEAD = """\
# Columns

`steps.jsonl` has one JSON object a step, of scalars. The log's table says the same names, and the trackers
under `train/`, `eval/` (the deployed model) and `time/`;
the console's seven columns are `step`, `hack_s`, `solve_s`, `hack_deploy`, `solve_deploy`, `rew_s`, `sec`,
the shares in percent.
A share `x` stands beside its counts, `x_k` of `x_n`; a column without a type is a number. `null` means not
measured in this step; NaN never occurs.

```python
pd.read_json("steps.jsonl", lines=True).plot(x="step", y=["hack_s", "solve_s"])
```

`watch`, where present, holds what the guard and the detectors saw in the step; `refresh` the overlap of a
direction with the one before it; `shadow` recall and false flags of each monitor in shadow.

| column | type | what | should | measured with |
|---|---|---|---|---|
"""
KEYS_TEXT = """\
The documents that vgrout was built from name these keys otherwise; all others have the same names. In their
`rollouts.jsonl` a bare `hacked` is detector C."""
TYPES = {"frac": "share", "hk": "share", "d": "integer", "s": "string"}  # by format


def columns() -> str:
    """Return columns.md."""
    lines = []
    whole = ""  # the last legend without an ellipsis, which those with one go on
    for f in fields(StepRow):
        about = f.metadata
        legend = about["legend"]
        if legend.startswith("…"):
            link = ": " if legend.startswith("… their") else " "
            legend = whole + link + legend.removeprefix("… ")
        else:
            whole = legend
        kind = TYPES.get(about["fmt"], "")
        should = about["should"].replace("; ELSE ", "; else ")
        when = WHEN[about["when"]]
        if f.name == "hk":
            for mode in MODES:
                what = f"student hacks of one flaw: `{mode}`"
                lines.append(row(f"`hk_{MODE_CODE[mode]}`", kind, what, should, when))
        else:
            lines.append(row(f"`{f.name}`", kind, legend, should, when))
    return COLUMNS_HEAD + "\n".join([*lines, *_documents_keys()]) + "\n"


def _documents_keys() -> list[str]:
    """Return the section with the keys that the documents name otherwise."""
    lines = ["", "## Keys in the documents", "", KEYS_TEXT, "", "| file | documents | here |"]
    lines.append("|---|---|---|")
    for file, keys in KEYS.items():
        lines += [row(f"`{file}`", f"`{theirs}`", f"`{here}`") for theirs, here in keys.items()]
    return lines


def row(*cells: str) -> str:
    """Return a line of a table.

    Raises:
        ValueError: a cell has over 300 characters; its text in the code has to be shorter.
    """
    for cell in cells:
        if len(cell) > LONGEST:
            raise ValueError(f"{len(cell)} characters, more than {LONGEST}: {cell}")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def documented(settings: type) -> dict[str, str]:
    """Return the string below each field of a settings class and of its parents, by field."""
    texts: dict[str, str] = {}
    for parent in settings.__mro__:
        if parent is not object:
            source = textwrap.dedent(inspect.getsource(parent))
            texts |= _field_texts(ast.parse(source).body[0])
    return texts


def _field_texts(statement: ast.stmt) -> dict[str, str]:
    """Return the string below each field of one class, by field."""
    assert isinstance(statement, ast.ClassDef)
    texts = {}
    for field, text in pairwise(statement.body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if is_field and is_text:
            texts[field.target.id] = " ".join(text.value.value.split())
    return texts


def legal(field: Field[Any]) -> str:
    """Say what the value of a flag may be."""
    rule, values = rule_of(field), legal_values(field.type)
    if {*MODES} <= {*values, *rule.words}:
        others = [f"`{value}`" for value in values if value not in MODES]
        return ", ".join(["a flaw" if values else "a list of flaws", *others])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    if rule.words:
        return "a list of " + ", ".join(f"`{word}`" for word in rule.words)
    return _interval(rule)


def _interval(rule: Rule) -> str:
    """Return the interval of legal numbers; "": every number is."""
    if rule.low is not None:
        low = f"[{rule.low:g}"
    elif rule.above is not None:
        low = f"({rule.above:g}"
    else:
        low = "(−∞"
    top = rule.below if rule.high is None else rule.high
    if top is None or top == math.inf:
        return "" if low == "(−∞" else f"{low}, ∞)"
    high = f"`{flag(top)}`" if isinstance(top, str) else f"{top:g}"
    return f"{low}, {high})" if rule.high is None else f"{low}, {high}]"


def named(title: str, rows: Mapping[str, str], text: str = "") -> list[str]:
    """Return a section with a table of names, under a text."""
    lines = ["", f"## {title}", ""]
    if text:
        lines += [text, ""]
    lines += ["| name | what |", "|---|---|"]
    return lines + [row(f"`{name}`", what) for name, what in rows.items()]


def flag_row(group: str, f: Field[Any], texts: Mapping[str, str]) -> str:
    """Return a flag's line, with the defaults of presets that have one of their own."""
    defaults = shown(f.default)
    for preset, (_, cfg) in PRESETS.items():
        value = getattr(getattr(cfg, group), f.name)
        if value != f.default:
            defaults += f"; {preset}: {shown(value)}"
    what = REGISTRY.get(f.name) or texts.get(f.name)
    if not what:
        what = next(about.help for about in f.type.__metadata__ if about.help)
    return row(f"`{flag(f.name)}`", defaults, legal(f), what)


FLAGS_HEAD = """\
# Commands and flags

`vgrout NAME …` is `python -m vgrout.NAME …`. The flags below are those of `train`; every other command lists
its own with `--help`.
"""
TABLE_HEAD = ["| flag | default | legal | what |", "|---|---|---|---|"]


def flags() -> str:
    """Return flags.md."""
    lines = [FLAGS_HEAD.rstrip("\n"), *named("Commands", COMMANDS), *_names()]
    lines += ["", "## Everyday flags", ""]
    lines += ["Where a preset has a default of its own, it is named.", "", *TABLE_HEAD]
    classes = {group: type(getattr(Config(), group)) for group in GROUPS}
    texts = {group: documented(settings) for group, settings in classes.items()}
    settings = {f.name: (group, f) for group, kind in classes.items() for f in fields(kind)}
    for name in EVERYDAY:
        if name in settings:
            group, f = settings[name]
            lines.append(flag_row(group, f, texts[group]))
    lines += ["", "## All other flags", "", "`--help-all` lists them in a terminal."]
    for group, kind in classes.items():
        about = ABOUT.get(group) or (inspect.getdoc(kind) or "").splitlines()[0]
        title = TITLE.get(group, group.capitalize())
        lines += ["", f"### {title}", "", about, "", *TABLE_HEAD]
        for f in fields(kind):
            if f.name not in EVERYDAY:
                lines.append(flag_row(group, f, texts[group]))
    return "\n".join([*lines, *_foreign_names()]) + "\n"


def _names() -> list[str]:
    """Return the sections on presets, methods, losses and flaws."""
    presets = {name: what for name, (what, _) in PRESETS.items()}
    refused = "A flag that the chosen method never reads is refused."
    interventions = {name: spec.what for name, spec in INTERVENTIONS.items()}
    monitors = {name: line_of(spec) for name, spec in MONITORS.items()}
    controls = {name: spec.what for name, spec in CONTROLS.items()}
    losses = {name: spec.what for name, spec in LOSSES.items()}
    flaws = {name: spec.should for name, spec in MODE_SPECS.items()}
    return [
        *named("Presets", presets, f"`vgrout train PRESET [--flag value …]`. {refused}"),
        *named("Interventions", interventions),
        *named("Monitors", monitors),
        *named("Controls", controls),
        *named("Losses", losses),
        *named("Flaws", flaws, "What an answer has to do to hack the grader:"),
    ]


def _foreign_names() -> list[str]:
    """Return the section on flags of other programs."""
    lines = ["", "## Names from elsewhere", ""]
    lines.append("Taken for our flag where they mean the same, else refused with the answer.")
    for program, answers in NAMES.items():
        lines += ["", f"### {program}", "", "| name | here |", "|---|---|"]
        for answer in dict.fromkeys(answers.values()):
            alike = [f"`{named_flag(name)}`" for name in answers if answers[name] == answer]
            here = f"`{answer}`, the same" if same(answer) else answer
            lines.append(row(", ".join(alike), here))
    return lines


def named_flag(name: str) -> str:
    """Return a flag, or a flag and a word of its value."""
    first, *rest = name.split()
    return " ".join([flag(first), *rest])


def shown(value: object) -> str:
    """Return a default as the page shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"`{value}`" if value != "" else "''"


PAGES: dict[str, Callable[[], str]] = {"columns.md": columns, "flags.md": flags}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(HEAD + page(), encoding="utf-8")
