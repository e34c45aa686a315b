"""Experiment trackers: they log a run's rows, rollouts and final numbers (`--track`).

The trackers' own clients are used. One is imported only if it is named, and is installed as an
extra (`uv sync --inexact --extra wandb`). Each writes to this machine: tensorboard and wandb below the run's
folder (wandb is offline unless WANDB_MODE is set), trackio where it keeps its projects
(TRACKIO_DIR). A run has an identifier of its own, kept in run.json: a resumed run continues its
curve, and another run in a folder of the same name has its own. A tracker that fails is dropped
with one warning, and the run goes on.
"""

import contextlib
import importlib
import importlib.util
import io
import math
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from loguru import logger
from tabulate import tabulate

from vgrout.ground.io import not_installed, one_line, to_json
from vgrout.ground.table import SECONDS, StepRow

PROJECT = "vgrout"
# columns that are not logged: those that the table does not show either
UNTRACKED = {"step", *(f.name for f in fields(StepRow) if f.metadata["when"] == "file")}
ROLLOUTS_EVERY = 10  # steps between samples of rollouts
ROLLOUTS = 8  # the size of a sample
ROLLOUT_COLUMNS = ("problem_id", "env_mode", "prompt", "text", "reward", "hacked", "solved")

Row = Mapping[str, Any]
Numbers = dict[str, int | float]


