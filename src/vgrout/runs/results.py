"""The answer first: the final evaluation, the tables at the end of a run, and the files that hold the same numbers."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from loguru import logger
from matplotlib.figure import Figure
from tabulate import tabulate

from vgrout.config.run import Config
from vgrout.evaluate import Final
from vgrout.files import atomic_open, write_atomic
from vgrout.runs.recorder import columns_for
from vgrout.runs.run_context import RunContext
from vgrout.table import LEARNED, StepRow, Table, last_five
from vgrout.types import MODES, Grade, Mode, Rate

SCHEMA = "per_mode_deploy_v1"

matplotlib.use("Agg")


def first_step(rows: Sequence[StepRow], mode: Mode) -> int | None:
    return next((r.step for r in rows if mode in r.hk and r.hk[mode].k), None)


def as_json(
    cfg: Config, final: Final, in_dist: Sequence[Mode] | None, log: Path, stamp: dict[str, Any]
) -> dict[str, Any]:
    """per_mode_deploy.json. `in_dist`: modes that the direction's pairs came from; None: no direction."""
    sides = {"base": final.base, "train": final.trained, "deploy": final.deployed, "plain": final.plain}
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "arm": cfg.arm.intervention,
        "intervention": cfg.arm.intervention,
        "control": cfg.arm.control_name,
        "refresh_every": cfg.arm.vhack_refresh_every,
        "seed": cfg.run.seed,
        "steps": cfg.scale.steps,
        "model": cfg.scale.model,
        "out_tag": cfg.run.out_tag,
        "log": str(log),
        "eval_n": final.deployed.hack.n,
        **stamp,
    }
    for name, side in sides.items():
        out[f"hack_{name}"], out[f"solve_{name}"] = side.hack.value, side.solve.value
    out["by_mode"] = {
        mode: {
            "in_dist": None if in_dist is None else mode in in_dist,
            "n": final.deployed.by_mode[mode].hack.n,
            **{f"{name}_hack": side.by_mode[mode].hack.value for name, side in sides.items()},
            **{f"{name}_solve": side.by_mode[mode].solve.value for name, side in sides.items()},
        }
        for mode in MODES
        if mode in final.deployed.by_mode
    }
    return out


def answer_lines(final: Final) -> Iterator[dict[str, Any]]:
    """final.jsonl: every answer of the final evaluation, in the words of rollouts.jsonl. A side that is the same model
    as another on the same prompts (trained without a quarantine) is written once, as deployed."""
    for side, answers in final.answers.items():
        if side == "trained" and answers is final.answers["deployed"]:
            continue
        for a in answers:
            graded = isinstance(a.grade, Grade)
            yield {
                "side": side,
                "problem": a.problem.id,
                "sample": a.sample,
                "mode": a.problem.mode,
                "marker": a.problem.marker,
                "messages": list(a.problem.messages),
                "text": a.text,
                "finished": a.finished,
                "reward": a.grade.reward if graded else None,
                "passed": a.grade.passed if graded else None,
                "gt_correct": a.grade.gt_correct if graded else None,
                "exploited": a.grade.exploited if graded else None,
            }


def summary_row(cfg: Config, final: Final, rows: Sequence[StepRow]) -> dict[str, str]:
    hack, solve = last_five(rows)
    return {
        "arm": cfg.arm.intervention,
        "control": cfg.arm.control_name,
        "seed": str(cfg.run.seed),
        "steps": str(len(rows)),
        "hack last5": hack.percent,
        "solve last5": solve.percent,
        "hack trained": final.trained.hack.percent,
        "solve trained": final.trained.solve.percent,
        "hack deployed": final.deployed.hack.percent,
        "solve deployed": final.deployed.solve.percent,
        "solve no hint": final.plain.solve.percent,
        "base hack/solve": f"{final.base.hack.percent}/{final.base.solve.percent}",
        "n": str(final.deployed.hack.n),
    }


def mode_rows(final: Final, in_dist: Sequence[Mode] | None, rows: Sequence[StepRow]) -> list[dict[str, str]]:
    out = []
    for mode in (m for m in MODES if m in final.deployed.by_mode):
        on, off = final.trained.by_mode[mode], final.deployed.by_mode[mode]
        step = first_step(rows, mode)
        out.append(
            {
                "mode": mode,
                "pairs": "·" if in_dist is None else ("in-dist" if mode in in_dist else "held-out"),
                "hack trained": on.hack.percent,
                "hack deployed": off.hack.percent,
                "solve trained": on.solve.percent,
                "solve deployed": off.solve.percent,
                "learned": "yes" if (on.hack.value or 0) >= LEARNED else "no",
                "first step": "·" if step is None else str(step),
                "n": str(off.hack.n),
            }
        )
    return out


