"""One estimator for every method: fixed held-out problems, a random stream of its own, the policy as one of its sides.

`python -m vgrout.evaluate RUN [--step N] [--problems FILE]` scores a saved adapter again. A saved adapter is the
deployed model; without further flags the numbers are those of the run's final evaluation.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tabulate import tabulate
from tqdm import tqdm

from vgrout import console, ranks
from vgrout.cli import cli_exit, parse_args
from vgrout.config.checks import check, setting
from vgrout.config.run import Config
from vgrout.config.sampling import Sampling
from vgrout.console import Clock
from vgrout.files import probe_writable, read_json, require_new, to_json, write_atomic
from vgrout.grading.grade import Grader
from vgrout.grading.reward import RewardFunction
from vgrout.model.saved import Saved, find_adapter, load_saved
from vgrout.model.source import is_small, model_facts, require_model
from vgrout.problems import (
    Row,
    assigned,
    balanced,
    load_rows,
    modes_in_turn,
    plain,
    require_fitting,
    too_long_prompts,
    with_modes,
    without_hints,
)
from vgrout.rng import torch_stream
from vgrout.teacher.pools import load_pool
from vgrout.types import Eval, Grade, GradedCompletion, Interrupted, Problem, Rate, Ungraded, spaced

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    import torch

    import vgrout.model.policy

KL_ANSWERS, KL_BATCH = 32, 8  # answers of an evaluation whose KL is measured, and how many in one forward

Side = Literal["base", "trained", "deployed", "quarantine"]
Answer = GradedCompletion[Grade | Ungraded]


def as_side(policy: "vgrout.model.policy.Policy", side: Side) -> AbstractContextManager[None]:
    """The policy as one of its sides: base = adapter off, trained = δS and δS_hack on, deployed = quarantine off,
    quarantine = δS off."""
    adapter = policy.adapter
    views = {
        "base": adapter.reference,
        "trained": nullcontext,
        "deployed": adapter.deployed,
        "quarantine": adapter.quarantine_only,
    }
    return views[side]()


def answers(
    lm: "vgrout.model.policy.LanguageModel",
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    *,
    sampling: Sampling,
    max_new: int,
    seed: int,
    step: int,
    purpose: str = "eval",
    on_completion: Callable[[], object] | None = None,
) -> list[Answer]:
    """n graded completions of each problem by the model as it is, in the order of the problems, then of their samples.

    The stream depends on (seed, purpose, step) only: sides share their noise, so their difference is less noisy than
    either, and training never sees it.
    """
    from vgrout.rollout import graded, sample_and_submit

    submitted = sample_and_submit(
        lm,
        grader,
        problems,
        n,
        sampling=sampling,
        max_new=max_new,
        stream=torch_stream(seed, purpose, step),
        on_completion=on_completion,
    )
    return [a for of_problem in graded(submitted) for a in of_problem]


def answers_of(
    side: Side,
    policy: "vgrout.model.policy.Policy",
    grader: Grader,
    problems: Sequence[Problem],
    n: int,
    cfg: Config,
    step: int,
    purpose: str = "eval",
) -> list[Answer]:
    """The same by one side of a run's policy."""
    with as_side(policy, in_run(side, cfg)):
        return answers(
            policy,
            grader,
            problems,
            n,
            sampling=cfg.sampling,
            max_new=cfg.scale.max_new,
            seed=cfg.run.seed,
            step=step,
            purpose=purpose,
        )


def in_run(side: Side, cfg: Config) -> Side:
    """The side that a run evaluates: under --control deploy_quarantine the quarantine is deployed."""
    return "quarantine" if side == "deployed" and cfg.method.control_spec.deploys_quarantine else side


def evaluate(
    policy: "vgrout.model.policy.Policy", grader: Grader, problems: Sequence[Problem], cfg: Config, step: int
) -> Eval:
    """The deployed model during training: G completions of each held-out problem, and the KL to the base."""
    given = answers_of("deployed", policy, grader, problems, cfg.scale.group, cfg, step)
    with as_side(policy, in_run("deployed", cfg)):
        return replace(Eval.of(given), kl=kl_to_base(policy, given))


def kl_to_base(policy: "vgrout.model.policy.Policy", given: Sequence[Answer]) -> float | None:
    """Mean over the tokens of at most KL_ANSWERS of these answers, nats; None without answers. Exact at each position,
    so few answers suffice: the standard deviation over seeds of 32 answers' mean is a tenth of it on the organism."""
    import torch

    some = spaced(given, KL_ANSWERS)
    batches = [some[i : i + KL_BATCH] for i in range(0, len(some), KL_BATCH)]

    def kl(part: Sequence[Answer]) -> "torch.Tensor":
        return policy.kl_to_base([policy.render(a.problem.messages) for a in part], [a.ids for a in part]).cpu()

    tokens = ranks.merged(lambda: {i: kl(batches[i]) for i in ranks.own([1] * len(batches))})
    return float(torch.cat([tokens[i] for i in range(len(batches))]).mean()) if tokens else None


