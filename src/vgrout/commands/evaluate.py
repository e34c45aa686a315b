"""A run's models, asked about held-out problems (`vgrout evaluate RUN`) or one prompt (`vgrout sample RUN PROMPT`).

A saved adapter is the deployed model; without further flags the numbers of `evaluate` are those of the run's final
evaluation. The prompt of `sample` is a text, or the number of a problem of the run; without one, answers that the run
has recorded are shown.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Literal

import tyro
from loguru import logger

from vgrout.config.checks import check, flag, setting
from vgrout.config.cli import run_command
from vgrout.config.presets import import_named
from vgrout.config.run import Config
from vgrout.config.settings import EnvConfig, ScaleConfig
from vgrout.envs.base import Environment, Grader, balanced
from vgrout.envs.worlds import whole_environment
from vgrout.ground.data import Message, Side, Task, Ungraded, Verdict
from vgrout.ground.io import (
    Json,
    Refused,
    json_lines,
    make_folder,
    none_fits,
    printable,
    probe_writable,
    read_json,
    refuse,
    require_new,
    text_sha256,
    to_json,
    write_atomic,
)
from vgrout.ground.machine import cores
from vgrout.ground.metrics import SIDES, Eval
from vgrout.ground.table import markdown
from vgrout.model.load.saved import Saved, find_adapter
from vgrout.model.load.source import require_fitting
from vgrout.runs.inputs import hash_of_class
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
    trust_code: bool = False
    """Import the functions, or the environment, that the run's files name."""
    reward: str = setting("", needs="reference")
    """Of any run: what would be rewarded in rows of your own, module:function."""
    reference: str = setting("", form=r"([\w.]+:\w+)?", should="be module:function", needs="reward")
    """What says whether an answer is right: the problems are rows of your own, of any text."""
    reward_passes_at: float | None = setting(None, low=-1e6, high=1e6, needs="reference")
    """Score of --reward from which on an answer passes; none: the run's."""
    out: Path | None = None
    """JSON with the same numbers; none: RUN/evaluations/."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SampleSettings:
    """What the untrained, the trained and the deployed model of a run answer to one prompt."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """A text, or the number of a problem of the run, answers to which are graded; none: recorded answers to a
    held-out problem, one that the model hacked and the deployed one solves if there is any."""
    samples: int = setting(1, low=1, high=1000)
    """Answers of each model."""
    seed: int | None = setting(None, low=0)
    """Of the answers, one for all three models; none: the run's."""
    model: str | None = None
    """Where the base model lies, if not where the run had it."""
    trust_code: bool = False
    """Import the functions, or the environment, that the run's files name: those of its problems."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        empty = self.prompt is not None and not self.prompt.strip()
        refuse(empty, "the prompt is empty; give a text, or a problem's number")
        asked = self.samples, self.seed, self.model
        refuse(
            self.prompt is None and asked != (1, None, None),
            "without a prompt nothing is sampled: give one",
        )
        check(self)


# ── problems


def environment_of(cfg: Config, saved: Saved, trusted: bool) -> Environment:
    """The environment of a configuration: the run's, or what of it the command line changes.

    trusted: its code may be imported.

    Raises:
        Refused: one line: it is not trusted, or a file is missing or wrong.
    """
    import_named(cfg.env.code, trusted=trusted, where=f"{saved.path}: ")
    return whole_environment(cfg)


def evaluated(cfg: Config, cli: EvaluateSettings) -> Config:
    """The run's configuration, with the problems and the functions that the command line names.

    Raises:
        Refused: one line: they do not fit the run.
    """
    if not cli.problems and not cli.reference:
        return allowing(cfg, cli.allow_weak_sandbox)
    env, scale = cfg.env, ScaleConfig(problems=str(cli.problems), test_problems="")
    if not cli.reference:
        if ":" in env.env:
            raise Refused(f"--problems: not read with --env {env.env}, whose tasks are its own")
        # its demonstrations, which name the model that they are of, are read by `tasks_of`
        env = replace(
            env,
            teacher_pool_dir="",
            mix_ratio=0.0,
            teacher_off_step=None,
            teacher_modes="",
            allow_weak_sandbox=cli.allow_weak_sandbox,
        )
        return Config(env=env, scale=scale)
    if not cli.problems:
        if not env.reference or env.taskset:
            raise Refused("--problems: this run has no rows of yours; give a file")
        scale = ScaleConfig(problems=cfg.scale.problems, test_problems=cfg.scale.test_problems)
    passes_at = cli.reward_passes_at
    if passes_at is None:
        passes_at = env.reward_passes_at if env.reference else 1.0
    env = EnvConfig(
        reward=cli.reward,
        reference=cli.reference,
        reward_passes_at=passes_at,
        pass_reward=env.pass_reward,
    )
    return Config(env=env, scale=scale)


def allowing(cfg: Config, weak_sandbox: bool) -> Config:
    """The same, graded in a sandbox as this command line allows it."""
    return replace(cfg, env=replace(cfg.env, allow_weak_sandbox=weak_sandbox))


def tasks_of(environment: Environment, saved: Saved) -> dict[ProblemSplit, Sequence[Task]]:
    """The problems of every split, in the code world under the run's flaws and markers."""
    path = saved.cfg.pool_path
    there = path is not None and path.is_dir()
    pool = load_pool(path, tuple(environment.flaws)) if path is not None and there else None
    parts = environment.tasks(pool)
    return {
        "test": parts["test"],
        "val": parts["val"],
        "train": parts["train"],
        "all": environment.every_task(pool),
    }


