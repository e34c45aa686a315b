"""What is known of a run once it has trained and has been evaluated for the last time."""

from collections.abc import Sequence
from dataclasses import dataclass

from vgrout.config.run import Config
from vgrout.envs.base import Splits
from vgrout.metrics import Final
from vgrout.runs.tallies import Tallies
from vgrout.table import StepRow


@dataclass(frozen=True)
class Outcome:
    """What the files of a run's end are written from."""

    cfg: Config
    rows: Sequence[StepRow]
    final: Final
    tallies: Tallies
    problems: Splits
    halted: str  # why the run ended before its last step; empty: it did not
    unrouted: str  # why it is no run of its method; empty: it is one

    @property
    def halves(self) -> Sequence[str]:
        """Letters of the weak detectors that split the hacks into half A and half B."""
        return self.cfg.env.report_detector_codes
