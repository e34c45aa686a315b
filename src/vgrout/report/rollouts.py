"""Rollouts of many runs as one compact object for the page: columns, and every text stored once."""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vgrout.envs.code.modes import MODE_SPECS, MODES, spelt
from vgrout.files import json_lines, printable
from vgrout.report.load import Condition, FinishedRun

# where an answer comes from: rollouts.jsonl, final.jsonl
PARTS = ("training", "base", "trained", "deployed", "plain")
# a bit each
FLAGS = ("hacked", "solved", "passed", "finished", "deployed", "gt_pass", "channel", "flagged")
STORED = ("marker", "prompt", "text")  # columns whose cells are numbers of distinct values
NUMBERS = ("reward", "advantage", "gate")
COLUMNS = ("run", "part", "step", "mode", "problem", *STORED, "flags", *NUMBERS)


def _groups(run: FinishedRun) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every answer with the number of its group: a training step, or a final problem on all sides."""
    last = -1
    for answer in json_lines(run.path / "rollouts.jsonl"):
        last = answer["step"]
        yield last, answer | {"side": "training"}
    problems: dict[int, int] = {}
    for answer in json_lines(run.path / "final.jsonl"):
        yield last + 1 + problems.setdefault(answer["problem_id"], len(problems)), answer


def pack(
    found: Sequence[Condition],
    limit: int,
    track: Callable[[Sequence[FinishedRun]], Iterable[FinishedRun]] = lambda runs: runs,
) -> dict[str, Any]:
    """At most about `limit` rollouts: of every run each k-th step as a whole, and each k-th problem of the final
    evaluation with all its answers on all sides; k is the same for every run, and 1 where all of them fit. A run
    whose file is damaged is left out, and named in `left_out`.
    """
    titles = {r: c.title for c in found for r in c.runs}
    files = [
        f
        for r in titles
        for name in ("rollouts", "final")
        if (f := r.path / f"{name}.jsonl").is_file()
    ]
    total = sum(text.count(b"\n") for f in files for text in [f.read_bytes()])
    every = max(1, math.ceil(total / limit)) if limit else 0
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for number, run in enumerate(track([*titles])) if limit else ():
        try:
            rows += [
                {"run": number} | _row(answer)
                for group, answer in _groups(run)
                if group % every == 0
            ]
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
            left_out.append(f"{run.path.name}: its rollouts ({type(e).__name__}: {e})")
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    stored: dict[str, list[str]] = {}
    for name in STORED:
        places = {text: i for i, text in enumerate(dict.fromkeys(columns[name]))}
        stored[f"{name}s"], columns[name] = [*places], [places[text] for text in columns[name]]
    return {
        "runs": [
            {"name": printable(r.path.name), "cell": printable(titles[r]), "seed": r.seed}
            for r in titles
        ],
        "parts": PARTS,
        "modes": MODES,
        "flags": FLAGS,
        "hack": [MODE_SPECS[m].pattern for m in MODES],
        "should": [MODE_SPECS[m].should for m in MODES],
        **stored,
        "prompts": [json.loads(prompt) for prompt in stored["prompts"]],
        "columns": columns,
        "every": every,
        "total": total,
        "left_out": left_out,
    }


def _row(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the columns but `run`. Raises TypeError where a text is none, ValueError where a number is infinite."""
    prompt = answer.get("messages") or [{"role": "user", "content": answer.get("prompt", "")}]
    numbers = {
        name: None if (x := answer.get(name)) is None else round(x + 0.0, 3) for name in NUMBERS
    }
    json.dumps([answer["problem_id"], numbers], allow_nan=False)
    return {
        "part": PARTS.index(answer["side"]),
        "step": answer.get("step"),
        "mode": MODES.index(answer["env_mode"]),
        "problem": answer["problem_id"],
        "marker": spelt(answer["env_mode"], answer["marker"]),
        "prompt": json.dumps([["" + m["role"], "" + m["content"]] for m in prompt]),
        "text": "" + answer["text"],
        "flags": sum(bool(answer.get(flag)) << bit for bit, flag in enumerate(FLAGS)),
        **numbers,
    }


def embedded(data: Mapping[str, Any]) -> str:
    """The object's JSON, gzipped, in base64: no answer's text can end the script element that holds it."""
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
