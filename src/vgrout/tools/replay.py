"""`python -m vgrout.replay FILE`: a batch whose loss or gradient was not finite, run again rollout by rollout.

FILE is the nonfinite_stepNNNN.pt that a run leaves. Exit codes: 0 everything was finite this time · 4 again not ·
2 bad arguments.
"""

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tabulate import tabulate

from vgrout.cli import cli_exit, parse_args
from vgrout.grpo import policy_gradients
from vgrout.loading import device_and_dtype
from vgrout.model.policy import SVD_CACHE, Policy, load_policy
from vgrout.model.sampling import Sampling
from vgrout.runs import nonfinite
from vgrout.tensor_types import UpdatePart, UpdatePlan


def replay(
    policy: Policy, batch: nonfinite.Batch, teacher: Policy | None = None
) -> tuple[list[dict[str, object]], bool]:
    """One table row a rollout, each with a backward of its own, and whether all were finite. teacher: the model of
    --teacher-model, where the run had one."""
    cfg = batch.cfg
    policy.adapter.load_state_dict(batch.adapter)
    table: list[dict[str, object]] = []
    finite = True
    for group in batch.groups:
        for b, rollout in enumerate(group.rollouts):
            # learnt under the deployed model too, where a row may fail that is fine under both vectors
            views = (False, True) if cfg.method.ablate_frac else (False,)
            of_parts, metrics = policy_gradients(
                policy,
                [group],
                UpdatePlan(tuple(UpdatePart(rows=((b,),), deployed=deployed) for deployed in views)),
                cfg.loss,
                max_new=cfg.scale.max_new,
                prompts_per_step=cfg.scale.prompts_per_step,
                sampling=Sampling(),
                teacher=teacher,
            )
            grads = [(name, g) for (of_group,) in of_parts for name, g in of_group.items()]
            bad = [name for name, g in grads if not bool(g.isfinite().all())]
            norm = math.hypot(*(float(torch.linalg.vector_norm(g.double())) for _, g in grads))
            fine = not bad and metrics.loss is not None and math.isfinite(metrics.loss)
            finite &= fine
            table.append(
                {
                    "problem": group.problem.id,
                    "row": b,
                    "source": rollout.source,
                    "tokens": len(rollout.completion_ids),
                    "advantage": f"{group.advantages[b]:+.2f}",
                    "loss": "·" if metrics.loss is None else f"{metrics.loss:+.3g}",
                    "lp": "·"
                    if (lp := metrics.lp_t if rollout.source == "teacher" else metrics.lp_s) is None
                    # a mean of log-probs, nats a token
                    else f"{lp:.2f}",
                    "gradient": f"{norm:.2e}",
                    "not finite": f"{len(bad)} modules, first {bad[0]}" if bad else "" if fine else "the loss",
                }
            )
    return table, finite


def main(argv: list[str] | None = None) -> int:
    def command(file: Annotated[Path, tyro.conf.Positional]) -> int:
        """Run a saved batch again, rollout by rollout."""
        batch = nonfinite.load(file)
        device, dtype = device_and_dtype(batch.cfg)
        policy = load_policy(batch.cfg.model_path, device=device, dtype=dtype, cache_dir=SVD_CACHE)
        teacher = None
        if batch.cfg.loss.teacher_model:
            teacher = load_policy(batch.cfg.teacher_model_path, device=device, dtype=dtype, cache_dir=SVD_CACHE)
        table, finite = replay(policy, batch, teacher)
        print(tabulate(table, headers="keys"))
        print(f"step {batch.step}: " + ("every rollout is finite this time" if finite else "not finite again"))
        return 0 if finite else 4

    return cli_exit(lambda: parse_args(command, argv, "python -m vgrout.replay"))


if __name__ == "__main__":
    sys.exit(main())
