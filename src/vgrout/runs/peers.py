"""The run as seen by the ranks beside rank 0, and what a restart by torchrun goes on with."""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from vgrout.config.run import Config
from vgrout.envs.base import Grader
from vgrout.ground import ranks
from vgrout.ground.io import Interrupted, Refused, read_json, show_fault, show_refusal
from vgrout.ground.ranks import RankLost
from vgrout.ground.records import began
from vgrout.runs.context import ENDINGS, REFUSED, RunContext, state_and_code
from vgrout.runs.run_dir import RUNS
from vgrout.runs.stopping import stop_on_signals


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
