"""Teacher pools on disk: cached rollouts of a model that already hacks.

A folder of `prompt_NNNN.jsonl.gz` (NNNN = problem id), one rollout a line; optionally `partition.json` (id → mode),
which makes the pool a *substrate*; and `pool.json`: who made it, with which tokenizer and grader, every file's sha256.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.files import file_sha256, from_json, read_text, regular, write_json
from vgrout.grading.grade import Grader
from vgrout.types import MODES, CachedGrade, Grade, Mode, Problem, Rate, Ungraded

_NAME = re.compile(r"prompt_(\d+)\.jsonl\.gz")
FILE_LIMIT, POOL_LIMIT = 2**26, 2**30  # unpacked bytes of a file and of a pool: a few MB of gzip can hold gigabytes


@dataclass(frozen=True, slots=True)
class Demo:
    """One cached rollout."""

    problem_id: int
    completion: str | None
    completion_ids: tuple[int, ...]  # of the pool's tokenizer; what follows its EOS is padding
    finished: bool  # False: cut off, so no EOS may be added
    logp: tuple[float, ...] | None  # nats per token, the teacher's own, where the pool has them
    mode: Mode | None  # of its labels, where the record names it
    prompt: str | None  # as it was rendered
    prompt_ids: tuple[int, ...] | None
    grade: CachedGrade


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool as loaded and checked; its tokens may be another tokenizer's."""

    folder: Path
    demos: dict[int, tuple[Demo, ...]]
    partition: dict[int, Mode]
    markers: dict[int, str]  # problem id → the name that its prompt announced, unless it was the mode's default
    tokenizer_sha256: str | None
    grader: str  # "unknown" without pool.json

    @property
    def ids(self) -> set[int]:
        """The problems that have demonstrations."""
        return set(self.demos)

    @property
    def announced(self) -> dict[int, str]:
        """Problem id → the name that its demonstrations use; "" (the mode's default) where the pool names none."""
        return {i: self.markers.get(i, "") for i in self.demos}

    @property
    def has_logp(self) -> bool:
        """Whether every rollout has the teacher's own log-probs."""
        return all(d.logp is not None for rows in self.demos.values() for d in rows)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_pool(folder: Path, flag: str = "--teacher-pool-dir") -> Pool:
    """Read and check a pool. Raises ValueError with file and line: corrupt gzip, bad schema, unknown mode, empty pool,
    a problem outside the partition, a file that is not the one pool.json recorded."""
    if not folder.is_dir():
        raise ValueError(
            f"{flag} {folder}: no such folder; `vgrout substrate` or `vgrout teacher` makes a pool, none: goes without"
        )
    meta: dict[str, Any] = {}
    card, divided = folder / "pool.json", folder / "partition.json"
    if card.exists():
        meta = _card(card)
    partition: dict[int, Mode] = {}
    if divided.exists():
        for key, mode in _mapping(divided).items():
            if not isinstance(mode, str) or mode not in MODES:
                raise ValueError(f"{divided}: problem {key} has unknown mode {mode!r}; one of {', '.join(MODES)}")
            partition[_id(key, divided)] = mode
    recorded: dict[str, str] = dict(meta.get("sha256", {}))
    demos: dict[int, tuple[Demo, ...]] = {}
    total = 0
    for path in sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)):
        problem_id = _id(path.name[len("prompt_") : -len(".jsonl.gz")], path)
        if problem_id in demos:
            raise ValueError(f"{path}: a second file for problem {problem_id}; leave one of them out")
        if partition and problem_id not in partition:
            raise ValueError(f"{path}: problem {problem_id} is not in partition.json")
        text, digest = _unpacked(path)
        if recorded and recorded.pop(path.name, None) != digest:
            raise ValueError(f"{path}: not the file that pool.json recorded (sha256); make the pool again")
        total += len(text)
        if total > POOL_LIMIT:
            raise ValueError(f"{folder}: more than {POOL_LIMIT >> 30} GiB unpacked; split the pool")
        demos[problem_id] = _read(path, text, problem_id, partition.get(problem_id), meta.get("grader", "unknown"))
    if recorded:
        raise ValueError(f"{folder / min(recorded)}: recorded in pool.json, not there; make the pool again")
    if not demos:
        raise ValueError(f"{flag} {folder}: no prompt_NNNN.jsonl.gz with rollouts in it")
    if not card.exists():
        logger.warning(
            f"{folder} has no pool.json: its labels come from an unknown grader, its tokens from an unknown tokenizer"
        )
    if odd := [key for key, name in meta.get("markers", {}).items() if not isinstance(name, str)]:
        raise ValueError(f"{card}: the marker of problem {odd[0]} should be text")
    markers = {_id(key, card): name for key, name in meta.get("markers", {}).items()}
    return Pool(folder, demos, partition, markers, meta.get("tokenizer_sha256"), meta.get("grader", "unknown"))


