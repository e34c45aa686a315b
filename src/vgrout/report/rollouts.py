"""Rollouts of many runs as one compact object for the page: columns, with every text stored once."""

import base64
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vgrout.envs.worlds import spelt
from vgrout.ground.data import Flaw
from vgrout.ground.io import Json, json_lines, printable
from vgrout.ground.metrics import SIDES
from vgrout.report.load import DAMAGE, Condition, FinishedRun, reason

# Where an answer comes from, as the page says it: "training" is rollouts.jsonl, the others are the
# sides of final.jsonl.
PARTS = {"training": "training"} | {side: name.title for side, name in SIDES.items()}
# Facts about an answer, one bit each.
FLAGS = ("hacked", "solved", "passed", "finished", "deployed", "gt_pass", "channel", "flagged")
# Columns whose cells are places in a list of distinct texts.
STORED = ("marker", "prompt", "thought", "text")
NUMBERS = ("reward", "advantage", "gate")
COLUMNS = ("run", "part", "step", "mode", "problem", *STORED, "flags", *NUMBERS)


def pack(found: Sequence[Condition], limit: int) -> dict[str, Any]:
    """Pack about `limit` rollouts at most.

    Every k-th step of each run is taken as a whole, and every k-th problem of the final evaluation
    with all its answers on all sides. k is the same for every run, and 1 if everything fits.

    Returns:
        What page.html reads. `left_out` names the runs whose files are damaged.
    """
    titles = {run: c.title for c in found for run in c.runs}
    flaws: dict[str, Flaw] = {}
    for run in titles:
        flaws |= run.all_flaws
    total = sum(_count(run) for run in titles)
    every = max(1, math.ceil(total / limit))
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for number, run in enumerate(tqdm(titles, "rollouts", unit="run", disable=None)):
        try:
            for part, answer in _answers(run, every):
                rows.append({"run": number} | _row(part, answer, list(flaws)))
        except DAMAGE as e:
            left_out.append(f"{run.path.name}: its rollouts ({reason(e, run.path)})")
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


def _answers(run: FinishedRun, every: int) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the answers of every `every`-th step and final problem, each with its part."""
    for answer in json_lines(run.path / "rollouts.jsonl"):
        if answer["step"] % every == 0:
            yield "training", answer
    places: dict[int, int] = {}  # of the final evaluation's problems
    for answer in json_lines(run.path / "final.jsonl"):
        if places.setdefault(answer["problem_id"], len(places)) % every == 0:
            yield answer["side"], answer


def _row(part: str, answer: dict[str, Json], modes: Sequence[str]) -> dict[str, object]:
    """Return the columns of an answer but `run`. modes: the names of all flaws."""
    messages = answer.get("messages")
    if not messages:
        messages = [{"role": "user", "content": answer.get("prompt", "")}]
    flags = 0
    for bit, flag in enumerate(FLAGS):
        if answer.get(flag):
            flags |= 1 << bit
    row: dict[str, object] = {
        "part": [*PARTS].index(part),
        "step": answer.get("step"),
        "mode": modes.index(answer["env_mode"]),
        "problem": answer["problem_id"],
        "marker": spelt(answer["env_mode"], answer.get("marker", "")),
        "prompt": json.dumps([[m["role"], m["content"]] for m in messages]),
        "thought": answer.get("thought", ""),
        "text": answer["text"],
        "flags": flags,
    }
    for name in NUMBERS:
        value = answer.get(name)
        if value is not None:
            value = round(value + 0.0, 3)
        row[name] = value
    return row


def embedded(data: Mapping[str, object]) -> str:
    """Return the object as gzipped JSON in base64.

    No answer's text can end the script element that holds it.
    """
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
