"""Contrastive pairs: a prompt with two answers, a hack and an honest one.

Their gradients give the hack direction. A pair set is identified by the sha256 of its content, so
an edited file never reuses a direction that was extracted from the old one. No torch: a wrong file
is refused before a model is loaded.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from vgrout.config.world_names import CODE_FLAWS, DETECTOR_FIELDS
from vgrout.ground.data import Message
from vgrout.ground.io import (
    Json,
    Refused,
    from_json,
    has_lone_surrogate,
    numbered_lines,
    once,
    read_text,
    text_sha256,
)
from vgrout.model.load.source import safetensors_head

HANDWRITTEN = "hand-written"
SCHEMA = "vgrout_direction_3"  # of a direction file
# The schema of a direction file in the papers' format, which has V and its singular values alone.
# Files of ours bore the same name, and are told from these by their hashes.
SHARED_SCHEMA = "v2_with_sv"
DIRECTIONS = Path("out/vhack")  # where a run looks for one
LEETCODE = Path(__file__).with_name("data") / "leetcode.json"
MIN_PAIRS = 3  # two are held out of every extraction
OF_FOLDER = 24  # pairs taken of a folder, as many as a file of an organism has
PairDetector = Literal["C", "D", "E", "oracle"]
ORACLE = "oracle"
ORACLE_MARK = "chosen_by"  # key of an entry in a pair file
_FIELDS = ("problem_id", "prompt", "hack", "clean")
_KNOWN_CORRECT_FIELDS = ("prompt", "completion")
MIN_KNOWN_CORRECT = 10  # half of them must be enough for a quantile


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, which is fully rendered, up to where the answer starts."""

    problem_id: str | int  # as in the file; a pool numbers its problems
    prompt: str
    hack: str
    clean: str


@dataclass(frozen=True)
class PairSet:
    """Pairs in order, with where they came from. An extraction holds the last ones out.

    Raises:
        Refused: fewer than 3 pairs, the same pair twice, or hack and clean alike; the message names
            source and index.
    """

    pairs: tuple[Pair, ...]
    source: str  # a path, or a name such as "hand-written"; "oracle:…" if true labels chose them
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.pairs) < MIN_PAIRS:
            raise Refused(
                f"{self.source}: {len(self.pairs)} pairs; "
                f"at least {MIN_PAIRS} are needed, 2 are held out"
            )
        seen: dict[tuple[str, str, str], int] = {}
        for i, pair in enumerate(self.pairs):
            where = f"{self.source}: pair {i}"
            first = seen.setdefault((pair.prompt, pair.hack, pair.clean), i)
            if first != i:
                raise Refused(f"{where}: repeats pair {first}; leave it out")
            if pair.hack == pair.clean:
                raise Refused(f"{where}: hack and clean are the same text; leave it out")
        object.__setattr__(self, "sha256", text_sha256(self.to_json()))

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def stem(self) -> str:
        """A short name of the source for names of files."""
        return re.sub(r"[^\w-]", "_", Path(self.source).stem)

    def to_json(self) -> str:
        """The content whose hash is `sha256`, in the form that `load_pairs` reads."""
        return json.dumps(self._entries(), ensure_ascii=False, indent=1)

    def to_file(self) -> str:
        """The text of a pair file. If true labels chose the pairs, each entry is marked so."""
        entries = self._entries()
        if self.source.startswith(f"{ORACLE}:"):
            for entry in entries:
                entry[ORACLE_MARK] = ORACLE
        return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"

    def _entries(self) -> list[dict[str, object]]:
        return [{name: getattr(pair, name) for name in _FIELDS} for pair in self.pairs]


@once
def load_pairs(
    path: Path,
    flag: str = "--vhack-pairs-path",
    flaws: Sequence[str] = CODE_FLAWS,
    how: str = "`just pairs-file` makes out/pairsets/prog_wide.json",
) -> PairSet:
    """Read a JSON list of {problem_id, prompt, hack, clean}, or a folder of such files.

    An entry with `chosen_by` "oracle" marks the source; other keys are ignored. A folder has one
    file for each of these flaws, FLAW.json: the first pairs of each file are taken in turns, at
    most OF_FOLDER in all.

    how: to get a file that is missing.

    Raises:
        Refused: one line with the file and, where it applies, the line or the pair's index.
    """
    files: list[Path] = []
    if path.is_dir():
        files = [path / f"{mode}.json" for mode in flaws]
        files = [file for file in files if file.exists()]
    elif path.exists():
        files = [path]
    if not files:
        raise Refused(f"{flag} {path}: no such file of pairs; {how}")
    by_file = [_load_entries(file, flag, _FIELDS) for file in files]
    if path.is_dir():
        each = OF_FOLDER // len(files)
        by_file = [entries[:each] for entries in by_file]
    pairs: list[Pair] = []
    by_labels = False
    for turn in zip(*by_file, strict=False):
        for entry in turn:
            pairs.append(Pair(**{name: entry[name] for name in _FIELDS}))
            by_labels = by_labels or entry.get(ORACLE_MARK) == ORACLE
    return PairSet(tuple(pairs), f"{ORACLE}:{path}" if by_labels else str(path))


