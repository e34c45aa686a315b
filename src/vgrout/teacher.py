"""Teacher pools: cached rollouts of a model that already exploits, mixed into the groups.

A folder of `prompt_NNNN.jsonl.gz` (NNNN = problem id), one rollout a line; optional `partition.json` (id → mode) and
`pool.json` (who made it, with which tokenizer and grader). Labels are used as cached and stay typed as such.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.nouns import MODES, CachedGrade, Mode, Problem, Rollout
from vgrout.rng import py_stream

_NAME = re.compile(r"prompt_(\d+)\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class Demo:
    """One cached rollout."""

    problem_id: int
    completion: str | None
    completion_ids: tuple[int, ...]
    logp: tuple[float, ...] | None  # the teacher's own log-prob of each token, where the pool has them
    grade: CachedGrade


@dataclass(frozen=True, slots=True)
class Pool:
    """A loaded folder, checked; tokens not yet trusted."""

    folder: Path
    demos: dict[int, tuple[Demo, ...]]
    partition: dict[int, Mode]
    tokenizer_sha256: str | None

    @property
    def ids(self) -> set[int]:
        return set(self.demos)

    @property
    def has_logp(self) -> bool:
        return all(d.logp is not None for rows in self.demos.values() for d in rows)


def _demo(record: Any, where: str, problem_id: int, grader: str) -> Demo:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object")
    for key, kind in (
        ("completion_ids", list),
        ("reward", (int, float)),
        ("hacked", bool),
        ("gt_pass", bool),
        ("fmt_ok", bool),
    ):
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{where}: key {key!r} is missing or not a {getattr(kind, '__name__', 'number')}")
    if (own := record.get("problem_id")) is not None and own != problem_id:
        raise ValueError(f"{where}: problem_id {own} in a file named for problem {problem_id}")
    if not all(isinstance(i, int) and i >= 0 for i in record["completion_ids"]) or not record["completion_ids"]:
        raise ValueError(f"{where}: 'completion_ids' should be token ids, at least one")
    logp = record.get("logp")
    if logp is not None and (not isinstance(logp, list) or len(logp) != len(record["completion_ids"])):
        raise ValueError(f"{where}: 'logp' should hold one number per completion token")
    return Demo(
        problem_id=problem_id,
        completion=record.get("completion"),
        completion_ids=tuple(record["completion_ids"]),
        logp=None if logp is None else tuple(float(x) for x in logp),
        grade=CachedGrade(
            reward=float(record["reward"]),
            hacked=record["hacked"],
            gt_pass=record["gt_pass"],
            format_ok=record["fmt_ok"],
            grader=grader,
        ),
    )


def load_pool(folder: Path) -> Pool:
    """Read and check a pool. Raises ValueError with file and line: corrupt gzip, bad schema, unknown mode, empty pool,
    a problem outside the partition."""
    if not folder.is_dir():
        raise ValueError(f"--teacher-pool-dir {folder}: no such folder")
    meta: dict[str, Any] = {}
    if (card := folder / "pool.json").is_file():
        meta = json.loads(card.read_text(encoding="utf-8"))
    else:
        logger.warning(
            f"{folder} has no pool.json: its labels come from an unknown grader, its tokens from an unknown tokenizer"
        )
    partition: dict[int, Mode] = {}
    if (file := folder / "partition.json").is_file():
        for key, mode in json.loads(file.read_text(encoding="utf-8")).items():
            if mode not in MODES:
                raise ValueError(f"{file}: problem {key} has unknown mode {mode!r}; one of {', '.join(MODES)}")
            partition[int(key)] = mode
    demos: dict[int, tuple[Demo, ...]] = {}
    for path in sorted(folder.iterdir()):
        if not (match := _NAME.fullmatch(path.name)):
            continue
        problem_id = int(match[1])
        if partition and problem_id not in partition:
            raise ValueError(f"{path}: problem {problem_id} is not in partition.json")
        rows: list[Demo] = []
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{path}, line {number}"
                    try:
                        record = json.loads(line)
                    except json.JSONDecodeError as e:
                        raise ValueError(f"{where}: not JSON ({e.msg})") from None
                    rows.append(_demo(record, where, problem_id, meta.get("grader", "unknown")))
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
            raise ValueError(f"{path}: cannot be read ({e})") from None
        if rows:
            demos[problem_id] = tuple(rows)
    if not demos:
        raise ValueError(f"--teacher-pool-dir {folder}: no prompt_NNNN.jsonl.gz with rollouts in it")
    return Pool(folder, demos, partition, meta.get("tokenizer_sha256"))


class Teacher:
    """Hands out demonstrations. With `pool=None`, or none wanted for a problem, it hands out nothing."""

    def __init__(
        self,
        pool: Pool | None,
        *,
        per_group: int,
        seed: int,
        off_step: int | None,
        modes: list[str],
        tokenizer_sha256: str,
        encode: Callable[[str], tuple[int, ...]],
        render: Callable[[Problem], tuple[int, ...]],
        max_new: int,
    ):
        """per_group: G_t. encode: completion text → token ids with EOS. render: a problem's prompt ids, always live.
        Cached ids count only for the tokenizer they were made with; else the completion text is re-tokenised."""
        self.pool, self.per_group, self.seed, self.off_step = pool, per_group, seed, off_step
        self.modes, self.render, self.max_new, self._encode = set(modes), render, max_new, encode
        self._ids: dict[tuple[int, int], tuple[int, ...]] = {}
        self._cached_ids_valid = pool is not None and pool.tokenizer_sha256 == tokenizer_sha256
        if pool is not None and per_group and not self._cached_ids_valid:
            if any(d.completion is None for rows in pool.demos.values() for d in rows):
                raise ValueError(
                    f"{pool.folder}: made with another tokenizer and without completion texts; cannot be used"
                )
            logger.warning(f"{pool.folder}: made with another tokenizer; completions are re-tokenised")

    def count(self, problem: Problem, step: int) -> int:
        """G_t for this problem at this step: 0 when off, held out, or not covered."""
        if self.pool is None or (self.off_step is not None and step >= self.off_step):
            return 0
        if self.modes and problem.mode not in self.modes:
            return 0
        return self.per_group if problem.id in self.pool.demos else 0

    def demos(self, problem: Problem, step: int) -> list[tuple[Rollout, CachedGrade]]:
        """G_t rollouts, drawn without replacement while there are enough; a function of (seed, step, problem)."""
        if not (n := self.count(problem, step)):
            return []
        assert self.pool is not None
        rows = self.pool.demos[problem.id]
        rng = py_stream(self.seed, "demos", step, problem.id)
        picks: list[int] = []
        while len(picks) < n:
            picks += rng.sample(range(len(rows)), min(n - len(picks), len(rows)))
        prompt_ids = self.render(problem)
        return [(self._rollout(problem, rows[i], i, prompt_ids), rows[i].grade) for i in picks]

    def _rollout(self, problem: Problem, demo: Demo, index: int, prompt_ids: tuple[int, ...]) -> Rollout:
        key = (problem.id, index)
        if key not in self._ids:
            ids = demo.completion_ids if self._cached_ids_valid else self._encode(demo.completion or "")
            self._ids[key] = ids[: self.max_new]
        return Rollout(
            problem=problem,
            source="teacher",
            deployed=False,
            prompt_ids=prompt_ids,
            completion_ids=self._ids[key],
            text=demo.completion or "",
            finished=True,
            logp_full=demo.logp[: self.max_new] if demo.logp and self._cached_ids_valid else None,
        )
