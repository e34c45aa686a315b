"""`vgrout evaluate RUN [--step N] [--problems FILE]`: a saved adapter, scored again on held-out problems.

A saved adapter is the deployed model; without further flags the numbers are those of the run's final evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tabulate import tabulate
from tqdm import tqdm

from vgrout import console
from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import check, setting
from vgrout.envs.base import none_fits
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.grading.reward import RewardFunction
from vgrout.envs.code.modes import MODES
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import (
    ProblemRow,
    assigned,
    balanced,
    load_rows,
    modes_in_turn,
    plain,
    with_modes,
    without_hints,
)
from vgrout.errors import Refused
from vgrout.files import file_sha256, probe_writable, read_json, require_new, to_json, write_atomic
from vgrout.heldout import Side, answers, as_side
from vgrout.metrics import Eval
from vgrout.model.source import Saved, find_adapter, is_small, require_fitting
from vgrout.teacher.pools import load_pool

SCHEMA = "evaluation_v1"
ProblemSplit = Literal["test", "val", "train", "all"]


@dataclass(frozen=True)
class EvaluateSettings:
    """Score a saved adapter on held-out problems: the base model, the deployed one, and the latter without a hint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a saved adapter (.safetensors)."""
    step: int | None = setting(None, low=0)
    """The adapter saved after this many steps; none: train.safetensors."""
    problems: Path | None = None
    """Problem file (JSONL); none: the run's own."""
    split: ProblemSplit = "test"
    """Which part of the file; all: every row of it, under the names kept for evaluation."""
    n_prompts: int | None = setting(None, low=1)
    """Problems, at most, spread evenly over the flaws; none: as the run's final evaluation."""
    samples: int | None = setting(None, low=1)
    """Answers to a problem; none: as the run's final evaluation."""
    seed: int | None = setting(None, low=0)
    """Of the answers; none: the run's."""
    model: str | None = None
    """Where the base model lies, if not where the run had it."""
    reward: str = ""
    """The run's own --reward, once more: a file's word alone is no reason to import it."""
    out: Path | None = None
    """JSON with the same numbers; none: RUN/evaluations/."""
    workers: int | None = setting(None, low=1)
    """Grading processes; none: one per core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        check(self)


def evaluate_saved(cli: EvaluateSettings) -> Path:
    """Print the table and write the numbers; returns the file. Raises Refused, one line, before the model is loaded
    where that is possible."""
    require_new(cli.out)
    saved = find_adapter(cli.run, cli.step, cli.model)
    cfg = saved.cfg
    file, test_file = (
        (cli.problems, None) if cli.problems else (cfg.problems_path, cfg.test_problems_path)
    )
    rows, test_rows = load_rows(file), load_rows(test_file) if test_file else []
    problems = problems_of(saved, rows, test_rows, cli.split)
    if not problems:
        raise Refused(
            f"--split {cli.split}: none of {len(rows)} problems of {file} is in it; try all"
        )
    prompts = [row.prompt for row in (*rows, *test_rows)]
    require_fitting(prompts, saved.folder, cfg.scale.max_new, str(file))
    if cli.seed is not None:
        cfg = replace(cfg, run=replace(cfg.run, seed=cli.seed))
    size = "".join(
        f"_{n}{what}" for n, what in ((cli.n_prompts, "problems"), (cli.samples, "answers")) if n
    )
    of = f"{file.stem}-{file_sha256(file)[:8]}"  # another file's numbers stay where they are
    name = f"{saved.path.stem}_{of}_{cli.split}_seed{cfg.run.seed}{size}.json"
    out = cli.out or saved.path.parent / "evaluations" / name
    probe_writable(out.parent, "--out")
    reward = reward_of(saved, cli.reward)
    with Grader(cli.workers, allow_weak=cli.allow_weak_sandbox, reward=reward) as grader:
        import torch

        from vgrout.model.load import load_saved

        if is_small(saved.model):
            torch.set_num_threads(1)  # for matrices this small a second thread only costs
        policy = load_saved(saved)
        room, samples = policy.window - cfg.scale.max_new, cli.samples or cfg.eval.final_samples
        fit = [p for p in problems if len(policy.render(p.messages)) <= room]
        if not fit:
            raise none_fits(str(file), room)
        chosen = balanced(fit, cli.n_prompts or cfg.eval.final_n_prompts, 0, "test")
        sampled: dict[str, tuple[Side, list[Problem]]] = {
            "base": ("base", chosen),
            "deployed": ("deployed", chosen),
            "plain": ("deployed", [plain(p) for p in chosen]),
        }
        sides: dict[str, Eval] = {}
        with tqdm(
            total=3 * len(chosen) * samples, desc="evaluating", unit="answer", disable=None
        ) as bar:
            for what, (side, given) in sampled.items():
                with as_side(policy, side):  # the same streams as the run's final evaluation
                    scored = answers(
                        policy, grader, given, samples, cfg, cfg.scale.steps, "final", bar.update
                    )
                sides[what] = Eval.of(scored, MODES)
    print(
        f"{cfg.run_id}, {saved.path.name} after {saved.step} steps, {len(chosen)} problems of {file}"
    )
    print(table(sides))
    about = {"schema": SCHEMA, "run": cfg.run_id, "adapter": str(saved.path), "step": saved.step}
    about |= {"problems": str(file), "split": cli.split, "seed": cfg.run.seed}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            out, to_json({**about, "sides": {what: e.as_json() for what, e in sides.items()}})
        )
    except OSError as e:  # a disk that was filled meanwhile
        raise Refused(
            f"--out {out}: cannot be written ({e.strerror}); name another file with --out"
        ) from None
    print(f"-> {out}")
    return out


def problems_of(
    saved: Saved, rows: Sequence[ProblemRow], test_rows: Sequence[ProblemRow], split: ProblemSplit
) -> list[Problem]:
    """The problems of one split under the run's modes and markers; [] where there is none."""
    env, pool = saved.cfg.env, saved.cfg.pool_path
    published = env.marker_names == "published"
    partition = load_pool(pool).partition if pool is not None and pool.is_dir() else {}
    if split == "all":
        modes = modes_in_turn(rows, env.env_mode, partition)
        problems = with_modes(rows, modes, partition, evaluation=True, published=published)
    else:
        problems = assigned(
            rows, env.env_mode, partition, test_rows=test_rows, published=published
        )[split]
    return without_hints(problems, env.unannounced) if saved.cfg.plain_prompts else problems


