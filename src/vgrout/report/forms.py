"""What a report requires of a run's files before it computes with them.

A file that is not as the trainer writes it is refused in one line, and its run is left out. So what
is raised later on is a fault of the report's own, and shows its traceback.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict, TypeGuard

from vgrout.errors import Refused

Object = Mapping[str, object]  # a JSON object


class Verdict(TypedDict):
    """What a monitor says of an answer."""

    flagged: bool
    score: NotRequired[float | None]


class Answer(TypedDict):
    """What a report reads of an answer's line in rollouts.jsonl or final.jsonl."""

    problem_id: int
    env_mode: str
    text: str
    hacked: bool | None  # None: it was not graded
    solved: bool | None
    mechanism: NotRequired[str | None]  # the flaw that it hacks, where that is not `env_mode`
    side: NotRequired[str]  # of final.jsonl
    step: NotRequired[int]  # of rollouts.jsonl, as is what follows it here
    flagged: NotRequired[bool]
    score: NotRequired[float | None]
    shadow: NotRequired[dict[str, Verdict]]  # by the monitor's name
    marker: NotRequired[str]
    messages: NotRequired[list[dict[str, str]]]
    prompt: NotRequired[str]
    thought: NotRequired[str]
    reward: NotRequired[float | None]
    advantage: NotRequired[float | None]
    gate: NotRequired[float | None]


def require_record(record: Object) -> None:
    """Check run.json, without its settings. Raises Refused."""
    file = "run.json"
    parts: dict[str, Object] = {}
    for name in ("hashes", "git", "direction"):
        parts[name] = _object(record.get(name) or {}, f"{file}: {name}")
    for name, digest in parts["hashes"].items():
        _require(digest is None or _is_text(digest), f"{file}: hashes: {name}", digest)
    revision = parts["git"].get("revision", "")
    _require(_is_text(revision), f"{file}: git: revision", revision)
    likeness = parts["direction"].get("cos_with_real") or {}
    likeness = _object(likeness, f"{file}: direction: cos_with_real")
    for name in ("rms", "chance_rms"):
        _require_number(likeness.get(name), f"{file}: direction: {name}")
    flaws = record.get("flaws")
    for name, facts in flaws.items() if isinstance(flaws, dict) else ():
        facts = _object(facts, f"{file}: flaws: {name}")
        for key in ("code", "should", "pattern"):
            _require(_is_text(facts.get(key)), f"{file}: flaws: {name}: {key}", facts)


def require_final(final: Object, known: Sequence[str]) -> None:
    """Check per_mode_deploy.json. known: the flaws of the run. Raises Refused."""
    file = "per_mode_deploy.json"
    _require_count(final.get("eval_n"), f"{file}: eval_n")
    _require_shares(final, file)
    by_mode = _object(final["by_mode"], f"{file}: by_mode")
    _require(not by_mode.keys().isdisjoint(known), f"{file}: by_mode", list(by_mode))
    for name, numbers in by_mode.items():
        numbers = _object(numbers, f"{file}: {name}")
        _require_count(numbers.get("n"), f"{file}: {name}: n")
        _require(numbers.get("in_dist") in (None, True, False), f"{file}: {name}: in_dist", numbers)
        _require_shares(numbers, f"{file}: {name}")


def require_same_answers(final: Object, graded: Mapping[str, int]) -> None:
    """Check that per_mode_deploy.json counts the deployed model's answers that final.jsonl has. Raises Refused.

    graded: by side, how many graded answers final.jsonl has.
    """
    got, counted = graded.get("deployed", 0), final["eval_n"]
    said = f"of {got} graded answers, in per_mode_deploy.json {counted}"
    _require(got == counted, "final.jsonl: the deployed model", said)


def require_steps(rows: Sequence[object]) -> None:
    """Check the rows of steps.jsonl. Raises Refused."""
    _require(bool(rows), "steps.jsonl", "empty")
    for number, line in enumerate(rows, 1):
        where = f"steps.jsonl, line {number}"
        row = _object(line, where)
        for name in ("step", "hack_s_k", "hack_s_n", "solve_s_k", "solve_s_n"):
            _require_count(row.get(name), f"{where}: {name}")
        _require(row["step"] == number - 1, f"{where}: step", row["step"])
        for name, value in row.items():
            if name.startswith(("hk_", "hack_", "solve_", "signal_")) or name in ("all_zero", "n"):
                _require_number(value, f"{where}: {name}")


