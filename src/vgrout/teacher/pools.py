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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.data import CachedGrade
from vgrout.environments import CODE_FLAWS
from vgrout.errors import Refused
from vgrout.files import file_sha256, from_json, read_text, regular, require_new, write_json

_NAME = re.compile(r"prompt_(\d{1,18})\.jsonl\.gz")
# unpacked bytes of a file and of a pool: a few MB of gzip can hold gigabytes
FILE_LIMIT, POOL_LIMIT = 2**26, 2**30


@dataclass(frozen=True, slots=True)
class Demo:
    """One cached rollout."""

    completion: str | None
    completion_ids: tuple[int, ...]  # of the pool's tokenizer; what follows its EOS is padding
    finished: bool  # False: cut off, so no EOS may be added
    logp: tuple[float, ...] | None  # nats per token, the teacher's own, where the pool has them
    mode: str | None  # of its labels, where the record names it
    prompt: str | None  # as it was rendered
    prompt_ids: tuple[int, ...] | None
    grade: CachedGrade


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool as loaded and checked; its tokens may be another tokenizer's."""

    folder: Path
    demos: dict[int, tuple[Demo, ...]]
    partition: dict[int, str]
    # problem id → the name that its prompt announced, unless it was the mode's default
    markers: dict[int, str]
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


# ── reading


def load_pool(
    folder: Path, flaws: Sequence[str] = CODE_FLAWS, flag: str = "--teacher-pool-dir"
) -> Pool:
    """Read and check a pool. flaws: those that its records may name.

    Raises:
        Refused: with file and line: corrupt gzip, bad schema, unknown flaw, empty pool, a problem outside the
            partition, a file that is not the one pool.json recorded.
    """
    if not folder.is_dir():
        raise Refused(
            f"{flag} {folder}: no such folder; `vgrout substrate` or `vgrout teacher` makes a pool, none: goes without"
        )
    card, divided = folder / "pool.json", folder / "partition.json"
    meta: dict[str, Any] = {
        "tokenizer_sha256": None,
        "grader": "unknown",
        "sha256": {},
        "markers": {},
    } | _object(card)
    partition, markers = _by_id(divided, _object(divided), flaws), _by_id(card, meta["markers"])
    recorded: dict[str, str] = dict(meta["sha256"])
    demos: dict[int, tuple[Demo, ...]] = {}
    room = POOL_LIMIT
    for path, name in sorted(
        (p, found[1]) for p in folder.iterdir() if (found := _NAME.fullmatch(p.name))
    ):
        text, digest = _unpacked(path)
        number, room, lines = int(name), room - len(text), list(io.StringIO(text, newline="\n"))
        faults = {
            f"problem {number} has a second file": number in demos,
            f"problem {number} is not in partition.json": bool(partition)
            and number not in partition,
            "not the file that pool.json recorded (sha256); make the pool again": (
                bool(meta["sha256"]) and recorded.pop(path.name, None) != digest
            ),
            f"with it the pool is more than {POOL_LIMIT >> 30} GiB unpacked; split it": room < 0,
            "no rollouts in it; delete the file": not lines,
        }
        if any(faults.values()):
            raise Refused(f"{path}: {next(fault for fault, there in faults.items() if there)}")
        demos[number] = tuple(
            _demo(line, f"{path}, line {n}", number, partition.get(number), flaws, meta["grader"])
            for n, line in enumerate(lines, 1)
        )
    if recorded or not demos:
        lost = (
            f"{folder / min(recorded)}: recorded in pool.json, not there; make the pool again"
            if recorded
            else ""
        )
        raise Refused(lost or f"{flag} {folder}: no prompt_NNNN.jsonl.gz with rollouts in it")
    if not card.exists():
        logger.warning(
            f"{folder} has no pool.json: its labels come from an unknown grader, its tokens from an unknown tokenizer"
        )
    return Pool(folder, demos, partition, markers, meta["tokenizer_sha256"], meta["grader"])


def _object(file: Path) -> dict[str, Any]:
    """A JSON object, whose keys have the types of pool.json's; {} where there is no such file."""
    data = from_json(read_text(file), str(file)) if file.exists() else {}
    types = {"tokenizer_sha256": str, "grader": str, "sha256": dict, "markers": dict}
    wrong = "" if isinstance(data, dict) else "should be a JSON object"
    for key in types.keys() & data if not wrong else ():
        if not isinstance(data[key], types[key]):
            wrong = f"{key!r} should be {'text' if types[key] is str else 'an object'}"
    if wrong:
        raise Refused(f"{file}: {wrong}")
    return data


