"""Rollouts of many runs as one compact object for the page: columns, with every text stored once."""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vgrout.data import Flaw
from vgrout.envs.worlds import spelt
from vgrout.errors import Refused, refuse
from vgrout.files import json_lines, printable
from vgrout.metrics import SIDES
from vgrout.report.forms import Answer, require_shown
from vgrout.report.load import Condition, FinishedRun

# Where an answer comes from, as the page says it: "training" is rollouts.jsonl, the others are the
# sides of final.jsonl.
PARTS = {"training": "training"} | {side: name.title for side, name in SIDES.items()}
# Facts about an answer, one bit each.
FLAGS = ("hacked", "solved", "passed", "finished", "deployed", "gt_pass", "channel", "flagged")
# Columns whose cells are places in a list of distinct texts.
STORED = ("marker", "prompt", "thought", "text")
NUMBERS = ("reward", "advantage", "gate")
COLUMNS = ("run", "part", "step", "mode", "problem", *STORED, "flags", *NUMBERS)


def pack(
    found: Sequence[Condition],
    limit: int,
    track: Callable[[Sequence[FinishedRun]], Iterable[FinishedRun]] = list,
) -> dict[str, Any]:
    """Pack about `limit` rollouts at most; 0: none.

    Every k-th step of each run is taken as a whole, and every k-th problem of the final evaluation
    with all its answers on all sides. k is the same for every run, and 1 if everything fits.

    Args:
        found: the conditions.
        limit: how many rollouts, about.
        track: shows progress over the runs.

    Returns:
        What page.html reads. `left_out` names the runs whose files are damaged.
    """
    titles = {run: c.title for c in found for run in c.runs}
    flaws = _flaws(titles)
    total = sum(_count(run) for run in titles)
    every = 0
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    if limit:
        every = max(1, math.ceil(total / limit))
        for number, run in enumerate(track(list(titles))):
            try:
                rows += _rows(run, number, every, list(flaws))
            except (Refused, OSError) as e:  # anything else is a fault of this program
                why = str(e).replace(f"{run.path}/", "")
                left_out.append(f"{run.path.name}: its rollouts ({why})")
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    texts: dict[str, list[str]] = {}
    for name in STORED:
        texts[name] = list(dict.fromkeys(columns[name]))
        place = {text: i for i, text in enumerate(texts[name])}
        columns[name] = [place[text] for text in columns[name]]
    runs = []
    for run, title in titles.items():
        runs.append({"name": printable(run.path.name), "cell": printable(title), "seed": run.seed})
    return {
        "runs": runs,
        "parts": list(PARTS.values()),
        "flags": FLAGS,
        "modes": list(flaws),
        "hack": [flaw.pattern for flaw in flaws.values()],
        "should": [flaw.should for flaw in flaws.values()],
        "markers": texts["marker"],
        "prompts": [json.loads(prompt) for prompt in texts["prompt"]],
        "thoughts": texts["thought"],
        "texts": texts["text"],
        "columns": columns,
        "every": every,
        "total": total,
        "left_out": left_out,
    }


def _count(run: FinishedRun) -> int:
    """Return how many answers a run has written."""
    lines = 0
    for name in ("rollouts.jsonl", "final.jsonl"):
        file = run.path / name
        if file.is_file():
            lines += file.read_bytes().count(b"\n")
    return lines


def _flaws(runs: Iterable[FinishedRun]) -> dict[str, Flaw]:
    """Return the flaws of these runs' environments, by name."""
    flaws: dict[str, Flaw] = {}
    for run in runs:
        flaws |= run.all_flaws
    return flaws


# How the lines of rollouts.jsonl and of final.jsonl begin: with what their group is known by.
_STEP = re.compile(r'\{"step": (\d+),')
_PROBLEM = re.compile(r'\{"side": "\w+", "problem_id": (\d+),')


def _rows(
    run: FinishedRun, number: int, every: int, modes: Sequence[str]
) -> list[dict[str, object]]:
    """Return the rows of every `every`-th group of a run, the `number`-th one.

    A group is a training step, or a final problem on all sides. Lines of other groups are not
    parsed, if they begin as this program writes them.
    """
    rows = []
    last = -1

    def of_step(line: str) -> bool:
        nonlocal last
        step = _STEP.match(line)
        if step is None:
            return True
        last = int(step[1])
        return last % every == 0

    for answer in json_lines(run.path / "rollouts.jsonl", of_step):
        require_shown(answer, modes, "rollouts.jsonl")
        refuse(type(answer.get("step")) is not int, "rollouts.jsonl: an answer has no step")
        last = max(last, answer["step"])
        if answer["step"] % every == 0:
            answer["side"] = "training"
            rows.append({"run": number} | _row(answer, modes))

    places: dict[int, int] = {}

    def of_problem(line: str) -> bool:
        problem = _PROBLEM.match(line)
        return problem is None or _is_taken(int(problem[1]))

    def _is_taken(problem: int) -> bool:
        place = places.setdefault(problem, len(places))
        return (last + 1 + place) % every == 0

    for answer in json_lines(run.path / "final.jsonl", of_problem):
        require_shown(answer, modes, "final.jsonl")
        if _is_taken(answer["problem_id"]):
            rows.append({"run": number} | _row(answer, modes))
    return rows


def _row(answer: Answer, modes: Sequence[str]) -> dict[str, object]:
    """Return the columns of an answer but `run`. modes: the names of all flaws."""
    numbers = {name: _rounded(answer.get(name)) for name in NUMBERS}
    return {
        "part": [*PARTS].index(answer["side"]),
        "step": answer.get("step"),
        "mode": modes.index(answer["env_mode"]),
        "problem": answer["problem_id"],
        "marker": spelt(answer["env_mode"], answer.get("marker", "")),
        "prompt": _prompt(answer),
        "thought": answer.get("thought", ""),
        "text": answer["text"],
        "flags": _bits(answer),
        **numbers,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value + 0.0, 3)


def _prompt(answer: Answer) -> str:
    """Return the JSON of a prompt: pairs of role and content."""
    messages = answer.get("messages")
    if not messages:
        messages = [{"role": "user", "content": answer.get("prompt", "")}]
    pairs = [[m["role"], m["content"]] for m in messages]
    return json.dumps(pairs)


def _bits(answer: Answer) -> int:
    bits = 0
    for bit, flag in enumerate(FLAGS):
        if answer.get(flag):
            bits |= 1 << bit
    return bits


def embedded(data: Mapping[str, object]) -> str:
    """Return the object as gzipped JSON in base64.

    No answer's text can end the script element that holds it.
    """
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
