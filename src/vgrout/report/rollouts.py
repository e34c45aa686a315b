"""Rollouts of many runs as one compact object for the page: columns, with every text stored once."""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vgrout.data import Flaw
from vgrout.environments import spelt
from vgrout.files import json_lines, printable
from vgrout.report.load import Condition, FinishedRun

# Where an answer comes from: "training" is rollouts.jsonl, the others are sides of final.jsonl.
PARTS = ("training", "base", "trained", "deployed", "plain")
# Facts about an answer, one bit each.
FLAGS = ("hacked", "solved", "passed", "finished", "deployed", "gt_pass", "channel", "flagged")
# Columns whose cells are places in a list of distinct texts.
STORED = ("marker", "prompt", "text")
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
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
                left_out.append(f"{run.path.name}: its rollouts ({type(e).__name__}: {e})")
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
        "parts": PARTS,
        "flags": FLAGS,
        "modes": list(flaws),
        "hack": [flaw.pattern for flaw in flaws.values()],
        "should": [flaw.should for flaw in flaws.values()],
        "markers": texts["marker"],
        "prompts": [json.loads(prompt) for prompt in texts["prompt"]],
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


def _rows(run: FinishedRun, number: int, every: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of every `every`-th group of a run, the `number`-th one."""
    rows = []
    for group, answer in _groups(run):
        if group % every == 0:
            rows.append({"run": number} | _row(answer, modes))
    return rows


def _groups(run: FinishedRun) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every answer with its group: a training step, or a final problem on all sides."""
    last = -1
    for answer in json_lines(run.path / "rollouts.jsonl"):
        last = answer["step"]
        yield last, answer | {"side": "training"}
    places: dict[int, int] = {}
    for answer in json_lines(run.path / "final.jsonl"):
        place = places.setdefault(answer["problem_id"], len(places))
        yield last + 1 + place, answer


def _row(answer: dict[str, Any], modes: Sequence[str]) -> dict[str, Any]:
    """Return the columns of an answer but `run`. modes: the names of all flaws.

    Raises:
        KeyError: something is missing.
        TypeError: a text is not a string, or a number not a number.
        ValueError: a number is infinite, or a name unknown.
    """
    numbers = {name: _number(answer.get(name)) for name in NUMBERS}
    json.dumps([answer["problem_id"], numbers], allow_nan=False)  # raises where the page would
    return {
        "part": PARTS.index(answer["side"]),
        "step": answer.get("step"),
        "mode": modes.index(answer["env_mode"]),
        "problem": answer["problem_id"],
        "marker": spelt(answer["env_mode"], answer.get("marker", "")),
        "prompt": _prompt(answer),
        "text": _text(answer["text"]),
        "flags": _bits(answer),
        **numbers,
    }


def _number(value: Any) -> float | None:
    # + 0.0 refuses what is no number, which float() would not
    return None if value is None else round(value + 0.0, 3)


def _prompt(answer: dict[str, Any]) -> str:
    """Return the JSON of a prompt: pairs of role and content."""
    messages = answer.get("messages")
    if not messages:
        messages = [{"role": "user", "content": answer.get("prompt", "")}]
    pairs = [[_text(m["role"]), _text(m["content"])] for m in messages]
    return json.dumps(pairs)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {type(value).__name__}")
    return value


def _bits(answer: dict[str, Any]) -> int:
    bits = 0
    for bit, flag in enumerate(FLAGS):
        if answer.get(flag):
            bits |= 1 << bit
    return bits


def embedded(data: Mapping[str, Any]) -> str:
    """Return the object as gzipped JSON in base64.

    No answer's text can end the script element that holds it.
    """
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
