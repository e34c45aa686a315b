"""The recorder shared by all trainers: run.json, table, steps.jsonl, checkpoints, and resuming from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from loguru import logger

from vgrout import ranks
from vgrout.files import read_json, write_atomic
from vgrout.runs import checkpoint
from vgrout.runs.run_context import RunContext, require_same
from vgrout.table import Columns, Table

RESUMED = ("argv", "git", "versions", "hashes", "ranks")  # what run.json records about each resume

R = TypeVar("R", bound=Columns)


@runtime_checkable
class Stateful(Protocol):
    """Has state that a checkpoint keeps: what the next step reads and seed and step number do not determine."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class StepRecorder(Generic[R]):
    """Writes a run's files: `open` once, then `write` and `keep` at every step. `rows` are those so far."""

    def __init__(
        self,
        run: RunContext,
        row: type[R],
        state: Mapping[str, Stateful],
        every: int = 1,
        keep: int = 1,
        short: bool = True,
    ) -> None:
        """state: what goes into a checkpoint. every: steps between checkpoints. keep: how many are kept. short: the
        console gets its few columns, not all."""
        self.run, self.row, self.state, self.every, self.kept, self.short = run, row, state, every, keep, short
        self.rows: list[R] = []

    def open(self, more: Mapping[str, Any], has: set[str], modes: Sequence[str] = ()) -> None:
        """Write run.json, explain the table; on a resume first restore the last good checkpoint.

        more: entries of run.json besides `RunContext.record`. has, modes: choose the table's columns.

        Raises:
            ValueError: an input has changed since the run started, or no checkpoint can be used.
        """
        run, logged = self.run, self.run.dir.steps_on_disk()
        record: dict[str, Any] = {**run.record, **more, "hashes": run.hashes | more["hashes"]}
        if run.resumes:
            first = read_json(run.path / "run.json")
            require_same(run.path, record["hashes"], run.force)
            self.resume()
            logger.info(f"resumed after step {len(self.rows) - 1}")
            again = {"step": len(self.rows)} | {name: record[name] for name in RESUMED if name in record}
            started_with = record["config"] if run.force else first.get("begun", first.get("config"))
            resumed = [*first.get("resumed", []), again]
            record = {**first, "config": record["config"], "begun": started_with, "resumed": resumed}
        run.dir.write_json("run.json", record)
        run.trackers.start(run.path, record["config"], len(self.rows), logged)
        run.started()
        self.table, self.full = Table(has, modes, self.row, short=True), Table(has, modes, self.row)
        for line in self.full.legend():
            logger.debug(line)

    def resume(self) -> None:
        """Continue from the last checkpoint that is whole and of this run, with the files cut back to it.

        Raises:
            ValueError: there is none; nothing on disk has changed then.
        """
        run, passed_over = self.run.path, list[str]()
        for point in checkpoint.newest_first(run, passed_over):
            try:
                rows = checkpoint.rows_before(run, point.next_step, point.sizes)
                checkpoint.require_rows(run, point)
                self.restore(point.state, rows)
                break
            except Exception as e:  # whatever a foreign state does to its readers
                passed_over.append(f"{point.path}: not of this run ({type(e).__name__}: {' '.join(str(e).split())})")
        else:
            raise checkpoint.none_left(run, passed_over)
        for line in passed_over:
            logger.warning(f"{line}; going back one further")
        checkpoint.rewind(run, point)
        ranks.from_first((point.state, rows))

    def restore(self, state: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> None:
        """Continue from this state and these rows, which rank 0 has read."""
        self.rows[:] = [self.row.from_json(row) for row in rows]
        for name, part in self.state.items():
            part.load_state_dict(state[name])

    def write(self, row: R, rollouts: Sequence[dict[str, Any]] | None, more: Mapping[str, Any] | None = None) -> None:
        """Write a finished step: the table's line, rollouts.jsonl, steps.jsonl (with `more`), the trackers. rollouts
        None: they are written elsewhere."""
        for table in (self.table, self.full):
            for line in table.lines(row):
                logger.log("INFO" if (table is self.table) == self.short else "DEBUG", line)
        record = row.as_json() | dict(more or {})
        self.run.dir.append(record, rollouts)
        self.run.trackers.row(record, rollouts or ())

    def keep(self, step: int, closing: bool) -> None:
        """Save a checkpoint if one is due or the run ends here (`closing`), and write status.json."""
        if closing or (step + 1) % self.every == 0:
            state = {name: part.state_dict() for name, part in self.state.items()}
            checkpoint.save(self.run.path, step + 1, state, self.kept)
        self.run.status("running", "")

    def finish(self, line: str, table: str, record: Mapping[str, Any]) -> None:
        """Write summary.md: the line to quote, a table, every step. record: the final numbers, for the trackers. The
        console gets the line alone."""
        write_atomic(self.run.path / "summary.md", f"{line}\n\n{table}\n\n{self.full.markdown(self.rows)}\n")
        for text in table.splitlines():
            logger.debug(text)
        self.run.trackers.final(record, (), None, self.rows[-1].step)
        logger.info(f"{line}\nmore: {self.run.path / 'summary.md'}")
