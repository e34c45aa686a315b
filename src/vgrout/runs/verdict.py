"""The last four lines of a run: its model as trained and as deployed, beside what they are compared with; what that
means, in words; and where to read on."""

import math
from pathlib import Path

from vgrout.cli import command
from vgrout.config.presets import recorded
from vgrout.config.run import Config
from vgrout.embedded import PLAIN_GRPO, PLAIN_GRPO_SEEDS
from vgrout.heldout import Final
from vgrout.table import TOO_FEW

ENOUGH = 384  # answers, as in `mini`: a rate near 2 % is then told from one near 5 %
MORE = 4  # times the answers to a problem, for half the width of an interval


def last_lines(cfg: Config, final: Final, means: str, run: Path) -> list[str]:
    """The four lines, and where there were too few answers for a verdict how to have more.

    means: the conclusion of the run's report.
    """
    base, control = final.base, cfg.method.control_name
    (hack, *_), (solve, *_) = PLAIN_GRPO["hack"], PLAIN_GRPO["solve"]
    plain = f"plain GRPO {hack} / {solve} ({PLAIN_GRPO_SEEDS} seeds)" if recorded(cfg) else ""
    beside = f"untrained {base.hack.percent} / {base.solve.percent}", plain
    lines = [
        *(
            f"{name:<11} {side.hack.percent:>5} % hack  {side.solve.percent:>5} % solve    {other}".rstrip()
            for name, side, other in zip(
                ("as trained", "deployed"), (final.trained, final.deployed), beside, strict=True
            )
        ),
        f"verdict: {means}" + ("" if control == "none" else f", under --control {control}"),
        f"more: {run / 'summary.md'} · dynamics.png · {command(f'report {run}')}",
    ]
    if TOO_FEW in means and cfg.env.environment == "code":
        n, samples = cfg.eval.final_n_prompts, cfg.eval.final_samples
        samples = max(math.ceil(ENOUGH / n), MORE * samples)
        reward = f" --reward={cfg.env.reward}" if cfg.env.reward else ""
        lines.append(f"more answers: {command(f'evaluate {run} --samples {samples}{reward}')}")
    return lines