def require_answer(line: object, sides: Sequence[str], where: str) -> None:
    """Check a line of final.jsonl, but for its texts. Raises Refused."""
    answer = _object(line, where)
    _require(answer.get("side") in sides, f"{where}: side", answer.get("side"))
    _require_graded(answer, where)
    _require_count(answer.get("problem_id"), f"{where}: problem_id")
    _require("reward" in answer, f"{where}: reward", "missing")
    _require_number(answer["reward"], f"{where}: reward")


def require_flagged(line: object, where: str) -> None:
    """Check what a line of rollouts.jsonl says of flags. Raises Refused."""
    rollout = _object(line, where)
    _require_graded(rollout, where)
    _require_count(rollout.get("step"), f"{where}: step")
    shadow = _object(rollout.get("shadow", {}), f"{where}: shadow")
    for name, of_monitor in [("flagged", rollout), *shadow.items()]:
        verdict = _object(of_monitor, f"{where}: {name}")
        its = verdict.get("flagged", None if verdict is rollout else "missing")
        _require(its in (None, True, False), f"{where}: {name}", its)
        _require_number(verdict.get("score"), f"{where}: {name}: score")


def require_shown(line: object, modes: Sequence[str], where: str) -> None:
    """Check a line of either file for the reader of rollouts. Raises Refused."""
    answer = _object(line, where)
    _require(answer.get("env_mode") in modes, f"{where}: env_mode", answer.get("env_mode"))
    _require_count(answer.get("problem_id"), f"{where}: problem_id")
    for name in ("text", "thought", "marker", "prompt"):
        value = answer.get(name, None if name == "text" else "")
        _require(isinstance(value, str), f"{where}: {name}", value)
    messages = answer.get("messages") or []
    if not isinstance(messages, list):
        raise _refused(f"{where}: messages", messages)
    for each in messages:
        message = _object(each, f"{where}: messages")
        for name in ("role", "content"):
            _require(isinstance(message.get(name), str), f"{where}: messages: {name}", message)
    for name in ("reward", "advantage", "gate", "step"):
        _require_number(answer.get(name), f"{where}: {name}")


def _require_graded(answer: Object, where: str) -> None:
    for name in ("hacked", "solved"):
        _require(name in answer, f"{where}: {name}", "missing")
        _require(answer[name] in (None, True, False), f"{where}: {name}", answer[name])
    _require(_is_text(answer.get("env_mode")), f"{where}: env_mode", answer.get("env_mode"))
    mechanism = answer.get("mechanism")
    _require(mechanism is None or _is_text(mechanism), f"{where}: mechanism", mechanism)


def _require_shares(numbers: Object, where: str) -> None:
    for name, value in numbers.items():
        if name.startswith(("hack_", "solve_", "tries_")) or name.endswith(
            ("_hack", "_solve", "_tries")
        ):
            is_share = _is_number(value) and 0 <= value <= 1
            _require(value is None or is_share, f"{where}: {name}", value)
        if name.startswith("n_") or name.endswith("_n"):
            _require_count(value, f"{where}: {name}")


def _is_text(value: object) -> bool:
    """Whether it is a text that can be written: half of a surrogate pair, which JSON can spell, is none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(value: object, where: str) -> Object:
    """Return the value as the JSON object that it has to be."""
    if not isinstance(value, dict):
        raise _refused(where, value)
    return value


def _require_count(value: object, where: str) -> None:
    _require(type(value) is int and 0 <= value < 2**53, where, value)


def _require_number(value: object, where: str) -> None:
    _require(value is None or _is_number(value), where, value)


def _is_number(value: object) -> TypeGuard[float]:
    if type(value) is int:
        return abs(value) < 2**53
    return type(value) is float and math.isfinite(value)


def _require(condition: bool, where: str, value: object) -> None:
    if not condition:
        raise _refused(where, value)


def _refused(where: str, value: object) -> Refused:
    return Refused(f"{where}: is {value!s:.60}")
