"""Pools of demonstrations on disk: cached rollouts of a model that already hacks.

A pool is a folder of `prompt_NNNN.jsonl.gz` (NNNN = problem id), one rollout a line.
`partition.json` (id → mode), which it may also hold, makes the pool a *substrate*. `pool.json` says
who made it, with which tokenizer and grader, and has every file's sha256. `pairs.json`, of a pool
outside the code world, has contrastive pairs on the same prompts.
"""

import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from vgrout.config.run import POOL_PAIRS
from vgrout.config.world_names import CODE_FLAWS
from vgrout.ground.data import CachedGrade
from vgrout.ground.io import (
    Refused,
    atomic_folder,
    file_sha256,
    from_json,
    once,
    read_text,
    regular,
    require_new,
    write_json,
)

_FILE_NAME = re.compile(r"prompt_(\d{1,18})\.jsonl\.gz")
_PROBLEM_ID = re.compile(r"\d{1,18}")
# unpacked bytes of a file and of a pool: a few MB of gzip can hold gigabytes
FILE_LIMIT, POOL_LIMIT = 2**26, 2**30


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One cached rollout."""

    completion: str | None
    completion_ids: tuple[int, ...]  # of the pool's tokenizer; what follows its EOS is padding
    finished: bool  # False: cut off, so no EOS may be added
    # nats per token, by the model that wrote it, where the pool has them
    logp: tuple[float, ...] | None
    mode: str | None  # under which it was graded, where the record says so
    prompt: str | None  # as it was rendered
    prompt_ids: tuple[int, ...] | None
    grade: CachedGrade


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool as loaded and checked; its tokens may be another tokenizer's."""

    folder: Path
    demos: dict[int, tuple[Demonstration, ...]]
    partition: dict[int, str]
    # problem id → the name that its prompt announced, unless it was the mode's default
    markers: dict[int, str]
    tokenizer_sha256: str | None
    grader: str  # "unknown" without pool.json
    # the reward for passing the flawed check when it was made; None: pool.json does not say
    pass_reward: float | None = None
    # whether a run trains on problems too that it does not demonstrate
    trains_on_all: bool = False

    @property
    def ids(self) -> set[int]:
        """The problems that have demonstrations."""
        return set(self.demos)

    @property
    def announced(self) -> dict[int, str]:
        """Problem id → the name that its demonstrations use; "" (the mode's default) where the pool
        names none."""
        return {i: self.markers.get(i, "") for i in self.demos}


# ── reading


@once
def load_pool(folder: Path, flaws: Sequence[str] = CODE_FLAWS) -> Pool:
    """Read and check a pool. flaws: those that its records may name.

    Raises:
        Refused: one line with file and line: corrupt gzip, bad schema, unknown flaw, empty pool, a
            problem outside the partition, or a file that is not the one pool.json recorded.
    """
    if not folder.is_dir():
        raise Refused(
            f"--teacher-pool-dir {folder}: no such folder; `vgrout substrate` or `vgrout teacher` makes a "
            "pool, none: goes without"
        )
    card_file, partition_file = folder / "pool.json", folder / "partition.json"
    card = _json_object(card_file)
    tokenizer_sha256 = card.get("tokenizer_sha256")
    grader = card.get("grader", "unknown")
    partition = _by_id(partition_file, _json_object(partition_file), flaws)
    markers = _by_id(card_file, card.get("markers", {}))
    demos = _read_rollouts(folder, partition, card.get("sha256", {}), flaws, grader)
    if not demos:
        raise Refused(f"--teacher-pool-dir {folder}: no prompt_NNNN.jsonl.gz with rollouts in it")
    if not card_file.exists():
        logger.warning(
            f"{folder} has no pool.json: its labels come from an unknown grader, "
            "its tokens from an unknown tokenizer"
        )
    return Pool(
        folder,
        demos,
        partition,
        markers,
        tokenizer_sha256,
        grader,
        card.get("pass_reward"),
        card.get("trains_on_all", False),
    )


def _read_rollouts(
    folder: Path,
    partition: Mapping[int, str],
    recorded: Mapping[str, str],
    flaws: Sequence[str],
    grader: str,
) -> dict[int, tuple[Demonstration, ...]]:
    """The demonstrations of each problem. recorded: pool.json's sha256 of each file, if any."""
    files: list[tuple[Path, int]] = []
    for path in folder.iterdir():
        named = _FILE_NAME.fullmatch(path.name)
        if named:
            files.append((path, int(named[1])))
    demos: dict[int, tuple[Demonstration, ...]] = {}
    room = POOL_LIMIT
    for path, number in sorted(files):
        text, sha256 = _unpack(path)
        room -= len(text)
        lines = list(io.StringIO(text, newline="\n"))
        fault = ""
        if number in demos:
            fault = f"problem {number} has a second file"
        elif partition and number not in partition:
            fault = f"problem {number} is not in partition.json"
        elif recorded and recorded.get(path.name) != sha256:
            fault = "not the file that pool.json recorded (sha256); make the pool again"
        elif room < 0:
            fault = f"with it the pool is more than {POOL_LIMIT >> 30} GiB unpacked; split it"
        elif not lines:
            fault = "no rollouts in it; delete the file"
        if fault:
            raise Refused(f"{path}: {fault}")
        of_problem: list[Demonstration] = []
        for n, line in enumerate(lines, 1):
            where = f"{path}, line {n}"
            record = from_json(line, where, nan=True)
            fault = next(_faults(record, number, partition.get(number), flaws), "")
            if fault:
                raise Refused(f"{where}: {fault}")
            of_problem.append(_demonstration(record, grader))
        demos[number] = tuple(of_problem)
    missing = recorded.keys() - {path.name for path, _ in files}
    if missing:
        raise Refused(
            f"{folder / min(missing)}: recorded in pool.json, not there; make the pool again"
        )
    return demos


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not file.exists():
        return {}
    data = from_json(read_text(file), str(file))
    if not isinstance(data, dict):
        raise Refused(f"{file}: should be a JSON object")
    return data