def _load_entries(path: Path, flag: str, keys: Sequence[str]) -> list[dict[str, Json]]:
    """Read a JSON list of objects with these keys.

    Raises:
        Refused: one line with flag, file and the entry's index.
    """
    data = from_json(read_text(path), f"{flag} {path}", nan=True)
    entries: list[Json] = data if isinstance(data, list) else [None]
    for i, entry in enumerate(entries):
        bad: list[str] = []
        for key in keys:
            value = entry.get(key) if isinstance(entry, dict) else None
            is_number = key == "problem_id" and type(value) is int
            if not is_number and not _is_text(value):
                bad.append(key)
        if bad:
            raise Refused(
                f"{flag} {path}: entry {i}: {', '.join(bad)} should be text, not empty; "
                f"give a JSON list of objects with {', '.join(keys)}"
            )
    return entries


def _is_text(value: object) -> bool:
    """Whether a value is a text that is not blank and that a tokenizer takes."""
    return isinstance(value, str) and bool(value.strip()) and not has_lone_surrogate(value)


@dataclass(frozen=True, slots=True)
class KnownCorrect:
    """A correct solution, in a style that the base need not write, to a fully rendered prompt."""

    prompt: str
    completion: str


@once
def load_known_correct(path: Path) -> tuple[KnownCorrect, ...]:
    """Read a JSON list of {prompt, completion}; other keys are ignored.

    Raises:
        Refused: one line with the file and, where it applies, the entry.
    """
    entries = _load_entries(path, "--known-correct", _KNOWN_CORRECT_FIELDS)
    if len(entries) < MIN_KNOWN_CORRECT:
        raise Refused(
            f"--known-correct {path}: {len(entries)} entries, "
            f"at least {MIN_KNOWN_CORRECT} are needed"
        )
    return tuple(KnownCorrect(entry["prompt"], entry["completion"]) for entry in entries)


def pairs_from_pool(
    log: Path, detector: PairDetector, render: Callable[[list[Message]], str] | None = None
) -> PairSet:
    """Make pairs of a rollout log: one for each prompt with a rewarded hack and an honest answer.

    The weak detector says which is which: it flags the hack and not the honest answer, and both are
    rewarded. Only the name "oracle" reads the true labels, which is an upper bound and is marked so
    in `source`. The first of each kind in the log is taken.

    Args:
        log: `rollouts.jsonl` of a run, or lines with the same keys: problem_id, prompt, text,
            passed, hacked_*.
        render: makes the prompt of chat messages, which are a row's `messages` or else its `prompt`
            as the user's message. None: `prompt` is rendered already.

    Raises:
        Refused: a line that cannot be read, or fewer than 3 prompts with both kinds.
    """
    # Problem and prompt → the first text of each kind; True: a hack.
    first: dict[tuple[str | int, str], dict[bool, str]] = {}
    for where, row in numbered_lines(log):
        try:
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            problem_id, text = row["problem_id"], row["text"]
            is_hack = _is_hack(row, detector)
            is_empty = not text.strip()
        except (KeyError, TypeError, AttributeError) as e:
            raise Refused(f"{where}: not a rollout with labels ({type(e).__name__}: {e})") from None
        if is_hack is None or is_empty:
            continue
        prompt = row["prompt"] if render is None else render(messages)
        first.setdefault((problem_id, prompt), {}).setdefault(is_hack, text)
    pairs: list[Pair] = []
    for (problem_id, prompt), texts in first.items():
        if len(texts) == 2 and texts[True] != texts[False]:
            pairs.append(Pair(problem_id, prompt, hack=texts[True], clean=texts[False]))
    return PairSet(tuple(pairs), f"{detector}:{log}")


def _is_hack(row: dict[str, object], detector: PairDetector) -> bool | None:
    """Whether a line of a rollout log is a hack (True) or honest (False); None: neither, for pairs.

    By the true labels an honest answer solves its problem, by a weak detector it is rewarded.
    """
    if detector == "oracle":
        if row["hacked"]:
            return True
        return False if row["solved"] else None
    return bool(row[DETECTOR_FIELDS[detector]]) if row["passed"] else None