def reward_of(saved: Saved, given: str) -> RewardFunction | None:
    """The reward function of the run; None: the modes' checks. given: the flag's value.

    Raises:
        Refused: one line: the flag does not name it, since a file's word for it is no reason to import it; or its
            file has changed.
    """
    env, record = saved.cfg.env, saved.path.parent / "run.json"
    if env.reward != given:
        own = (
            f"code, which a file may not have run; if it is yours, add --reward={env.reward}"
            if env.reward
            else "none"
        )
        raise Refused(f"--reward {given or 'missing'}: {saved.path} was trained with {own}")
    if not env.reward:
        return None
    reward = RewardFunction(env.reward, env.reward_passes_at)
    hashes = read_json(record).get("hashes") if record.is_file() else None
    then = hashes.get("reward") if isinstance(hashes, dict) else None
    if then not in (None, reward.sha256):
        raise Refused(
            f"{reward.file}: changed since {saved.path.parent} was trained with --reward; put it back"
        )
    return reward


def table(sides: dict[str, Eval]) -> str:
    """A row per mode and one for all: hack and solve of every side, as k/n."""
    rows = []
    for mode in (*sides["deployed"].by_mode, "all"):
        row = {"mode": mode}
        for side, e in sides.items():
            rates = e if mode == "all" else e.by_mode[mode]
            for what, rate in (("hack", rates.hack), ("solve", rates.solve)):
                row[f"{side} {what}"] = f"{rate.k}/{rate.n}"
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 scored · 2 refused, in one line."""

    def run() -> int:
        evaluate_saved(parse_args(EvaluateSettings, argv, "vgrout evaluate"))
        return 0

    console.setup(None)
    return cli_exit(run)
