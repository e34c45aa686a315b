"""`python -m benchmarks NAME`: measures a claim on this machine, and prints it as a Markdown table.

Past figures are in notes/benchmarks.md. They are ratios of contestants that took turns: the median
of paired rounds, and in brackets their middle half. A bench imports torch only if it needs it:
grading forks its peers, which torch in this process would slow down.
"""

import importlib
import sys
from pathlib import Path
from typing import Literal

from vgrout.cli import cli_exit, parse_args
from vgrout.errors import Refused
from vgrout.model.source import require_model


def step(quick: bool = False) -> str:
    """A whole training step of the organism against TRL's (ten minutes; uv run --extra bench …).

    Args:
        quick: few rounds.
    """
    return importlib.import_module("benchmarks.step").run(quick)


def real(model: Path, dtype: Literal["auto", "fp32", "bf16"] = "bf16", quick: bool = False) -> str:
    """A pretrained model: a step and its memory against TRL's, sampling and update against the machine's bounds
    (ten minutes; uv run --extra bench …).

    Args:
        model: its folder.
        dtype: of all contestants' weights; auto: of each its default, which for TRL is fp32.
        quick: one round of each.
    """
    require_model(model)
    return importlib.import_module("benchmarks.real").run(model.resolve(), dtype, quick)


def gpu(quick: bool = False, part: Literal["all", "steps", "claims"] = "all") -> str:
    """All that is claimed of a GPU.

    Steps: a step of `fast` at Qwen3-4B's shapes against TRL's, where TRL is installed (with vLLM too where that is),
    and the sampling of `full`. Ten minutes, and up to five more for each way of setting TRL. Claims: update and
    sampling against the card's bounds and the plan's memory, kernels and CUDA graphs against their plain forms, `mini`
    against the CPU and killed and resumed. Ten minutes. Each figure is a JSON line on standard error as soon as it is
    there.

    Args:
        quick: a small load.
        part: steps, claims, or both.
    """
    return importlib.import_module("benchmarks.gpu").run(quick, part)


def launches() -> str:
    """Kernels that an update and a decoding step launch on a GPU, and the bytes they move, with fused blocks and
    without: counted from shapes, without a GPU (a minute)."""
    return importlib.import_module("benchmarks.launches").run()


def grading(quick: bool = False, problems: Path | None = None) -> str:
    """The sandbox against graders that start an interpreter for every run (minutes).

    Args:
        quick: fewer rounds. problems: a file of real problems; without one, only answers of the
        organism's size are measured.
    """
    if problems is not None and not problems.is_file():
        raise Refused(f"--problems {problems}: no such file")
    return importlib.import_module("benchmarks.grading").run(quick, problems)


def growth(quick: bool = False) -> str:
    """Work that should not grow: a sweep's plan of 1,000 jobs, a report over 300 runs, a run on 100,000 rows, and step
    10,000 against step 100 (a quarter of an hour).

    Args:
        quick: a tenth of each.
    """
    return importlib.import_module("benchmarks.growth").run(quick)


def verdicts(*pythons: str, problems: Path | None = None, against: Path | None = None) -> str:
    """Wrong verdicts on honest and hostile answers, at every level of the sandbox (minutes for each Python).

    Args:
        pythons: interpreters that grade and run the answers; by default this one.
        problems: a file of real problems, whose canonical solutions are honest answers too.
        against: another checkout of this project, to compare the CPU time of grading with.
    """
    if problems is not None and not problems.is_file():
        raise Refused(f"--problems {problems}: no such file")
    if against is not None and not (against / "src" / "vgrout").is_dir():
        raise Refused(f"--against {against}: no checkout of this project")
    resolved = None if problems is None else problems.resolve()
    bench = importlib.import_module("benchmarks.verdicts")
    return bench.run(pythons or [sys.executable], resolved, against)


def main(argv: list[str]) -> int:
    """Run one bench. Exit codes: 0 measured · 2 refused, in one line."""

    def command() -> int:
        benches = {
            bench.__name__: bench
            for bench in (step, real, gpu, launches, grading, growth, verdicts)
        }
        print(parse_args(benches, argv or ["--help"], "python -m benchmarks"))
        return 0

    return cli_exit(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
