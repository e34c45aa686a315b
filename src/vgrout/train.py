"""`python -m vgrout.train PRESET [--flag value …]`: parse, refuse, start the sandbox, then load torch and run the loop.

Exit codes are those of `launch`. Every exit after the run directory was made leaves `status.json` in it: state, steps
done, reason, what to run next.
"""

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout import console
from vgrout.cli import cli_exit
from vgrout.config.run import ARM_NAME, Config, from_dict, parse, resumed
from vgrout.files import probe_writable, read_json, to_json
from vgrout.grading.grade import Grader
from vgrout.runs.preflight import Inputs, file_hashes, hypotheses_sha256, plan_lines, preflight
from vgrout.runs.run_context import FINISHED, NOTHING, finish, require_same, run_with_status
from vgrout.runs.run_dir import RUNS, RunDir, environment, last_resumable
from vgrout.runs.signals import Stop
from vgrout.table import REFERENCE_STEP


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    return cli_exit(lambda: start(asked), NOTHING)


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
            print("\n".join(plan_lines(cfg, inputs, grader, resume[0] if resume else RUNS)))
            return FINISHED
        run = RunDir.reopen(resume[0]) if resume else RunDir.create(cfg.run_id)
        log = Path("logs") / f"{run.path.name}.log"
        console.setup(log)
        launch = Launch(cfg, inputs, files, grader, run, log, resume is not None, force)
        return run_with_status(
            run,
            launch.again,
            launch.resumes,
            lambda stop, clock: load(launch, stop, clock),
            lambda loaded: go(launch, *loaded),
        )


def load(launch: Launch, stop: Stop, clock: console.Clock) -> tuple[Any, dict[str, Any]]:
    """The study, and what is stamped on its files. Raises ValueError, one line, where files do not fit the model or
    are not those that the run started from."""
    cfg, run, grader = launch.cfg, launch.run, launch.grader
    record = {**environment(), "config": cfg.as_dict(), "hashes": launch.files}
    if not launch.resumes:  # before anything is loaded: a sweep beside this one sees that the run is being made
        run.write_json("run.json", record)
    # Importing torch and transformers takes seconds; a wrong flag never waits for it.
    room = importlib.import_module("vgrout.study")
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
    if study.arm.origin and study.arm.origin.cosine_to_real:
        logger.info(study.arm.origin.cosine_to_real.line())
    logger.info(grader.protections.line())
    stamp = {"sandbox": grader.protections.as_dict()}
    hashes = launch.files | room.hashes(study)
    record |= {"accelerator": room.accelerator(), **room.provenance(study), **stamp, "hashes": hashes}
    record["pool"] = study.teacher.record()
    if launch.resumes:
        first = read_json(run.path / "run.json")
        require_same(run.path, hashes, launch.force)
        room.restore(study)
        logger.info(f"resumed after step {len(study.rows) - 1}")
        again_from = {"step": len(study.rows), **{k: record[k] for k in ("argv", "git", "versions", "hashes")}}
        begun = record["config"] if launch.force else first.get("begun", first["config"])
        resumed_at = [*first.get("resumed", []), again_from]
        record = {**first, "config": record["config"], "begun": begun, "resumed": resumed_at}
    else:
        hashes |= {"direction": room.direction_hash(study), "hypotheses": hypotheses_sha256()}
    run.write_json("run.json", record)
    run.status("running", len(study.rows), "", launch.again)
    return study, stamp


def go(launch: Launch, study: Any, stamp: dict[str, Any]) -> int:
    """The steps, the final evaluation, the report; how each ending is written down."""
    loop, room, tail = (importlib.import_module(f"vgrout.{m}") for m in ("loop", "study", "tail"))
    run = launch.run

    def body() -> None:
        loop.train(study)
        logger.info("final evaluation on held-out problems and markers …")
        final = room.evaluate_final(study)
        tail.report(study, final, room.in_distribution(study, launch.inputs), launch.log, stamp)

    if (stopped := finish(run, launch.again, lambda: len(study.rows), body)) is not None:
        return stopped
    run.status("finished", len(study.rows), "", f"read {run.path / 'summary.md'}")
    logger.info(f"peak memory {room.peak_memory()}")
    return FINISHED


def find_resume(asked: Config) -> tuple[Path, Config] | None:
    """The run directory to go on with, and its configuration under this command line's process settings."""
    if not asked.run.resume:
        return None
    path = last_resumable(RUNS) if asked.run.resume == "latest" else Path(asked.run.resume)
    record, status = read_json(path / "run.json"), read_json(path / "status.json")
    if "preset" not in record.get("config", {}):
        raise ValueError(f"--resume {path}: not a run of vgrout.train; give one of those below {RUNS}")
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
