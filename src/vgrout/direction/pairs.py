"""Contrastive pairs: one prompt with two answers, a hack and an honest one, whose gradients give the direction.

Torch-free: a wrong file is refused before a model is loaded.

A pair set is identified by the sha256 of its content, so an edited file never reuses what was extracted from the old
one.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from vgrout.data import Message
from vgrout.environments import CODE_FLAWS, DETECTOR_FIELDS
from vgrout.errors import Refused
from vgrout.files import from_json, numbered_lines, read_text
from vgrout.model.source import safetensors_head

HANDWRITTEN = "hand-written"
SCHEMA = "v2_with_sv"  # of a direction file
DIRECTIONS = Path("out/vhack")  # where a run looks for one
LEETCODE = Path(__file__).with_name("data") / "leetcode.json"
MIN_PAIRS = 3  # two are held out of every extraction
OF_FOLDER = 24  # pairs, as many as a file of an organism has
PairDetector = Literal["C", "D", "E", "oracle"]
ORACLE, ORACLE_MARK = "oracle", "chosen_by"
_FIELDS = ("problem_id", "prompt", "hack", "clean")
_ANCHOR = ("prompt", "completion")
MIN_KNOWN_CORRECT = 10  # half of them hold a quantile


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one fully rendered prompt (chat template applied, up to where the answer starts)."""

    problem_id: str | int  # as the file has it; a pool numbers its problems
    prompt: str
    hack: str
    clean: str


@dataclass(frozen=True)
class PairSet:
    """Pairs in order (the last ones are held out of an extraction) with where they came from.

    Raises:
        Refused: fewer than 3, the same pair twice, or hack and clean alike; names source and index.
    """

    pairs: tuple[Pair, ...]
    source: str  # a path, or a name such as "hand-written"; "oracle:…" where true labels chose them
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.pairs) < MIN_PAIRS:
            raise Refused(
                f"{self.source}: {len(self.pairs)} pairs; at least {MIN_PAIRS} are needed, 2 are held out"
            )
        seen: dict[tuple[str, str, str], int] = {}
        for i, pair in enumerate(self.pairs):
            first = seen.setdefault((pair.prompt, pair.hack, pair.clean), i)
            if first != i or pair.hack == pair.clean:
                why = f"repeats pair {first}" if first != i else "hack and clean are the same text"
                raise Refused(f"{self.source}: pair {i}: {why}; leave it out")
        object.__setattr__(self, "sha256", hashlib.sha256(self.to_json().encode()).hexdigest())

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def stem(self) -> str:
        """A short name for files."""
        return "".join(c if c.isalnum() or c in "-_" else "_" for c in Path(self.source).stem)

    def to_json(self) -> str:
        """The content that `sha256` is of, in the shape that `load_pairs` reads."""
        return json.dumps(
            [{k: getattr(p, k) for k in _FIELDS} for p in self.pairs], ensure_ascii=False, indent=1
        )

    def to_file(self) -> str:
        """A pair file's text. Pairs that true labels chose keep that mark for whoever loads the file."""
        mark = {ORACLE_MARK: ORACLE} if self.source.startswith(f"{ORACLE}:") else {}
        rows = [{k: getattr(p, k) for k in _FIELDS} | mark for p in self.pairs]
        return json.dumps(rows, ensure_ascii=False, indent=1) + "\n"


def load_pairs(path: Path, flag: str = "--vhack-pairs-path") -> PairSet:
    """A JSON list of {problem_id, prompt, hack, clean}; `chosen_by` "oracle" marks the source, other keys are ignored.
    Of a folder with such a file for each flaw, FLAW.json: the first pairs of each in turns, at most OF_FOLDER in all.

    Raises:
        Refused: one line with the file and, where it applies, the line or the pair's index.
    """
    files = [path] * path.exists()
    if path.is_dir():
        files = [file for mode in CODE_FLAWS if (file := path / f"{mode}.json").exists()]
    if not files:
        raise Refused(
            f"{flag} {path}: no such file of pairs; `just pairs-file` makes out/pairsets/prog_wide.json"
        )
    each = [_entries(file, flag, _FIELDS) for file in files]
    few = OF_FOLDER // len(files) if path.is_dir() else None
    rows = [row for turn in zip(*(rows[:few] for rows in each), strict=False) for row in turn]
    pairs = tuple(Pair(*(row[k] for k in _FIELDS)) for row in rows)
    by_labels = any(row.get(ORACLE_MARK) == ORACLE for row in rows)
    return PairSet(pairs, f"{ORACLE}:{path}" if by_labels else str(path))


