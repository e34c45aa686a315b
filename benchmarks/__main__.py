"""`python -m benchmarks NAME`: measures a claim on this machine, and prints it as a Markdown table.

Past figures are in notes/benchmarks.md. They are ratios of contestants that took turns: the median
of paired rounds, and in brackets their middle half. A bench imports torch only if it needs it:
grading forks its peers, which torch in this process would slow down.
"""

import importlib
import sys
from pathlib import Path
from typing import Literal

from vgrout.config.cli import cli_exit, parse_args
from vgrout.ground.io import Refused
from vgrout.model.load.source import require_model


def step(quick: bool = False) -> str:
    """A whole training step of the organism against TRL's (ten minutes; uv run --extra bench …).

    Args:
        quick: few rounds.
    """
    return importlib.import_module("benchmarks.step").run(quick)


def real(model: Path, dtype: Literal["auto", "fp32", "bf16"] = "bf16", quick: bool = False) -> str:
    """A pretrained model: a step, its memory and sampling against TRL's (ten minutes; uv run --extra bench …).

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
    and the sampling of `full`. Ten minutes, and up to five more for each way of setting TRL. Claims: the time of
    update and sampling, the plan's memory, kernels and CUDA graphs against their plain forms, `mini` against the CPU
    and killed and resumed. Ten minutes. Each figure is a JSON line on standard error as soon as it is
    there.

    Args:
        quick: a small load.
        part: steps, claims, or both.
    """
    return importlib.import_module("benchmarks.gpu").run(quick, part)


def grading(quick: bool = False, problems: Path | None = None) -> str:
    """The sandbox against graders that start an interpreter for every run (minutes).

    Args:
        quick: fewer rounds. problems: a file of real problems; without one, only answers of the
        organism's size are measured.
    """
    if problems is not None and not problems.is_file():
        raise Refused(f"--problems {problems}: no such file")
    return importlib.import_module("benchmarks.grading").run(quick, problems)


def main(argv: list[str]) -> int:
    """Run one bench. Exit codes: 0 measured · 2 refused, in one line."""

    def command() -> int:
        benches = {bench.__name__: bench for bench in (step, real, gpu, grading)}
        print(parse_args(benches, argv or ["--help"], "python -m benchmarks"))
        return 0

    return cli_exit(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
