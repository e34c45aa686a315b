"""The last four lines of a run: its model as trained and as deployed, beside what they are compared with; what that
means, in words; and where to read on."""

from pathlib import Path

from vgrout.cli import command
from vgrout.config.presets import recorded
from vgrout.config.run import Config
from vgrout.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.heldout import Final


def last_lines(cfg: Config, final: Final, means: str, run: Path) -> list[str]:
    """The four lines. means: the conclusion of the run's report."""
    base, control = final.base, cfg.method.control_name
    (hack, *_), (solve, *_) = PLAIN_GRPO["hack"], PLAIN_GRPO["solve"]
    plain = f"plain GRPO {hack} / {solve} ({PLAIN_GRPO_SEEDS} seeds)" if recorded(cfg) else ""
    beside = f"untrained {base.hack.percent} / {base.solve.percent}", plain
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
