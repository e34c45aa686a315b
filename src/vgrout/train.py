"""`python -m vgrout.train PRESET [--flag value …]`: parse, refuse, start the sandbox, then load torch and run the loop.

Exit codes: 0 finished · 2 bad arguments or configuration, nothing started · 4 diverged · 130 interrupted, state saved ·
1 anything else. Every exit after the run directory was made leaves `status.json` in it.
"""

import importlib
import sys
from pathlib import Path

from loguru import logger

from vgrout import console
from vgrout.config import ARM_NAME, Config, from_dict, parse, resumed
from vgrout.grading.grade import Grader
from vgrout.plan import Inputs, plan_lines, preflight
from vgrout.run_dir import RunDir, environment, last_resumable, read_json, to_json
from vgrout.signals import Stop, stop_on_signals
from vgrout.step_row import REFERENCE_STEP

FINISHED, BAD, DIVERGED, INTERRUPTED = 0, 2, 4, 130


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
        compile_reward=cfg.env.compile_reward, pass_reward=cfg.env.pass_reward, allow_weak=cfg.env.allow_weak_sandbox
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
            run.status("failed", 0, str(e), "correct the flag and start again")
            logger.error(str(e))
            return BAD
        except KeyboardInterrupt:
            run.status("interrupted", run.steps_on_disk(), "second interrupt: stopped at once", again)
            logger.error(f"stopped at once; the last checkpoint stands. Go on with: {again}")
            return INTERRUPTED
        except BaseException as e:
            run.status("failed", run.steps_on_disk(), f"{type(e).__name__}: {e}", again)
            logger.opt(exception=True).error(f"{type(e).__name__}: {e}")
            return 1


def go(cfg: Config, inputs: Inputs, grader: Grader, run: RunDir, log: Path, stop: Stop, resumes: bool) -> int:
    """Load, train, evaluate, report."""
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    loop, study_room, tail = (importlib.import_module(f"vgrout.{m}") for m in ("loop", "study", "tail"))
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
    if resumes:
        study_room.restore(study)
        logger.info(f"resumed after step {len(study.rows) - 1}")
    else:
        run.write_json(
            "run.json", {**environment(), "config": cfg.as_dict(), **stamp, **study_room.hashes(study, inputs)}
        )
    again = f"python -m vgrout.train {cfg.preset} --resume {run.path}"
    run.status("running", len(study.rows), "", again)
    try:
        rows = loop.train(study)
    except loop.Interrupted as e:
        run.status("interrupted", len(study.rows), str(e), again)
        logger.warning(f"{e}; saved. Go on with: {again}")
        return INTERRUPTED
    except loop.Diverged as e:
        run.status("diverged", len(study.rows), str(e), "lower --lr or --grad-clip and start again")
        logger.error(str(e))
        return DIVERGED
    logger.info("final evaluation on held-out problems and markers …")
    final = study_room.evaluate_final(study)
    tail.report(study, final, study_room.in_distribution(study, inputs), log, stamp)
    run.status("finished", len(rows), "", f"read {run.path / 'summary.md'}")
    logger.info(f"peak memory {study_room.peak_memory()}")
    return FINISHED


def find_resume(asked: Config) -> tuple[Path, Config] | None:
    """The run directory to go on with, and its configuration under this command line's process settings."""
    if not asked.run.resume:
        return None
    path = last_resumable(Path("out/runs")) if asked.run.resume == "latest" else Path(asked.run.resume)
    record, status = read_json(path / "run.json"), read_json(path / "status.json")
    if status["state"] == "finished":
        raise ValueError(f"--resume {path}: this run is finished; nothing is left to do")
    cfg, differing = resumed(asked, from_dict(record["config"]))
    if differing and not asked.run.resume_force:
        raise ValueError(f"--resume {path}: differs in {', '.join(differing)}; drop these flags, or add --resume-force")
    return path, cfg


if __name__ == "__main__":
    sys.exit(main())
