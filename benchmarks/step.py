"""A whole training step, sandboxed grading on, against TRL's GRPOTrainer with LoRA doing the same work.

Both sample P 4 · G 8 answers of the organism to the same prompts, at the same settings, and learn from them at a rate
of 1e-6, so that their answers keep the same lengths. They take turns, a few steps each, in one process.
"""

from pathlib import Path

from benchmarks import rig, trl_peer
from benchmarks.report import Ratio, at_least
from benchmarks.rows import Report, Row
from vgrout.grading.grade import cores
from vgrout.table import read_steps

GOALS: dict[str, float] = {"none": 3, "route2": 2.5}
Contestant = tuple[str, int]  # intervention, ranks


def run(quick: bool = False) -> Report:
    """Our step's time on one core and on all of them against TRL's, and the parts of ours."""
    blocks, per_block = (3, 2) if quick else (8, 4)
    with rig.workplace(), rig.grader() as grader:
        contestants: list[Contestant] = [(name, n) for n in dict.fromkeys((1, cores())) for name in GOALS]
        own = {(name, n): rig.Turns(rig.config(name, per_block, f"_{n}"), n) for name, n in contestants}
        seconds: dict[Contestant, list[float]] = {of: [] for of in contestants}
        for trainer in own.values():
            trainer.take(2)  # the guard samples its references in the first step

        def our_turn() -> None:
            for of, trainer in own.items():
                seconds[of].append(trainer.take(per_block))

        problems = rig.load("none", grader).problems
        prompts = [problems.draw(rig.SEED, step, rig.P) for step in range((blocks + 1) * per_block)]
        try:
            peer = trl_peer.measure(prompts, blocks, per_block, our_turn, tried=1 if quick else 2)
        except trl_peer.Missing as missing:
            for _ in range(blocks):
                our_turn()
            rows = [Row("step", _name(of), "TRL", "not measured", f"≥ {GOALS[of[0]]:g} ×", None) for of in contestants]
            note = str(missing)
        else:
            rows = [_against(of, Ratio.of(peer.seconds, seconds[of])) for of in contestants]
            note = peer.note
        for trainer in own.values():
            trainer.close()
        return Report([*rows, *(_split(of, trainer.path) for of, trainer in own.items())], [note])


def _name(of: Contestant) -> str:
    name, n = of
    return f"{name}, graded in the sandbox, {n} rank{'s' * (n > 1)}"


def _against(of: Contestant, ratio: Ratio) -> Row:
    """The goal is that of the whole machine, which TRL has too."""
    name, n = of
    if n < cores():
        return Row("step", _name(of), "TRL", str(ratio))
    return at_least("step", _name(of), "TRL", ratio, GOALS[name])


def _split(of: Contestant, run: Path) -> Row:
    """The parts of our step's time."""
    steps = read_steps(run / "steps.jsonl")[2:]
    total = sum(r["sec"] for r in steps)
    share = {name: sum(r[name] for r in steps) / total for name in ("gen", "grade", "fb")}
    figure = f"sampling {share['gen']:.0%}, waiting for grades {share['grade']:.0%}, update {share['fb']:.0%}"
    signal = sum(r["signal_k"] for r in steps) / max(1, sum(r["signal_n"] for r in steps))
    return Row(
        "step", f"{of[0]}, {of[1]} rank{'s' * (of[1] > 1)}: its parts", f"{signal:.0%} of groups have a signal", figure
    )
