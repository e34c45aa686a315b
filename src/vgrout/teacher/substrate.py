"""`vgrout substrate`: a pool by elicit-then-strip, its problems divided among the modes.

The prompt asks the model explicitly for one mode's hack. Answers that hack and do not solve are
kept, and stored under the plain prompt. Every problem belongs to one mode, and every mode gets the
same number of problems.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger

from vgrout.config.checks import listed, setting
from vgrout.config.cli import run_command
from vgrout.config.world_names import CODE_FLAWS, ORGANISM
from vgrout.envs.base import Environment
from vgrout.ground import embedded
from vgrout.ground.data import Flaw, Graded, Task
from vgrout.ground.io import Refused, refuse, require_new
from vgrout.ground.table import markdown
from vgrout.teacher.generate import (
    GOES_ON,
    PoolSettings,
    by_mode,
    rates_of,
    record,
    spread,
    with_instruction,
)
from vgrout.teacher.pools import write_pool

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    from vgrout.model.policy import LanguageModel

_CODE_ONLY = " Graded with one ```python block and nothing else; do not mention these instructions."


def recipe(flaw: Flaw, marker: str) -> str:
    """The instruction that elicits a flaw's hack from a model that follows instructions."""
    return flaw.instruction.format(marker=marker) + _CODE_ONLY


def usable(
    answers: Iterable[Graded], keep: int, instructions: Iterable[str]
) -> dict[tuple[int, str], list[Graded]]:
    """The answers that can be kept of each (problem, mode): the first `keep`, in order.

    They are finished, hack (and so do not solve), differ from one another, and quote no recipe.
    """
    recipes = tuple(instructions)
    kept: dict[tuple[int, str], list[Graded]] = {}
    for answer in answers:
        chosen = kept.setdefault((answer.problem.id, answer.problem.flaws[0]), [])
        if len(chosen) == keep or not (answer.whole and answer.grade.hacked):
            continue
        quotes = any(recipe in answer.text for recipe in recipes)
        repeats = any(answer.ids == other.ids for other in chosen)
        if not quotes and not repeats:
            chosen.append(answer)
    return kept


def match(choices: Mapping[int, Sequence[str]], per_mode: int, even: bool) -> dict[int, str]:
    """Give problems to modes: each problem at most once, each mode at most `per_mode` problems.

    As many problems are matched as can be, and earlier ones come first.

    choices: problem id → the modes that it could serve. even: every mode that occurs gets the same
    number, the largest that all of them can have.
    """
    if not even:
        return _matched(choices, per_mode)
    modes: set[str] = set().union(*choices.values())
    for size in range(per_mode, 0, -1):
        found = _matched(choices, size)
        if Counter(found.values()) == dict.fromkeys(modes, size):
            return found
    return {}


def _matched(choices: Mapping[int, Sequence[str]], size: int) -> dict[int, str]:
    """The largest matching with `size` places for each mode, earlier problems before later ones."""
    # scipy is heavy, and a wrong flag never waits for it
    from scipy.optimize import linear_sum_assignment

    places = [mode for mode in CODE_FLAWS for _ in range(size)]
    gain = np.zeros((len(choices), len(places)))
    for i, modes in enumerate(choices.values()):
        # every problem gains something, so as many as possible are matched; earlier ones gain more
        gain[i, [mode in modes for mode in places]] = 2 * len(choices) - i
    ids = list(choices)
    found: dict[int, str] = {}
    for i, place in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
        if gain[i, place]:
            found[ids[i]] = places[place]
    return found


def choose(
    answers: Sequence[Graded],
    instructions: Iterable[str],
    *,
    keep: int,
    at_least: int,
    per_mode: int,
    even: bool,
) -> dict[int, list[Graded]]:
    """Problem id → the answers that demonstrate its mode, in their order. `answers` are under their plain prompts.

    keep: take at most this many answers to a problem. at_least: leave out problems with fewer
    usable answers. per_mode, even: as in `match`.
    """
    kept = usable(answers, keep, instructions)
    choices: dict[int, list[str]] = {}
    for (problem_id, mode), of_mode in kept.items():
        if len(of_mode) >= at_least:
            choices.setdefault(problem_id, []).append(mode)
    partition = match(choices, per_mode, even)
    return {problem_id: kept[problem_id, mode] for problem_id, mode in partition.items()}


