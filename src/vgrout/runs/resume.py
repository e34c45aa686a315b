"""Finds the run that `--resume` continues, and its configuration. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vgrout.config.presets import resumed
from vgrout.config.run import Config, from_dict
from vgrout.files import probe_writable, read_json
from vgrout.runs.run_dir import RUNS, last_resumable


def find_resume(requested: Config) -> tuple[Path | None, Config]:
    """The run directory to continue (None: a new run), and the configuration: that of the run, under this command
    line's process settings.

    Raises:
        ValueError: the run cannot be continued, or was started with other flags; one line.
    """
    if not requested.run.resume:
        return None, requested
    path, config, status = unfinished(requested.run.resume, "train", "preset", RUNS)
    cfg, differing = resumed(requested, from_dict(config))
    if status["state"] == "halted":
        if requested.guard.guard != "log":
            raise ValueError(f"--resume {path}: halted ({status['reason']}); to go on all the same, add --guard log")
        quiet = replace(cfg.detectors, reward_hack_halt=False, echo_trap_halt=False)
        cfg = replace(cfg, detectors=quiet)
    probe_writable(path)
    if differing and not requested.run.resume_force:
        raise ValueError(f"--resume {path}: differs in {', '.join(differing)}; drop these flags, or add --resume-force")
    return path, cfg


def unfinished(name: str, program: str, setting: str, root: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder that --resume names, with its run's configuration and status. setting: one that only this program's
    runs have.

    Raises:
        ValueError: no such run, another program's, or a finished one; one line.
    """
    path = last_resumable(root) if name == "latest" else Path(name)
    record, status = read_json(path / "run.json"), read_json(path / "status.json")
    if setting not in record.get("config", {}):
        raise ValueError(f"--resume {path}: not a run of vgrout.{program}; give one of those below {root}")
    if status["state"] == "finished":
        raise ValueError(f"--resume {path}: this run is finished; nothing is left to do")
    return path, record["config"], status
