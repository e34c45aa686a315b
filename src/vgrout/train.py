"""`python -m vgrout.train PRESET [--flag value …]`: parse, refuse, start the sandbox, then load torch and run the loop.

Exit codes: 0 finished · 2 bad arguments or configuration, nothing started · 3 halted by the guard or a detector ·
4 diverged · 130 interrupted, state saved · 1 anything else. Every exit after the run directory was made leaves
`status.json` in it: state, steps done, reason, what to run next.
"""

import errno
import importlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout import console
from vgrout.config import ARM_NAME, Config, from_dict, parse, resumed
from vgrout.grading.grade import Grader
from vgrout.plan import Inputs, file_hashes, hypotheses_sha256, plan_lines, preflight
from vgrout.run_dir import RunDir, environment, last_resumable, probe_writable, read_json, to_json
from vgrout.signals import Stop, stop_on_signals
from vgrout.step_row import REFERENCE_STEP

FINISHED, FAILED, BAD, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE = (*FULL, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    try:
        return start(asked)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("E interrupted; nothing was started", file=sys.stderr)
        return INTERRUPTED


@dataclass(frozen=True)
class Launch:
    """A run about to start or to go on: checked, its directory there, torch not loaded yet."""

    cfg: Config
    inputs: Inputs
    files: dict[str, str | None]  # hashes of the input files
    grader: Grader
    run: RunDir
    log: Path
    resumes: bool
    force: bool  # go on although files have changed

    @property
    def again(self) -> str:
        return f"python -m vgrout.train {self.cfg.preset} --resume {self.run.path}"


def start(asked: Config) -> int:
    """Everything up to the run directory refuses by ValueError, in one line, with nothing started."""
    resume = find_resume(asked)
    cfg, force = resume[1] if resume else asked, asked.run.resume_force
    inputs = preflight(cfg, resume[0] if resume else None)
    files = file_hashes(cfg, inputs)
    if resume:
        require_same(resume[0], files, force)
    # The zygotes are exec'd before torch is imported: small, and ready by the time the model is.
    with Grader(
        compile_reward=cfg.env.compile_reward,
        pass_reward=cfg.env.pass_reward,
        allow_weak=cfg.env.allow_weak_sandbox,
        retries=cfg.run.max_error_retries,
    ) as grader:
        if cfg.run.dry_run:
            print(to_json(cfg.as_dict()))
            print("\n".join(plan_lines(cfg, inputs, grader)))
            return FINISHED
        run = RunDir.reopen(resume[0]) if resume else RunDir.create(cfg.run_id)
        log = Path("logs") / f"{run.path.name}.log"
        console.setup(log)
        return carry(Launch(cfg, inputs, files, grader, run, log, resume is not None, force))


def carry(launch: Launch) -> int:
    """Load, train, evaluate, report; whatever happens, `status.json` has the last word."""
    run, again = launch.run, launch.again
    try:
        with run, stop_on_signals() as stop, console.Clock() as clock:
            try:
                with clock("loading"):
                    study, stamp = load(launch, stop, clock)
            except ValueError as e:  # files that do not fit the model; a refused resume leaves the run as it was
                if not launch.resumes:
                    last_word(run, "failed", 0, str(e), "correct the flag and start again")
                logger.error(str(e))
                return BAD
            return go(launch, study, stamp)
    except KeyboardInterrupt:
        last_word(run, "interrupted", run.steps_on_disk(), "second interrupt: stopped at once", again)
        logger.error(f"stopped at once; the last checkpoint stands. Go on with: {again}")
        return INTERRUPTED
    except BaseException as e:
        if isinstance(e, OSError) and (e.errno in STORAGE or not run.path.is_dir()):
            return storage_failed(run, e, again)
        last_word(run, "failed", run.steps_on_disk(), f"{type(e).__name__}: {e}", again)
        logger.opt(exception=True).error(f"{type(e).__name__}: {e}")
        return FAILED


def load(launch: Launch, stop: Stop, clock: console.Clock) -> tuple[Any, dict[str, Any]]:
    """The study, and what is stamped on its files. Raises ValueError, one line, where files do not fit the model or
    are not those that the run started from."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    room, cfg, run, grader = importlib.import_module("vgrout.study"), launch.cfg, launch.run, launch.grader
    logger.info(f"argv: {' '.join(sys.argv)}")
    logger.info(f"verbose log: {launch.log} · run: {run.path}")
    study = room.load_study(cfg, launch.inputs, run, grader, stop, clock)
    logger.info(
        f"{cfg.preset} · {ARM_NAME[cfg.arm.intervention]} (control: {cfg.arm.control_name}) · {cfg.scale.model} · "
        f"{cfg.scale.steps} steps · G {cfg.scale.group} · P {cfg.scale.prompts_per_step} · lr {cfg.opt.lr:g} · "
        f"seed {cfg.run.seed} · {study.policy.device.type} · "
        f"{cfg.generations * cfg.scale.steps / REFERENCE_STEP:.1f} reference steps"
    )
    if cfg.arm.control_name != "none":
        logger.info(f"control {cfg.arm.control_name}: {cfg.arm.control_what}")
    if study.arm.origin and study.arm.origin.likeness:
        logger.info(study.arm.origin.likeness.line())
    logger.info(grader.protections.line())
    stamp = {"sandbox": grader.protections.as_dict()}
    hashes = launch.files | room.hashes(study)
    about = {"accelerator": room.accelerator(), **room.provenance(study)}
    record = {**environment(), **about, "config": cfg.as_dict(), **stamp, "hashes": hashes}
    record["pool"] = study.teacher.record()
    if launch.resumes:
        first = read_json(run.path / "run.json")
        require_same(run.path, hashes, launch.force)
        room.restore(study)
        logger.info(f"resumed after step {len(study.rows) - 1}")
        again_from = {"step": len(study.rows), **{k: record[k] for k in ("argv", "git", "versions", "hashes")}}
        record = {**first, "config": cfg.as_dict(), "resumed": [*first.get("resumed", []), again_from]}
    else:
        hashes |= {"direction": room.direction_hash(study), "hypotheses": hypotheses_sha256()}
    run.write_json("run.json", record)
    run.status("running", len(study.rows), "", launch.again)
    return study, stamp


def go(launch: Launch, study: Any, stamp: dict[str, Any]) -> int:
    """The steps, the final evaluation, the report; how each ending is written down."""
    loop, room, tail, watch = (importlib.import_module(f"vgrout.{m}") for m in ("loop", "study", "tail", "watch"))
    run, again = launch.run, launch.again
    try:
        rows = loop.train(study)
        logger.info("final evaluation on held-out problems and markers …")
        final = room.evaluate_final(study)
    except loop.Interrupted as e:
        run.status("interrupted", len(study.rows), str(e), again)
        logger.warning(f"{e}; saved. Go on with: {again}")
        return INTERRUPTED
    except watch.Halted as e:
        on = f"{again} --guard log"
        run.status("halted", len(study.rows), str(e), f"read the last answers; to go on all the same: {on}")
        logger.error(f"halted: {e}. To go on all the same: {on}")
        return HALTED
    except watch.Diverged as e:
        run.status("diverged", len(study.rows), str(e), "lower --lr or --grad-clip and start again")
        logger.error(str(e))
        return DIVERGED
    tail.report(study, final, room.in_distribution(study, launch.inputs), launch.log, stamp)
    run.status("finished", len(rows), "", f"read {run.path / 'summary.md'}")
    logger.info(f"peak memory {room.peak_memory()}")
    return FINISHED


def last_word(run: RunDir, state: str, step: int, reason: str, then: str) -> None:
    """A run's status where even that may fail."""
    try:
        run.status(state, step, reason, then)
    except OSError as e:
        logger.error(f"{run.path}/status.json cannot be written ({e.strerror})")


def storage_failed(run: RunDir, error: OSError, again: str) -> int:
    """The last good checkpoint stands; say so in a file that has room kept for it, and in one line."""
    points = sorted(run.path.glob("resume/step_*/manifest.json"), key=lambda p: (len(p.parent.name), p.parent.name))
    last = f"the last good checkpoint is {points[-1].parent.name}" if points else "there is no checkpoint"
    if error.errno in FULL:
        free = shutil.disk_usage(run.path).free // 1024
        reason, then = f"disk full ({error.strerror}; {free} KiB free below {run.path})", "free some space, then: "
    else:
        reason, then = f"files of the run cannot be written ({error})", "once they can: "
    last_word(run, "failed", run.steps_on_disk(), f"{reason}; {last}", then + again)
    logger.error(f"{reason}; {last}. {then[0].upper()}{then[1:]}{again}")
    return FAILED


def require_same(run: Path, now: Mapping[str, object], force: bool) -> None:
    """Raises ValueError naming the inputs whose bytes are no longer those that the run started from."""
    then = read_json(run / "run.json")["hashes"]
    changed = ", ".join(name for name in now if name in then and then[name] != now[name])
    if changed and not force:
        raise ValueError(f"--resume {run}: changed since: {changed}; put them back, or add --resume-force")


def find_resume(asked: Config) -> tuple[Path, Config] | None:
    """The run directory to go on with, and its configuration under this command line's process settings."""
    if not asked.run.resume:
        return None
    path = last_resumable(Path("out/runs")) if asked.run.resume == "latest" else Path(asked.run.resume)
    record, status = read_json(path / "run.json"), read_json(path / "status.json")
    if status["state"] == "finished":
        raise ValueError(f"--resume {path}: this run is finished; nothing is left to do")
    cfg, differing = resumed(asked, from_dict(record["config"]))
    if status["state"] == "halted":
        if asked.guard.guard != "log":
            raise ValueError(f"--resume {path}: halted ({status['reason']}); to go on all the same, add --guard log")
        quiet = replace(cfg.detectors, reward_hack_halt=False, echo_trap_halt=False)
        cfg = replace(cfg, detectors=quiet)
    probe_writable(path)
    if differing and not asked.run.resume_force:
        raise ValueError(f"--resume {path}: differs in {', '.join(differing)}; drop these flags, or add --resume-force")
    return path, cfg


if __name__ == "__main__":
    sys.exit(main())
