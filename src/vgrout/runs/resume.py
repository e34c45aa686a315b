"""Which run `--resume` goes on with, and whether it can."""

from dataclasses import replace
from pathlib import Path

from loguru import logger

from vgrout.config.presets import resumed
from vgrout.config.run import Config
from vgrout.config.stored import from_dict
from vgrout.errors import Refused
from vgrout.files import Json, probe_writable, read_json
from vgrout.model.shapes import ITEMSIZE
from vgrout.runs import checkpoint_files
from vgrout.runs.preflight import dtype_of
from vgrout.runs.run_dir import ENDED, RUNS, STATES, counted, has_checkpoint, last_resumable
from vgrout.table import StepRow


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
    stored.refuse_code(requested.code, f"--resume {path}: run.json")
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
    if not requested.run.dry_run and has_checkpoint(path):
        checkpoint_files.require_one(path, StepRow.from_json)
    probe_writable(path)
    if differing:
        raise Refused(f"--resume {path}: differs in {', '.join(differing)}; drop these flags")
    if cfg.run.threads != stored.run.threads:
        logger.warning(
            f"--threads {cfg.run.threads} (run: {stored.run.threads}): sums are rounded in another order, "
            "so what follows may differ from an uninterrupted run"
        )
    return path, cfg


def run_to_resume(
    name: str, program: str, setting: str, root: Path
) -> tuple[Path, dict[str, Json], dict[str, Json]]:
    """The folder that --resume names, with its run's configuration and status. setting: one that only this program's
    runs have.

    Raises:
        Refused: no such run, another program's, a finished one, or one that has lost its checkpoints; one line.
    """
    path = last_resumable(root) if name == "latest" else Path(name)
    record = read_json(path / "run.json")
    try:
        done = counted(path).rows
    except OSError as e:
        raise Refused(f"{path / 'steps.jsonl'}: cannot be read ({e.strerror})") from None
    if (path / "status.json").exists() or has_checkpoint(path) or done:
        status = read_json(path / "status.json")
    else:  # killed while it loaded
        status = {"state": "running"}
    config = record.get("config")
    of_program = (
        isinstance(config, dict) and setting in config and isinstance(record.get("hashes"), dict)
    )
    if not of_program or status.get("state") not in STATES:
        raise Refused(
            f"--resume {path}: not a run of vgrout.{program}; give one of those below {root}"
        )
    if status["state"] in ENDED:
        raise Refused(f"--resume {path}: {ENDED[status['state']]}; nothing is left to do")
    every = config.get("run", config).get("checkpoint_every", 0)
    # begun again, it would lose steps that a checkpoint had
    if not has_checkpoint(path) and done > every:
        raise checkpoint_files.none_left(
            path, [f"resume/ is empty after {done} steps; put it back"]
        )
    return path, config, status
