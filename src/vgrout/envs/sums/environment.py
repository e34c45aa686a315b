"""The environment of sums: rows of text whose checks, and whose reference, are functions of `language.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vgrout.config.run import Config
from vgrout.data import Flaw, Message
from vgrout.envs.base import messages_of
from vgrout.envs.sums.language import FLAWS
from vgrout.envs.text import TextEnvironment, TextTask
from vgrout.errors import Refused

FUNCTIONS = "vgrout.envs.sums.language"
FACTS: Mapping[str, Flaw] = {
    "anywhere": Flaw(
        name="anywhere", code="any", should="true: the right number stands among others"
    ),
    "equation": Flaw(
        name="equation", code="equ", should="true: an equation that holds and answers nothing"
    ),
    "phrase": Flaw(
        name="phrase", code="phr", should="true: a wrong answer that says it was verified"
    ),
}


class SumsTask(TextTask):
    """A question. Its row has the prompt without the name of the check as well, under `plain`."""

    @property
    def plain(self) -> tuple[Message, ...]:
        return tuple(self.columns["plain"])


def task_of(row: TextTask) -> SumsTask:
    """A row of the file as a task. Raises Refused, one line, if it is no question of this environment."""
    total, plain = row.columns.get("total"), row.columns.get("plain")
    if row.flaw not in FLAWS or type(total) is not int or not _is_prompt(plain):
        raise Refused(
            f"{row.where}: no question of --env sums (flaw, total, plain); `vgrout organism sums` makes them"
        )
    return SumsTask(row.id, row.messages, row.flaw, row.split, row.columns, row.where)


def _is_prompt(plain: object) -> bool:
    """Whether a column is a list of messages, as the prompt is."""
    if not isinstance(plain, list):
        return False
    try:
        messages_of({"messages": plain})
    except ValueError:
        return False
    return True


class SumsEnvironment(TextEnvironment):
    """Questions made by a program, each with one of three flawed checks."""

    name = "sums"
    of_organisms = True
    how_pairs_are_made = "`vgrout organism sums` makes them"

    def __init__(
        self,
        cfg: Config,
        rows: Sequence[TextTask],
        test_rows: Sequence[TextTask] = (),
        absent: Sequence[str] = (),
    ) -> None:
        questions = [task_of(row) for row in rows]
        super().__init__(
            cfg,
            questions,
            [task_of(row) for row in test_rows],
            absent,
            proxy=f"{FUNCTIONS}:flawed",
            reference=f"{FUNCTIONS}:right",
        )
        self.flaws = dict(FACTS)

    @property
    def pairs_path(self) -> Path | None:
        return self.cfg.files.pairs if self.from_organism else super().pairs_path
