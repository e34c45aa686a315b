"""From a command line to a run. No torch.

Everything that can be checked is checked, the sandbox starts, the run's folder is made, and the loop runs in it.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from loguru import logger

from vgrout.config.presets import import_named, resumed
from vgrout.config.run import Config, from_dict
from vgrout.envs.base import Grader
from vgrout.ground import console, ranks
from vgrout.ground.io import (
    Interrupted,
    Refused,
    probe_writable,
    read_json,
    show_fault,
    show_refusal,
    spelled,
    to_json,
)
from vgrout.ground.machine import cores
from vgrout.ground.ranks import RankLost
from vgrout.ground.records import began
from vgrout.model.load.source import ITEMSIZE
from vgrout.runs.context import (
    ENDINGS,
    FINISHED,
    INTERRUPTED,
    REFUSED,
    RunContext,
    state_and_code,
    stop_on_signals,
)
from vgrout.runs.inputs import Inputs, file_hashes, require_own_labels
from vgrout.runs.plan import dtype_of, first_lines, plan_lines, preflight
from vgrout.runs.run_dir import RUNS, require_same, run_to_resume
from vgrout.runs.tracking import Trackers

Loop = Callable[[Config, RunContext, Inputs], object]


def launch(
    train: Loop,
    requested: Config,
    on_run: Callable[[RunContext], object] | None = None,
    *,
    named: bool = True,
) -> int:
    """Check everything that can be checked without torch, start the sandbox, then train. Returns the exit code.

    train: the loop. It imports torch, and nothing does so before.
    on_run: called with the run as soon as it has a folder.
    named: somebody chose the intervention; else the plan and the first lines say that it is the preset's.

    Raises:
        Refused: a user's mistake, in one line, with nothing started.
    """
    require_torchrun()
    console.setup(None)  # what is said before the run has a log
    if not ranks.first():
        return FINISHED if requested.run.dry_run else follow(train)
    # path: the folder of the run that is resumed; None: a new run
    try:
        requested = resumed_by_torchrun(requested)
    except Interrupted as e:
        logger.warning(str(e))
        return INTERRUPTED
    path, cfg = find_resume(requested)
    if requested.typed.get("dry_run") == "config":
        print(to_json(cfg.as_dict()))
        return FINISHED
    named = named or path is not None
    inputs = preflight(cfg, path)
    hashes = file_hashes(cfg, inputs)
    if path:
        require_same(path, hashes)
    # The sandbox starts before torch is imported: its fork servers stay small, and are ready by the
    # time the model is.
    with grader_of(cfg, inputs) as grader:
        if not path:
            inputs.environment.check(grader)
            require_own_labels(cfg, inputs, grader)
        folder = path or cfg.run.output_dir or RUNS
        plan = plan_lines(cfg, inputs, grader, folder, named=named, resumes=path is not None)
        if cfg.run.dry_run:
            print(spelled("\n".join(plan)))
            return FINISHED
        run = RunContext.begin(
            f"train {cfg.preset}" + " --trust-code" * bool(cfg.own_code),
            path,
            cfg.run_id,
            grader,
            given=cfg.run.output_dir,
            record={"config": cfg.as_dict(), "hashes": hashes},
            trackers=Trackers(cfg.run.trackers),
        )
        if on_run:
            on_run(run)
        with run:
            run.announce(*first_lines(cfg, named=named))
            for line in plan:
                logger.debug(line)
            with ranks.joined():
                ranks.from_first((cfg, inputs, run.resumes))
                train(cfg, run, inputs)
        return run.code


def find_resume(requested: Config) -> tuple[Path | None, Config]:
    """The run directory to continue (None: a new run), and the configuration: that of the run, under this command
    line's process settings.

    Raises:
        Refused: the run cannot be continued, or was started with other flags; one line.
    """
    if not requested.run.resume:
        return None, requested
    path, config, status = run_to_resume(requested.run.resume, "train", "preset", RUNS)
    stored = from_dict(config, f"--resume {path}: run.json")
    import_named(stored.own_code, trusted=requested.run.trust_code, where=f"--resume {path}: ")
    began = read_json(path / "run.json").get("dtype")
    # auto may mean another one on this machine
    named = requested.run.dtype != "auto" or began != dtype_of(stored)
    if stored.run.dtype == "auto" and began in ITEMSIZE and named:
        stored = replace(stored, run=replace(stored.run, dtype=began))
    cfg, differing = resumed(requested, stored)
    if status["state"] == "halted":
        if requested.guard.guard != "log":
            raise Refused(
                f"--resume {path}: halted ({status.get('reason')}); to go on all the same, add --guard log"
            )
        quiet = replace(cfg.detectors, reward_hack_halt=False, echo_trap_halt=False)
        cfg = replace(cfg, detectors=quiet)
    probe_writable(path)
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    if cfg.run.threads != stored.run.threads:
        logger.warning(
            f"--threads {cfg.run.threads} (run: {stored.run.threads}): sums are rounded in another order, "
            "so what follows may differ from an uninterrupted run"
        )
    return path, cfg


def follow(train: Loop) -> int:
    """A rank beside rank 0: the same loop on rank 0's inputs, writing nothing. Returns the exit code."""
    logger.remove()  # rank 0 logs
    with ranks.joined():
        # receives rank 0's values; the ones given here are placeholders
        cfg, inputs, resumes = ranks.from_first((Config(), None, False))
        assert inputs is not None
        with grader_of(cfg, inputs) as grader, Peer(grader, resumes) as run:
            train(cfg, run, inputs)
    return run.code