@dataclass(frozen=True)
class Final:
    """The final evaluation, on the same test problems for every method. `plain`: the deployed model without a hint."""

    base: Eval
    trained: Eval
    deployed: Eval
    plain: Eval
    answers: Mapping[str, Sequence[Answer]]  # of each side; without a quarantine, trained is the same list as deployed

    @classmethod
    def of(cls, **answers: Sequence[Answer]) -> "Final":
        """From the four sides' answers, by their names."""
        return cls(**{side: Eval.of(given) for side, given in answers.items()}, answers=answers)


def evaluate_final(
    policy: "vgrout.model.policy.Policy",
    grader: Grader,
    test: Sequence[Problem],
    cfg: Config,
    clock: Clock,
    stop: Callable[[], bool],
) -> Final:
    """All four sides on the same held-out test problems. Equal sides are sampled once: without a quarantine `trained`
    is `deployed`, and where no prompt has a hint `plain` is, too. The base comes first, so that a broken adapter
    cannot disturb it.

    Raises:
        Interrupted: `stop` returned True between two sides.
    """
    problems = balanced(test, cfg.eval.final_n_prompts, 0, "test")

    def sampled(side: Side, problems: Sequence[Problem], label: str = "") -> list[Answer]:
        if stop():
            raise Interrupted("interrupted before the final evaluation was done")
        with clock(f"final evaluation, {side}{label}"):
            n, step = cfg.eval.final_samples, cfg.scale.steps
            return answers_of(side, policy, grader, problems, n, cfg, step, "final")

    base, deployed = sampled("base", problems), sampled("deployed", problems)
    differs = bool(policy.adapter.δS_hack.any()) or cfg.method.control_spec.deploys_quarantine
    trained = sampled("trained", problems) if differs else deployed
    bare = deployed if cfg.plain_prompts else sampled("deployed", [plain(p) for p in problems], " without a hint")
    return Final.of(base=base, trained=trained, deployed=deployed, plain=bare)


# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────────

SCHEMA = "evaluation_v1"
Split = Literal["test", "val", "train", "all"]


@dataclass(frozen=True)
class Cli:
    """Score a saved adapter on held-out problems: the base model, the deployed one, and the latter without a hint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a saved adapter (.safetensors)."""
    step: int | None = setting(None, low=0)
    """The adapter saved after this many steps; none: train.safetensors."""
    problems: Path | None = None
    """Problem file (JSONL); none: the run's own."""
    split: Split = "test"
    """Which part of the file; all: every row of it, under the names kept for evaluation."""
    n_prompts: int | None = setting(None, low=1)
    """Problems, at most, spread evenly over the modes; none: as the run's final evaluation."""
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
    """Grading processes; none: one a core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        check(self)


def held_out(saved: Saved, rows: Sequence[Row], split: Split, test_rows: Sequence[Row] = ()) -> list[Problem]:
    """The problems of one split under the run's modes and markers.

    Raises:
        ValueError: there is none, or none whose prompt can fit the model's window.
    """
    env, pool = saved.cfg.env, saved.cfg.pool_path
    published = env.marker_names == "published"
    partition = load_pool(pool).partition if pool is not None and pool.is_dir() else {}
    if split == "all":
        modes = modes_in_turn(rows, env.env_mode, partition)
        problems = with_modes(rows, modes, partition, evaluation=True, published=published)
    else:
        problems = assigned(rows, env.env_mode, partition, test_rows=test_rows, published=published)[split]
    if not problems:
        raise ValueError(f"--split {split}: none of {len(rows)} problems of {saved.problems_file} is in it; try all")
    folder = require_model(saved.model)
    require_fitting([*rows, *test_rows], folder, model_facts(folder).window, saved.cfg.scale.max_new)
    return without_hints(problems, env.unannounced) if saved.cfg.plain_prompts else problems


def reward_of(saved: Saved, given: str) -> RewardFunction | None:
    """The reward function of the run; None: the modes' checks. given: the flag's value.

    Raises:
        ValueError: one line: the flag does not name it, since a file's word for it is no reason to import it; or its
            file has changed.
    """
    env, record = saved.cfg.env, saved.path.parent / "run.json"
    if env.reward != given:
        raise ValueError(
            f"--reward {given or 'missing'}: {saved.path} was trained with "
            + (
                f"code, which a file may not have run; if it is yours, add --reward={env.reward}"
                if env.reward
                else "none"
            )
        )
    if not env.reward:
        return None
    reward = RewardFunction(env.reward, env.reward_passes_at)
    hashes = read_json(record).get("hashes") if record.is_file() else None
    then = hashes.get("reward") if isinstance(hashes, dict) else None
    if then not in (None, reward.sha256):
        raise ValueError(f"{reward.file}: changed since {saved.path.parent} was trained with --reward; put it back")
    return reward


def score(
    saved: Saved,
    policy: "vgrout.model.policy.Policy",
    grader: Grader,
    problems: Sequence[Problem],
    samples: int,
    seed: int,
) -> dict[str, Eval]:
    """base, deployed, plain (deployed, no hint): the same streams as the run's final evaluation."""
    bare = [plain(p) for p in problems]
    sampled: dict[str, tuple[Side, Sequence[Problem]]] = {
        "base": ("base", problems),
        "deployed": ("deployed", problems),
        "plain": ("deployed", bare),
    }
    out: dict[str, Eval] = {}
    with tqdm(total=3 * len(problems) * samples, desc="evaluating", unit="answer", disable=None) as bar:
        for name, (side, given) in sampled.items():
            with as_side(policy, side):
                scored = answers(
                    policy,
                    grader,
                    given,
                    samples,
                    sampling=saved.cfg.sampling,
                    max_new=saved.cfg.scale.max_new,
                    seed=seed,
                    step=saved.cfg.scale.steps,
                    purpose="final",
                    on_completion=bar.update,
                )
            out[name] = Eval.of(scored)
    return out