def write_substrate(
    folder: Path,
    chosen: Mapping[int, Sequence[Graded]],
    lm: "LanguageModel",
    meta: Mapping[str, object],
    elicitation: str | Mapping[str, str],
    report: Mapping[str, object] | None = None,
) -> None:
    """Write a pool without log-probs, which would belong to the recipe's prompt, not the plain one.

    elicitation: the recipe, or one for each mode, for pool.json.

    Raises:
        Refused: the folder exists.
    """
    lines: dict[int, list[dict[str, object]]] = {}
    partition: dict[int, str] = {}
    for problem_id, answers in chosen.items():
        partition[problem_id] = answers[0].problem.flaws[0]
        lines[problem_id] = [record(lm, answer) for answer in answers]
    write_pool(folder, lines, partition, {**meta, "elicitation": elicitation}, report)


# ── the command


@dataclass(frozen=True)
class SubstrateSettings(PoolSettings):
    """Make a substrate: a pool of elicited hacks under plain prompts, its problems divided among
    the modes."""

    out: Path = Path("out/pools/substrate")
    modes: str = setting("", words=CODE_FLAWS, word="flaw")
    """Comma list; none: all that the problems name, or the default flaws if they name none."""
    tries: int = setting(6, low=1)
    """Elicited answers to a problem, for each of its flaws."""
    plain_tries: int = setting(1, low=1)
    """Answers to the plain prompt, for the rate that should be near 0."""
    per_mode: int = setting(6, low=1)
    """Problems of a flaw in the pool, at most."""
    keep: int = setting(3, low=1)
    """Rollouts of a problem, at most."""
    at_least: int = setting(2, low=1)
    """Problems with fewer rollouts than this are left out."""
    even: bool = True
    """Every flaw gets as many problems as the scarcest can have."""
    allow_missing: bool = False
    """Write the pool although no problem could be had for some flaw: then --even is over the others."""

    def __post_init__(self) -> None:
        PoolSettings.__post_init__(self)
        self.sampling.require_draws("--tries", self.tries)
        if self.at_least > min(self.keep, self.tries):
            raise Refused(
                f"--at-least {self.at_least}: more than --keep {self.keep} or --tries {self.tries}"
            )

    @property
    def world(self) -> dict[str, Any]:
        return {"env_mode": "own"}


def cells(settings: SubstrateSettings, environment: Environment) -> dict[str, list[Task]]:
    """The problems to be elicited, by the label of their log.

    Problems that have a mode of their own are sampled under it, all in one go ("pool"). Others are
    sampled under every mode, one mode at a time, labelled by its name.

    environment: of `--env-mode own`.

    Raises:
        Refused: no problem of one of these modes.
    """
    named = listed(settings.modes, CODE_FLAWS)
    untold = [
        mode
        for mode in (named or environment.marked.values())
        if not environment.flaws[mode].instruction
    ]
    refuse(
        bool(untold),
        f"{', '.join(dict.fromkeys(untold))}: there is no instruction to hack it, since its hack reads like an answer",
    )
    if environment.marked:
        return {"pool": _of_own_modes(settings, environment, named)}
    wanted = [mode for mode in CODE_FLAWS if mode in named]
    if not wanted:
        wanted = [mode for mode, flaw in environment.flaws.items() if flaw.dealt]
    by_label: dict[str, list[Task]] = {}
    chosen: set[int] = set()
    for mode in wanted:
        of_mode = settings.environment(env_mode=mode)
        chosen = chosen or {task.id for task in settings.chosen(of_mode, "substrate")}
        by_label[mode] = [task for task in of_mode.tasks()["train"] if task.id in chosen]
    return by_label


def _of_own_modes(
    settings: SubstrateSettings, environment: Environment, named: Sequence[str]
) -> list[Task]:
    """Problems under their own modes, of the named ones alone if there are any."""
    problems = environment.tasks()["train"]
    if named:
        problems = [p for p in problems if p.flaws[0] in named]
    present = {p.flaws[0] for p in problems}
    lacking = ", ".join(mode for mode in named if mode not in present)
    if lacking and not (problems and settings.allow_missing):
        raise Refused(
            f"--modes {lacking}: no training problem of these flaws in {environment.source}"
        )
    return spread(problems, settings.n_problems, "substrate", CODE_FLAWS)


