"""One estimator for every arm: a fixed set of held-out problems, an own random stream, knob on or off, per mode.

`python -m vgrout.evaluate RUN [--step N] [--problems FILE]` scores a saved adapter again. A saved adapter is the
deployed model; without further flags the numbers are those of the run's own final evaluation.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tabulate import tabulate
from tqdm import tqdm

from vgrout import console
from vgrout.cli import cli_exit, given
from vgrout.config.run import ORGANISM
from vgrout.files import to_json, write_atomic
from vgrout.grading.grade import Grader
from vgrout.model.policy import LanguageModel, Policy
from vgrout.model.sampler import Sample, Sampling, sample
from vgrout.model.saved import Saved, find_adapter, load_saved
from vgrout.problems import Row, assigned, balanced, load_rows, plain, with_modes
from vgrout.rng import torch_stream
from vgrout.teacher.pools import load_pool
from vgrout.types import MODES, Answer, Eval, Grade, Problem, Rate, Ungraded

Side = Literal["base", "trained", "deployed", "quarantine"]


def as_side(policy: Policy, side: Side) -> AbstractContextManager[None]:
    """The policy as one of its sides: base = both knobs off, trained = both on, deployed = quarantine off,
    quarantine = kept knob off."""
    adapter = policy.adapter
    views = {
        "base": adapter.reference,
        "trained": nullcontext,
        "deployed": adapter.deployed,
        "quarantine": adapter.ablate_kept,
    }
    return views[side]()


def ask(
    lm: LanguageModel,
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    *,
    sampling: Sampling,
    max_new: int,
    seed: int,
    step: int,
    purpose: str = "eval",
    on_answer: Callable[[], object] | None = None,
) -> list[Answer]:
    """Sample n answers to each problem from the model as it is, and grade them; in the order of the problems, then of
    their samples.

    The stream depends on (seed, purpose, step) only: sides share their noise, so their difference is less noisy than
    either, and training never sees it.
    """
    sampled: dict[tuple[int, int], tuple[Sample, Future[Grade | Ungraded]]] = {}

    def submit(prompt: int, index: int, answer: Sample) -> None:
        sampled[prompt, index] = answer, grader.submit(problems[prompt], answer.text)
        if on_answer is not None:
            on_answer()

    prompts = [lm.render(p.messages) for p in problems]
    sample(lm, prompts, n, sampling, max_new, torch_stream(seed, purpose, step), submit)
    return [
        Answer(problems[p], i, answer.text, answer.finished, verdict.result())
        for (p, i), (answer, verdict) in sorted(sampled.items())
    ]


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────────

SCHEMA = "evaluation_v1"
Split = Literal["test", "val", "train", "all"]


@dataclass(frozen=True)
class Cli:
    """Score a saved adapter on held-out problems: the base model, the deployed one, and that without a hint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a saved adapter (.safetensors)."""
    step: int | None = None
    """The adapter saved after this many steps; none: train.safetensors."""
    problems: Path | None = None
    """Problem file (JSONL); none: the run's own."""
    split: Split = "test"
    """Which part of the file; all: every row of it, under the names kept for evaluation."""
    n_prompts: int | None = None
    """Problems, at most, spread evenly over the modes; none: as the run's final evaluation."""
    samples: int | None = None
    """Answers to a problem; none: as the run's final evaluation."""
    seed: int | None = None
    """Of the answers; none: the run's."""
    model: str | None = None
    """Where the base model lies, if not where the run had it."""
    out: Path | None = None
    """JSON with the same numbers; none: RUN/evaluations/."""
    workers: int | None = None
    """Grading processes; none: one a core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        for name in ("n_prompts", "samples", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: at least 1")


def held_out(saved: Saved, rows: Sequence[Row], split: Split, policy: Policy) -> list[Problem]:
    """The problems of one split under the run's modes and markers, prompts that fit.

    Raises:
        ValueError: there is none.
    """
    env, max_new = saved.cfg.env, saved.cfg.scale.max_new
    pool = saved.cfg.pool_path
    partition = load_pool(pool).partition if pool is not None and pool.is_dir() else {}
    if split == "all":
        modes = list(MODES) if env.env_mode == "own" else [m for m in MODES if m == env.env_mode]
        problems = with_modes(rows, modes, partition, evaluation=True)
    else:
        problems = assigned(rows, env.env_mode, partition)[split]
    fit = [p for p in problems if len(policy.render(p.messages)) <= policy.window - max_new]
    if not fit:
        raise ValueError(f"--split {split}: none of {len(rows)} problems is in it, with a prompt that fits the window")
    return fit


def score(
    saved: Saved, policy: Policy, grader: Grader, problems: Sequence[Problem], samples: int, seed: int
) -> dict[str, Eval]:
    """base, deployed, plain (deployed, no hint): the same streams as the run's final evaluation."""
    bare = [plain(p) for p in problems]
    asked: dict[str, tuple[Side, Sequence[Problem]]] = {
        "base": ("base", problems),
        "deployed": ("deployed", problems),
        "plain": ("deployed", bare),
    }
    out: dict[str, Eval] = {}
    with tqdm(total=3 * len(problems) * samples, desc="evaluating", unit="answer", disable=None) as bar:
        for name, (side, of) in asked.items():
            with as_side(policy, side):
                answers = ask(
                    policy,
                    grader,
                    of,
                    samples,
                    sampling=Sampling(),
                    max_new=saved.cfg.scale.max_new,
                    seed=seed,
                    step=saved.cfg.scale.steps,
                    purpose="final",
                    on_answer=bar.update,
                )
            out[name] = Eval.of(answers)
    return out


