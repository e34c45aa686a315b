"""Runs a sweep on a Ray cluster, whose machines need not share a file system.

Each run is started in its own folder on a machine that Ray picks, with copies of its input files and, if it is resumed,
of its run directory. What it writes, checkpoints included, is copied here every few seconds, so a lost machine costs
only what was not copied yet. Every machine needs vgrout, and the model's weights if they are named by a hub id or an
absolute path.
"""

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.config.run import Config
from vgrout.files import read_json, to_json, write_atomic
from vgrout.sweep.mirror import LOGS, PRINTED, Changes, Receiver, Sender
from vgrout.sweep.workers import Attempt, Lost, spawn

CONNECT_S = 10.0
PULL_S = 2.0  # between two looks at a run's files: what the loss of a machine costs
SHIPPED = 2**30  # most bytes of input files that are sent with a run
SVD_CACHE = Path("out/svd_cache")  # shared by all runs of a machine: it takes minutes at 4B
Files = dict[str, bytes]  # path below the folder of the run → content


@dataclass(frozen=True)
class Look:
    """News of a run on another machine."""

    code: int | None  # of its process; None: it runs
    changes: Changes


def installed() -> Any:
    """The module ray. Raises ValueError, one line, without that extra."""
    try:
        return importlib.import_module("ray")  # seconds to import
    except ImportError:
        raise ValueError("--via ray: ray is not installed; `uv sync --extra ray`, or leave --via out") from None


class Ray:
    """Workers on a cluster: one run per GPU where it has any, else one per core."""

    def __init__(self, address: str, most: int | None) -> None:
        """address: "" starts a cluster on this machine that ends with the sweep. most: runs at a time.

        Raises:
            ValueError: no cluster can be reached, in one line.
        """
        self._ray = installed()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports to its makers over the network
        own = {} if address else {"num_cpus": most or os.cpu_count(), "include_dashboard": False}
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdecimal():  # where nobody listens, Ray would retry for minutes
                socket.create_connection((host, int(port)), CONNECT_S).close()
            self._ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, OSError, RuntimeError, ValueError) as e:
            raise ValueError(f"--ray-address {address!r}: no cluster can be reached there ({e})") from None
        self._gpus = (
            1 if self._ray.cluster_resources().get("GPU") else 0
        )  # Ray hides GPUs from actors that request none
        actor = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)
        self._node = actor(NodeRun)
        self._most, self._slots, self._counted = most, 0, -PULL_S
        self._packed: dict[Path, Any] = {}  # input files that the cluster has

    @property
    def slots(self) -> int:
        """GPUs, or else cores, of the machines that are there now."""
        if time.monotonic() - self._counted >= PULL_S:
            self._counted = time.monotonic()
            has, before = self._ray.cluster_resources(), self._slots
            there = int(has.get("GPU" if self._gpus else "CPU", 0))
            self._slots = min(there, self._most or there)
            if before and not self._slots:
                logger.warning("the cluster has no machine left; waiting for one, or for Ctrl-C")
        return self._slots

    def start(self, attempt: Attempt) -> "RayJob":
        """Raises ValueError where an input file cannot be sent."""
        packs = [self._pack(path) for path in input_paths(attempt.cfg)]
        return RayJob(self._ray, self._node.remote(), attempt, packs)

    def close(self) -> None:
        self._ray.shutdown()

    def _pack(self, path: Path) -> Any:
        if path not in self._packed:
            self._packed[path] = self._ray.put(packed([path]))
        return self._packed[path]