class TensorBoard:
    """Shown by `tensorboard --logdir out/runs`. After a resume, steps done again replace the earlier ones."""

    def __init__(
        self, run: Path, config: Mapping[str, object], first: int, tracker_id: str
    ) -> None:
        """first: the next step. tracker_id: not needed, since tensorboard knows a run by its folder."""
        from torch.utils.tensorboard.writer import SummaryWriter

        again = (run / "tensorboard").exists()
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=first if again else None)
        self.writer.add_text("config", f"```\n{to_json(config)}\n```", first)

    def scalars(self, values: Numbers, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def table(self, name: str, rows: Sequence[Row], step: int) -> None:
        cells = []
        for row in rows:
            texts = [str(value) for value in row.values()]
            cells.append([text.replace("|", "\\|").replace("\n", "<br>") for text in texts])
        self.writer.add_text(name, tabulate(cells, list(rows[0]), "github"), step)

    def image(self, name: str, png: Path, step: int) -> None:
        from matplotlib.image import imread

        rgb = imread(png)[..., :3]
        self.writer.add_image(name, rgb, step, dataformats="HWC")

    def close(self, code: int) -> None:
        self.writer.close()


class Wandb:
    """Offline unless WANDB_MODE is set; `wandb sync --append RUN/wandb/offline-run-*` uploads."""

    MODULE = "wandb"

    def __init__(
        self, run: Path, config: Mapping[str, object], first: int, tracker_id: str
    ) -> None:
        """tracker_id: the run's own; "": its folder's name is, as in older runs."""
        self.module = importlib.import_module(self.MODULE)
        project = os.environ.get(f"{self.MODULE.upper()}_PROJECT", PROJECT)
        with quiet():
            self.run = self.module.init(
                project=project, config=dict(config), **self.options(run, tracker_id)
            )

    def options(self, run: Path, tracker_id: str) -> dict[str, object]:
        """Return arguments of the client's `init` besides project and configuration."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        return {
            "name": run.name,
            "id": tracker_id or run.name,
            "dir": run,
            "mode": mode,
            "resume": None if mode == "offline" else "allow",  # offline, the id identifies the run
            "settings": self.module.Settings(silent=True, console="off", x_disable_stats=True),
        }

    def scalars(self, values: Numbers, step: int) -> None:
        self.run.log(dict(values), step=step)

    def table(self, name: str, rows: Sequence[Row], step: int) -> None:
        cells = [list(row.values()) for row in rows]
        table = self.module.Table(columns=list(rows[0]), data=cells)
        self.run.log({name: table}, step=step)

    def image(self, name: str, png: Path, step: int) -> None:
        self.run.log({name: self.module.Image(str(png))}, step=step)

    def close(self, code: int) -> None:
        self.run.finish(exit_code=code)


class Trackio(Wandb):
    """Shown by `trackio show --project vgrout`. It has wandb's API."""

    MODULE = "trackio"

    def options(self, run: Path, tracker_id: str) -> dict[str, object]:
        """Return the same for trackio, which knows a run by its name."""
        name = f"{run.name}-{tracker_id}" if tracker_id else run.name
        return {
            "name": name,
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }

    def close(self, code: int) -> None:
        with quiet():
            self.module.finish()


CLIENTS: dict[str, type[TensorBoard | Wandb]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def require(name: str) -> None:
    """Raises Refused, one line, if a tracker's client is not installed. It is not imported."""
    if importlib.util.find_spec(name) is None:
        raise not_installed(name)


class Trackers:
    """A run's trackers.

    Call `start` once, `row` every step, `final` at the end, and `close` however the run ended.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self.clients: dict[str, TensorBoard | Wandb] = {}
        self.logged = 0

    def start(
        self, run: Path, config: Mapping[str, object], first: int, logged: int, tracker_id: str = ""
    ) -> None:
        """Start the clients.

        first: the next step. logged: how many steps were on disk before a resume went back to it. tracker_id: the
        run's own; "": its folder's name is, as in older runs.
        """
        self.logged = logged
        for name in self.names:
            with self._or_without(name):
                self.clients[name] = CLIENTS[name](run, config, first, tracker_id)
        if self.clients:
            logger.info(f"tracked by {', '.join(self.clients)}")

    def row(self, row: Row, rollouts: Sequence[Row]) -> None:
        """Log a step: its columns by group, and now and then some of its rollouts."""
        step, values = row["step"], grouped(row)
        shown = []
        if step % ROLLOUTS_EVERY == 0:
            every = max(1, math.ceil(len(rollouts) / ROLLOUTS))
            for rollout in rollouts[::every]:
                shown.append({name: rollout[name] for name in ROLLOUT_COLUMNS})
        for name, client in list(self.clients.items()):
            if name != "tensorboard" and step < self.logged:  # the others cannot replace a step
                continue
            with self._or_without(name):
                client.scalars(values, step)
                if shown:
                    client.table("rollouts", shown, step)

    def final(
        self, numbers_at_end: Row, summary: Row | None, figure: Path | None, step: int
    ) -> None:
        """Log the final evaluation as `final/…`, with a table of one row and a figure if there are any.

        step: the last one.
        """
        values: Numbers = {}
        for name, value in numbers(numbers_at_end).items():
            if name.startswith(("hack", "solve")):
                values[f"final/{name}"] = value
        for name, client in list(self.clients.items()):
            with self._or_without(name):
                if values:
                    client.scalars(values, step)
                if summary:
                    client.table("final", [summary], step)
                if figure:
                    client.image("dynamics", figure, step)

    def close(self, code: int) -> None:
        """Close the clients. code: the run's exit code."""
        for name, client in list(self.clients.items()):
            with self._or_without(name):
                client.close(code)
        self.clients.clear()

    @contextlib.contextmanager
    def _or_without(self, name: str) -> Generator[None]:
        """Drop the tracker, with a warning, if its client raises."""
        try:
            yield
        except Exception as e:
            self.clients.pop(name, None)
            logger.opt(exception=e).debug(f"--track {name}")
            why = one_line(e)
            logger.warning(f"--track {name}: left out from here on ({type(e).__name__}: {why})")


def grouped(row: Row) -> Numbers:
    """Return a step's columns under eval/ (the deployed model), time/ (seconds) and train/.

    Counts whose share is there are left out, and what a row repeats for whoever reads the file.
    """
    columns = numbers(row)
    out: Numbers = {}
    for name, value in columns.items():
        share, _, last = name.rpartition("_")
        is_count = last in ("k", "n") and f"{share}_k" in columns and f"{share}_n" in columns
        if name in UNTRACKED or is_count:
            continue
        if name in SECONDS:
            group = "time"
        elif name.endswith("_deploy") or "guard/" in name:
            group = "eval"
        else:
            group = "train"
        out[f"{group}/{name.replace('/', '_')}"] = value
    return out


def numbers(data: Row, above: str = "") -> Numbers:
    """Return the numbers in nested data as a flat mapping, `a/b` for b in a.

    Of a pair [word, number] the number is taken.
    """
    out: Numbers = {}
    for name, value in data.items():
        match value:
            case bool():
                pass
            case int() | float():
                out[above + name] = value
            case Mapping():
                out |= numbers(value, f"{above}{name}/")
            case [str(), int() | float() as number]:
                out[above + name] = number
    return out


def quiet() -> contextlib.AbstractContextManager[object]:
    """Hide what a client prints on stdout, where the step table is."""
    return contextlib.redirect_stdout(io.StringIO())