def grader_of(cfg: Config, inputs: Inputs) -> Grader:
    """Start what grades this run's answers. Its workers are this machine's cores, divided among the ranks on it."""
    workers = max(1, cores() // ranks.here())
    return inputs.environment.grader(workers, cfg.run.max_error_retries)


# ── several ranks


def require_torchrun() -> None:
    """Raises Refused where somebody has set the ranks of several processes, and torchrun has not: each would make the
    same run, and none would know of the others."""
    ranks_set = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and ranks_set not in ("", "1") and ranks.size() == 1:
        raise Refused(
            f"RANK and WORLD_SIZE ({ranks_set}) are set, but not by torchrun, so that every process would make the "
            "same run alone; start them with `torchrun … -m -- vgrout.train`, or unset both"
        )


def resumed_by_torchrun(requested: Config) -> Config:
    """The requested configuration; after a restart by torchrun, set to resume the run that its job has begun.

    Raises:
        Interrupted: that run was asked to stop, which torchrun takes for a failure.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return requested
    for run in _of_this_job(requested, "status.json"):
        if read_json(run / "status.json").get("state") == "interrupted":
            raise Interrupted(f"{run}: was interrupted, and stays so after torchrun's restart")
    begun = _of_this_job(requested, "run.json")
    if requested.run.resume or not begun:
        return requested
    return replace(requested, run=replace(requested.run, resume=str(max(begun, key=began))))


def _of_this_job(requested: Config, file: str) -> list[Path]:
    """The runs in which this job of torchrun's has written the file. Files that cannot be read are another's."""
    job = ranks.torchrun_id()
    if job is None:
        return []
    own = requested.run.output_dir
    files = [*RUNS.glob(f"*/{file}"), *([] if own is None else own.glob(file))]
    if requested.run.resume not in (None, "", "latest"):
        files += Path(requested.run.resume).glob(file)
    found: list[Path] = []
    for path in files:
        with contextlib.suppress(Refused, OSError):
            if read_json(path).get("torchrun") == job:
                found.append(path.parent)
    return found


class Peer(RunContext):
    """A run as seen by a rank beside rank 0: the same loop, nothing written."""

    def __init__(self, grader: Grader, resumes: bool) -> None:
        self._on_every_rank(grader, resumes)

    def __enter__(self) -> "Peer":
        self.stop = self._open.enter_context(stop_on_signals())
        self._open.enter_context(self.clock)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> bool:
        self._open.close()
        _, self.code = state_and_code(e)
        if e is None or type(e) in ENDINGS:
            pass  # rank 0 says so
        elif isinstance(e, RankLost):
            print(f"E {e}", file=sys.stderr)
        elif isinstance(e, Refused):  # which rank 0 says as well, if it is its own
            self.code = REFUSED
            show_refusal(e)
        else:
            show_fault(e)
        return True
