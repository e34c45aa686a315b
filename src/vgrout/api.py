"""For notebooks and scripts: train, read, evaluate and export runs. `import vgrout` has these names.

    run = vgrout.train_run("mini", intervention="route2", steps=30)
    run.steps[["step", "hack_s", "solve_s"]]
    run.plot()
    run.evaluate(samples=4)["sides"]["deployed"]

A command and its function are one thing: flags are keywords, with _ for -. The functions are not called `train` and
`evaluate` because a module is, and `evaluate` is a method.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vgrout import train
from vgrout.commands.evaluate import EvaluateSettings, evaluate_saved
from vgrout.config.cli import argv_of, parse_args
from vgrout.config.presets import resolve
from vgrout.config.run import Config, from_dict
from vgrout.export.__main__ import ExportSettings, export_run
from vgrout.ground import console
from vgrout.ground.io import Refused, json_lines, one_line, printable, read_json, read_text
from vgrout.ground.records import unfinished
from vgrout.runs.context import REFUSED, RunContext
from vgrout.runs.launch import launch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


Value = str | int | float | bool | Path | Sequence[str | Path] | None


class RunFailed(RuntimeError):
    """A run that started and did not finish: halted, diverged, interrupted or failed.

    `run` holds what it wrote. `__cause__` is the exception that ended it: of `vgrout.ground.io`, or the
    fault, of this program or of your own class.
    """

    def __init__(self, run: "Run", code: int) -> None:
        super().__init__(
            f"{run.path}: {run.status['state']} after {run.status['step']} steps: {run.status['reason']}"
        )
        self.run, self.code = run, code


@dataclass(frozen=True)
class Run:
    """A run's folder. A file is read once and kept; `load_run(run.path)` reads it again.

    It is shown by its name, its state and its verdict.
    """

    path: Path

    @cached_property
    def config(self) -> Config:
        """The resolved settings. Raises Refused where another version of this program made the run."""
        return from_dict(read_json(self.path / "run.json")["config"])

    @property
    def status(self) -> dict[str, object]:
        """state, step, reason and next, read anew each time."""
        return read_json(self.path / "status.json")

    @cached_property
    def final(self) -> dict[str, object]:
        """The final evaluation: hack_deploy, solve_deploy, … , by_mode. Raises Refused before there is one."""
        return read_json(self.path / "per_mode_deploy.json")

    @cached_property
    def steps(self) -> "DataFrame":
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

    def plot(self) -> "Figure":
        """Draw hack and solve by step, as dynamics.png has them. A run without a final evaluation has its curves alone.

        Raises:
            Refused: a file is missing or damaged, or there is no step yet.
        """
        from vgrout.report import figures, load

        run = load.read_run(self.path, self.config)
        return figures.dynamics(load.conditions([run])).figure

    def __repr__(self) -> str:
        return printable("\n".join([f"{self.path}: {self._state()}", *self._verdict()]))

    def _state(self) -> str:
        """What became of the run, and after how many steps."""
        try:
            why, status = unfinished(self.path), self.status
        except Refused:
            return "no status.json that could be read"
        if why.startswith("stopped at"):  # it was killed
            return why
        reason = one_line(status.get("reason") or "")
        reason = f": {reason}" if reason else ""
        steps = status.get("step")
        after = f" after {steps} steps" if isinstance(steps, int) else ""
        return f"{why or status['state']}{after}{reason}"

    def _verdict(self) -> list[str]:
        """The title of summary.md, where there is one."""
        try:
            title = read_text(self.path / "summary.md").partition("\n")[0]
        except (Refused, OSError):
            return []
        return [title.removeprefix("# ").replace("Verdict", "verdict", 1)]

    def evaluate(self, **flags: Value) -> dict[str, object]:
        """Score the adapter again, with the flags of `vgrout evaluate`. Shares are [k, n].

        Raises:
            Refused: one line, as the command would print it.
        """
        cli = parse_args(EvaluateSettings, [str(self.path), *argv_of(flags)], "vgrout.Run.evaluate")
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
        words = [str(self.path), "--out", str(out), "--to", to, *argv_of(flags)]
        export_run(parse_args(ExportSettings, words, "vgrout.Run.export"))
        return Path(out)


def train_run(preset: str, *, quiet: bool = False, **flags: Value) -> Run:
    """One run of a preset (smoke, mini, small, sums, fast, full) to its end; flags are those of `vgrout train`.
    In a notebook a progress bar with the shares of hacks and solutions is in place of a printed row per step; with
    columns="all" the rows are printed too.

    quiet: nothing is printed; the log lies below logs/ as always.

    Raises:
        Refused: a wrong flag or file, one line; nothing was started. It is a ValueError.
        RunFailed: it started, and was halted, diverged, interrupted or failed, also by a fault while
            it was loaded; why is its `__cause__`.
    """
    if flags.get("dry_run"):
        raise Refused(
            "dry_run: prints a plan and makes no run; `vgrout train PRESET --dry-run` does that"
        )
    runs: list[RunContext] = []

    def on_run(run: RunContext) -> None:
        run.bars = None if quiet else console.notebook_bars()
        runs.append(run)

    with contextlib.ExitStack() as hidden:
        if quiet:
            printed = io.StringIO()
            hidden.enter_context(contextlib.redirect_stdout(printed))
            hidden.enter_context(contextlib.redirect_stderr(printed))
        code = launch(
            train.train, resolve([preset, *argv_of(flags)]), on_run, named="intervention" in flags
        )
    if not runs:
        raise Refused(f"{preset}: this rank writes no run; rank 0 does")
    begun = runs[0]
    if code == REFUSED:
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


def _frame(file: Path) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([*json_lines(file)])
