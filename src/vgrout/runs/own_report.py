"""A finished run as `vgrout report` has it, for the run's own last page.

pandas, scipy and matplotlib take seconds to import, and no run waits for them to start: this module is imported at
its end.
"""

from pathlib import Path

from vgrout.config.run import Config
from vgrout.ground.metrics import Rate
from vgrout.report import conclusions, figures, load, tables


class OwnReport:
    """A report of one run. Raises Refused where its files are not those of a finished run."""

    def __init__(self, run: Path, cfg: Config) -> None:
        (self._condition,) = load.conditions([load.read_run(run, cfg)])

    @property
    def steps(self) -> int:
        """How many there were."""
        return len(self._condition.first.steps)

    def last_five(self, what: load.What) -> Rate:
        """The share of the model's own answers that hack or solve, in the last five steps."""
        return self._condition.first.last_five(what)

    def conclusion(self) -> str:
        """In a few words what the final evaluation means."""
        return conclusions.conclusion(self._condition)

    def by_flaw(self) -> str:
        """The table of hack and solve by flaw, in Markdown."""
        return tables.by_flaw([self._condition]).markdown()

    def dynamics(self) -> bytes:
        """dynamics.png."""
        return figures.dynamics([self._condition]).figure.png()