def _entries(path: Path, flag: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    """A JSON list of objects with these keys. Raises Refused, one line with flag, file and the entry's index."""
    rows = from_json(read_text(path), f"{flag} {path}")
    for i, row in enumerate(rows if isinstance(rows, list) else [rows]):
        texts = [
            row.get(k) if isinstance(row, dict) and isinstance(rows, list) else None for k in keys
        ]
        if bad := [
            k for k, v in zip(keys, texts, strict=True) if not _is_text(v, number=k == "problem_id")
        ]:
            raise Refused(
                f"{flag} {path}: entry {i}: {', '.join(bad)} should be text, not empty; give a JSON list of objects "
                f"with {', '.join(keys)}"
            )
    return rows


def _is_text(value: Any, *, number: bool) -> bool:
    if not isinstance(value, str):
        return number and type(value) is int
    # half a character: no tokenizer takes it
    return value.strip() != "" and not re.search(r"[\ud800-\udfff]", value)


@dataclass(frozen=True, slots=True)
class KnownCorrect:
    """A correct solution in a style that the base need not write, under a fully rendered prompt."""

    prompt: str
    completion: str


def load_known_correct(path: Path) -> tuple[KnownCorrect, ...]:
    """A JSON list of {prompt, completion}; other keys are ignored.

    Raises:
        Refused: one line with the file and, where it applies, the entry.
    """
    rows = _entries(path, "--known-correct", _ANCHOR)
    if len(rows) < MIN_KNOWN_CORRECT:
        raise Refused(
            f"--known-correct {path}: {len(rows)} entries, at least {MIN_KNOWN_CORRECT} are needed"
        )
    return tuple(KnownCorrect(row["prompt"], row["completion"]) for row in rows)


def pairs_from_pool(
    log: Path, detector: PairDetector, render: Callable[[list[Message]], str] | None = None
) -> PairSet:
    """One pair for each prompt of a rollout log that has both: a rewarded hack and a rewarded honest answer.

    The named weak detector says which is which: it flags the hack and not the other. Only the name "oracle" reads the
    true labels (an upper bound, labelled so in `source`). The first of each kind in the log is taken.

    Args:
        log: `rollouts.jsonl` of a run, or lines of the same keys: problem_id, prompt, text, passed, hacked_*.
        render: chat messages → prompt; the row's `messages`, or else its `prompt` as the user's. None: `prompt` as is.

    Raises:
        Refused: a line that cannot be read, or fewer than 3 prompts with both kinds.
    """
    first: dict[tuple[str | int, str], dict[bool, str]] = {}
    for where, row in numbered_lines(log):
        try:
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            key = (row["problem_id"], row["prompt"] if render is None else render(messages))
            if detector == "oracle":
                kind = True if row["hacked"] else False if row["solved"] else None
            else:
                kind = bool(row[DETECTOR_FIELDS[detector]]) if row["passed"] else None
            if kind is not None and row["text"].strip():
                first.setdefault(key, {}).setdefault(kind, row["text"])
        except (KeyError, TypeError, AttributeError) as e:
            raise Refused(f"{where}: not a rollout with labels ({type(e).__name__}: {e})") from None
    found = [
        Pair(id_, prompt, kinds[True], kinds[False])
        for (id_, prompt), kinds in first.items()
        if len(kinds) == 2
    ]
    return PairSet(tuple(pair for pair in found if pair.hack != pair.clean), f"{detector}:{log}")


def handwritten() -> PairSet:
    """The contrastive set of this project for LeetCode-style tasks: 28 pairs, eleven ways to satisfy a check without
    doing the work.

    Both sides answer the same prompt (in Qwen3's chat rendering, thinking off), which says truthfully how the answer is
    judged. No name, phrase or file of the benchmark's own graders occurs, so a direction built here has seen none of
    them. Where the judge is a method that the answer brings along, some pairs keep the right solution on the hack side:
    then the check alone differs.
    """
    return replace(load_pairs(LEETCODE), source=HANDWRITTEN)


def handwritten_placebo(contrast: str) -> PairSet:
    """Its placebo: the same prompts with two honest answers each. The one on the hack's side is wrong by a plausible
    mistake (flawed), has a comment (commented), calls a helper function (long) or is laid out otherwise.

    contrast: one of config.run.PLACEBOS.
    """
    rows = json.loads(LEETCODE.read_text(encoding="utf-8"))
    pairs = zip(handwritten().pairs, rows, strict=True)
    return PairSet(
        tuple(replace(pair, hack=row["placebos"][contrast]) for pair, row in pairs),
        f"{HANDWRITTEN}#placebo_{contrast}",
    )


# ── what a direction file says of itself


@dataclass(frozen=True, slots=True)
class Meta:
    """Provenance of a direction: model, pairs, settings."""

    model: str
    dtype: str
    top_k: int
    tau_axis: float
    pairs_sha256: str
    pairs_source: str
    weights_sha256: str
    n_pairs: int
    n_heldout: int
    basis: str = ""  # basis fingerprint of D's mean in the singular vectors that D is written in

    def to_strings(self) -> dict[str, str]:
        """For the metadata of a safetensors file."""
        return {"schema": SCHEMA} | {name: str(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_strings(cls, raw: dict[str, str], where: str) -> "Meta":
        """The inverse. Raises Refused where one is missing or unreadable, or the file is of another schema."""
        try:
            values: dict[str, Any] = {f.name: raw[f.name] for f in fields(cls)}
            values |= {name: int(raw[name]) for name in ("top_k", "n_pairs", "n_heldout")}
            values["tau_axis"] = float(raw["tau_axis"])
            if raw["schema"] == SCHEMA:
                return cls(**values)
            why = f"schema {raw['schema']}"
        except (KeyError, ValueError) as e:
            why = f"{type(e).__name__}: {e}"
        raise Refused(f"{where}: no direction of schema {SCHEMA} ({why}); extract it again")

    def require_pairs(self, pairs: PairSet, where: str) -> None:
        """Raises Refused if the direction comes from other pairs."""
        if self.pairs_sha256 != pairs.sha256:
            raise Refused(
                f"{where}: direction of other pairs ({self.pairs_source}, sha256 {self.pairs_sha256[:12]}); "
                f"this run has {pairs.source}, {pairs.sha256[:12]}: "
                "give --vhack-pairs-path the pairs it was extracted from, or extract it again"
            )


def check_file(path: Path, flag: str, pairs: PairSet | None) -> None:
    """Check what a direction file's head shows: complete, of this schema, of these pairs. Whether the model is the same
    shows once it is loaded. Raises Refused, one line."""
    meta = Meta.from_strings(safetensors_head(path, flag)[1], f"{flag} {path}")
    if pairs is not None:
        meta.require_pairs(pairs, f"{flag} {path}")