class RayJob:
    """A run on a machine of the cluster, with its files copied here."""

    def __init__(self, ray: Any, node: Any, attempt: Attempt, packs: Sequence[Any]) -> None:
        self._ray, self._node = ray, node
        self._files = Receiver(attempt.resumes, attempt.log)
        resumed = [attempt.resumes, LOGS / f"{attempt.resumes.name}.log"] if attempt.resumes else []
        self._start = node.begin.remote([*attempt.flags], packed(resumed), *packs)
        self._host = ""
        self._look: Any = None
        self._next = 0.0

    def poll(self) -> int | None:
        """Copy what is new; returns the exit code with the last of it. Raises Lost, OSError."""
        if self._look is None:
            if time.monotonic() < self._next:
                return None
            self._look = self._node.look.remote()
        try:
            if not self._host and self._ready(self._start):
                self._host = self._ray.get(self._start)
            if not self._ready(self._look):
                return None
            look: Look = self._ray.get(self._look)
        except (
            self._ray.exceptions.RayError
        ) as e:  # the machine or Ray's process there is lost, or the run could not be started
            self._give_up()
            why = str(e).strip().splitlines()[-1] if isinstance(e, self._ray.exceptions.RayTaskError) else ""
            what = f"{self._host or 'a machine'} could not run it ({why})" if why else f"{self._host} was lost"
            raise Lost(what if self._host or why else "its machine was lost") from None
        self._look, self._next = None, time.monotonic() + PULL_S
        self._files.take(look.changes)
        if look.code is not None:
            self._node.forget.remote()  # the machine's process ends with the last reference to it
            self._files.close(kept=bool(look.changes.runs))
        return look.code

    def terminate(self) -> None:
        """Ask the run to save and end; cancel it if no machine has started it yet."""
        if self._ready(self._start):
            self._node.terminate.remote()
        else:
            self._ray.kill(self._node)

    def _ready(self, reply: Any) -> bool:
        return bool(self._ray.wait([reply], timeout=0)[0])

    def _give_up(self) -> None:
        """Unlock the run, and record that it was interrupted if it last reported itself running."""
        self._ray.kill(self._node)
        self._files.close()
        if self._files.run is None:
            return
        with contextlib.suppress(ValueError):  # it had not written one
            path = self._files.run / "status.json"
            if (status := read_json(path)).get("state") == "running":
                write_atomic(path, to_json(status | {"state": "interrupted", "reason": "its machine was lost"}))


class NodeRun:
    """One run's process on a machine of the cluster, in its own folder."""

    def begin(self, flags: list[str], *packs: Files) -> str:
        """Start the run; returns the machine's name. Raises OSError where its files cannot be written."""
        home = Path(tempfile.gettempdir()) / f"vgrout-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=home))
        cache, link = home / "svd_cache", self._folder / SVD_CACHE
        for folder in (cache, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        link.symlink_to(cache)
        for name, data in (item for pack in packs for item in pack.items()):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._sender = Sender(self._folder)
        os.chdir(self._folder)
        self._process: subprocess.Popen[bytes] = spawn(Attempt(flags, Path()).argv, Path(PRINTED), threads=1)
        return socket.gethostname()

    def look(self) -> Look:
        """Exit code and changes. The code is read first, so that the changes with it are the last."""
        code = self._process.poll()
        return Look(code, self._sender.changes())

    def terminate(self) -> None:
        """SIGTERM: save and end; a second call: end at once."""
        self._process.terminate()

    def forget(self) -> None:
        """Remove the run's folder here."""
        os.chdir("/")
        shutil.rmtree(self._folder, ignore_errors=True)


def input_paths(cfg: Config | None) -> list[Path]:
    """The input files and folders to send with a run: those with a relative path. Absolute ones, among them the bundled
    organism's, every machine has itself.

    Raises:
        ValueError: one line, where a path lies outside this folder, or the files are too large to be sent.
    """
    if cfg is None:
        return []
    top = Path(cfg.env.reward.partition(":")[0].partition(".")[0]) if cfg.env.reward else None
    named = [
        *(Path(m) for m in (cfg.model_path, cfg.teacher_model_path if cfg.loss.teacher_model else "") if m),
        cfg.problems_path,
        cfg.test_problems_path,
        cfg.pool_path,
        cfg.pairs_path if cfg.method.reads_pairs else None,
        cfg.placebo_path,
        cfg.known_correct_path,
        cfg.method.v_hack_path,
        cfg.scale.organism,
        *(run / "steps.jsonl" for run in cfg.guard.healthy_runs),
        *((top, top.with_suffix(".py")) if top else ()),
    ]
    paths = sorted({p for p in named if p is not None and not p.is_absolute() and p.exists()})
    for path in paths:
        if not path.resolve().is_relative_to(Path.cwd().resolve()):
            raise ValueError(f"--via ray: {path} lies outside this folder, so that it cannot be sent; move it below")
    if (size := sum(f.stat().st_size for p in paths for f in _files(p))) > SHIPPED:
        raise ValueError(
            f"--via ray: {', '.join(map(str, paths))}: {size / 2**30:.1f} GiB are too much to send; put the largest "
            "where every machine has it, and give its absolute path"
        )
    return paths


def packed(paths: Sequence[Path]) -> Files:
    """Contents of these files and of the folders' files, hidden ones left out."""
    return {str(f): f.read_bytes() for p in paths for f in _files(p)}


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith("."))