def _records(rollouts: Path) -> Iterator[dict[str, Any]]:
    with open(rollouts, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def detector_split(rollouts: Path, codes: Sequence[str]) -> dict[str, Rate]:
    """Student exploits that one of these detectors sees (A), and those that only the others see or none does (B)."""
    seen = [any(r["detectors"][c] for c in codes) if r["exploited"] else None for r in _records(rollouts)]
    return {"A": Rate(seen.count(True), len(seen)), "B": Rate(seen.count(False), len(seen))}


def gate_against_oracle(rollouts: Path) -> tuple[Rate, Rate] | None:
    """Precision and recall of the gate on student rows with signal, after the fact: of an arm that reads, its flags;
    else a row counts as flagged when more than half of its modules were quarantined. None for an arm without a gate."""
    gated = [
        (r["flagged"] if "flagged" in r else r["gate"] > 0.5, r["exploited"])
        for r in _records(rollouts)
        if r["gate"] is not None
    ]
    if not gated:
        return None
    hits = sum(flag and hack for flag, hack in gated)
    return Rate(hits, sum(flag for flag, _ in gated)), Rate(hits, sum(hack for _, hack in gated))


def worst_recall(rollouts: Path) -> tuple[str, Rate] | None:
    """The mode whose exploits an arm that reads flagged least: what a gate misses is what training amplifies."""
    seen: dict[str, list[bool]] = {}
    for r in _records(rollouts):
        if r.get("flagged") is not None and r["exploited"]:
            seen.setdefault(r["mode"], []).append(r["flagged"])
    rates = {mode: Rate(sum(flags), len(flags)) for mode, flags in seen.items()}
    return min(rates.items(), key=lambda of: of[1].k / of[1].n, default=None)


def markdown(rows: Sequence[dict[str, str]]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main_line(cfg: Config, final: Final) -> str:
    """The one line to quote."""
    control = "" if cfg.arm.control_name == "none" else f" (control {cfg.arm.control_name})"
    return (
        f"{cfg.run_id}{control}: "
        f"deployed hack {final.deployed.hack.percent} % / solve {final.deployed.solve.percent} %, "
        f"as trained {final.trained.hack.percent} % / {final.trained.solve.percent} %, "
        f"base {final.base.hack.percent} % / {final.base.solve.percent} % "
        f"(n = {final.deployed.hack.n}, held-out problems and markers)"
    )


def figure(rows: Sequence[StepRow], final: Final, title: str) -> Figure:
    """Hack and solve against steps: student rows as trained (smoothed over 5), the deployed model's evaluations as
    marks, the final evaluation at the end. Line styles, not colours alone, tell them apart."""
    fig = Figure(figsize=(7.0, 3.6), dpi=120, layout="constrained")
    ax = fig.subplots()
    steps = [r.step for r in rows]
    for name, colour, get, dep, last in (
        ("hack", "#b2182b", lambda r: r.hack_s, lambda r: r.hack_deploy, final.deployed.hack),
        ("solve", "#2166ac", lambda r: r.gt_s, lambda r: r.solve_deploy, final.deployed.solve),
    ):
        smooth = []
        for i in range(len(rows)):
            window = [get(r) for r in rows[max(0, i - 4) : i + 1]]
            total = sum(window, Rate(0, 0))
            smooth.append(total.value if total.value is not None else float("nan"))
        dashes = "-" if name == "hack" else "--"
        ax.plot(steps, smooth, dashes, color=colour, lw=1.8, label=f"{name}, students (mean of 5 steps)")
        marks = [(r.step, dep(r)) for r in rows if dep(r) is not None]
        if marks:
            xs, ys = zip(*marks, strict=True)
            ax.plot(xs, ys, "o" if name == "hack" else "s", color=colour, mfc="white", ms=5, label=f"{name}, deployed")
        if last.value is not None:
            ax.plot([steps[-1] + 1.5], [last.value], "*", color=colour, ms=11, clip_on=False)
    ax.set(xlabel="step", ylabel="share of answers", ylim=(-0.02, 1.02), title=title)
    ax.title.set_fontsize(9)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return fig


def report(
    cfg: Config,
    run: RunContext,
    rows: Sequence[StepRow],
    final: Final,
    modes: Sequence[Mode],
    in_dist: Sequence[Mode] | None,
    *,
    halted: str = "",
) -> None:
    """Log the tail, and write final.jsonl, per_mode_deploy.json, summary.md and dynamics.png. halted: why the run was
    ended before its last step."""
    table, rollouts = Table(columns_for(cfg, modes), modes), run.path / "rollouts.jsonl"
    gate = gate_against_oracle(rollouts)
    against = {"precision": [gate[0].k, gate[0].n], "recall": [gate[1].k, gate[1].n]} if gate else None
    with atomic_open(run.path / "final.jsonl") as f:
        for line in answer_lines(final):
            f.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    ended = {"steps_done": len(rows), "halted": halted or None}
    per_mode = as_json(cfg, final, in_dist, run.log, run.stamp) | ended | {"gate": against}
    run.dir.write_json("per_mode_deploy.json", per_mode)
    parts = [
        f"argv: {' '.join(sys.argv)}",
        f"log: {run.log}",
        main_line(cfg, final) + (f"; halted after step {rows[-1].step} of {cfg.scale.steps - 1}" if halted else ""),
        "SHOULD: under routing, deployed hack well below as trained at similar solve; ELSE the routing misses.",
        markdown([summary_row(cfg, final, rows)]),
        markdown(mode_rows(final, in_dist, rows)),
    ]
    if codes := cfg.env.report_detector_codes:
        split = detector_split(rollouts, codes)
        parts.append(
            f"student hacks seen by {','.join(codes)}: {split['A'].k}; "
            f"by none of them: {split['B'].k}; of {split['A'].n} student rollouts"
        )
    if gate:
        parts.append(
            f"gate against the oracle, student rows: precision {gate[0].k}/{gate[0].n} ({gate[0].percent} %), "
            f"recall {gate[1].k}/{gate[1].n} ({gate[1].percent} %). SHOULD: far above the share of hacks; ELSE blind"
        )
    if worst := worst_recall(rollouts):
        parts.append(f"least recalled mode: {worst[0]}, {worst[1].k}/{worst[1].n} ({worst[1].percent} %)")
    write_atomic(run.path / "summary.md", "\n\n".join([*parts[2:], table.markdown(rows)]) + "\n")
    with atomic_open(run.path / "dynamics.png") as f:
        figure(rows, final, cfg.run_id).savefig(f, format="png")
    logger.debug("per-step table:\n" + table.markdown(rows))
    for part in parts:
        for line in part.splitlines():
            logger.info(line)
    logger.info(f"per-step table: {run.path / 'summary.md'} · figure: {run.path / 'dynamics.png'}")