def _mapping(file: Path) -> dict[str, Any]:
    data = from_json(read_text(file), str(file))
    if not isinstance(data, dict):
        raise ValueError(f"{file}: should be a JSON object")
    return data


def _card(file: Path) -> dict[str, Any]:
    meta = _mapping(file)
    for key, kind in (("tokenizer_sha256", str), ("grader", str), ("sha256", dict), ("markers", dict)):
        if key in meta and not isinstance(meta[key], kind):
            raise ValueError(f"{file}: {key!r} should be {'text' if kind is str else 'an object'}")
    return meta


def _id(key: str, file: Path) -> int:
    if not re.fullmatch(r"\d{1,18}", key):
        raise ValueError(f"{file}: {key[:40]!r} is no problem id")
    return int(key)


def _unpacked(path: Path) -> tuple[str, str]:
    """A file's text, and the sha256 of its bytes."""
    try:
        with open(path, "rb", opener=regular) as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) as packed:
                data = packed.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise ValueError(f"{path}: more than {FILE_LIMIT >> 20} MiB unpacked; no problem has so many rollouts")
        return data.decode(), digest
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: cannot be read ({e})") from None


def _read(path: Path, text: str, problem_id: int, mode: Mode | None, grader: str) -> tuple[Demo, ...]:
    rows: list[Demo] = []
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        where = f"{path}, line {number}"
        rows.append(_demo(from_json(line, where, is_line=True), where, problem_id, mode, grader))
    if not rows:
        raise ValueError(f"{path}: no rollouts in it; delete the file")
    return tuple(rows)


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold."""
    return type(value) in (int, float) and abs(value) <= 1e38


_NEEDED = (
    ("completion_ids", list, "list"),
    ("reward", (int, float), "number"),
    ("hacked", bool, "bool"),
    ("gt_pass", bool, "bool"),
    ("fmt_ok", bool, "bool"),
)


def _demo(record: Any, where: str, problem_id: int, mode: Mode | None, grader: str) -> Demo:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object")
    for key, kind, name in _NEEDED:
        value = record.get(key)
        if not _is_number(value) if name == "number" else not isinstance(value, kind):
            raise ValueError(f"{where}: key {key!r} is missing or not a {name}")
    for key, kind in (("completion", str), ("prompt", str), ("prompt_ids", list), ("plen", int), ("finished", bool)):
        if (value := record.get(key)) is not None and type(value) is not kind:
            raise ValueError(f"{where}: key {key!r} is not a {kind.__name__}")
        if isinstance(value, str) and re.search(r"[\ud800-\udfff]", value):
            raise ValueError(f"{where}: key {key!r} holds half a character (a lone surrogate)")
    if (own := record.get("problem_id")) is not None and own != problem_id:
        raise ValueError(f"{where}: problem_id {own} in a file named for problem {problem_id}")
    own_mode: Mode | None = record.get("env_mode")
    if own_mode is not None and (not isinstance(own_mode, str) or own_mode not in MODES):
        raise ValueError(f"{where}: unknown env_mode {own_mode!r}; one of {', '.join(MODES)}")
    if mode is not None and own_mode is not None and own_mode != mode:
        raise ValueError(f"{where}: env_mode {own_mode}, but partition.json says {mode}")
    if (record.get("plen") or 0) < 0:
        raise ValueError(f"{where}: 'plen' is negative")
    ids, prompt_ids, logp = record["completion_ids"], record.get("prompt_ids"), record.get("logp")
    for key, tokens in (("completion_ids", ids), ("prompt_ids", prompt_ids or ())):
        if not all(type(i) is int and 0 <= i < 2**31 for i in tokens):
            raise ValueError(f"{where}: {key!r} should be token ids")
    if not ids:
        raise ValueError(f"{where}: 'completion_ids' should be token ids, at least one")
    if logp is not None and (not isinstance(logp, list) or len(logp) != len(ids) or not all(map(_is_number, logp))):
        raise ValueError(f"{where}: 'logp' should hold one number per completion token")
    return Demo(
        problem_id=problem_id,
        completion=record.get("completion"),
        completion_ids=tuple(ids),
        finished=record.get("finished", True),
        logp=None if logp is None else tuple(map(float, logp)),
        mode=own_mode,
        prompt=record.get("prompt"),
        # older pools hold prompt and completion in one list
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids[: record.get("plen")]),
        grade=CachedGrade(
            reward=float(record["reward"]),
            hacked=record["hacked"],
            gt_pass=record["gt_pass"],
            format_ok=record["fmt_ok"],
            grader=grader,
        ),
    )


# ── today's grader ─────────────────────────────────────────────────────────────────────────────────────────────────

LABELS = ("hacked", "gt_pass", "fmt_ok", "reward")


@dataclass(frozen=True, slots=True)
class Regraded:
    """A pool under today's grader, and how its labels differ from the cached ones."""

    pool: Pool  # with today's labels, without rollouts that could not be graded
    differ: dict[str, Rate]  # label → rollouts for which it has changed, of all graded
    changes: tuple[str, ...]  # a line for each rollout with a label that differs
    ungraded: int

    def lines(self) -> list[str]:
        """The lines for the log."""
        n = self.differ["hacked"].n
        counts = ", ".join(f"{name} {rate.k}/{n}" for name, rate in self.differ.items())
        out = [f"pool graded again by {self.pool.grader}: differs from the cached labels in {counts}"]
        if self.ungraded:
            out.append(f"{self.ungraded} rollouts could not be graded and are left out")
        return [*out, *(f"  {line}" for line in self.changes[:8])]


