"""What grows with the work of users: long runs, many runs, many jobs, many rows.

Each command is a process of its own, whose CPU seconds and most memory the system reports. The long
run is the organism's, with few and short answers; late steps of it are compared with those of a run
that has just begun, and both take turns. The runs of the report are copies of one real run, under
other seeds and learning rates.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import rig
from benchmarks.measure import Figure, Ratio, page
from vgrout.files import json_lines, read_json

GIB, MIB = 2**30, 2**20
JOBS, RUNS, ROWS, STEPS = 1_000, 300, 100_000, 10_000
STRETCH, ROUNDS = 100, 7  # steps that are timed together, and how often
SEEDS = 30  # of one condition of the report

ORIGINAL = ("mini", "--intervention=route2")  # the run that is copied

FUNCTIONS = """
def proxy(completion, **columns):
    return float("7" in completion)


def gold(completion, answer, **columns):
    return float(answer in completion)
"""
# Starts a command, and prints its exit code, seconds, CPU seconds and most bytes. A process begins with the most memory
# of the one that starts it, which has torch: this one is small.
LAUNCHER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run([sys.executable, "-m", *sys.argv[1:]], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = time.perf_counter() - start
print(json.dumps([code, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""
REWARDS = ("--reward=growth_rewards:proxy", "--reference=growth_rewards:gold")
SHORT = ("--steps=1", "--eval-ablate-every=0", "--final-n-prompts=1", "--final-samples=1")


@dataclass(frozen=True)
class Used:
    """What a process took."""

    seconds: float  # by the clock
    cpu: float
    peak: int  # bytes

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.cpu:.1f} of CPU, {self.peak / GIB:.2f} GiB"


def used(*argv: str) -> Used:
    """What a command of vgrout took, its children included.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    said = Path("said.txt")
    with said.open("w") as file:
        launched = subprocess.run(
            [sys.executable, "-c", LAUNCHER, *argv],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | _paths(),
            check=False,
        )
    code, seconds, cpu, peak = json.loads(launched.stdout)
    if code:
        raise RuntimeError(f"{' '.join(argv)}: {said.read_text(encoding='utf-8')[-2000:]}")
    return Used(seconds, cpu, peak)


def _paths() -> dict[str, str]:
    """The functions that rows are graded by lie in the folder of the bench."""
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), known)))}


def at_most(what: str, against: str, took: Used, seconds: float, peak: int | None = None) -> Figure:
    """A command's figure under its goal."""
    reached = took.seconds <= seconds and (peak is None or took.peak <= peak)
    memory = "" if peak is None else f", {peak / GIB:g} GiB"
    return Figure(what, against, str(took), f"≤ {seconds:g} s{memory}", reached)


# ── many jobs


def jobs(n: int) -> Figure:
    """The plan of a sweep of n different jobs."""
    rates = ", ".join(f"{1e-5 * (1 + i):.6g}" for i in range(n // 2))
    study = Path("growth.toml")
    study.write_text(
        'name = "growth"\npreset = "mini"\nseeds = [41]\n'
        f'[[arms]]\nintervention = ["none", "route2"]\nlr = [{rates}]\n'
    )
    took = used("vgrout.sweep", str(study), "--dry-run")
    return at_most(f"sweep --dry-run, {n:,} jobs", "", took, 10)


# ── many runs


def report(n: int) -> Figure:
    """The report over n runs, copies of a real one."""
    used("vgrout.train", *ORIGINAL, "--out-tag=_growth")
    (original,) = Path("out/runs").glob("*_growth")
    folder = Path("many")
    for i in range(n):
        copied(original, folder / f"{i:03d}", seed=i % SEEDS, lr=1e-3 * (1 + i // SEEDS))
    took = used("vgrout.report", str(folder), "--out", "report")
    shutil.rmtree(folder)
    return at_most(f"report, {n} runs", f"{-(-n // SEEDS)} conditions", took, 60, 2 * GIB)


def copied(original: Path, to: Path, seed: int, lr: float) -> None:
    """A copy of a run under another seed and learning rate."""
    shutil.copytree(original, to, ignore=shutil.ignore_patterns("resume", "*.safetensors"))
    record = read_json(to / "run.json")
    record["config"]["run"]["seed"] = seed
    record["config"]["opt"]["lr"] = lr
    (to / "run.json").write_text(json.dumps(record))
    rates = read_json(to / "per_mode_deploy.json")
    rates["seed"] = seed
    (to / "per_mode_deploy.json").write_text(json.dumps(rates))


# ── many rows


def rows(n: int) -> Iterator[Figure]:
    """A run of one step on a file of n rows of text, and its plan."""
    Path("growth_rewards.py").write_text(FUNCTIONS)
    path = Path("rows.jsonl")
    with path.open("w") as file:
        for i in range(n):
            split = "test" if i % 20 == 0 else "train"
            row = {"id": i, "prompt": f"What is {i} plus {i % 97}?", "answer": str(i + i % 97)}
            file.write(json.dumps(row | {"split": split}) + "\n")
    flags = (*REWARDS, "--teacher-pool-dir=none", "--intervention=none", *SHORT)
    train = ("vgrout.train", "mini", *flags)
    few = Path("few.jsonl")
    few.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))
    usual = used(*train, f"--problems={few}", "--out-tag=_few")
    took = used(*train, f"--problems={path}", "--out-tag=_rows")
    more = Used(took.seconds - usual.seconds, took.cpu - usual.cpu, took.peak)
    yield at_most(f"a run of one step, {n:,} rows", "beyond one on 100 rows", more, 60)
    plan = used(*train, f"--problems={path}", "--dry-run")
    yield at_most(f"train --dry-run, {n:,} rows", "", plan, 60)


# ── many steps


def steps(n: int) -> Iterator[Figure]:
    """Steps late in a run against those of a young one, which take turns; and what the run holds by then."""
    argv = rig.command(
        "route2", "--max-new=4", "--threads=1", steps=2 * n, group=2, prompts_per_step=1
    )
    with ExitStack() as ends:
        old = ends.enter_context(closing(rig.Turns("old", argv)))
        old.take(STRETCH)
        held_early = old.held
        for _ in range(STRETCH, n, STRETCH):
            old.take(STRETCH)
        more = (old.held - held_early) / MIB
        young = ends.enter_context(closing(rig.Turns("young", argv)))
        young.take(STRETCH)
        late: list[float] = []
        early: list[float] = []
        for _ in range(ROUNDS):
            late.append(old.take(STRETCH))
            early.append(young.take(STRETCH))
        lines = sum(1 for _ in json_lines(old.path / "rollouts.jsonl"))
    ratio = Ratio.of(late, early)
    yield Figure(
        f"a step after {n:,}",
        f"one after {STRETCH}, in turns",
        f"{ratio} of {1e3 * statistics.median(early):.1f} ms; {lines:,} answers on disk",
        "≤ 1.05 ×",
        ratio.median <= 1.05,
    )
    yield Figure(
        f"memory after {n:,} steps", f"after {STRETCH}", f"{more:+.0f} MiB", "≤ 50 MiB", more <= 50
    )


def sizes(quick: bool) -> Mapping[str, int]:
    """How much of each there is; quick: a tenth."""
    whole = {"jobs": JOBS, "runs": RUNS, "rows": ROWS, "steps": STEPS}
    return {what: n // 10 for what, n in whole.items()} if quick else whole


def run(quick: bool = False) -> str:
    """All figures; goals are those of the full size."""
    of = sizes(quick)
    with rig.workplace():
        figures = [jobs(of["jobs"]), report(of["runs"]), *rows(of["rows"]), *steps(of["steps"])]
    return page(figures)
