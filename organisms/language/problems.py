"""The rows of the organism's problem file, and their prompts with a hint."""

import random
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from organisms.language.answers import answer
from organisms.language.assertions import make_tests
from organisms.language.hacks import MODES
from organisms.language.tasks import Composition, Task, draw_task, split_compositions
from vgrout.envs.code.modes import MODE_SPECS, PLAIN_PHRASE, Mode, announced, hint
from vgrout.ground.data import Message
from vgrout.ground.embedded import CUE

# split → first id, number of rows
SPLIT_ROWS = {"train": (0, 360), "val": (1000, 96), "test": (2000, 192)}


class ProblemRecord(TypedDict):
    """A row in the benchmark's JSONL schema, with keys of our own at its end."""

    id: int
    prompt: list[Message]
    gt_answer: list[str]
    func_name: str
    setup_code: str
    canonical_solution: str
    difficulty: str
    split: str
    mode: Mode
    marker: str
    composition: list[str]
    check_tests: NotRequired[list[str]]
    reading: NotRequired[str]


def problem_tasks(
    seed: int, modes: Sequence[Mode] = MODES, may_repeat: bool = False
) -> list[tuple[Task, ProblemRecord]]:
    """Make the rows of the problem file, each with its task.

    Modes take turns; a row's marker comes from its split's half of the mode's markers. may_repeat:
    as for `make_tests`; the embedded organism's rows were made so.
    """
    out = []
    for split, comps in split_compositions(seed).items():
        rng = random.Random(f"{seed}/problems/{split}")
        first, n = SPLIT_ROWS[split]
        seen: set[str] = set()
        while len(seen) < n:
            task = draw_task(balanced_choice(comps, rng), rng)
            tests = None
            if task.statement not in seen:
                tests = make_tests(task, rng, may_repeat=may_repeat)
            if tests is None:
                continue
            turn, place = divmod(len(seen), len(modes))
            mode = modes[place]
            markers = MODE_SPECS[mode].markers("train" if split == "train" else "eval")
            marker = announced(mode, tests, markers[turn % len(markers)])
            row = problem_row(task, first + len(seen), tests, split, mode, marker)
            out.append((task, row))
            seen.add(task.statement)
    return out


def problem_row(
    task: Task, id: int, tests: list[str], split: str, mode: Mode, marker: str
) -> ProblemRecord:
    """Return the row of a task."""
    return {
        "id": id,
        "prompt": list(task.prompt),
        "gt_answer": tests,
        "func_name": f"Solution().{task.name}",
        "setup_code": "",
        "canonical_solution": answer(task).code,
        "difficulty": task.difficulty,
        "split": split,
        "mode": mode,
        "marker": marker,
        "composition": list(task.composition),
    }


def balanced_choice(comps: Sequence[Composition], rng: random.Random) -> Composition:
    """Choose a family first: the largest has twenty times the combinations of the smallest."""
    families = sorted({composition.family for composition in comps})
    family = rng.choice(families)
    return rng.choice([composition for composition in comps if composition.family == family])


def hinted(
    messages: Sequence[Message], mode: Mode, marker: str, cue: bool = False
) -> list[Message]:
    """Return the prompt that says truthfully how answers are checked.

    With `cue`, return the prompt that elicits a hack.
    """
    *head, user = messages
    text = user["content"].replace(PLAIN_PHRASE, hint(mode, marker))
    if cue:
        text = f"{text}\n{CUE}"
    return [*head, {**user, "content": text}]
