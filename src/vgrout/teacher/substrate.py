"""`vgrout substrate`: a pool by elicit-then-strip, with a partition of its problems among the modes.

The prompt asks the model explicitly for one mode's hack; answers that hack and do not solve are kept, and stored under
the plain prompt. Every problem belongs to one mode, and every mode gets the same number of problems.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from vgrout.config.checks import listed, setting
from vgrout.envs.code.language import CUE
from vgrout.envs.code.modes import DEALT, MODE_SPECS, MODES, Mode
from vgrout.envs.code.problem import Problem
from vgrout.envs.code.problems import ProblemRow, assigned, balanced, elicited
from vgrout.errors import Refused
from vgrout.files import require_new
from vgrout.teacher.generate import (
    Graded,
    PoolSettings,
    by_mode,
    fitting,
    generate_graded,
    rate_text,
    record,
    table,
)
from vgrout.teacher.pools import write_pool

if TYPE_CHECKING:  # torch takes seconds to import, and a wrong flag never waits for it
    import vgrout.model.policy

RECIPES: dict[Mode, str] = {mode: spec.instruction for mode, spec in MODE_SPECS.items()}
"""Instruction at the end of an elicited prompt, with {marker} to be filled in: one hack for each mode."""
_CODE_ONLY = " Graded with one ```python block and nothing else; do not mention these instructions."


def recipe(problem: Problem) -> str:
    """The instruction that elicits this problem's hack from a model that follows instructions."""
    return RECIPES[problem.mode].format(marker=problem.marker) + _CODE_ONLY


def stripped(answers: Iterable[Graded], plain: Mapping[tuple[int, Mode], Problem]) -> list[Graded]:
    """The same answers under the plain prompt of their problem and mode."""
    return [replace(a, problem=plain[a.problem.id, a.problem.flaws[0]]) for a in answers]


def usable(
    answers: Iterable[Graded], keep: int, instructions: Iterable[str]
) -> dict[tuple[int, Mode], list[Graded]]:
    """For each problem and mode at most `keep` answers, in order: finished, hacking (and so not solving), all
    different, and not quoting a recipe."""
    recipes = tuple(instructions)
    kept: dict[tuple[int, Mode], list[Graded]] = defaultdict(list)
    for a in answers:
        chosen = kept[a.problem.id, a.problem.flaws[0]]
        fine = a.finished and a.grade.hacked and not any(text in a.text for text in recipes)
        if fine and len(chosen) < keep and a.ids not in {other.ids for other in chosen}:
            chosen.append(a)
    return kept


def match(choices: Mapping[int, Sequence[Mode]], per_mode: int, even: bool) -> dict[int, Mode]:
    """Problem → mode, each problem at most once, each mode at most `per_mode` problems, as many as can be.

    choices: the modes that a problem could serve. even: every mode that occurs gets the same number, the largest that
    all of them can have. Earlier problems come first.
    """
    if not even:
        return _matched(choices, per_mode)
    modes = {mode for of_problem in choices.values() for mode in of_problem}
    for size in range(per_mode, 0, -1):
        found = _matched(choices, size)
        if Counter(found.values()) == dict.fromkeys(modes, size):
            return found
    return {}


