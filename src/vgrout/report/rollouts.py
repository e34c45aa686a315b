"""Rollouts of many runs as one compact object for the HTML page: columns, and every text stored once."""

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from vgrout.files import json_lines, printable
from vgrout.modes import MODE_SPECS, spelt
from vgrout.report.runs import Cell, Run
from vgrout.types import MODES

T = TypeVar("T")

PARTS = ("training", "base", "trained", "deployed", "plain")  # where an answer comes from: rollouts.jsonl, final.jsonl
FLAGS = ("hacked", "solved", "passed", "finished", "deployed", "gt_pass", "channel", "flagged")  # a bit each
COLUMNS = (
    *("run", "part", "step", "mode", "problem", "marker", "prompt", "text", "flags", "reward", "advantage", "gate"),
)


class Store:
    """Distinct values, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._at: dict[str, int] = {}

    def put(self, value: Any) -> int:
        name = value if isinstance(value, str) else json.dumps(value)
        if name not in self._at:
            self._at[name] = len(self.values)
            self.values.append(value)
        return self._at[name]


def _groups(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every answer with the number of its group: a training step, or a final problem on all sides."""
    last = -1
    for answer in json_lines(run.path / "rollouts.jsonl"):
        last = answer["step"]
        yield last, answer | {"side": "training"}
    problems: dict[int, int] = {}
    for answer in json_lines(run.path / "final.jsonl"):
        yield last + 1 + problems.setdefault(answer["problem_id"], len(problems)), answer


def pack(
    cells: Sequence[Cell], limit: int, track: Callable[[Sequence[Run]], Iterable[Run]] = lambda runs: runs
) -> dict[str, Any]:
    """At most about `limit` rollouts: of every run each k-th step as a whole, and each k-th problem of the final
    evaluation with all its answers on all sides; k is the same for every run, and 1 where all of them fit. A run
    whose file is damaged is left out, and named in `left_out`.
    """
    titles = {r: c.title for c in cells for r in c.runs}
    runs = list(titles)
    total = sum(_lines(r) for r in runs)
    every = max(1, math.ceil(total / limit)) if limit else 0
    prompts, texts, markers = Store(), Store(), Store()
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    left_out: list[str] = []
    for number, run in enumerate(track(runs)) if limit else ():
        packed = len(columns["run"])
        try:
            for group, answer in _groups(run):
                if group % every:
                    continue
                prompt = answer.get("messages") or [{"role": "user", "content": answer.get("prompt", "")}]
                row: dict[str, Any] = {
                    "run": number,
                    "part": PARTS.index(answer["side"]),
                    "step": _is(int, answer.get("step")),
                    "mode": MODES.index(answer["env_mode"]),
                    "problem": _is(int, answer["problem_id"]),
                    "marker": markers.put(spelt(answer["env_mode"], answer["marker"])),
                    "prompt": prompts.put([[_is(str, m["role"]), _is(str, m["content"])] for m in prompt]),
                    "text": texts.put(_is(str, answer["text"])),
                    "flags": sum(bool(answer.get(flag)) << bit for bit, flag in enumerate(FLAGS)),
                    "reward": _short(answer["reward"]),
                    "advantage": _short(answer.get("advantage")),
                    "gate": _short(answer.get("gate")),
                }
                for name in COLUMNS:
                    columns[name].append(row[name])
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
            left_out.append(f"{run.name}: its rollouts ({type(e).__name__}: {e})")
            for column in columns.values():
                del column[packed:]
    return {
        "runs": [{"name": printable(r.name), "cell": printable(titles[r]), "seed": r.seed} for r in runs],
        "parts": PARTS,
        "modes": MODES,
        "flags": FLAGS,
        "hack": [MODE_SPECS[m].pattern for m in MODES],
        "should": [MODE_SPECS[m].should for m in MODES],
        "markers": markers.values,
        "prompts": prompts.values,
        "texts": texts.values,
        "columns": columns,
        "every": every,
        "total": total,
        "left_out": left_out,
    }


def _is(kind: type[T], value: Any) -> T | None:
    """A value of this type, or None. Raises TypeError for another."""
    if value is not None and type(value) is not kind:
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _lines(run: Run) -> int:
    count = 0
    for name in ("rollouts.jsonl", "final.jsonl"):
        if (path := run.path / name).is_file():
            with open(path, "rb") as f:
                count += sum(chunk.count(b"\n") for chunk in iter(lambda: f.read(1 << 20), b""))
    return count


def _short(value: float | None) -> float | None:
    return None if value is None else round(float(value + 0), 3)


def embedded(data: dict[str, Any]) -> str:
    """The object's JSON, gzipped, in base64: no answer's text can end the script element that holds it."""
    raw = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
