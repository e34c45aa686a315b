"""A whole training step, sandboxed grading on, against TRL's GRPOTrainer with LoRA doing the same work.

Both sample P 4 · G 8 answers of the organism to the same prompts, at the same settings, and learn from them at a rate
of 1e-6, so that their answers keep the same lengths. They take turns, a few steps each, in one process.
"""

from pathlib import Path

from benchmarks import rig, trl_peer
from benchmarks.report import Ratio, at_least
from benchmarks.rows import Report, Row
from vgrout.config.arm import Intervention
from vgrout.table import read_steps

ARMS: tuple[Intervention, ...] = ("none", "route2")


def run(quick: bool = False) -> Report:
    """Our step's time against TRL's, and what ours is made of."""
    blocks, per_block = (3, 2) if quick else (8, 4)
    with rig.workplace(), rig.grader() as grader:
        ours = {arm: rig.Turns(rig.config(arm, checkpoint_every=per_block), grader) for arm in ARMS}
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for trainer in ours.values():
            trainer.take(2)  # the guard samples its references in the first step

        def our_turn() -> None:
            for arm, trainer in ours.items():
                seconds[arm].append(trainer.take(per_block))

        problems = rig.load("none", grader).problems
        prompts = [problems.draw(rig.SEED, step, rig.P) for step in range((blocks + 1) * per_block)]
        try:
            peer = trl_peer.measure(prompts, blocks, per_block, our_turn, tried=1 if quick else 2)
        except trl_peer.Missing as missing:
            for _ in range(blocks):
                our_turn()
            rows = [Row("step", f"{arm}", "TRL", "not measured", "≥ 3 ×", None) for arm in ARMS]
            note = str(missing)
        else:
            rows = [
                at_least("step", f"{arm}, graded in the sandbox", "TRL", Ratio.of(peer.seconds, seconds[arm]), 3)
                for arm in ARMS
            ]
            note = peer.note
        for trainer in ours.values():
            trainer.close()
        return Report([*rows, *(_split(arm, trainer.path) for arm, trainer in ours.items())], [note])


def _split(arm: str, run: Path) -> Row:
    """What our step's time is made of."""
    steps = read_steps(run / "steps.jsonl")[2:]
    total = sum(r["sec"] for r in steps)
    share = {name: sum(r[name] for r in steps) / total for name in ("gen", "grade", "fb")}
    figure = f"sampling {share['gen']:.0%}, waiting for grades {share['grade']:.0%}, update {share['fb']:.0%}"
    signal = sum(r["signal_k"] for r in steps) / max(1, sum(r["signal_n"] for r in steps))
    return Row("step", f"{arm}: its parts", f"{signal:.0%} of groups have a signal", figure)
