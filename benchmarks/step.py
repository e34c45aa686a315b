"""A whole training step, graded in the sandbox, against the same work by TRL's GRPOTrainer and LoRA.

Both sample P 4 · G 8 answers of the organism to the same prompts, at the same settings, and learn
from them at a rate of 1e-6, so that their answers keep the same lengths. They take turns, a few
steps each. Ours is one process.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from statistics import mean

from benchmarks import rig, trl_peer
from benchmarks.measure import Figure, Ratio, page
from vgrout.ground.io import json_lines

GOALS: dict[str, float] = {"none": 3, "route2": 2.5}
WARM_UP = 2  # steps; the guard samples its references in the first one


def run(quick: bool = False) -> str:
    """Our step's time against TRL's, and the parts of ours. Raises Refused without TRL."""
    blocks, per_block = (3, 2) if quick else (8, 4)
    trl_peer.libraries()
    with rig.workplace(), ExitStack() as ends:
        ours: dict[str, rig.Turns] = {}
        for name in GOALS:
            trainer = rig.Turns(name, rig.command(name))
            ours[name] = ends.enter_context(closing(trainer))
        seconds: dict[str, list[float]] = {name: [] for name in GOALS}
        for trainer in ours.values():
            trainer.take(WARM_UP)

        def our_turn() -> None:
            for name, trainer in ours.items():
                seconds[name].append(trainer.take(per_block))

        problems = rig.problems(rig.command("none"), (blocks + 1) * per_block)
        theirs, note = trl_peer.measure(problems, blocks, per_block, our_turn, choose=not quick)
        figures: list[Figure] = []
        for name, goal in GOALS.items():
            ratio = Ratio.of(theirs, seconds[name])
            figures.append(ratio.at_least(f"{name}, graded in the sandbox", "TRL", goal))
        for name, trainer in ours.items():
            figures.append(parts(name, trainer.path, seconds[name]))
    return page(figures, note)


def parts(name: str, run: Path, seconds: list[float]) -> Figure:
    """Where our step's time goes.

    seconds: of its steps, by block. The rows' own totals have the peer's turns in them.
    """
    steps = list(json_lines(run / "steps.jsonl"))[1:]
    whole = mean(seconds)
    sampling, grading, update = (
        mean(row[part] for row in steps) / whole for part in ("gen", "grade", "fb")
    )
    signal = sum(r["signal_k"] for r in steps) / max(1, sum(r["signal_n"] for r in steps))
    return Figure(
        f"{name}: its parts",
        f"{signal:.0%} of groups have a signal",
        f"{whole:.2f} s: sampling {sampling:.0%}, waiting for grades {grading:.0%}, "
        f"update {update:.0%}",
    )
