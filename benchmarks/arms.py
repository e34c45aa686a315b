"""A step of every method against plain GRPO's, in whole runs of the preset `mini` that take turns on one machine.

All learn at a rate of 1e-6, so that they sample alike and differ in what the method adds: monitors that read, forwards
under other vectors, gradients of single rollouts. A step is all that the trainer does, its files too, without
evaluations.
"""

from dataclasses import replace

from benchmarks import rig
from benchmarks.report import Ratio, at_most
from benchmarks.rows import Report, Row
from vgrout.config.presets import parse
from vgrout.config.run import Config

READS = ("--intervention=screen", "--monitor-prompts=40")  # the calibration is before the first step
KNOWS = ("--monitor=labels", "--known-modes=exit_code")
METHODS: dict[str, tuple[str, ...]] = {
    "none": ("--intervention=none",),
    "erase": ("--intervention=erase",),
    "route": ("--intervention=route",),
    "route2": ("--intervention=route2",),
    "route2-per-module": ("--method=route2-per-module",),
    "sgtm (labels), quarantine block:3": ("--intervention=sgtm", "--monitor=labels", "--quarantine=block:3"),
    "screen (labels)": ("--intervention=screen", "--monitor=labels"),
    "screen (pmi)": (*READS, "--monitor=pmi"),
    "screen (twin)": ("--intervention=screen", "--monitor=twin"),
    "penalty (labels of one flaw)": ("--intervention=penalty", *KNOWS),
    "quarantine": ("--method=quarantine",),
    "linear probe": ("--intervention=penalty", "--monitor=online_probe", "--seed-monitor=labels", *KNOWS[1:]),
}
GOALS = {"route2": 1.2, "screen (pmi)": 1.15}  # × the step of none
AGAINST = dict.fromkeys(("quarantine", "linear probe"), ("penalty (labels of one flaw)", 1.25))


def run(quick: bool = False) -> Report:
    """Seconds of a step over those of `none`, in turns."""
    blocks, per_block = (2, 2) if quick else (6, 5)
    with rig.workplace():
        runs = {name: rig.Turns(config(flags, f"_{i}")) for i, (name, flags) in enumerate(METHODS.items())}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for trainer in runs.values():
            trainer.take(2)  # calibrations, and the guard's references
        for _ in range(blocks):
            for name, trainer in runs.items():
                seconds[name].append(trainer.take(per_block))
        for trainer in runs.values():
            trainer.close()
    rows = []
    for name in list(METHODS)[1:]:
        ratio = Ratio.of(seconds[name], seconds["none"])
        goal = GOALS.get(name)
        rows.append(at_most("arms", name, "none", ratio, goal) if goal else Row("arms", name, "none", str(ratio)))
    for name, (other, goal) in AGAINST.items():
        rows.append(at_most("arms", name, other, Ratio.of(seconds[name], seconds[other]), goal))
    return Report(rows)


def config(flags: tuple[str, ...], tag: str) -> Config:
    """`mini` by these flags, at a tiny rate and without evaluations."""
    cfg = parse(["mini", *flags])
    return replace(
        cfg,
        scale=replace(cfg.scale, steps=1_000),
        opt=replace(cfg.opt, lr=rig.LR),
        eval=replace(cfg.eval, eval_ablate_every=0),
        run=replace(cfg.run, checkpoint_every=10_000_000, out_tag=f"_bench{tag}"),
    )
