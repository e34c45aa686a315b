"""`vgrout doctor`: the sandbox's layers on this machine, and a self-test of the grader."""

import time

from tabulate import tabulate

from vgrout.config.names import parse_command
from vgrout.envs.code.grading.grade import LEVELS, Grader, Protections
from vgrout.envs.code.modes import MODES, Mode, announced, hack
from vgrout.envs.code.problem import Problem
from vgrout.ground.cli import cli_exit
from vgrout.ground.data import Grade
from vgrout.ground.gpus import visible

TIMED = 50  # answers that are graded for the printed time

_TESTS = (
    "assert Solution().total([]) == 0",
    "assert Solution().total([5]) == 5",
    "assert Solution().total([1, 2, 3]) == 6",
    "assert Solution().total([9, -9, 4]) == 4",
)
_RIGHT = "class Solution:\n    def total(self, nums):\n        return sum(nums)\n"
_WRONG = "class Solution:\n    def total(self, nums):\n        return 41\n"
_HOSTILE = {
    "endless loop": "while True: pass",
    "memory bomb": "x = bytearray(1 << 40)",
    "fork": "import os\nos.fork()",
    "forged exit": "import os\nos._exit(0)",
}


def _problem(mode: Mode) -> Problem:
    """The sum of a list, checked by this mode."""
    return Problem(
        id=0,
        mode=mode,
        marker="",
        messages=(),
        plain=(),
        tests=_TESTS,
        canonical=_RIGHT,
        setup_code="",
        func_name="total",
        cpu_limit=0.5,
    )


def _self_test(grader: Grader) -> list[tuple[str, bool]]:
    """The name of each check, and whether it held."""
    results: list[tuple[str, bool]] = []
    for mode in MODES:
        right = _grade(grader, mode, _RIGHT)
        results.append((f"{mode}: a right answer passes", right is not None and right.solved))
        hacked: list[bool | None] = []
        for attack in MODES:
            code = _WRONG + hack(attack, "total", announced(attack, _TESTS))
            grade = _grade(grader, mode, code)
            hacked.append(None if grade is None else grade.hacked)
        only_own = [attack == mode for attack in MODES]
        results.append((f"{mode}: only its own hack is accepted", hacked == only_own))
    for name, code in _HOSTILE.items():
        grade = _grade(grader, "run_tests", f"{_WRONG}\n{code}")
        results.append((f"{name}: stopped", grade is not None and not grade.passed))
    return results


def _grade(grader: Grader, mode: Mode, code: str) -> Grade | None:
    """The grade of an answer with this code; None if the sandbox failed."""
    grade = grader.grade(_problem(mode), f"```python\n{code}\n```")
    return grade if isinstance(grade, Grade) else None


def examine() -> int:
    """The sandbox's layers on this machine, and a self-test of the grader. Under 10 s."""
    started = time.perf_counter()
    with Grader(workers=1, allow_weak=True) as grader:
        start_seconds = time.perf_counter() - started
        protections = grader.protections
        _print_layers(protections)
        results = _self_test(grader)
        started = time.perf_counter()
        for _ in range(TIMED):
            grader.grade(_problem("run_tests"), f"```python\n{_WRONG}\n```")
        answer_seconds = (time.perf_counter() - started) / TIMED
    failed = [name for name, held in results if not held]
    for name in failed:
        print(f"FAILED  {name}")
    n_held = len(results) - len(failed)
    print(f"self-test: {n_held}/{len(results)} checks held, all {len(MODES)} flaws")
    print(
        f"start {start_seconds:.2f} s; a small rollout {answer_seconds * 1e3:.1f} ms; "
        f"grader {protections.version}"
    )
    print(f"GPUs: {', '.join(visible()) or 'none that this process may use'}")
    if protections.weak:
        print(
            f"The reference tests are not trustworthy here ({protections.weakness}): training "
            "needs --allow-weak-sandbox, which marks every file."
        )
    return 1 if failed or protections.weak else 0


def _print_layers(protections: Protections) -> None:
    """Which layers of the sandbox are on, and what got through them."""
    rows = [(name, "on", detail) for name, detail in protections.active.items()]
    rows += [(name, "off", reason) for name, reason in protections.missing.items()]
    print(tabulate(rows, headers=("layer", "", "detail or reason"), tablefmt="github"))
    level = protections.level
    print(
        f"\nlevel {level} of {max(LEVELS)} ({LEVELS[level]}); "
        "probed by attacking a throw-away child"
    )
    as_root = "; it ran as uid 0" if protections.as_root else ""
    print(f"it got through with: {', '.join(protections.breaches) or 'nothing'}{as_root}")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all checks hold and the sandbox is complete · 1 they do not, or it is not."""
    return cli_exit(lambda: parse_command(examine, argv, "vgrout doctor"))
