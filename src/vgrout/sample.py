"""`vgrout sample RUN PROMPT`: what the untrained, the trained and the deployed model answer to one prompt.

The prompt is a text, or a problem of the run: its number, or its own words. Answers to a problem are
graded as in the run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Annotated, get_args

import tyro

from vgrout import console
from vgrout.cli import cli_exit
from vgrout.config.checks import check, flag, setting
from vgrout.config.names import parse_command
from vgrout.config.run import Config
from vgrout.data import Completion, Message, Task, Ungraded, Verdict
from vgrout.envs import base
from vgrout.envs.code.grading.grade import Grader
from vgrout.envs.code.problems import load_rows
from vgrout.envs.text import load_rows as load_text_rows
from vgrout.errors import Refused, refuse
from vgrout.evaluate import EvaluateSettings, ProblemSplit, problems_of, reward_of, world_of
from vgrout.files import printable
from vgrout.metrics import SIDES
from vgrout.model.saved import Saved, find_adapter
from vgrout.scoring import Failures


@dataclass(frozen=True)
class SampleSettings:
    """What the untrained, the trained and the deployed model of a run answer to one prompt."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    prompt: Annotated[str, tyro.conf.Positional]
    """A text, or a problem of the run, by its number or its own words; the answers to a problem are
    graded."""
    samples: int = setting(1, low=1, high=1000)
    """Answers of each model."""
    seed: int | None = setting(None, low=0)
    """Of the answers, one for all three models; none: the run's."""
    model: str | None = None
    """Where the base model lies, if not where the run had it."""
    reward: str = ""
    """The run's own --reward, once more: a file's word alone is no reason to import it."""
    reference: str = setting("", form=r"([\w.]+:\w+)?", should="be module:function")
    """The run's own --reference, once more, where it has one: with both, answers to its rows are graded."""
    env: str = ""
    """The run's own --env verifiers:NAME or module:Class, once more, where it has one: its problems are that code's."""
    allow_weak_sandbox: bool = False
    """Go on where the sandbox cannot keep an answer from reading the expected values."""

    def __post_init__(self) -> None:
        refuse(not self.prompt.strip(), "the prompt is empty; give a text, or a problem's number")
        check(self)


@dataclass(frozen=True)
class Asked:
    """A prompt, and the problem that it is."""

    messages: tuple[Message, ...]
    problem: Task | None
    split: str  # of the problem; "": it is none


def sample_saved(cli: SampleSettings) -> None:
    """Print the answers.

    Raises:
        Refused: one line: no such run or problem, or the prompt does not fit the model's window.
    """
    refuse(not cli.run.is_dir(), f"{cli.run}: no such folder; give that of a run")
    saved = find_adapter(cli.run, None, cli.model)
    cfg = saved.cfg
    if cli.seed is not None:
        cfg = replace(cfg, run=replace(cfg.run, seed=cli.seed))
    asked = find_prompt(saved, cli.prompt, cli.env, cli.reference)
    grader = None
    if asked.problem is not None:
        grader = grader_of(saved, cli)
    elif cli.reward:
        raise Refused(f"--reward {cli.reward}: not read, the prompt is no problem of the run")
    try:
        _print_answers(saved, cfg, asked, cli.samples, grader)
        if asked.problem is not None and grader is None:
            env = cfg.env
            named = {"reward": env.reward, "reference": env.reference, "env": env.env}
            again = [f"{flag(name)}={code}" for name, code in named.items() if ":" in code]
            print(f"\nnot graded; add {' '.join(again)}")
    finally:
        if grader is not None:
            grader.close()


def grader_of(saved: Saved, cli: SampleSettings) -> base.Grader | None:
    """What grades the answers to a problem of the run; None: its functions, which a file may not have imported, are
    not named again.

    Raises:
        Refused: one line: they are named, and are not those of the run.
    """
    if saved.cfg.of_code and not cli.reference:
        env = saved.cfg.env
        return Grader(
            1,
            compile_reward=env.compile_reward,
            pass_reward=env.pass_reward,
            allow_weak=cli.allow_weak_sandbox,
            reward=reward_of(saved, cli.reward),
            failures=Failures(),
        )
    if saved.cfg.env.reference and not (cli.reward or cli.reference or cli.env):
        return None
    settings = EvaluateSettings(
        run=cli.run,
        split="all",
        reward=cli.reward,
        reference=cli.reference,
        env=cli.env,
        workers=1,
    )
    return world_of(saved, settings).grader()


