"""`python -m vgrout.train PRESET [--flag value …]`: parse, refuse, start the sandbox, then load torch and run the loop.

Exit codes: 0 finished · 2 bad arguments or configuration, nothing started · 3 halted by the guard or a detector ·
4 diverged · 130 interrupted, state saved · 1 anything else. Every exit after the run directory was made leaves
`status.json` in it.
"""

import errno
import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from loguru import logger

from vgrout import console
from vgrout.config import ARM_NAME, Config, from_dict, parse, resumed
from vgrout.grading.grade import Grader
from vgrout.plan import Inputs, plan_lines, preflight
from vgrout.run_dir import RunDir, environment, last_resumable, probe_writable, read_json, to_json
from vgrout.signals import Stop, stop_on_signals
from vgrout.step_row import REFERENCE_STEP

FINISHED, FAILED, BAD, HALTED, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    try:
        return start(asked)
    except ValueError as e:
        print(f"E {e}", file=sys.stderr)
        return BAD


def start(asked: Config) -> int:
    """Everything up to the run directory refuses by ValueError, in one line, with nothing started."""
    resume = find_resume(asked)
    cfg = resume[1] if resume else asked
    inputs = preflight(cfg)
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
        again = f"python -m vgrout.train {cfg.preset} --resume {run.path}"
        try:
            with run, stop_on_signals() as stop:
                return go(cfg, inputs, grader, run, log, stop, resumes=resume is not None)
        except ValueError as e:  # files that do not fit the model
            if resume is None:  # a refused resume leaves the run as it was
                run.status("failed", 0, str(e), "correct the flag and start again")
            logger.error(str(e))
            return BAD
        except KeyboardInterrupt:
            run.status("interrupted", run.steps_on_disk(), "second interrupt: stopped at once", again)
            logger.error(f"stopped at once; the last checkpoint stands. Go on with: {again}")
            return INTERRUPTED
        except BaseException as e:
            if isinstance(e, OSError) and e.errno in FULL:
                return disk_full(run, e, again)
            run.status("failed", run.steps_on_disk(), f"{type(e).__name__}: {e}", again)
            logger.opt(exception=True).error(f"{type(e).__name__}: {e}")
            return FAILED


def go(cfg: Config, inputs: Inputs, grader: Grader, run: RunDir, log: Path, stop: Stop, resumes: bool) -> int:
    """Load, train, evaluate, report."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    loop, study_room, tail, watch = (importlib.import_module(f"vgrout.{m}") for m in ("loop", "study", "tail", "watch"))
    logger.info(f"argv: {' '.join(sys.argv)}")
    logger.info(f"verbose log: {log} · run: {run.path}")
    study = study_room.load_study(cfg, inputs, run, grader, stop)
    logger.info(
        f"{cfg.preset} · {ARM_NAME[cfg.arm.intervention]} (control: {cfg.arm.control_name}) · {cfg.scale.model} · "
        f"{cfg.scale.steps} steps · G {cfg.scale.group} · P {cfg.scale.prompts_per_step} · lr {cfg.opt.lr:g} · "
        f"seed {cfg.run.seed} · {study.policy.device.type} · "
        f"{cfg.generations * cfg.scale.steps / REFERENCE_STEP:.1f} reference steps"
    )
    logger.info(grader.protections.line())
    stamp = {"sandbox": grader.protections.as_dict()}
    record = {**environment(), "config": cfg.as_dict(), **stamp, **study_room.hashes(study, inputs)}
    if resumes:
        first = read_json(run.path / "run.json")
        require_same_files(run, record["hashes"], first["hashes"], cfg.run.resume_force)
        study_room.restore(study)
        logger.info(f"resumed after step {len(study.rows) - 1}")
        again_from = {"step": len(study.rows), **{k: record[k] for k in ("argv", "git", "versions", "hashes")}}
        record = {**first, "config": cfg.as_dict(), "resumed": [*first.get("resumed", []), again_from]}
    run.write_json("run.json", record)
    again = f"python -m vgrout.train {cfg.preset} --resume {run.path}"
    run.status("running", len(study.rows), "", again)
    try:
        rows = loop.train(study)
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
    logger.info("final evaluation on held-out problems and markers …")
    final = study_room.evaluate_final(study)
    tail.report(study, final, study_room.in_distribution(study, inputs), log, stamp)
    run.status("finished", len(rows), "", f"read {run.path / 'summary.md'}")
    logger.info(f"peak memory {study_room.peak_memory()}")
    return FINISHED


def disk_full(run: RunDir, error: OSError, again: str) -> int:
    """The last good checkpoint stands; say so in a file that has room kept for it, and in one line."""
    free = shutil.disk_usage(run.path).free
    points = sorted(p.parent.name for p in run.path.glob("resume/step_*/manifest.json"))
    last = f"the last good checkpoint is {points[-1]}" if points else "there is no checkpoint yet"
    reason = f"disk full ({error.strerror}; {free // 1024} KiB free below {run.path}); {last}"
    run.status("failed", run.steps_on_disk(), reason, f"free some space, then: {again}")
    logger.error(f"{reason}. Free some space, then: {again}")
    return FAILED


def require_same_files(run: RunDir, now: dict[str, object], then: dict[str, object], force: bool) -> None:
    """Raises ValueError naming the inputs whose bytes are no longer those that the run started from."""
    changed = ", ".join(name for name in then if then[name] != now.get(name))
    if changed and not force:
        raise ValueError(f"--resume {run.path}: changed since: {changed}; put them back, or add --resume-force")


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
