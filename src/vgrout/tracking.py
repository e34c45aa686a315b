"""Experiment trackers: a run's rows, rollouts and final numbers, through the trackers' own clients (`--track`).

A client is imported only if it is named, and is installed as an extra (`uv sync --extra wandb`). Each writes to this
machine: tensorboard and wandb below the run's folder (wandb is offline unless WANDB_MODE is set), trackio where it
keeps its projects (TRACKIO_DIR). Every tracker names the run after its folder, so that a resumed run continues its
curve. A tracker that fails is dropped with one warning, and the run goes on.
"""

import contextlib
import importlib
import importlib.util
import io
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.cli import not_installed
from vgrout.files import to_json
from vgrout.table import SECONDS, StepRow

PROJECT = "vgrout"
# Columns that are no curves: counts, parts of others, what stands in the row twice.
UNTRACKED = {f.name for f in fields(StepRow) if f.metadata["when"] == "file"} | {
    "step",
    "n",
    "ref_eq",
    "ratio_min",
}
UNTRACKED |= {"all_zero", "all_one", "masked_positive", "masked_negative"}
UNTRACKED |= {f"cos_{when}_{rows}" for when in ("pre", "post") for rows in "st"}
UNTRACKED |= {f"watch/guard/{name}" for name in ("n", "proxy", "held_out", "kl")}
UNTRACKED |= {f"refresh/{name}" for name in ("age", "modules", "axes")}
ROLLOUTS_EVERY, ROLLOUTS = 10, 8  # steps between samples of rollouts, and the size of a sample
ROLLOUT_COLUMNS = ("problem_id", "env_mode", "prompt", "text", "reward", "hacked", "solved")

Row = Mapping[str, Any]