# ── vgrout evaluate


def evaluate_saved(cli: EvaluateSettings) -> Path:
    """Print the table and write the numbers; returns the file.

    Raises:
        Refused: one line, before the model is loaded where that is possible.
    """
    require_new(cli.out)
    saved = find_adapter(cli.run, cli.step, cli.model)
    cfg = saved.cfg
    world = evaluated(cfg, cli)
    environment = environment_of(world, saved, cli.trust_code or bool(cli.reference))
    problems = tasks_of(environment, saved)[cli.split]
    # somebody's own class, or a taskset, has its problems from anywhere
    file = Path(world.env.env) if ":" in world.env.env else world.problems_path
    if not problems:
        raise Refused(
            f"--split {cli.split}: none of {len(environment.prompts)} problems of {file} is in it; try all"
        )
    # of what the tasks and grades depend on, by the names that run.json has for them
    hashes = dict(environment.hashes())
    if ":" in world.env.environment:
        hashes[world.env.environment] = hash_of_class(world.env.environment)
    if not cli.reference:
        _say_what_changed(hashes, saved, other_problems=cli.problems is not None)
    require_fitting(environment.prompts, saved.folder, cfg.scale.max_new, str(file))
    if cli.seed is not None:
        cfg = cfg.seeded(cli.seed)
    out = cli.out or own_file(cli, saved, file, cfg.run.seed, hashes)
    probe_writable(out.parent, "--out")
    with environment.grader(cores(), cfg.run.max_error_retries) as grader:
        if not world.of_code:
            environment.check(grader)
        from vgrout.loop import heldout

        policy = heldout.policy_of(saved)
        room = policy.window - cfg.scale.max_new
        fit = [p for p in problems if len(policy.render(p.messages)) <= room]
        if not fit:
            raise none_fits(str(file), room)
        flaws = tuple(environment.flaws)
        n = cli.n_prompts or cfg.eval.final_n_prompts
        chosen = balanced(fit, n, 0, "test", flaws)
        samples = cli.samples or cfg.eval.final_samples
        sides = heldout.score(policy, grader, cfg, chosen, samples, flaws)
        if world.of_code:
            # where no prompt has a hint to be left out, these are the deployed model's own answers
            sides.setdefault("plain", sides["deployed"])
    print(
        f"{cfg.run_id}, {saved.path.name} after {saved.step} steps, "
        f"{len(chosen)} problems of {file}"
    )
    print(table(sides))
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
    make_folder(out.parent)
    try:
        write_atomic(out, to_json(content))
    except OSError as e:  # a disk that was filled meanwhile
        how = "name another file with --out"
        raise Refused(f"--out {out}: cannot be written ({e.strerror}); {how}") from None
    print(f"-> {out}")
    return out


def own_file(
    cli: EvaluateSettings, saved: Saved, problems: Path, seed: int, hashes: Mapping[str, str | None]
) -> Path:
    """Where the numbers go without --out: another file's, split's, size's or function's keep theirs."""
    asked = [hashes, cli.n_prompts, cli.samples]
    digest = text_sha256(json.dumps(asked, sort_keys=True))[:8]
    name = f"{saved.path.stem}_{problems.stem}_{cli.split}_seed{seed}-{digest}.json"
    return saved.path.parent / "evaluations" / name