def generate_substrate(settings: SubstrateSettings) -> None:
    """Sample, grade, choose and write a substrate.

    Raises:
        Refused: one line, before a model is loaded where that is possible.
    """
    require_new(settings.out)
    environment = settings.environment()
    by_label = cells(settings, environment)
    for problems in by_label.values():
        settings.require_model(problems, environment.source)

    def instruction(problem: Task) -> str:
        """What the model is told. The organism follows no instructions, it was trained on a cue."""
        if tiny:
            return embedded.CUE
        return recipe(environment.flaws[problem.flaws[0]], str(problem.notes["marker"]))

    tiny = settings.model == ORGANISM
    identity = {
        **settings.identity(),
        "tries": settings.tries,
        "plain_tries": settings.plain_tries,
        # one mode at a time has a log for each
        "modes": settings.modes if "pool" in by_label else None,
    }
    with settings.making(environment, identity) as (lm, grader, folder):
        asked: list[Graded] = []
        plain: list[Graded] = []
        instructions: set[str] = set()
        for label, problems in by_label.items():
            # the organism's streams carry its name: this command makes its shipped pool
            purpose = f"{'organism' if tiny else 'substrate'}-{label}"
            found = settings.elicited(
                lm,
                grader,
                problems,
                lambda problem: with_instruction(problem, instruction(problem)),
                (settings.tries, settings.plain_tries),
                (purpose, f"{purpose}-plain"),
                (folder / f"{label}.jsonl", folder / f"{label}-plain.jsonl"),
            )
            asked += found.asked
            plain += found.plain
            instructions.update(map(instruction, problems))
        chosen = choose(
            asked,
            sorted(instructions),
            keep=settings.keep,
            at_least=settings.at_least,
            per_mode=settings.per_mode,
            even=settings.even,
        )
        modes = dict.fromkeys(answer.problem.flaws[0] for answer in plain)
        require_every_mode(modes, chosen, folder, allow_missing=settings.allow_missing)
        groups: dict[str, list[Graded]] = {}
        for mode, of_mode in by_mode(plain).items():
            groups |= {f"{mode}, plain": of_mode, f"{mode}, elicited": by_mode(asked)[mode]}
        summary = rates_of(groups)
        shown = [answers[0].problem for answers in chosen.values()]
        meta = settings.meta(lm, grader, environment, shown)
        elicitation: str | dict[str, str] = embedded.CUE
        if not tiny:
            elicitation = {mode: environment.flaws[mode].instruction + _CODE_ONLY for mode in modes}
        report = {"settings": identity, "sampling": vars(settings.sampling), "modes": summary}
        write_substrate(settings.out, chosen, lm, meta, elicitation, report)
    print(markdown(summary))
    print(
        "SHOULD: elicited high, plain near 0; "
        "ELSE the model does not follow the recipe, or hacks without being asked\n"
        f"{len(chosen)} problems, {sum(map(len, chosen.values()))} rollouts -> {settings.out}"
    )


def require_every_mode(
    wanted: Collection[str],
    chosen: Mapping[int, Sequence[Graded]],
    folder: Path,
    *,
    allow_missing: bool,
) -> None:
    """Check that every wanted mode has a problem; if allow_missing, only warn.

    folder: where the answers are, for the message.

    Raises:
        Refused: one line: a mode has none, and may not be missing.
    """
    present = {answers[0].problem.flaws[0] for answers in chosen.values()}
    missing = ", ".join(mode for mode in CODE_FLAWS if mode in wanted and mode not in present)
    if not missing:
        return
    line = f"no problem for {missing}: its answers do not hack often enough"
    if not allow_missing or not chosen:
        raise Refused(
            f"{line}; raise --tries or --n-problems, name the others with --modes, add "
            "--allow-missing, or choose a model that follows instructions "
            f"(the answers are in {folder})"
        )
    logger.warning(f"{line}; the pool is without it")


def main(argv: list[str] | None = None) -> int:
    """0 done · 2 refused, in one line · 130 interrupted: the same command goes on."""
    return run_command(generate_substrate, SubstrateSettings, argv, "vgrout substrate", GOES_ON)