def regraded(
    pool: Pool,
    problems: Mapping[int, Problem],
    grader: Grader,
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Regraded:
    """Grade every rollout of these problems again; the others keep no label and leave the pool.

    Raises:
        ValueError: a rollout without its text, or nothing left.
    """
    version = grader.protections.version
    jobs: list[tuple[Demo, Future[Grade | Ungraded]]] = []
    for problem_id, problem in problems.items():
        for demo in pool.demos.get(problem_id, ()):
            if demo.completion is None:
                raise ValueError(f"--regrade-pool: {pool.folder}: problem {problem_id} has no completion text")
            jobs.append((demo, grader.submit(problem, demo.completion)))
    kept: dict[int, list[Demo]] = {}
    differ = dict.fromkeys(LABELS, 0)
    changes: list[str] = []
    ungraded = 0
    for demo, future in track(jobs):
        now = future.result()
        if isinstance(now, Ungraded):
            ungraded += 1
            continue
        then = demo.grade
        new = CachedGrade(now.reward, now.hacked, now.gt_pass, now.format_ok, version)
        changed = {
            "hacked": (then.hacked, new.hacked),
            "gt_pass": (then.gt_pass, new.gt_pass),
            "fmt_ok": (then.format_ok, new.format_ok),
            "reward": (then.reward, new.reward),
        }
        for name, (a, b) in changed.items():
            differ[name] += a != b
        if differs := [f"{name} {a} -> {b}" for name, (a, b) in changed.items() if a != b]:
            place = len(kept.get(demo.problem_id, ())) + 1
            changes.append(
                f"problem {demo.problem_id}, rollout {place} ({now.mode}, {now.exit_status}): {', '.join(differs)}"
            )
        kept.setdefault(demo.problem_id, []).append(replace(demo, grade=new, mode=now.mode))
    if not kept:
        raise ValueError(f"--regrade-pool: {pool.folder}: not one rollout of these problems could be graded")
    n = len(jobs) - ungraded
    return Regraded(
        pool=replace(pool, demos={i: tuple(rows) for i, rows in kept.items()}, grader=version),
        differ={name: Rate(k, n) for name, k in differ.items()},
        changes=tuple(changes),
        ungraded=ungraded,
    )


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_pool(
    folder: Path,
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]],
    partition: Mapping[int, Mode] | None,
    meta: Mapping[str, Any],
    report: Mapping[str, Any] | None = None,
) -> None:
    """Write records by problem id, the partition, and pool.json with counts and hashes; `folder` appears when complete.

    report: content of report.json beside them.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"--out {folder}: exists; choose another folder or delete it")
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    fresh.mkdir(parents=True)
    try:
        files: dict[str, str] = {}
        for problem_id, records in rollouts.items():
            path = fresh / f"prompt_{problem_id:04d}.jsonl.gz"
            text = "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records)
            # no name and no time in the header: the same rollouts are the same bytes
            with open(path, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as f:
                f.write(text.encode())
            files[path.name] = file_sha256(path)
        if partition is not None:
            write_json(fresh / "partition.json", {str(i): mode for i, mode in partition.items()})
        counts = {"problems": len(rollouts), "rollouts": sum(map(len, rollouts.values()))}
        write_json(fresh / "pool.json", {**meta, **counts, "sha256": files})
        if report is not None:
            write_json(fresh / "report.json", report)
        for path in fresh.iterdir():  # a folder under its final name has its contents on disk
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