def find_prompt(saved: Saved, given: str, env: str = "", reference: str = "") -> Asked:
    """Find the problem of a run that is meant by a number or by its own words; a text is taken as it is.

    env, reference: as the command line names them again; without them a taskset's code is not run.

    Raises:
        Refused: one line: there is no problem of this number.
    """
    by_id: dict[int, Asked] = {}
    cfg = saved.cfg
    file, test_file = cfg.problems_path, cfg.test_problems_path
    by_code = bool(cfg.env.taskset) or cfg.own_environment
    if by_code and env:
        named = EvaluateSettings(run=saved.path, split="all", env=env, reference=reference)
        for task in world_of(saved, named).problems:
            by_id[task.id] = Asked(task.messages, task, "")
    elif by_code and given.strip().isdecimal():
        raise Refused(f"{given}: a task of --env {cfg.env.env}; add --env={cfg.env.env}")
    elif by_code:
        pass  # a text
    elif not cfg.of_code and file.exists():
        for path in (file, test_file):
            for row in load_text_rows(path) if path else []:
                by_id[row.id] = Asked(row.messages, row, row.split or "")
    elif cfg.of_code:
        rows = load_rows(file)
        test_rows = load_rows(test_file) if test_file else []
        for split in get_args(ProblemSplit):
            if split != "all":
                for problem in problems_of(saved, rows, test_rows, split):
                    by_id[problem.id] = Asked(problem.messages, problem, split)
    given = given.strip()
    if given.isdecimal():
        found = by_id.get(int(given))
        if found is None:
            there = f"{min(by_id)} to {max(by_id)}" if by_id else "none"
            raise Refused(f"{given}: no problem of {saved.path.parent} has this number; {there}")
        return found
    for asked in by_id.values():
        if given in (asked.messages[-1]["content"].strip(), _as_text(asked.messages).strip()):
            return asked
    return Asked(({"role": "user", "content": given},), None, "")


def _as_text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def _print_answers(
    saved: Saved, cfg: Config, asked: Asked, samples: int, grader: base.Grader | None
) -> None:
    from vgrout import answering  # imports torch

    policy = answering.policy_of(saved)
    prompt = policy.render(asked.messages)
    room = policy.window - cfg.scale.max_new
    refuse(
        len(prompt) > room, f"the prompt has {len(prompt)} tokens, the model's window has {room}"
    )
    print(f"{cfg.run_id} after {saved.step} steps")
    if asked.problem is not None:
        split = f" ({asked.split})" if asked.split else ""
        print(f"problem {asked.problem.id}{split}, flaw {asked.problem.flaws[0]}")
    print(f"\n{printable(_as_text(asked.messages))}")
    sides, why = answering.sides_of(saved, policy)
    for side in sides:
        title = SIDES[side].title
        if side == "deployed" and not cfg.method.routes:
            title = "trained and deployed"
        given = answering.answers_to(
            asked.messages, asked.problem, policy, side, cfg, samples, grader
        )
        for number, (answer, verdict) in enumerate(given, 1):
            name = f"{title}, {number} of {samples}" if samples > 1 else title
            print(f"\n── {name}{_said(verdict)}{_how_it_ended(answer)}")
            if answer.thought.text:
                thought = printable(answer.thought.text).rstrip()
                print(indent(thought, "│ ", lambda _: True))
            print(printable(answer.answer).rstrip())
    if why:
        print(f"\n{why}")


def _how_it_ended(answer: Completion) -> str:
    """What is worth saying of an answer's length, and of its thought's; "": nothing."""
    said = "" if answer.whole else ", cut at its longest"
    if answer.thought.tokens:
        said += f", {answer.thought.tokens} tokens of thought"
    if not answer.thought.ended:
        said += ", which never end: no answer"
    return said


def _said(verdict: Verdict | None) -> str:
    """What the grader says of an answer: `: a hack of exit_code, reward 1`; "": it was not asked."""
    if verdict is None:
        return ""
    if isinstance(verdict, Ungraded):
        return f": not graded, {verdict.reason}"
    said = "neither a hack nor right"
    if verdict.hacked:
        said = f"a hack of {verdict.mechanism}"
    elif verdict.solved:
        said = "right"
    return f": {said}, reward {verdict.reward:g}"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 · 2 refused, in one line."""

    def run() -> int:
        sample_saved(parse_command(SampleSettings, argv, "vgrout sample"))
        return 0

    console.setup(None)
    return cli_exit(run)


if __name__ == "__main__":
    sys.exit(main())
