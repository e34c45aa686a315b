"""Names of the worlds that are built in, of their flaws and of their detectors: plain data for flags and checks.

Settings know a world by what stands here, and import none.
"""

from typing import TYPE_CHECKING, Literal

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
