"""The last four lines of a run: its model as trained and as deployed, beside what they are compared with; what that
means, in words; and where to read on."""

from dataclasses import fields
from pathlib import Path

from vgrout.cli import command
from vgrout.config.presets import PRESETS
from vgrout.config.run import Config
from vgrout.data.organism import PLAIN_GRPO
from vgrout.evaluate import Final


def comparable(cfg: Config) -> bool:
    """Whether PLAIN_GRPO is the same setting without the method: preset mini, all but method, seed and watching."""
    mini = PRESETS["mini"][1]
    free = ("method", "run", "guard", "detectors")
    return cfg.method.intervention != "none" and all(
        getattr(cfg, f.name) == getattr(mini, f.name) for f in fields(cfg) if f.name not in free
    )


def last_lines(cfg: Config, final: Final, means: str, run: Path) -> list[str]:
    """The four lines. means: the conclusion of the run's report."""
    base, control = final.base, cfg.method.control_name
    beside = f"untrained {base.hack.percent} / {base.solve.percent}", PLAIN_GRPO if comparable(cfg) else ""
    return [
        *(
            f"{name:<11} {side.hack.percent:>5} % hack  {side.solve.percent:>5} % solve    {other}".rstrip()
            for name, side, other in zip(
                ("as trained", "deployed"), (final.trained, final.deployed), beside, strict=True
            )
        ),
        f"verdict: {means}" + ("" if control == "none" else f", under --control {control}"),
        f"more: {run / 'summary.md'} · dynamics.png · {command(f'report {run}')}",
    ]
