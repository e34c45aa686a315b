"""`vgrout evaluate RUN [--step N] [--problems FILE]`: scores a saved adapter on held-out problems.

A saved adapter is the deployed model; without further flags the numbers are those of the run's
final evaluation.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from loguru import logger
from tabulate import tabulate

from vgrout import console
from vgrout.cli import cli_exit
from vgrout.config.checks import check, flag, setting
from vgrout.config.env import EnvConfig
from vgrout.config.groups import ScaleConfig
from vgrout.config.names import parse_command
from vgrout.config.run import Config
from vgrout.config.world_names import WORLDS
from vgrout.cores import cores
from vgrout.data import Message, Task
from vgrout.envs import base
from vgrout.envs.base import balanced, none_fits
from vgrout.envs.code.environment import CodeEnvironment
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.grading.reward import reward_function
from vgrout.envs.code.modes import MODES
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import (
    ProblemRow,
    load_rows,
    modes_in_turn,
    with_modes,
    without_hints,
)
from vgrout.envs.text import TextEnvironment, fingerprint
from vgrout.envs.worlds import environment_class
from vgrout.errors import Refused
from vgrout.files import (
    file_sha256,
    hash_of_file,
    probe_writable,
    read_json,
    require_new,
    to_json,
    write_atomic,
)
from vgrout.metrics import SIDES, Eval
from vgrout.model.saved import Saved, find_adapter
from vgrout.model.source import require_fitting
from vgrout.runs.inputs import hash_of_class, source_of
from vgrout.scoring import Failures, ScoringFunction
from vgrout.teacher.pools import load_pool

SCHEMA = "evaluation_v1"
ProblemSplit = Literal["test", "val", "train", "all"]


@dataclass(frozen=True)
class EvaluateSettings:
    """Score a saved adapter on held-out problems: the untrained model, the deployed one, and the deployed one
    without a hint."""

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
    """The run's own --reward, once more: a file's word alone is no reason to import it. With --reference, of any run:
    what would be rewarded in rows of your own."""
    reference: str = setting("", form=r"([\w.]+:\w+)?", should="be module:function")
    """What says whether an answer is right: the problems are rows of your own, of any text."""
    env: str = ""
    """The run's own --env verifiers:NAME or module:Class, once more, where it has one."""
    reward_passes_at: float | None = setting(None, low=-1e6, high=1e6, needs="reference")
    """Score of --reward from which on an answer passes; none: the run's."""
    out: Path | None = None
    """JSON with the same numbers; none: RUN/evaluations/."""
    workers: int | None = setting(None, low=1)
    """Grading processes; none: one per core."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        check(self)


def evaluate_saved(cli: EvaluateSettings) -> Path:
    """Print the table and write the numbers; returns the file.

    Raises:
        Refused: one line, before the model is loaded where that is possible.
    """
    require_new(cli.out)
    saved = find_adapter(cli.run, cli.step, cli.model)
    cfg = saved.cfg
    world = world_of(saved, cli)
    if not world.problems:
        raise Refused(
            f"--split {cli.split}: none of {len(world.prompts)} problems of {world.file} is in it; try all"
        )
    file = world.file
    _say_what_changed(saved, world, cli)
    require_fitting(world.prompts, saved.folder, cfg.scale.max_new, str(file))
    if cli.seed is not None:
        cfg = replace(cfg, run=replace(cfg.run, seed=cli.seed))
    out = cli.out or _own_file(cli, saved, file, cfg.run.seed, world.by)
    probe_writable(out.parent, "--out")
    with world.grader() as grader:
        world.check(grader)
        from vgrout import answering  # imports torch

        policy = answering.policy_of(saved)
        room = policy.window - cfg.scale.max_new
        fit = [p for p in world.problems if len(policy.render(p.messages)) <= room]
        if not fit:
            raise none_fits(str(file), room)
        n = cli.n_prompts or cfg.eval.final_n_prompts
        chosen = balanced(fit, n, 0, "test", world.flaws)
        samples = cli.samples or cfg.eval.final_samples
        sides = answering.score(policy, grader, cfg, chosen, samples, world.flaws)
        if isinstance(chosen[0], Problem):
            # where no prompt has a hint to be left out, these are the deployed model's own answers
            sides.setdefault("plain", sides["deployed"])
    print(
        f"{cfg.run_id}, {saved.path.name} after {saved.step} steps, "
        f"{len(chosen)} problems of {file}"
    )
    print(table(sides))
    if cfg.env.thinking:
        print(thoughts_line(sides))
    content = {
        "schema": SCHEMA,
        "run": cfg.run_id,
        "adapter": str(saved.path),
        "step": saved.step,
        "problems": str(file),
        "split": cli.split,
        "seed": cfg.run.seed,
        **({"graded_by": grader.stamp["graded_by"]} if cli.reference else {}),
        "sides": {side: scored.as_json() for side, scored in sides.items()},
    }
    _write(out, to_json(content))
    print(f"-> {out}")
    return out


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text)
    except OSError as e:  # a disk that was filled meanwhile
        raise Refused(
            f"--out {out}: cannot be written ({e.strerror}); name another file with --out"
        ) from None


def _own_file(cli: EvaluateSettings, saved: Saved, problems: Path, seed: int, by: str) -> Path:
    """Where the numbers go without --out: another file's, split's, size's or function's keep theirs.

    by: a fingerprint of the functions that grade, if they are not the run's for certain.
    """
    name = f"{saved.path.stem}_{problems.stem}-{file_sha256(problems)[:8]}_{cli.split}_seed{seed}"
    if cli.n_prompts:
        name += f"_{cli.n_prompts}problems"
    if cli.samples:
        name += f"_{cli.samples}answers"
    if by:
        name += f"_by-{by}"
    return saved.path.parent / "evaluations" / f"{name}.json"


@dataclass(frozen=True)
class World:
    """What is evaluated on, its files read and checked. check: raises Refused where the grader cannot grade."""

    file: Path
    problems: Sequence[Task]  # of the split
    prompts: Sequence[tuple[Message, ...]]  # of all of them
    flaws: Sequence[str]  # all that there are, in the usual order
    grader: Callable[[], base.Grader]
    check: Callable[[Any], object] = lambda _: None
    by: str = ""  # fingerprint of functions that the command line names
    # of its files and functions, by the names that run.json has for them
    hashes: Mapping[str, str | None] = field(default_factory=dict)


def world_of(saved: Saved, cli: EvaluateSettings) -> World:
    """What the command line and the run say is evaluated on. Raises Refused, one line."""
    env = saved.cfg.env
    if env.taskset:
        return taskset_world(saved, cli)
    if saved.cfg.own_environment and not cli.problems:
        return own_world(saved, cli)
    if cli.env:
        raise Refused(
            f"--env {cli.env}: {saved.path} was trained with --env {env.env}; leave it out"
        )
    if cli.reference:
        return rows_world(saved, cli)
    if env.environment in WORLDS and env.environment not in ("code", "text"):
        return built_in_world(saved, cli)
    return code_world(saved, cli)


def own_world(saved: Saved, cli: EvaluateSettings) -> World:
    """The tasks of somebody's own environment, which the command line has to name again. Raises Refused, one line."""
    cfg = saved.cfg
    name = cfg.env.env
    if cli.env != name:
        or_else = "; or give rows and functions with --problems, --reward and --reference"
        raise _not_named(saved, "env", cli.env, f"--env={name}{or_else}")
    if cli.reward or cli.reference or cli.reward_passes_at is not None:
        raise Refused(
            f"--reward, --reference, --reward-passes-at: not read with --env {name}; leave them out"
        )
    own = environment_class(name)
    world = _world(own.of_run(cfg), source_of(own) or Path(name), saved, cli)
    return replace(world, hashes={**world.hashes, name: hash_of_class(name)})