def _by_id(file: Path, words: Mapping[str, Any], legal: Sequence[str] = ()) -> dict[int, Any]:
    """Problem id → the file's word for it."""
    for key, word in words.items():
        named = re.fullmatch(r"\d{1,18}", key)
        if not named or not isinstance(word, str) or (legal and word not in legal):
            should = f"problem {key} has {word!r}; should be {'a mode' if legal else 'text'}"
            raise Refused(f"{file}: {should if named else f'{key[:40]!r} is no problem id'}")
    return {int(key): word for key, word in words.items()}


def _unpacked(path: Path) -> tuple[str, str]:
    """A file's text, and the sha256 of its bytes."""
    try:
        with open(path, "rb", opener=regular) as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) as packed:
                data = packed.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise EOFError(
                f"more than {FILE_LIMIT >> 20} MiB unpacked; no problem has so many rollouts"
            )
        return data.decode(), digest
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise Refused(f"{path}: cannot be read ({e})") from None


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold."""
    return type(value) in (int, float) and abs(value) <= 1e38


def _is_text(value: Any) -> bool:
    """Whether it is text without half a character (a lone surrogate)."""
    return isinstance(value, str) and not re.search(r"[\ud800-\udfff]", value)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_SCHEMA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "completion_ids": (lambda value: _is_tokens(value) and bool(value), "token ids, at least one"),
    "reward": (_is_number, "a number"),
    "hacked": _SWITCH,
    "gt_pass": _SWITCH,
    "fmt_ok": _SWITCH,
    "completion": (_is_text, "text"),
    "prompt": (_is_text, "text"),
    "prompt_ids": (_is_tokens, "token ids"),
    "plen": (lambda value: type(value) is int and value >= 0, "a number of tokens"),
    "finished": _SWITCH,
    "logp": (lambda value: isinstance(value, list) and all(map(_is_number, value)), "numbers"),
}
_NEEDED = ("completion_ids", "reward", "hacked", "gt_pass", "fmt_ok")


def _faults(record: Any, number: int, mode: str | None, flaws: Sequence[str]) -> Iterator[str]:
    """What is wrong with a line, in this order: a check presumes those before it."""
    if not isinstance(record, dict):
        yield "not a JSON object"
    for key, (is_legal, what) in _SCHEMA.items():
        if (record.get(key) is not None or key in _NEEDED) and not is_legal(record.get(key)):
            yield f"key {key!r} should be {what}"
    if record.get("env_mode") not in (None, *flaws):
        yield f"key 'env_mode' should be one of {', '.join(flaws)}"
    if record.get("problem_id") not in (None, number):
        yield f"a rollout of problem {record['problem_id']} in a file named for problem {number}"
    if mode is not None and record.get("env_mode") not in (None, mode):
        yield f"env_mode {record['env_mode']}, but partition.json says {mode}"
    if record.get("logp") is not None and len(record["logp"]) != len(record["completion_ids"]):
        yield "'logp' should hold one number per completion token"


def _demo(
    line: str, where: str, number: int, mode: str | None, flaws: Sequence[str], grader: str
) -> Demo:
    record = from_json(line, where)
    if fault := next(_faults(record, number, mode, flaws), ""):
        raise Refused(f"{where}: {fault}")
    prompt_ids, logp = record.get("prompt_ids"), record.get("logp")
    return Demo(
        completion=record.get("completion"),
        completion_ids=tuple(record["completion_ids"]),
        finished=record.get("finished", True),
        logp=None if logp is None else tuple(map(float, logp)),
        mode=record.get("env_mode"),
        prompt=record.get("prompt"),
        # older pools hold prompt and completion in one list
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids[: record.get("plen")]),
        grade=CachedGrade(
            reward=float(record["reward"]),
            passed=record["hacked"] or record["gt_pass"],
            hacked=record["hacked"],
            gt_pass=record["gt_pass"],
            format_ok=record["fmt_ok"],
            grader=grader,
        ),
    )


# ── writing


def write_pool(
    folder: Path,
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]],
    partition: Mapping[int, str] | None,
    meta: Mapping[str, Any],
    report: Mapping[str, Any] | None = None,
) -> None:
    """Write records by problem id, the partition, and pool.json with counts and hashes; `folder` appears when complete.

    report: content of report.json beside them.

    Raises:
        Refused: the folder exists.
    """
    require_new(folder)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    fresh.mkdir(parents=True)
    try:
        files: dict[str, str] = {}
        for problem_id, records in rollouts.items():
            path = fresh / f"prompt_{problem_id:04d}.jsonl.gz"
            text = "".join(
                json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records
            )
            # no name and no time in the header: the same rollouts are the same bytes
            with (
                open(path, "wb") as raw,
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as f,
            ):
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