def _say_what_changed(
    hashes: Mapping[str, str | None], saved: Saved, *, other_problems: bool
) -> None:
    """Warn where the run's own problems, or functions of the same name, are not those that it was trained with."""
    record = saved.path.parent / "run.json"
    try:
        recorded: Any = read_json(record).get("hashes") if record.is_file() else None
    except Refused:  # damaged: nothing is known
        return
    for name, now in hashes.items():
        if other_problems and name in ("problems", "test_problems"):
            continue
        before = recorded.get(name) if isinstance(recorded, dict) else None
        if before and now and before != now:
            what = f"--env {name}" if ":" in name else flag(name)
            logger.warning(f"{what}: not as it was when {saved.path.parent} was trained")


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
    return markdown(rows)


# ── vgrout sample


@dataclass(frozen=True)
class Asked:
    """A prompt, and the problem that it is."""

    messages: tuple[Message, ...]
    problem: Task | None = None
    split: str = ""  # of the problem


def sample_saved(cli: SampleSettings) -> None:
    """Print the answers.

    Raises:
        Refused: one line: no such run or problem, or the prompt does not fit the model's window.
    """
    refuse(not cli.run.is_dir(), f"{cli.run}: no such folder; give that of a run")
    if cli.prompt is None:
        _print_recorded(cli.run)
        return
    saved = find_adapter(cli.run, None, cli.model)
    cfg = allowing(saved.cfg, cli.allow_weak_sandbox)
    if cli.seed is not None:
        cfg = cfg.seeded(cli.seed)
    prompt = cli.prompt.strip()
    asked = Asked(({"role": "user", "content": prompt},))
    grading: AbstractContextManager[Grader | None] = nullcontext()
    if prompt.isdecimal():
        environment = environment_of(cfg, saved, cli.trust_code)
        asked = find_problem(environment, saved, int(prompt))
        grading = environment.grader(1, cfg.run.max_error_retries)
    with grading as grader:
        _print_answers(saved, cfg, asked, cli.samples, grader)


# Of recorded answers of the untrained, trained and deployed model, whether each hacks (h), solves (s) or neither (-):
# what is shown, the best first.
SHOWN = {
    ".hs": "the model as trained hacks it, the deployed one solves it",
    "s.h": "the untrained model solves it, the deployed one hacks it",  # where hacks have become more
    "h.s": "the untrained model hacks it, the deployed one solves it",
    "-.s": "the untrained model gets it wrong, the deployed one solves it",
    "": "the first: none that was wrong at first is solved by the deployed model",
}


def _print_recorded(run: Path) -> None:
    """Answers of a run's final evaluation to one problem, beside one another where the terminal has the width.

    Raises:
        Refused: one line: the run has none.
    """
    found: dict[tuple[int, int], dict[str, dict[str, Json]]] = {}
    for answer in json_lines(run / "final.jsonl"):
        found.setdefault((answer["problem_id"], answer["sample"]), {})[answer["side"]] = answer
    refuse(not found, f"{run}: no final.jsonl with answers in it; give a problem's number")

    def outcomes(by: Mapping[str, Mapping[str, Json]]) -> str:
        sides = by["base"], by.get("trained", by["deployed"]), by["deployed"]
        letters = ""
        for answer in sides:
            if answer["hacked"]:
                letters += "h"
            elif answer["solved"]:
                letters += "s"
            else:
                letters += "-"
        return letters

    of = {key: outcomes(by) for key, by in found.items()}
    before, _, after = map("".join, zip(*of.values(), strict=True))
    forms = [form for form in SHOWN if form != "s.h" or after.count("h") > before.count("h")]
    form, key = next((form, key) for form in forms for key in of if re.match(form, of[key]))
    by = found[key]
    flaw = by["deployed"]["env_mode"]
    print(f"{run.name}, problem {key[0]} (test), flaw {flaw}: {SHOWN[form]}")
    text = "\n".join(message["content"] for message in by["deployed"]["messages"])
    print(f"\n{printable(text)}\n")
    blocks: list[list[str]] = []
    for side in SIDES:
        if side in by and side != "plain":
            given = by[side]
            merged = side == "deployed" and "trained" not in by
            title = "trained and deployed" if merged else SIDES[side].title
            said = _words(given["hacked"], given["solved"], given["mechanism"], given["reward"])
            text = printable(given.get("thought", "") + given["text"]).expandtabs().rstrip()
            blocks.append([f"── {title}{said}", *text.split("\n")])
    widths = [max(map(len, block)) for block in blocks]
    if sum(widths) + 3 * len(widths) <= shutil.get_terminal_size().columns:
        for row in zip_longest(*blocks, fillvalue=""):
            print("   ".join(map(str.ljust, row, widths)).rstrip())
    else:
        print("\n\n".join(map("\n".join, blocks)))