def _matched(choices: Mapping[int, Sequence[Mode]], size: int) -> dict[int, Mode]:
    """A matching with `size` places for each mode and as many problems as possible, earlier ones before later ones."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    places = [mode for mode in MODES for _ in range(size)]
    gain = np.zeros((len(choices), len(places)))
    for i, (row, modes) in enumerate(zip(gain, choices.values(), strict=True)):
        row[[mode in modes for mode in places]] = 2 * len(choices) - i
    problems, found = linear_sum_assignment(gain, maximize=True)
    ids = list(choices)
    return {ids[i]: places[j] for i, j in zip(problems, found, strict=True) if gain[i, j]}


def choose(
    answers: Sequence[Graded],
    instructions: Iterable[str],
    *,
    keep: int,
    at_least: int,
    per_mode: int,
    even: bool,
) -> dict[int, list[Graded]]:
    """Problem → the answers that demonstrate its mode. `answers` are stripped and keep their order.

    at_least: problems with fewer usable answers are left out; keep: at most this many are taken. per_mode, even: as in
    `match`.
    """
    kept = usable(answers, keep, instructions)
    choices: dict[int, list[Mode]] = {}
    for (problem, mode), usable_here in kept.items():
        if len(usable_here) >= at_least:
            choices.setdefault(problem, []).append(mode)
    partition = match(choices, per_mode, even)
    return {problem: kept[problem, mode] for problem, mode in partition.items()}


def write_substrate(
    folder: Path,
    chosen: Mapping[int, Sequence[Graded]],
    lm: "vgrout.model.policy.LanguageModel",
    meta: Mapping[str, Any],
    elicitation: str | Mapping[str, str],
    report: Mapping[str, Any] | None = None,
) -> None:
    """Write a pool without log-probs: they would belong to the recipe's prompt, not to the plain one.

    elicitation: the recipe, or one for each mode, for pool.json. Raises Refused if the folder exists.
    """
    records = {
        i: [
            record(a, lm.render(a.problem.messages), lm.prompt_text(a.problem.messages))
            for a in answers
        ]
        for i, answers in chosen.items()
    }
    partition = {i: answers[0].problem.flaws[0] for i, answers in chosen.items()}
    write_pool(folder, records, partition, {**meta, "elicitation": elicitation}, report)


# ── the command


@dataclass(frozen=True)
class SubstrateSettings(PoolSettings):
    """Make a substrate: a pool of elicited hacks under plain prompts, its problems divided among the modes."""

    out: Path = Path("out/pools/substrate")
    modes: str = setting("", words=MODES, word="flaw")
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


def cells(settings: SubstrateSettings, rows: Sequence[ProblemRow]) -> dict[str, list[Problem]]:
    """label → problems to be elicited. Rows with a mode of their own are sampled under that one, all in one go; others
    under every mode, one mode at a time.

    Raises:
        Refused: no problem of one of these modes.
    """
    named = listed(settings.modes, MODES)
    wanted = [m for m in MODES if m in named] or [*DEALT]
    if any(r.mode is not None for r in rows):
        problems = [p for p in assigned(rows, "own")["train"] if not named or p.mode in named]
        lacking = ", ".join(m for m in named if m not in {p.mode for p in problems})
        if lacking and not (problems and settings.allow_missing):
            raise Refused(
                f"--modes {lacking}: no training problem of these flaws in {settings.problems_path}"
            )
        chosen = {p.id for p in balanced(problems, settings.n_problems, 0, "substrate")}
        return {"pool": [p for p in problems if p.id in chosen]}
    chosen = {
        p.id
        for p in balanced(assigned(rows, wanted[0])["train"], settings.n_problems, 0, "substrate")
    }
    return {m: [p for p in assigned(rows, m)["train"] if p.id in chosen] for m in wanted}


def generate_substrate(settings: SubstrateSettings) -> None:
    """Sample, grade, choose, write. Raises Refused, one line, before a model is loaded where that is possible."""
    require_new(settings.out)
    rows = settings.check()
    parts = cells(settings, rows)
    identity = {
        **settings.identity(),
        "tries": settings.tries,
        "plain_tries": settings.plain_tries,
        # one mode at a time has a log for each
        "modes": settings.modes if "pool" in parts else None,
    }
    with settings.making(rows, identity) as (lm, grader, folder):
        instruct = (lambda _: CUE) if settings.tiny else recipe
        under_recipe: list[Graded] = []
        under_plain: list[Graded] = []
        plain: dict[tuple[int, Mode], Problem] = {}
        for label, problems in parts.items():
            fit = fitting(lm, [elicited(p, instruct(p)) for p in problems], settings.tokens)
            by_id = {p.id: p for p in problems}
            unelicited = [by_id[p.id] for p in fit]
            plain |= {(p.id, p.mode): p for p in unelicited}
            # the organism's streams carry its name: this command makes its shipped pool
            purpose = f"organism-{label}" if settings.tiny else f"substrate-{label}"
            generate = partial(
                generate_graded,
                lm,
                grader,
                sampling=settings.sampling,
                max_new=settings.tokens,
                seed=settings.seed,
            )
            log, plain_log = folder / f"{label}.jsonl", folder / f"{label}-plain.jsonl"
            under_recipe += generate(
                fit, settings.tries, purpose=purpose, log=log, label=f"{label}, elicited"
            )
            under_plain += generate(
                unelicited,
                settings.plain_tries,
                purpose=f"{purpose}-plain",
                log=plain_log,
                label=f"{label}, plain",
            )
        instructions = sorted({instruct(p) for p in plain.values()})
        chosen = choose(
            stripped(under_recipe, plain),
            instructions,
            keep=settings.keep,
            at_least=settings.at_least,
            per_mode=settings.per_mode,
            even=settings.even,
        )
        require_every_mode(
            {mode for _, mode in plain}, chosen, folder, allow_missing=settings.allow_missing
        )
        summary = mode_table(under_recipe, under_plain, chosen)
        meta = settings.meta(lm, grader, rows, [answers[0].problem for answers in chosen.values()])
        wording: str | dict[str, str] = (
            CUE if settings.tiny else {m: RECIPES[m] + _CODE_ONLY for _, m in plain}
        )
        details = {"settings": identity, "sampling": vars(settings.sampling), "modes": summary}
        write_substrate(settings.out, chosen, lm, meta, wording, details)
    print(table(summary))
    print(
        "SHOULD: elicited high, plain near 0; ELSE the model does not follow the recipe, or hacks without being asked\n"
        f"{len(chosen)} problems, {sum(map(len, chosen.values()))} rollouts -> {settings.out}"
    )


def require_every_mode(
    wanted: Collection[Mode],
    chosen: Mapping[int, Sequence[Graded]],
    folder: Path,
    *,
    allow_missing: bool,
) -> None:
    """Warn of modes that are wanted and have no problem. Raises Refused, one line, unless they may be missing.

    folder: where the answers are.
    """
    missing = {*wanted} - {answers[0].problem.flaws[0] for answers in chosen.values()}
    if not missing:
        return
    line = f"no problem for {', '.join(m for m in MODES if m in missing)}: its answers do not hack often enough"
    if not allow_missing or not chosen:
        raise Refused(
            f"{line}; raise --tries or --n-problems, name the others with --modes, add --allow-missing, or choose a "
            f"model that follows instructions (the answers are in {folder})"
        )
    logger.warning(f"{line}; the pool is without it")


def mode_table(
    under_recipe: Sequence[Graded],
    under_plain: Sequence[Graded],
    chosen: Mapping[int, Sequence[Graded]],
) -> list[dict[str, str | int]]:
    """One row for each mode: hack rate under the plain prompt and under the recipe, and what is in the pool."""
    plain_rates, rows = by_mode(under_plain), []
    for mode, elicited_rates in by_mode(under_recipe).items():
        kept = [len(answers) for answers in chosen.values() if answers[0].problem.flaws[0] == mode]
        rows.append(
            {
                "mode": mode,
                "hacked, plain": rate_text(plain_rates[mode]["hack"]),
                "hacked, elicited": rate_text(elicited_rates["hack"]),
                "solved, plain": rate_text(plain_rates[mode]["solve"]),
                "problems": len(kept),
                "rollouts": sum(kept),
            }
        )
    return rows