def taskset_world(saved: Saved, cli: EvaluateSettings) -> World:
    """The tasks of a taskset of verifiers, which the command line has to name again. Raises Refused, one line."""
    env = saved.cfg.env
    named = {"env": env.env, "reference": env.reference if ":" in env.reference else ""}
    for name, own in named.items():
        if getattr(cli, name) != own:
            raise _not_named(saved, name, getattr(cli, name), f"{flag(name)}={own}")
    if cli.problems or cli.reward or cli.reward_passes_at is not None:
        raise Refused(
            f"--problems, --reward, --reward-passes-at: not read with --env {env.env}; leave them out"
        )
    environment = environment_class(env.environment).of_run(saved.cfg)
    return _world(environment, environment.rubric.file, saved, cli)


def built_in_world(saved: Saved, cli: EvaluateSettings) -> World:
    """Rows whose functions come with the package. Raises Refused, one line."""
    of_run = saved.cfg
    file = cli.problems or of_run.problems_path
    env = EnvConfig(env=of_run.env.env, pass_reward=of_run.env.pass_reward)
    environment = environment_class(env.env).of_run(
        Config(env=env, scale=ScaleConfig(problems=str(file)))
    )
    if cli.reward:
        raise Refused("--reward: goes with --reference; leave it out")
    return _world(environment, file, saved, cli)


