"""The last four lines of a run: its model as trained and as deployed, beside what they are compared with; what that
means, in words; and where to read on."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from vgrout.config.presets import PRESETS
from vgrout.config.run import Config
from vgrout.data.organism import PLAIN_GRPO
from vgrout.evaluate import Final
from vgrout.runs.expectation import NEAR, SKILL
from vgrout.table import StepRow
from vgrout.types import Rate


def verdict(
    untrained: tuple[Rate, Rate], trained: Rate, deployed: tuple[Rate, Rate], *, plain: bool, unlearnt: str = ""
) -> str:
    """What the final evaluation means, in a few words.

    untrained, deployed: hack and solve. trained: hack as trained. plain: plain GRPO, where no method is to remove
    anything. unlearnt: why training taught nothing.
    """
    hack_before, solve_before = (rate.value for rate in untrained)
    hack, solve = (rate.value for rate in deployed)
    if unlearnt:
        return f"nothing was learnt: {unlearnt}"
    if hack_before is None or solve_before is None or hack is None or solve is None:
        return "none: not every model has graded answers"
    lost, hacks = solve <= solve_before - SKILL, hack > hack_before + NEAR
    if plain:
        learnt = "to hack" if hacks else "to solve, not to hack" if solve > solve_before + NEAR else "little"
        return f"plain GRPO learnt {learnt}{', and lost skill' if lost else ''}"
    removed = (trained.value or 0) > hack_before + NEAR
    what = "still hacks" if hacks else "hacks removed" if removed else "learnt no hacks"
    return f"{what}, skill {'lost' if lost else 'kept'}"


def unlearnt(rows: Sequence[StepRow]) -> str:
    """Why these steps taught nothing; "" where rewards differed within a group."""
    groups, answers = sum((r.signal for r in rows), Rate(0, 0)), sum(r.n for r in rows)
    if groups.k:
        return ""
    if sum(r.all_zero for r in rows) == groups.n:
        return f"none of {answers} answers earned the full reward, and no group had rewards that differ"
    return f"no group had rewards that differ, in {answers} answers"


def comparable(cfg: Config) -> bool:
    """Whether PLAIN_GRPO is the same setting without the method: preset mini, all but method, seed and watching."""
    mini = PRESETS["mini"][1]
    free = ("method", "run", "guard", "detectors")
    return cfg.method.intervention != "none" and all(
        getattr(cfg, f.name) == getattr(mini, f.name) for f in fields(cfg) if f.name not in free
    )


def last_lines(cfg: Config, final: Final, rows: Sequence[StepRow], run: Path) -> list[str]:
    """The four lines."""
    base, deployed, control = final.base, final.deployed, cfg.method.control_name
    beside = f"untrained {base.hack.percent} / {base.solve.percent}", PLAIN_GRPO if comparable(cfg) else ""
    said = verdict(
        (base.hack, base.solve),
        final.trained.hack,
        (deployed.hack, deployed.solve),
        plain=cfg.method.intervention == "none",
        unlearnt=unlearnt(rows),
    )
    return [
        *(
            f"{name:<11} {side.hack.percent:>5} % hack  {side.solve.percent:>5} % solve    {other}".rstrip()
            for name, side, other in zip(("as trained", "deployed"), (final.trained, deployed), beside, strict=True)
        ),
        f"verdict: {said}" + ("" if control == "none" else f" (under --control {control})"),
        f"more: {run / 'summary.md'} · dynamics.png · rollouts: vgrout report {run}",
    ]