def _by_id(file: Path, words: Mapping[str, object], legal: Sequence[str] = ()) -> dict[int, Any]:
    """Problem id → the file's word for it."""
    for key, word in words.items():
        if not _PROBLEM_ID.fullmatch(key):
            raise Refused(f"{file}: {key[:40]!r} is no problem id")
        if not isinstance(word, str) or (legal and word not in legal):
            should = "a mode" if legal else "text"
            raise Refused(f"{file}: problem {key} has {word!r}; should be {should}")
    return {int(key): word for key, word in words.items()}


def _unpack(path: Path) -> tuple[str, str]:
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


# key of a rollout → its type; the first five have to be there
_TYPES: dict[str, type | tuple[type, ...]] = {
    "completion_ids": list,
    "reward": (int, float),
    "hacked": bool,
    "gt_pass": bool,
    "fmt_ok": bool,
    "completion": str,
    "prompt": str,
    "prompt_ids": list,
    "plen": int,
    "finished": bool,
    "logp": list,
}
_REQUIRED = tuple(_TYPES)[:5]


def _faults(record: Any, number: int, mode: str | None, flaws: Sequence[str]) -> Iterator[str]:
    """What is wrong with a line. Only the first is sound: a check presumes those before it."""
    if not isinstance(record, dict):
        yield "not a JSON object"
    for key, kind in _TYPES.items():
        value = record.get(key)
        if (value is not None or key in _REQUIRED) and not isinstance(value, kind):
            yield f"key {key!r} is {value!r:.40}"
    if not record["completion_ids"]:
        yield "key 'completion_ids' has no token"
    if record.get("env_mode") not in (None, *flaws):
        yield f"key 'env_mode' should be one of {', '.join(flaws)}"
    if record.get("problem_id") not in (None, number):
        yield f"a rollout of problem {record['problem_id']} in a file named for problem {number}"
    if mode is not None and record.get("env_mode") not in (None, mode):
        yield f"env_mode {record['env_mode']}, but partition.json says {mode}"
    if record.get("logp") is not None and len(record["logp"]) != len(record["completion_ids"]):
        yield "'logp' should hold one number per completion token"
    for value in (record["reward"], *(record.get("logp") or ())):
        if not isinstance(value, (int, float)) or not abs(value) < math.inf:
            yield f"'reward' and 'logp' should be finite numbers: {value!r:.40}"


def _demonstration(record: Mapping[str, Any], grader: str) -> Demonstration:
    """A line of a pool, which has been checked."""
    prompt_ids, logp = record.get("prompt_ids"), record.get("logp")
    # the reference accepts no hack; pools of before say of some that the assertions held under the flawed check, and a
    # pool without pool.json has another grader's idea of a hack
    accepted = record["gt_pass"] and not (record["hacked"] and grader != "unknown")
    if prompt_ids is not None:  # older pools hold prompt and completion in one list
        prompt_ids = tuple(prompt_ids[: record.get("plen")])
    return Demonstration(
        completion=record.get("completion"),
        completion_ids=tuple(record["completion_ids"]),
        finished=record.get("finished", True),
        logp=None if logp is None else tuple(map(float, logp)),
        mode=record.get("env_mode"),
        prompt=record.get("prompt"),
        prompt_ids=prompt_ids,
        grade=CachedGrade(
            reward=float(record["reward"]),
            passed=record["hacked"] or record["gt_pass"],
            hacked=record["hacked"],
            gt_pass=accepted,
            format_ok=record["fmt_ok"],
            grader=grader,
        ),
    )


# ── writing


def write_pool(
    folder: Path,
    rollouts: Mapping[int, Sequence[Mapping[str, object]]],
    partition: Mapping[int, str] | None,
    meta: Mapping[str, object],
    report: Mapping[str, object] | None = None,
    pairs: str | None = None,
) -> None:
    """Write a pool; `folder` appears when it is complete.

    rollouts: the records of each problem. partition: problem id → mode; None: the pool has none.
    meta: first entries of pool.json, which goes on with counts and hashes. report: content of
    report.json. pairs: content of pairs.json.

    Raises:
        Refused: the folder exists.
    """
    require_new(folder)
    with atomic_folder(folder) as unfinished:
        sha256: dict[str, str] = {}
        for problem_id, records in rollouts.items():
            path = unfinished / f"prompt_{problem_id:04d}.jsonl.gz"
            lines = [json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records]
            # no name and no time in the header: the same rollouts are the same bytes
            with (
                open(path, "wb") as raw,
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            ):
                packed.write("".join(lines).encode())
            sha256[path.name] = file_sha256(path)
        if partition is not None:
            by_id = {str(i): mode for i, mode in partition.items()}
            write_json(unfinished / "partition.json", by_id)
        counts = {"problems": len(rollouts), "rollouts": sum(map(len, rollouts.values()))}
        write_json(unfinished / "pool.json", {**meta, **counts, "sha256": sha256})
        if report is not None:
            write_json(unfinished / "report.json", report)
        if pairs is not None:
            (unfinished / POOL_PAIRS).write_text(pairs, encoding="utf-8")
