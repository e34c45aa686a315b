"""What a run writes step by step, whatever it trains: run.json, table, steps.jsonl, checkpoints; and the way back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from loguru import logger

from vgrout import ranks
from vgrout.console import explain_columns, terminal_width
from vgrout.files import read_json, write_atomic
from vgrout.runs import checkpoint
from vgrout.runs.run_context import RunContext, require_same
from vgrout.table import Columns, Table

AGAIN = ("argv", "git", "versions", "hashes", "ranks")  # what run.json says of each resume
MAX_SKIPPED = 3  # non-finite steps in a row before a run counts as diverged

R = TypeVar("R", bound=Columns)


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint keeps: all that the next step reads and that a seed and a step number do not give."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class StepRecorder(Generic[R]):
    """`open` once, then `write` and `keep` at every step; `rows` are the run's so far."""

    def __init__(
        self, run: RunContext, row: type[R], state: Mapping[str, Stateful], every: int = 1, keep: int = 1
    ) -> None:
        """state: what goes into a checkpoint, under its keys. every, keep: steps between checkpoints, and how many."""
        self.run, self.row, self.state, self.every, self.kept = run, row, state, every, keep
        self.rows: list[R] = []

    def open(self, more: Mapping[str, Any], has: set[str], modes: Sequence[str] = (), documented: str = "") -> None:
        """Write run.json; after a resume go back to the last good checkpoint; explain the table.

        more: for run.json, beside what `RunContext.record` has. has, modes: what decides on the table's columns.
        documented: where else they are explained.

        Raises:
            ValueError: the inputs are not those that the run started from, or no checkpoint can be used.
        """
        run, logged = self.run, self.run.dir.steps_on_disk()
        record: dict[str, Any] = {**run.record, **more, "hashes": run.hashes | more["hashes"]}
        if run.resumes:
            first = read_json(run.path / "run.json")
            require_same(run.path, record["hashes"], run.force)
            self.put_back(*ranks.from_first(self.past()))
            logger.info(f"resumed after step {len(self.rows) - 1}")
            again = {"step": len(self.rows)} | {name: record[name] for name in AGAIN if name in record}
            begun = record["config"] if run.force else first.get("begun", first.get("config"))
            resumed = [*first.get("resumed", []), again]
            record = {**first, "config": record["config"], "begun": begun, "resumed": resumed}
        run.dir.write_json("run.json", record)
        run.trackers.start(run.path, record["config"], len(self.rows), logged)
        run.started()
        self.table = Table(has, modes, terminal_width(), of=self.row)
        self.full = Table(has, modes, of=self.row)
        explain_columns(self.table.legend(), f"{run.log}{documented}")

    def past(self) -> tuple[Mapping[str, Any], Sequence[dict[str, Any]]]:
        """The state of the last good checkpoint and the rows up to it; files are cut back to it."""
        point, rows = checkpoint.go_back(self.run.path)
        return point.state, rows

    def put_back(self, state: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> None:
        """To the last good checkpoint, as rank 0 has read it."""
        self.rows[:] = [self.row.from_json(row) for row in rows]
        for name, part in self.state.items():
            part.load_state_dict(state[name])

    def write(self, row: R, rollouts: Sequence[dict[str, Any]] | None, more: Mapping[str, Any] | None = None) -> None:
        """A finished step: the table's line, rollouts.jsonl, steps.jsonl (with `more` in its line), the trackers.
        rollouts None: they lie elsewhere."""
        for line in self.table.lines(row):
            logger.info(line)
        if self.table.hidden:
            for line in self.full.lines(row):
                logger.debug(line)
        record = row.as_json() | dict(more or {})
        self.run.dir.append(record, rollouts)
        self.run.trackers.row(record, rollouts or ())

    def keep(self, step: int, closing: bool) -> None:
        """The checkpoint, if one is due or the run ends here (`closing`), and status.json."""
        if closing or (step + 1) % self.every == 0:
            state = {name: part.state_dict() for name, part in self.state.items()}
            checkpoint.save(self.run.path, step + 1, state, self.kept)
        self.run.status("running", "")

    def finish(self, line: str, table: str, record: Mapping[str, Any]) -> None:
        """summary.md: the line to quote, a table, every step. record: the final numbers, for the trackers."""
        write_atomic(self.run.path / "summary.md", f"{line}\n\n{table}\n\n{self.full.markdown(self.rows)}\n")
        for text in (*table.splitlines(), line):
            logger.info(text)
        self.run.trackers.final(record, (), None, self.rows[-1].step)


def diverged(skipped: Sequence[int]) -> str:
    """Why a run ends here: the loss or gradient of its last steps was not finite; "": it does not. skipped: 1 for each
    such step."""
    ends = len(skipped) >= MAX_SKIPPED and all(skipped[-MAX_SKIPPED:])
    return f"loss or gradient not finite, {MAX_SKIPPED} steps in a row" if ends else ""