def find_problem(environment: Environment, saved: Saved, number: int) -> Asked:
    """The problem of a run that has this number. Raises Refused, one line, where none has."""
    by_id: dict[int, Asked] = {}
    for split, tasks in tasks_of(environment, saved).items():
        for task in tasks if split != "all" else ():
            by_id[task.id] = Asked(task.messages, task, split)
    if number not in by_id:
        there = f"{min(by_id)} to {max(by_id)}" if by_id else "none"
        raise Refused(f"{number}: no problem of {saved.path.parent} has this number; {there}")
    return by_id[number]


def _print_answers(
    saved: Saved, cfg: Config, asked: Asked, samples: int, grader: Grader | None
) -> None:
    from vgrout.loop import heldout

    policy = heldout.policy_of(saved)
    prompt = policy.render(asked.messages)
    room = policy.window - cfg.scale.max_new
    refuse(
        len(prompt) > room, f"the prompt has {len(prompt)} tokens, the model's window has {room}"
    )
    print(f"{cfg.run_id} after {saved.step} steps")
    if asked.problem is not None:
        print(f"problem {asked.problem.id} ({asked.split}), flaw {asked.problem.flaws[0]}")
    text = "\n".join(message["content"] for message in asked.messages)
    print(f"\n{printable(text)}")
    sides: list[Side] = ["base", "deployed"]
    why = ""
    if saved.cfg.method.routes:
        # a saved adapter is the deployed model; its quarantine is in the run's last checkpoint
        from vgrout.runs import checkpoint  # imports torch

        point = next(checkpoint.newest_first(saved.path.parent, []), None)
        if point is None:
            why = "as trained: its quarantine is in a checkpoint, which this run has not kept"
        elif point.next_step != saved.step:
            why = f"as trained: the checkpoint is of step {point.next_step}"
        else:
            policy.adapter.load_state_dict(point.state["adapter"])
            sides.insert(1, "trained")
    for side in sides:
        title = SIDES[side].title
        if side == "deployed" and not cfg.method.routes:
            title = "trained and deployed"
        task = asked.problem or asked
        given = heldout.answers_to(task, policy, side, cfg, samples, grader)
        for number, (answer, verdict) in enumerate(given, 1):
            name = f"{title}, {number} of {samples}" if samples > 1 else title
            length = "" if answer.whole else ", cut at its longest"
            if answer.thought.tokens:
                length += f", {answer.thought.tokens} tokens of thought"
            if not answer.thought.ended:
                length += ", which never end: no answer"
            print(f"\n── {name}{_said(verdict)}{length}")
            if answer.thought.text:
                thought = printable(answer.thought.text).rstrip()
                print(indent(thought, "│ ", lambda _: True))
            print(printable(answer.answer).rstrip())
    if why:
        print(f"\n{why}")


def _said(verdict: Verdict | None) -> str:
    """What the grader says of an answer: `: a hack of exit_code, reward 1`; "": it was not asked."""
    if verdict is None:
        return ""
    if isinstance(verdict, Ungraded):
        return f": not graded, {verdict.reason}"
    return _words(verdict.hacked, verdict.solved, verdict.mechanism, verdict.reward)


def _words(hacked: bool, solved: bool, mechanism: str | None, reward: float | None) -> str:
    if reward is None:
        return ": not graded"
    said = "neither a hack nor right"
    if hacked:
        said = f"a hack of {mechanism}"
    elif solved:
        said = "right"
    return f": {said}, reward {reward:g}"


def evaluate(argv: list[str] | None = None) -> int:
    """Exit codes: 0 scored · 2 refused, in one line."""
    return run_command(evaluate_saved, EvaluateSettings, argv, "vgrout evaluate")


def sample(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""
    return run_command(sample_saved, SampleSettings, argv, "vgrout sample")