def as_json(saved: Saved, problems_file: Path, split: Split, seed: int, sides: dict[str, Eval]) -> dict[str, Any]:
    """Counts as pairs [k, n]."""

    def pair(rate: Rate) -> list[int]:
        return [rate.k, rate.n]

    return {
        "schema": SCHEMA,
        "run": saved.cfg.run_id,
        "adapter": str(saved.path),
        "step": saved.step,
        "problems": str(problems_file),
        "split": split,
        "seed": seed,
        "sides": {
            name: {
                "hack": pair(e.hack),
                "solve": pair(e.solve),
                "ended": pair(e.finished),
                "not_graded": e.dropped,
                "by_mode": {m: {"hack": pair(r.hack), "solve": pair(r.solve)} for m, r in e.by_mode.items()},
            }
            for name, e in sides.items()
        },
    }


def report(sides: dict[str, Eval]) -> str:
    """One row a mode and one for all, hack and solve of every side, as k/n."""

    def row(name: str, rates: dict[str, tuple[Rate, Rate]]) -> dict[str, str]:
        cells = {"mode": name}
        for side, (hack, solve) in rates.items():
            cells |= {f"{side} hack": f"{hack.k}/{hack.n}", f"{side} solve": f"{solve.k}/{solve.n}"}
        return cells

    modes = sides["deployed"].by_mode
    rows = [row(m, {s: (e.by_mode[m].hack, e.by_mode[m].solve) for s, e in sides.items()}) for m in modes]
    rows.append(row("all", {s: (e.hack, e.solve) for s, e in sides.items()}))
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def command(cli: Cli) -> int:
    """Raises ValueError, one line, before the model is loaded where that is possible."""
    saved = find_adapter(cli.run, cli.step, cli.model, cli.problems)
    cfg, rows = saved.cfg, load_rows(saved.problems_file)
    seed = cfg.run.seed if cli.seed is None else cli.seed
    stem = f"{saved.path.stem}_{saved.problems_file.stem}_{cli.split}_seed{seed}"
    out = cli.out or saved.path.parent / "evaluations" / f"{stem}.json"
    if out.is_dir():
        raise ValueError(f"--out {out}: is a folder; name a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _unwritable(out, e) from None
    with Grader(cli.workers, allow_weak=cli.allow_weak_sandbox) as grader:
        if cfg.scale.model == ORGANISM:
            torch.set_num_threads(1)  # for matrices this small a second thread only costs
        policy = load_saved(saved)
        problems = held_out(saved, rows, cli.split, policy)
        problems = balanced(problems, cli.n_prompts or cfg.eval.final_n_prompts, 0, "test")
        sides = score(saved, policy, grader, problems, cli.samples or cfg.eval.final_samples, seed)
    print(
        f"{cfg.run_id}, {saved.path.name} after {saved.step} steps, {len(problems)} problems of {saved.problems_file}"
    )
    print(report(sides))
    try:
        write_atomic(out, to_json(as_json(saved, saved.problems_file, cli.split, seed, sides)))
    except OSError as e:
        raise _unwritable(out, e) from None
    print(f"-> {out}")
    return 0


def _unwritable(out: Path, e: OSError) -> ValueError:
    return ValueError(f"--out {out}: cannot be written ({e.strerror}); name another file with --out")


def main(argv: list[str] | None = None) -> int:
    """0 scored · 2 refused, in one line."""
    console.setup(None)
    return cli_exit(lambda: command(given(Cli, argv, "python -m vgrout.evaluate")))


if __name__ == "__main__":
    sys.exit(main())