class TensorBoard:
    """Shown by `tensorboard --logdir out/runs`. After a resume, steps done again replace the earlier ones."""

    def __init__(self, run: Path, config: Mapping[str, Any], first: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=first or None)
        self.writer.add_text("config", f"```\n{to_json(config)}\n```", first)

    def scalars(self, values: Mapping[str, int | float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def table(self, name: str, rows: Sequence[Row], step: int) -> None:
        from tabulate import tabulate

        cells = [
            [str(v).replace("|", "\\|").replace("\n", "<br>") for v in row.values()] for row in rows
        ]
        self.writer.add_text(name, tabulate(cells, headers=list(rows[0]), tablefmt="github"), step)

    def image(self, name: str, png: Path, step: int) -> None:
        from matplotlib.image import imread

        self.writer.add_image(name, imread(png)[..., :3], step, dataformats="HWC")

    def close(self, code: int) -> None:
        self.writer.close()


class Wandb:
    """Offline unless WANDB_MODE is set; `wandb sync --append RUN/wandb/offline-run-*` uploads."""

    MODULE = "wandb"

    def __init__(self, run: Path, config: Mapping[str, Any], first: int) -> None:
        self.module = importlib.import_module(self.MODULE)
        project = os.environ.get(f"{self.MODULE.upper()}_PROJECT", PROJECT)
        with quiet():
            self.run = self.module.init(
                project=project, name=run.name, config=dict(config), **self.options(run)
            )

    def options(self, run: Path) -> dict[str, Any]:
        """Arguments of the client's `init` besides project, name and configuration."""
        mode = os.environ.get("WANDB_MODE", "offline")
        return {
            "id": run.name,
            "dir": run,
            "mode": mode,
            "resume": None if mode == "offline" else "allow",  # offline, the id identifies the run
            "settings": self.module.Settings(silent=True, console="off", x_disable_stats=True),
        }

    def scalars(self, values: Mapping[str, int | float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def table(self, name: str, rows: Sequence[Row], step: int) -> None:
        table = self.module.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({name: table}, step=step)

    def image(self, name: str, png: Path, step: int) -> None:
        self.run.log({name: self.module.Image(str(png))}, step=step)

    def close(self, code: int) -> None:
        self.run.finish(exit_code=code)


class Trackio(Wandb):
    """Shown by `trackio show --project vgrout`. It has wandb's API."""

    MODULE = "trackio"

    def options(self, run: Path) -> dict[str, Any]:
        return {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}

    def close(self, code: int) -> None:
        with quiet():
            self.module.finish()


CLIENTS: dict[str, type[TensorBoard | Wandb]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def require(name: str) -> None:
    """Raises Refused, one line, for a tracker whose client is not installed. Imports nothing."""
    if importlib.util.find_spec(name) is None:
        raise not_installed(name)


class Trackers:
    """A run's trackers: `start` once, `row` every step, `final` at the end, and `close` however the run ended."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self.clients: dict[str, TensorBoard | Wandb] = {}
        self.logged = 0

    def start(self, run: Path, config: Mapping[str, Any], first: int, logged: int) -> None:
        """first: the next step. logged: how many steps were on disk before a resume went back to it."""
        self.logged = logged
        for name in self.names:
            with self._or_without(name):
                self.clients[name] = CLIENTS[name](run, config, first)
        if self.clients:
            logger.info(f"tracked by {', '.join(self.clients)}")

    def row(self, row: Row, rollouts: Sequence[Row]) -> None:
        """Log a step: its columns by group, and now and then some of its rollouts."""
        step, values = row["step"], grouped(row)
        some = (
            rollouts[:: max(1, -(-len(rollouts) // ROLLOUTS))] if step % ROLLOUTS_EVERY == 0 else []
        )
        shown = [{name: r[name] for name in ROLLOUT_COLUMNS} for r in some]
        for name, client in list(self.clients.items()):
            if name != "tensorboard" and step < self.logged:  # the others cannot replace a step
                continue
            with self._or_without(name):
                client.scalars(values, step)
                if shown:
                    client.table("rollouts", shown, step)

    def final(
        self, numbers_at_end: Row, table: Sequence[Row], figure: Path | None, step: int
    ) -> None:
        """Log the final evaluation as `final/…`, with its table and figure where there are any. step: the last one."""
        shares = {k: v for k, v in numbers_at_end.items() if k.startswith(("hack", "solve"))}
        values = {f"final/{name}": value for name, value in numbers(shares).items()}
        for name, client in list(self.clients.items()):
            with self._or_without(name):
                if values:
                    client.scalars(values, step)
                if table:
                    client.table("final", table, step)
                if figure:
                    client.image("dynamics", figure, step)

    def close(self, code: int) -> None:
        """code: the run's exit code."""
        for name, client in list(self.clients.items()):
            with self._or_without(name):
                client.close(code)
        self.clients.clear()

    @contextlib.contextmanager
    def _or_without(self, name: str) -> Generator[None]:
        try:
            yield
        except Exception as e:
            self.clients.pop(name, None)
            logger.warning(
                f"--track {name}: left out from here on ({type(e).__name__}: {' '.join(str(e).split())})"
            )


def grouped(row: Row) -> dict[str, int | float]:
    """A step's columns under eval/ (the deployed model), time/ (seconds) and train/. Without counts, whose share is
    there, and without what a row repeats for whoever reads the file."""
    out: dict[str, int | float] = {}
    flat = numbers(row)
    for name, value in flat.items():
        base, _, last = name.rpartition("_")
        if name in UNTRACKED or (last in ("k", "n") and {f"{base}_k", f"{base}_n"} <= flat.keys()):
            continue
        group = (
            "time"
            if name in SECONDS
            else "eval"
            if name.endswith("_deploy") or "guard/" in name
            else "train"
        )
        out[f"{group}/{name.replace('/', '_')}"] = value
    return out


def numbers(data: Row, above: str = "") -> dict[str, int | float]:
    """The numbers in nested data as a flat mapping, `a/b` for b in a; of [word, number] the number."""
    out: dict[str, int | float] = {}
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
    """Hides what a client prints on stdout, where the step table is."""
    return contextlib.redirect_stdout(io.StringIO())
