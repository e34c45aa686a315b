"""For notebooks and scripts: train, read, evaluate and export runs. `import vgrout` has these names.

    run = vgrout.train_run("mini", intervention="route2", steps=30)
    run.rows.plot(x="step", y=["hack_s", "solve_s"])
    run.evaluate(samples=4)["sides"]["deployed"]

A command and its function are one thing: flags are keywords, with _ for -. The functions are not called `train` and
`evaluate` because the modules behind `vgrout train` and `vgrout evaluate` are.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vgrout.cli import parse_args
from vgrout.config.presets import resolve
from vgrout.config.run import Config, from_dict
from vgrout.errors import Refused, refuse
from vgrout.files import json_lines, read_json

if TYPE_CHECKING:
    from pandas import DataFrame

    from vgrout.runs.context import RunContext


Value = str | int | float | bool | Path | Sequence[str | Path] | None


class RunFailed(RuntimeError):
    """A run that started and did not finish: halted, diverged, interrupted or failed.

    `run` holds what it wrote. `__cause__` is the exception that ended it: of `vgrout.errors`, or the
    fault, of this program or of your own class.
    """

    def __init__(self, run: "Run", code: int) -> None:
        super().__init__(
            f"{run.path}: {run.status['state']} after {run.status['step']} steps: {run.status['reason']}"
        )
        self.run, self.code = run, code


@dataclass(frozen=True)
class Run:
    """A run's folder. A file is read once and kept; `load_run(run.path)` reads it again."""

    path: Path

    @cached_property
    def config(self) -> Config:
        """The resolved settings. Raises Refused where another version of this program made the run."""
        return from_dict(read_json(self.path / "run.json")["config"])

    @property
    def status(self) -> dict[str, Any]:
        """state, step, reason and next, read anew each time."""
        return read_json(self.path / "status.json")

    @cached_property
    def final(self) -> dict[str, Any]:
        """The final evaluation: hack_deploy, solve_deploy, … , by_mode. Raises Refused before there is one."""
        return read_json(self.path / "per_mode_deploy.json")

    @cached_property
    def rows(self) -> "DataFrame":
        """One row per step, in the columns of docs/columns.md."""
        return _frame(self.path / "steps.jsonl")

    @cached_property
    def rollouts(self) -> "DataFrame":
        """One row per answer of the policy during training, with its reward and every flag."""
        return _frame(self.path / "rollouts.jsonl")

    @cached_property
    def answers(self) -> "DataFrame":
        """One row per answer of the final evaluation; `side` is base, trained, deployed or plain (no hint)."""
        return _frame(self.path / "final.jsonl")

    def evaluate(self, **flags: Value) -> dict[str, Any]:
        """Score the adapter again, with the flags of `vgrout evaluate`. Shares are [k, n].

        Raises:
            Refused: one line, as the command would print it.
        """
        from vgrout.evaluate import EvaluateSettings, evaluate_saved

        cli = parse_args(EvaluateSettings, [str(self.path), *argv(flags)], "vgrout.Run.evaluate")
        with contextlib.redirect_stdout(io.StringIO()):
            return read_json(evaluate_saved(cli))

    def export(
        self, out: str | Path, to: Literal["model", "peft", "inspect"] = "model", **flags: Value
    ) -> Path:
        """Write the run for other programs, with the flags of `vgrout export`.

        Raises:
            Refused: one line, as the command would print it.
            RuntimeError: the written model is not the deployed one; nothing is left behind.
        """
        from vgrout.export.__main__ import ExportSettings, export_run

        words = [str(self.path), "--out", str(out), "--to", to, *argv(flags)]
        export_run(parse_args(ExportSettings, words, "vgrout.Run.export"))
        return Path(out)


def train_run(preset: str, *, quiet: bool = False, **flags: Value) -> Run:
    """One run of a preset (smoke, mini, small, fast, full) to its end; flags are those of `vgrout train`.
    quiet: nothing is printed; the log lies below logs/ as always.

    Raises:
        Refused: a wrong flag or file, one line; nothing was started. It is a ValueError.
        RunFailed: it started, and was halted, diverged, interrupted or failed, also by a fault while
            it was loaded; why is its `__cause__`.
    """
    from vgrout import train
    from vgrout.runs.context import BAD

    if flags.get("dry_run"):
        raise Refused(
            "dry_run: prints a plan and makes no run; `vgrout train PRESET --dry-run` does that"
        )
    runs: list[RunContext] = []
    with contextlib.ExitStack() as hidden:
        if quiet:
            printed = io.StringIO()
            hidden.enter_context(contextlib.redirect_stdout(printed))
            hidden.enter_context(contextlib.redirect_stderr(printed))
        code = train.launch(
            resolve([preset, *argv(flags)]), runs.append, named="intervention" in flags
        )
    if not runs:
        raise Refused(f"{preset}: this rank writes no run; rank 0 does")
    begun = runs[0]
    if code == BAD:
        assert begun.error is not None
        why = f"{preset}: refused while it was loaded: {begun.error}"
        raise Refused(why) from begun.error.__cause__
    run = Run(begun.path)
    if code:
        raise RunFailed(run, code) from begun.error
    return run


def load_run(path: str | Path) -> Run:
    """A run's folder, finished or not. Raises Refused, one line, where there is none."""
    path = Path(path)
    if not (path / "run.json").is_file():
        raise Refused(f"{path}: no run.json in it; a run's folder is one of those below out/runs")
    return Run(path)


def argv(flags: dict[str, Value]) -> list[str]:
    """Keywords as a command line: True and False are --flag and --no-flag, None is left out, a list a comma list.

    Raises:
        Refused: a value that is no flag's.
    """
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "ndim", 0) == 0:  # a number of numpy or torch
            value = item()
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, str | int | float | Path):
            words.append(f"--{flag}={value}")
        elif value is not None:
            words.append(f"--{flag}={','.join(_listed(name, value))}")
    return words


def _listed(name: str, value: object) -> list[str]:
    """The words of a list. Raises Refused where it is no list of texts or paths."""
    given = " ".join(repr(value).split())[:80]
    words: list[str] = []
    for word in value if isinstance(value, list | tuple | set) else [None]:
        refuse(
            not isinstance(word, str | Path),
            f"{name}={given}: should be one value, or for some flags a list of names; several runs are several calls",
        )
        words.append(str(word))
    return words


def _frame(file: Path) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([*json_lines(file)])