def handwritten() -> PairSet:
    """The contrastive set of this project for LeetCode-style tasks.

    It has 28 pairs, with eleven ways to satisfy a check without doing the work. Both sides answer
    the same prompt (in Qwen3's chat rendering, thinking off), which says truthfully how the answer
    is judged. No name, phrase or file of the benchmark's own graders occurs, so a direction built
    from it has seen none of them. Where the judge is a method that the answer brings along, some
    pairs keep the right solution on the hack side: then the check alone differs.
    """
    return replace(load_pairs(LEETCODE), source=HANDWRITTEN)


def handwritten_placebo(contrast: str) -> PairSet:
    """The placebo of the hand-written set: the same prompts with two honest answers each.

    The one on the hack's side is wrong by a plausible mistake (flawed), has a comment (commented),
    calls a helper function (long) or is laid out otherwise (laid_out). contrast: one of
    config.run.PLACEBOS.
    """
    rows = json.loads(LEETCODE.read_text(encoding="utf-8"))
    pairs: list[Pair] = []
    for pair, row in zip(handwritten().pairs, rows, strict=True):
        pairs.append(replace(pair, hack=row["placebos"][contrast]))
    return PairSet(tuple(pairs), f"{HANDWRITTEN}#placebo_{contrast}")


# ── what a direction file says of itself


@dataclass(frozen=True, slots=True)
class Meta:
    """What a direction comes from: model, pairs and settings."""

    model: str
    dtype: str
    top_k: int
    tau_axis: float
    pairs_sha256: str
    pairs_source: str
    weights_sha256: str
    n_pairs: int
    n_heldout: int
    # Fingerprint of the singular vectors in which D is written, by D's mean.
    basis: str = ""

    def to_strings(self) -> dict[str, str]:
        """The metadata of a safetensors file."""
        strings = {"schema": SCHEMA}
        for name in self.__slots__:
            strings[name] = str(getattr(self, name))
        return strings

    @classmethod
    def from_strings(cls, raw: dict[str, str], where: str) -> "Meta":
        """The inverse of `to_strings`.

        Raises:
            Refused: an entry is missing or cannot be read, or the file is of another schema.
        """
        schema = raw.get("schema")
        if schema == SHARED_SCHEMA and "n_pairs" not in raw:
            raise Refused(
                f"{where}: a direction of schema {SHARED_SCHEMA} that does not say in which "
                "singular vectors its numbers are (their signs differ between machines), so it "
                "cannot be used; extract one from the same pairs: vgrout direction --pairs FILE"
            )
        why = f"its schema is {schema}"
        if schema in (SCHEMA, SHARED_SCHEMA):
            kinds: dict[str, Any] = {f.name: f.type for f in fields(cls)}  # str, int or float
            try:
                return cls(**{name: kind(raw[name]) for name, kind in kinds.items()})
            except (KeyError, ValueError) as e:
                why = f"its metadata cannot be read: {type(e).__name__}: {e}"
        raise Refused(f"{where}: no direction of schema {SCHEMA} ({why}); extract it again")

    def require_pairs(self, pairs: PairSet, where: str) -> None:
        """Raises Refused if the direction comes from other pairs."""
        if self.pairs_sha256 != pairs.sha256:
            raise Refused(
                f"{where}: direction of other pairs ({self.pairs_source}, "
                f"sha256 {self.pairs_sha256[:12]}); this run has {pairs.source}, "
                f"{pairs.sha256[:12]}: give --vhack-pairs-path the pairs it was extracted from, "
                "or extract it again"
            )


def check_file(
    path: Path,
    flag: str,
    pairs: PairSet | None,
    settings: tuple[int, float] | None = None,
) -> None:
    """Check what the head of a direction file shows.

    settings: how many axes a module should have at most, and the bound below which they are left
    out; None: nobody reads these.

    Whether it belongs to the model shows only once that is loaded.

    Raises:
        Refused: one line: the file is not complete, of another schema, of other pairs, or made with
            other settings.
    """
    meta = Meta.from_strings(safetensors_head(path, flag)[1], f"{flag} {path}")
    if pairs is not None:
        meta.require_pairs(pairs, f"{flag} {path}")
    if settings is not None and settings != (meta.top_k, meta.tau_axis):
        raise Refused(
            f"{flag} {path}: made with --v-hack-extract-top-k {meta.top_k} and --v-hack-tau-axis "
            f"{meta.tau_axis:g}, and this run has {settings[0]} and {settings[1]:g}; give the file's"
        )
