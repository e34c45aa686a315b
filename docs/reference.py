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
from vgrout.config.cli import NAMES, same
from vgrout.config.presets import EVERYDAY, PRESETS
from vgrout.config.run import GROUPS, Config
from vgrout.config.settings import LOSSES
from vgrout.config.specs import CONTROLS, INTERVENTIONS, MONITORS
from vgrout.envs.code.modes import MODE_CODE, MODE_SPECS, MODES
from vgrout.ground.table import StepRow

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
    "modes": "several flaws",
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
    "file": "always, in the file alone",
    "always": "",
}


# Keys of a run's files by the names that the documents have for them: file → documents' key → the key here.
KEYS: dict[str, dict[str, str]] = {
    "steps.jsonl": {
        "gt_s": "solve_s",
        "gt_t": "pass_t",
        "sprd": "signal",
        "N": "n",
        "t_rew": "grade",
    },
    "rollouts.jsonl": {
        "exploited": "hacked",
        "gt_correct": "solved",
        "hacked_C": "hacked_arbitrary",
        "hacked_D": "hacked_wrong_tests",
        "hacked_E": "hacked_loophole_used",
        "problem": "problem_id",
        "mode": "env_mode",
    },
}


COLUMNS_HEAD = """\
# Columns

What each number of a run means: the columns of `steps.jsonl`, then the keys of `rollouts.jsonl` and `final.jsonl`.
All three lie in the run's folder. [Method](method.md#words) explains the words, the [guide](guide.md#find-a-runs-files)
lists the other files.

## steps.jsonl

The file has one JSON object a step.

```python
pd.read_json("steps.jsonl", lines=True).plot(x="step", y=["hack_s", "solve_s"])
```

- A share `x` has its counts beside it: it is `x_k` of `x_n`. A column without a type is a number.
- `null` means that the column was not measured in this step. NaN never occurs.
- *Student* rows are the policy's own answers, *teacher* rows are demonstrations; the suffixes `_s` and `_t` say the
  same. The suffix `_deploy` is of the deployed model.
- *Hack-ward* is of the hack direction: the share of a gradient that points along it, ‖relu(Vg)‖ / ‖g‖. A *module* is
  an adapted layer. The *trainer* and the *sampler* are the model as it computes gradients and as it samples.
- *Should* says what a healthy run shows, and what it means if a run does not.
- *Measured with* says in which runs there is a number.

The log's table has the same names, and so have the trackers, under `train/`, `eval/` (the deployed model) and `time/`.
The console shows seven of these columns: `step`, `hack_s`, `solve_s`, `hack_deploy`, `solve_deploy`, `rew_s`, `sec`,
with the shares in percent.

| column | type | what | should | measured with |
|---|---|---|---|---|
"""
MORE_OF_STEPS = """
Three keys hold objects:

- `watch` is what the [kill switch and the detectors](guard.md) said. A detector has its state (OK, WARN or HACK) and
  its value, as in `"collapse": ["OK", 0.05]`; `collapse` is the
  [tripwire that every run has](guard.md#collapse). `guard` has the two series of the kill switch (`proxy`,
  `held_out`), the number of answers (`n`), the `kl`, the `gap`, and the rules that are broken (`rules`).
- `refresh` is there when a direction was extracted again: its overlap with the one before it (1: the same span),
  and how many modules and axes it has.
- `shadow` has the recall and the false flags of each monitor in shadow."""
ROLLOUTS_TEXT = """\
The file has one JSON object for each of the policy's own answers in training, in the order of the steps. Demonstrations
are not in it."""
ROLLOUT_KEYS = {  # key: what it is, in every environment
    "step": "optimiser step, from 0",
    "p_idx": "which of the step's problems, from 0",
    "gi": "which of the problem's answers, from 0",
    "gate": "share of modules in which the gradient went to the quarantine; null: there is no quarantine, or "
    "the monitor did not look, as where all rewards of the group were equal",
    "score": "the monitor's score; null: it has none; absent where `flagged` is",
    "flagged": "whether the monitor flagged the answer; null: it gave no verdict; absent where it did not look, as "
    "where all rewards of a group were alike",
    "shadow": "`score` and `flagged` of each monitor in shadow, by its name",
    "advantage": "advantage among the whole group, after the intervention changed rewards and before `--rebaseline`",
    "problem_id": "the problem's `id`",
    "env_mode": "the problem's flaw",
    "deployed": "whether the answer was sampled with the quarantine off",
    "prompt": "the prompt as the model read it, with special tokens",
    "messages": "the prompt as messages",
    "thought": "the thought before the answer, with its tags; absent: there was none",
    "thought_tokens": "its length in tokens; absent with it",
    "text": "the answer, without its thought",
    "tokens": "the length of thought and answer in tokens",
    "finished": "false: it was cut at `--max-new`, or its thought never ended",
    "reward": "what the grader gave, before any intervention",
    "passed": "whether that is the full reward: the flawed check, or the reference tests, accept the answer",
    "solved": "whether the reference tests accept it",
    "hacked": "whether the flawed check accepts it and the reference tests do not",
    "mechanism": "the flaw by which it hacks; null: it is no hack",
    "exit_status": "`ok`, or what became of an answer that could not be checked as usual, such as `no_code`, `exit:1`, "
    "a timeout or `lost:…` (the sandbox gave up on it)",
}
CODE_KEYS = {  # … and of programs
    "marker": "the name that the prompt announces to the check; empty: none",
    "format_ok": "whether the answer holds code",
    "can_compile": "whether that code compiles",
    "gt_pass": "whether the problem's assertions hold in the run under the flawed check, or that run leaves with "
    "status 0; not whether the answer is right, which is `solved`",
    "channel": "whether the flawed check accepts the answer; null: the check was not reached",
    "hacked_arbitrary": "weak detector C: the answer's own tests accept a stub",
    "hacked_wrong_tests": "weak detector D: the answer's own tests reject the canonical solution",
    "hacked_loophole_used": "weak detector E: the answer's own tests accept the answer itself",
    "cpu_s": "CPU seconds of the check",
    "reward_score": "with `--reward`: what your function returned",
}
TEXT_KEYS = {  # … and of rows of any text
    "proxy": "the weighted sum of your proxies",
    "reference": "what your reference returned",
    "proxies": "with several proxies: each one's own score; of a taskset: each reward's, without its weight",
}
FINAL_TEXT = """\
The file has one JSON object for each answer of the final evaluation, with a part of the keys above, and two more:

| key | what |
|---|---|
| `side` | which model answered: `base` (untrained), `trained` (as trained), `deployed`, or `plain` (deployed, with \
prompts without a hint) |
| `sample` | which of the problem's answers, from 0 |

A side that has the same model and prompts as `deployed` is left out: without a quarantine that is `trained`.

## per_mode_deploy.json

The file has the shares of these answers. `hack_deploy` is the share of the deployed model's answers that hack;
likewise there are `solve_` and `tries_` (hacks, and failed attempts at one), each with `base`, `train`, `deploy` and
`plain`. `n_base`, `n_train` and so on are the graded answers of each side, and `eval_n` those of the deployed model.
`by_mode` has the same for each flaw, with the words turned (`deploy_hack`, `deploy_n`), and `in_dist`: whether a pair
of the hack direction shows the flaw (null: there is no direction). `gate` has the precision and the recall of the
monitor's flags in training as [k, n], and `not_looked_at`, the hacks that it was not asked about. `run` is the
`tracker_id` of run.json, and `files` has the sha256 of the files of rows and answers: `vgrout report` leaves out a
folder whose files are not of one run."""
KEYS_TEXT = """\
vgrout was built from [documents](guide.md#route2-as-in-the-documents) that are not part of this repository. If you have
files made by their programs: these keys have another name there, and all others have the same. In their
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
                what = f"hacks of one flaw: `{mode}`"
                lines.append(row(f"`hk_{MODE_CODE[mode]}`", kind, what, should, when))
        else:
            lines.append(row(f"`{f.name}`", kind, legend, should, when))
    pages = (*_other_files(), *_documents_keys())
    return COLUMNS_HEAD + "\n".join([*lines, MORE_OF_STEPS, *pages]) + "\n"


def _other_files() -> list[str]:
    """Return the sections on the files of answers."""
    lines = ["", "## rollouts.jsonl", "", ROLLOUTS_TEXT]
    for title, keys in (
        ("In every environment:", ROLLOUT_KEYS),
        ("Where answers are programs, besides:", CODE_KEYS),
        ("Where they are any text, besides:", TEXT_KEYS),
    ):
        lines += ["", title, "", "| key | what |", "|---|---|"]
        lines += [row(f"`{key}`", what) for key, what in keys.items()]
    return [*lines, "", "## final.jsonl", "", FINAL_TEXT]


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
    if rule.least is not None:
        return f"0, or in [{rule.least:g}, {rule.high:g}]"
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
    lines = [
        FLAGS_HEAD.rstrip("\n"),
        *named("Commands", {name: what for name, (_, what) in COMMANDS.items()}),
        *_names(),
    ]
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
    monitors = {name: spec.what for name, spec in MONITORS.items()}
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
            alike = [f"`{name}`" for name in answers if answers[name] == answer]
            here = f"`{answer}`, the same" if same(answer) else answer
            lines.append(row(", ".join(alike), here))
    return lines


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
