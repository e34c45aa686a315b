"""Which run `--resume` goes on with, and under which configuration. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vgrout.config.presets import resumed
from vgrout.config.run import Config, from_dict
from vgrout.files import probe_writable, read_json
from vgrout.runs.run_dir import RUNS, last_resumable


def find_resume(asked: Config) -> tuple[Path, Config] | None:
    """The run directory to go on with, and its configuration under this command line's process settings; None: a new
    run.

    Raises:
        ValueError: not a run that can go on, or other flags than it was begun with; one line.
    """
    if not asked.run.resume:
        return None
    path, config, status = unfinished(asked.run.resume, "train", "preset", RUNS)
    cfg, differing = resumed(asked, from_dict(config))
    if status["state"] == "halted":
        if asked.guard.guard != "log":
            raise ValueError(f"--resume {path}: halted ({status['reason']}); to go on all the same, add --guard log")
        quiet = replace(cfg.detectors, reward_hack_halt=False, echo_trap_halt=False)
        cfg = replace(cfg, detectors=quiet)
    probe_writable(path)
    if differing and not asked.run.resume_force:
        raise ValueError(f"--resume {path}: differs in {', '.join(differing)}; drop these flags, or add --resume-force")
    return path, cfg


def unfinished(asked: str, program: str, own: str, root: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder that --resume names, with the configuration and the status of its run. own: a setting that runs of
    this program alone have.

    Raises:
        ValueError: no such run, another program's, or nothing is left to do; one line.
    """
    path = last_resumable(root) if asked == "latest" else Path(asked)
    record, status = read_json(path / "run.json"), read_json(path / "status.json")
    if own not in record.get("config", {}):
        raise ValueError(f"--resume {path}: not a run of vgrout.{program}; give one of those below {root}")
    if status["state"] == "finished":
        raise ValueError(f"--resume {path}: this run is finished; nothing is left to do")
    return path, record["config"], status