def _not_named(saved: Saved, name: str, given: str, again: str) -> Refused:
    """The refusal of a command line that does not name a run's code again. name: of the setting. again: flags."""
    return Refused(
        f"{flag(name)} {given or 'missing'}: {saved.path} was trained with code, which a file may not have run; if it "
        f"is yours, add {again}"
    )


def _world(
    environment: base.Environment, file: Path, saved: Saved, cli: EvaluateSettings, by: str = ""
) -> World:
    """The world of an environment but the code world's. by: as in `World`.

    Raises:
        Refused: one line: a file of it is missing.
    """
    if environment.absent:
        raise Refused(environment.absent[0])
    problems: Sequence[Task]
    if cli.split != "all":
        problems = environment.tasks()[cli.split]
    elif isinstance(environment, TextEnvironment):
        problems = [*environment.rows, *environment.test_rows]  # in the order of the files
    else:
        problems = [task for part in environment.tasks().values() for task in part]
    retries = saved.cfg.run.max_error_retries
    return World(
        file,
        problems,
        environment.prompts,
        tuple(environment.flaws),
        lambda: environment.grader(cli.workers or cores(), retries),
        environment.check,
        by,
        environment.hashes(),
    )


def code_world(saved: Saved, cli: EvaluateSettings) -> World:
    """Python functions. Raises Refused, one line."""
    cfg = saved.cfg
    if cfg.env.reference:
        again = f"--reward={cfg.env.reward} --reference={cfg.env.reference}"
        raise _not_named(saved, "reference", cli.reference, again)
    if not cfg.of_code:
        raise Refused(
            f"{saved.path}: was trained with --env {cfg.env.env}; give rows and functions with --problems, --reward "
            "and --reference"
        )
    file, test_file = cfg.problems_path, cfg.test_problems_path
    if cli.problems:
        file, test_file = cli.problems, None
    rows = load_rows(file)
    test_rows = load_rows(test_file) if test_file else []
    problems = problems_of(saved, rows, test_rows, cli.split)
    reward = reward_of(saved, cli.reward)
    return World(
        file,
        problems,
        [row.messages for row in (*rows, *test_rows)],
        MODES,
        lambda: Grader(
            cli.workers,
            allow_weak=cli.allow_weak_sandbox,
            reward=reward,
            failures=Failures(),
        ),
        hashes={
            "problems": hash_of_file(file),
            "test_problems": hash_of_file(test_file) if test_file else None,
        },
    )


def _say_what_changed(saved: Saved, world: World, cli: EvaluateSettings) -> None:
    """Warn where the run's own problems, or functions of the same name, are not those that it was trained with."""
    try:
        recorded = _recorded_hashes(saved)
    except Refused:  # damaged: nothing is known
        return
    env, names = saved.cfg.env, list[str]()
    if not cli.problems:
        names += ["problems", "test_problems", env.env]
    if env.taskset or (cli.reward == env.reward and cli.reference == env.reference):
        names += ["reward", "reference"]
    for name in names:
        before, now = recorded.get(name), world.hashes.get(name)
        if before and now and before != now:
            what = f"--env {name}" if name == env.env else f"--{name.replace('_', '-')}"
            logger.warning(f"{what}: not as it was when {saved.path.parent} was trained")


