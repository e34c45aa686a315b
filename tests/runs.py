"""Small runs of the whole program on the embedded organism, and what its files hold."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vgrout.train import main

ARMS = ("none", "erase", "route", "route2", "pmi")  # pmi for all arms that read
SMALL = ["--steps", "5", "--group", "4", "--prompts-per-step", "2", "--final-n-prompts", "6", "--final-samples", "1"]
QUIET = ["--eval-ablate-every", "0", "--vhack-refresh-every", "2"]
TIMES = ("gen", "grade", "fb", "eval", "sec")
EVALUATED = ("hack_deploy", "solve_deploy", "eval", "watch")  # watch: the guard reads each evaluation


def flags(arm: str, *more: str) -> list[str]:
    own = {"none": [], "pmi": ["--reader-prompts", "40"]}.get(arm, QUIET[2:])
    return ["smoke", "--intervention", arm, "--threads", "1", *SMALL, *QUIET[:2], *own, *more]


def run(folder: Path, *argv: str, code: int = 0) -> Path:
    """Run the program in-process with `folder` as working directory; returns its run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(list(argv)) == code
    finally:
        os.chdir(before)
    return max((folder / "out" / "runs").iterdir())


def rows(path: Path, *without: str) -> list[dict[str, Any]]:
    """A run's rows without its timings and the columns named."""
    lines = (path / "steps.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in (*TIMES, *without)} for line in lines]


def adapter_bytes(path: Path) -> bytes:
    """The saved δS, without metadata (which names the configuration)."""
    tensors = load_file(path / "train.safetensors")
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
