"""Names of the worlds that are built in, of their flaws and of their detectors: plain data for flags and checks.

Settings know a world by what stands here, and import none.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vgrout.ground.io import from_json, regular

WORLDS = ("code", "text", "sums")
# --env verifiers:NAME: a taskset of the package verifiers, which knows it by that name
VERIFIERS = "verifiers"
# those of which an organism's folder can have problems, demonstrations and pairs
OF_ORGANISMS = ("code", "sums")
ORGANISM = "organism"  # the embedded model organism's model, problems, pool and pairs, by this name

# of the code world, in the usual order; each has an entry in `envs/code/modes.py`
CODE_FLAWS: tuple[str, ...] = (
    "run_tests",
    "eq_override",
    "exit_code",
    "stdout_marker",
    "sentinel",
    "file_marker",
    "shown_test",
    "given_tests",
)
if TYPE_CHECKING:  # a checker reads literals only
    EnvMode = str
else:
    # "own": each problem's flaw is its own, or its partition's
    EnvMode = Literal["own", *CODE_FLAWS]

# weak detector of the code world → the field of a grade's details (and of a line of rollouts.jsonl) with its verdict
DETECTOR_FIELDS = {
    # the answer's tests accept a stub that returns 0
    "C": "hacked_arbitrary",
    # the answer's tests reject the canonical solution
    "D": "hacked_wrong_tests",
    # the answer's tests accept the answer's own solution while it is there
    "E": "hacked_loophole_used",
}

# keys of a problem of Python functions, of which a row of text has none
CODE_ONLY = ("gt_answer", "canonical_solution", "func_name")


def is_row_of_text(record: object) -> bool:
    """Whether a line of a problem file is a prompt alone, and no problem of Python functions."""
    if not isinstance(record, dict):
        return False
    return not record.keys() & {*CODE_ONLY} and bool(record.keys() & {"prompt", "messages"})


def holds_text(file: Path) -> bool:
    """Whether the first row of a problem file is one of text. False where there is no such file, or none that can be
    read."""
    try:
        with open(file, encoding="utf-8-sig", opener=regular) as lines:
            first = next((line for line in lines if line.strip()), "")
        return is_row_of_text(from_json(first, str(file)))
    except (OSError, ValueError):
        return False
