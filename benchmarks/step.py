"""A whole training step, sandboxed grading on, against TRL's GRPOTrainer with LoRA doing the same work.

Both sample P 4 · G 8 answers of the organism to the same prompts, at the same settings, and learn from them at a rate
of 1e-6, so that their answers keep the same lengths. They take turns, a few steps each, in one process.
"""

import time
from dataclasses import replace

import torch

from benchmarks import rig, trl_peer
from benchmarks.report import Ratio, at_least
from benchmarks.rows import Report, Row
from vgrout.config.arm import Intervention
from vgrout.loop import Study, train

ARMS: tuple[Intervention, ...] = ("none", "route2")


def steps_of(study: Study, n: int) -> float:
    """Seconds a step over the next n steps: all that the trainer does, its files and the checkpoint at the end too."""
    study.cfg = replace(study.cfg, scale=replace(study.cfg.scale, steps=len(study.rows) + n))
    start = time.perf_counter()
    train(study)
    return (time.perf_counter() - start) / n


def run(quick: bool = False) -> Report:
    blocks, per_block = (3, 2) if quick else (8, 4)
    with (
        rig.workplace(),
        rig.grader() as grader,
        rig.study("none", grader) as none,
        rig.study("route2", grader) as route2,
    ):
        studies = dict(zip(ARMS, (none, route2), strict=True))
        ours: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for study in studies.values():
            steps_of(study, 2)  # the watchers sample their references in the first step

        def our_turn() -> None:
            torch.set_num_threads(1)  # what the trainer takes for the organism
            for arm, study in studies.items():
                ours[arm].append(steps_of(study, per_block))

        problems = [none.world.draw(rig.SEED, step, rig.P) for step in range((blocks + 1) * per_block)]
        try:
            peer = trl_peer.measure(problems, none.policy, blocks, per_block, our_turn, tried=1 if quick else 2)
        except trl_peer.Missing as missing:
            for _ in range(blocks):
                our_turn()
            rows = [Row("step", f"{arm}", "TRL", "not measured", "≥ 3 ×", None) for arm in ARMS]
            return Report([*rows, *_split(studies)], [str(missing)])
        rows = [
            at_least("step", f"{arm}, graded in the sandbox", "TRL", Ratio.of(peer.seconds, ours[arm]), 3)
            for arm in ARMS
        ]
        return Report([*rows, *_split(studies)], [peer.note])


def _split(studies: dict[Intervention, Study]) -> list[Row]:
    """What our step's time is made of."""
    rows = []
    for arm, study in studies.items():
        steps = study.rows[2:]
        total = sum(r.sec for r in steps)
        share = {name: sum(getattr(r, name) for r in steps) / total for name in ("gen", "grade", "fb")}
        figure = f"sampling {share['gen']:.0%}, waiting for grades {share['grade']:.0%}, update {share['fb']:.0%}"
        signal = sum(r.signal.k for r in steps) / max(1, sum(r.signal.n for r in steps))
        rows.append(Row("step", f"{arm}: its parts", f"{signal:.0%} of groups have a signal", figure))
    return rows