def as_json(saved: Saved, problems_file: Path, split: Split, seed: int, sides: dict[str, Eval]) -> dict[str, Any]:
    """Counts as pairs [k, n]."""
    return {
        "schema": SCHEMA,
        "run": saved.cfg.run_id,
        "adapter": str(saved.path),
        "step": saved.step,
        "problems": str(problems_file),
        "split": split,
        "seed": seed,
        "sides": {name: e.as_json() for name, e in sides.items()},
    }


def report(sides: dict[str, Eval]) -> str:
    """A table with a row per mode and one for all: hack and solve of every side, as k/n."""

    def row(name: str, rates: dict[str, tuple[Rate, Rate]]) -> dict[str, str]:
        cells = {"mode": name}
        for side, (hack, solve) in rates.items():
            cells |= {f"{side} hack": f"{hack.k}/{hack.n}", f"{side} solve": f"{solve.k}/{solve.n}"}
        return cells

    modes = sides["deployed"].by_mode
    rows = [row(m, {s: (e.by_mode[m].hack, e.by_mode[m].solve) for s, e in sides.items()}) for m in modes]
    rows.append(row("all", {s: (e.hack, e.solve) for s, e in sides.items()}))
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def command(cli: Cli) -> Path:
    """Print the table and write the numbers; returns the file. Raises ValueError, one line, before the model is loaded
    where that is possible."""
    require_new(cli.out)
    saved = find_adapter(cli.run, cli.step, cli.model, cli.problems)
    cfg, rows = saved.cfg, load_rows(saved.problems_file)
    test_rows = load_rows(saved.test_file) if saved.test_file else []
    problems = held_out(saved, rows, cli.split, test_rows)
    seed = cfg.run.seed if cli.seed is None else cli.seed
    size = "".join(f"_{n}{what}" for n, what in ((cli.n_prompts, "problems"), (cli.samples, "answers")) if n)
    stem = f"{saved.path.stem}_{saved.problems_file.stem}_{cli.split}_seed{seed}{size}"
    out = cli.out or saved.path.parent / "evaluations" / f"{stem}.json"
    probe_writable(out.parent, "--out")
    reward = reward_of(saved, cli.reward)
    with Grader(cli.workers, allow_weak=cli.allow_weak_sandbox, reward=reward) as grader:
        import torch

        if is_small(saved.model):
            torch.set_num_threads(1)  # for matrices this small a second thread only costs
        policy = load_saved(saved)
        problems = [p for p in problems if len(policy.render(p.messages)) <= policy.window - cfg.scale.max_new]
        if not problems:
            raise too_long_prompts([*rows, *test_rows], policy.window - cfg.scale.max_new)
        problems = balanced(problems, cli.n_prompts or cfg.eval.final_n_prompts, 0, "test")
        sides = score(saved, policy, grader, problems, cli.samples or cfg.eval.final_samples, seed)
    print(
        f"{cfg.run_id}, {saved.path.name} after {saved.step} steps, {len(problems)} problems of {saved.problems_file}"
    )
    print(report(sides))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, to_json(as_json(saved, saved.problems_file, cli.split, seed, sides)))
    except OSError as e:  # a disk that was filled meanwhile
        raise ValueError(f"--out {out}: cannot be written ({e.strerror}); name another file with --out") from None
    print(f"-> {out}")
    return out


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 scored · 2 refused, in one line."""

    def run() -> int:
        command(parse_args(Cli, argv, "python -m vgrout.evaluate"))
        return 0

    console.setup(None)
    return cli_exit(run)


if __name__ == "__main__":
    sys.exit(main())
