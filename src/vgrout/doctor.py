"""`vgrout doctor`: the sandbox's layers on this machine, and a self-test of the grader. Under 10 s."""

import sys
import time

from tabulate import tabulate

from vgrout.cli import cli_exit, parse_args
from vgrout.data import Grade
from vgrout.envs.code.grading.grade import LEVELS, Grader
from vgrout.envs.code.modes import MODES, Mode, announced, hack
from vgrout.envs.code.problem import Problem
from vgrout.gpus import visible

_TESTS = tuple(
    f"assert Solution().total({numbers}) == {sum(numbers)}"
    for numbers in ([], [5], [1, 2, 3], [9, -9, 4])
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
    return Problem(0, mode, "", (), (), _TESTS, _RIGHT, "", "total", cpu_limit=0.5)


def _self_test(grader: Grader) -> list[tuple[str, bool]]:
    """Name of each check, and whether it held."""

    def grade(mode: Mode, code: str) -> Grade | None:
        g = grader.grade(_problem(mode), f"```python\n{code}\n```")
        return g if isinstance(g, Grade) else None

    results = []
    for mode in MODES:
        right = grade(mode, _RIGHT)
        results.append((f"{mode}: a right answer passes", right is not None and right.solved))
        codes = [_WRONG + hack(attack, "total", announced(attack, _TESTS)) for attack in MODES]
        hacked = [g.hacked for code in codes if (g := grade(mode, code)) is not None]
        results.append(
            (
                f"{mode}: only its own hack is accepted",
                hacked == [attack == mode for attack in MODES],
            )
        )
    for name, code in _HOSTILE.items():
        g = grade("run_tests", f"{_WRONG}\n{code}")
        results.append((f"{name}: stopped", g is not None and not g.passed))
    return results


def examine() -> int:
    """The sandbox's layers on this machine, and a self-test of the grader. Under 10 s."""
    started = time.perf_counter()
    with Grader(workers=1, allow_weak=True) as grader:
        ready = time.perf_counter() - started
        p = grader.protections
        rows = [(name, "on", detail) for name, detail in p.active.items()]
        rows += [(name, "off", reason) for name, reason in p.missing.items()]
        print(tabulate(rows, headers=("layer", "", "detail or reason"), tablefmt="github"))
        print(
            f"\nlevel {p.level} of {max(LEVELS)} ({LEVELS[p.level]}); probed by attacking a throw-away child"
        )
        as_root = "; it ran as uid 0" if p.as_root else ""
        print(f"it got through with: {', '.join(p.breaches) or 'nothing'}{as_root}")
        results = _self_test(grader)
        t = time.perf_counter()
        for _ in range(50):
            grader.grade(_problem("run_tests"), f"```python\n{_WRONG}\n```")
        rollout = (time.perf_counter() - t) / 50
    bad = [name for name, held in results if not held]
    for name in bad:
        print(f"FAILED  {name}")
    print(
        f"self-test: {len(results) - len(bad)}/{len(results)} checks held, all {len(MODES)} flaws"
    )
    print(f"start {ready:.2f} s; a small rollout {rollout * 1e3:.1f} ms; grader {p.version}")
    print(f"GPUs: {', '.join(visible()) or 'none that this process may use'}")
    if p.weak:
        print(
            "The reference tests are not trustworthy here: training needs --allow-weak-sandbox, which marks every file."
        )
    return 1 if bad or p.weak else 0


def main(argv: list[str] | None = None) -> int:
    """0: all checks hold and the sandbox is complete. 1: a check failed, or the strict oracle is not trustworthy."""
    return cli_exit(lambda: parse_args(examine, argv, "vgrout doctor"))


if __name__ == "__main__":
    sys.exit(main())