def rows_world(saved: Saved, cli: EvaluateSettings) -> World:
    """Rows of a user's own, of any text. Raises Refused, one line."""
    of_run = saved.cfg
    if not cli.reward:
        raise Refused("--reference: goes with --reward; give both")
    if cli.allow_weak_sandbox:
        raise Refused("--allow-weak-sandbox: not read with --reference; leave it out")
    if not (cli.problems or of_run.env.reference):
        raise Refused("--problems: a run in another world has no rows of yours; give a file")
    passes_at = of_run.env.reward_passes_at if of_run.env.reference else 1.0
    if cli.reward_passes_at is not None:
        passes_at = cli.reward_passes_at
    env = EnvConfig(
        reward=cli.reward,
        reference=cli.reference,
        reward_passes_at=passes_at,
        pass_reward=of_run.env.pass_reward,
    )
    scale = ScaleConfig(problems=str(cli.problems))
    if not cli.problems:
        test_file = of_run.scale.test_problems
        scale = ScaleConfig(problems=of_run.scale.problems, test_problems=test_file)
    environment = environment_class("text").of_run(Config(env=env, scale=scale))
    by = fingerprint(environment.proxy, environment.reference)[:8]
    return _world(environment, Path(scale.problems), saved, cli, by)


def problems_of(
    saved: Saved, rows: Sequence[ProblemRow], test_rows: Sequence[ProblemRow], split: ProblemSplit
) -> list[Problem]:
    """The problems of one split under the run's modes and markers; [] if there are none."""
    cfg = saved.cfg
    path = cfg.pool_path
    pool = load_pool(path) if path is not None and path.is_dir() else None
    if split != "all":
        return CodeEnvironment(cfg, rows, test_rows).tasks(pool)[split]
    partition = pool.partition if pool else {}
    problems = with_modes(
        rows,
        modes_in_turn(rows, cfg.env.env_mode, partition),
        partition,
        evaluation=True,
        published=cfg.env.marker_names == "published",
    )
    return without_hints(problems, cfg.env.unannounced) if cfg.plain_prompts else problems


def reward_of(saved: Saved, given: str) -> ScoringFunction | None:
    """The reward function of the run; None if it was rewarded by the modes' checks.

    given: the value of --reward, which has to name the function again: that a file names it is no
    reason to import it.

    Raises:
        Refused: one line: the flag does not name it, or its file has changed.
    """
    env = saved.cfg.env
    if env.reward != given:
        own = "none"
        if env.reward:
            own = f"code, which a file may not have run; if it is yours, add --reward={env.reward}"
        raise Refused(f"--reward {given or 'missing'}: {saved.path} was trained with {own}")
    if not env.reward:
        return None
    reward = reward_function(env.reward, env.reward_passes_at)
    if _recorded_hashes(saved).get("reward") not in (None, reward.sha256):
        raise Refused(
            f"{reward.file}: changed since {saved.path.parent} was trained with --reward; "
            "put it back"
        )
    return reward


def _recorded_hashes(saved: Saved) -> Mapping[str, str | None]:
    """Of the files and functions that the run was trained with, as far as its run.json has them.

    Raises:
        Refused: run.json is damaged.
    """
    record = saved.path.parent / "run.json"
    hashes = read_json(record).get("hashes") if record.is_file() else None
    return hashes if isinstance(hashes, dict) else {}


def table(sides: dict[str, Eval]) -> str:
    """A row per flaw and one for all: hack and solve of every side, as k/n."""
    rows: list[dict[str, str]] = []
    for flaw in (*sides["deployed"].by_mode, "all"):
        row = {"flaw": flaw}
        for side, scored in sides.items():
            title = SIDES[side].title
            rates = scored if flaw == "all" else scored.by_mode[flaw]
            row[f"hack {title}"] = f"{rates.hack.k}/{rates.hack.n}"
            row[f"solve {title}"] = f"{rates.solve.k}/{rates.solve.n}"
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def thoughts_line(sides: dict[str, Eval]) -> str:
    """How long every side's thoughts are, and how many of its answers ended."""
    of_sides: list[str] = []
    for side, scored in sides.items():
        of_sides.append(f"{side} {scored.thought:.0f} ({scored.finished.percent} % ended)")
    return f"tokens of thought, mean per answer: {' · '.join(of_sides)}"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 scored · 2 refused, in one line."""

    def run() -> int:
        evaluate_saved(parse_command(EvaluateSettings, argv, "vgrout evaluate"))
        return 0

    console.setup(None)
    return cli_exit(run)


if __name__ == "__main__":
    sys.exit(main())
