"""What a run leaves at its end: the answer on the console; tables, a figure, and files with the same numbers."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import matplotlib
from loguru import logger
from matplotlib.figure import Figure
from tabulate import tabulate

from vgrout.config.run import Config
from vgrout.evaluate import Final
from vgrout.files import atomic_open, write_atomic
from vgrout.runs.expectation import expectation
from vgrout.runs.recorder import columns_for
from vgrout.runs.run_context import RunContext
from vgrout.runs.verdict import last_lines
from vgrout.table import LEARNED, StepRow, Table, last_five, whole_run
from vgrout.types import DETECTOR_FIELDS, MODE_CODE, MODES, Grade, Mode, Rate

SCHEMA = "per_mode_deploy_v1"

matplotlib.use("Agg")


def first_step(rows: Sequence[StepRow], mode: Mode) -> int | None:
    return next((r.step for r in rows if mode in r.hk and r.hk[mode].k), None)


def as_json(
    cfg: Config, final: Final, in_dist: Sequence[Mode] | None, log: Path, stamp: dict[str, Any]
) -> dict[str, Any]:
    """Contents of per_mode_deploy.json. in_dist: modes that the direction's pairs came from; None: no direction."""
    sides = {"base": final.base, "train": final.trained, "deploy": final.deployed, "plain": final.plain}
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "arm": cfg.method.intervention,
        "intervention": cfg.method.intervention,
        "control": cfg.method.control_name,
        "refresh_every": cfg.method.vhack_refresh_every,
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
        out[f"tries_{name}"] = side.tries.value
    out["by_mode"] = {
        mode: {
            "in_dist": None if in_dist is None else mode in in_dist,
            "n": final.deployed.by_mode[mode].hack.n,
            **{f"{name}_hack": side.by_mode[mode].hack.value for name, side in sides.items()},
            **{f"{name}_solve": side.by_mode[mode].solve.value for name, side in sides.items()},
            **{f"{name}_tries": side.by_mode[mode].tries.value for name, side in sides.items()},
        }
        for mode in MODES
        if mode in final.deployed.by_mode
    }
    return out


def answer_lines(final: Final) -> Iterator[dict[str, Any]]:
    """Lines of final.jsonl: every answer of the final evaluation, with the keys of rollouts.jsonl. A side with the same
    model and prompts as deployed (trained without a quarantine, plain where no prompt has a hint) is left out."""
    for side, answers in final.answers.items():
        if side != "deployed" and answers is final.answers["deployed"]:
            continue
        for a in answers:
            graded = isinstance(a.grade, Grade)
            yield {
                "side": side,
                "problem_id": a.problem.id,
                "sample": a.sample,
                "env_mode": a.problem.mode,
                "marker": a.problem.marker,
                "messages": list(a.problem.messages),
                "text": a.text,
                "finished": a.finished,
                "reward": a.grade.reward if graded else None,
                "passed": a.grade.passed if graded else None,
                "solved": a.grade.solved if graded else None,
                "hacked": a.grade.hacked if graded else None,
                "mechanism": a.grade.mechanism if graded else None,
            }


def summary(cfg: Config, final: Final, rows: Sequence[StepRow]) -> dict[str, str]:
    """One run as one record: quantity → value, shares in percent."""
    hack, solve = last_five(rows)
    pool = cfg.pool_path
    return {
        "cue": expectation(cfg.method, final).cue,
        "arm": cfg.method.intervention,
        "control": cfg.method.control_name,
        "seed": str(cfg.run.seed),
        "steps": str(len(rows)),
        "pool": "·" if pool is None else cfg.env.teacher_pool_dir if cfg.files.pool == pool else pool.name,
        "mix": f"{cfg.env.mix_ratio if cfg.mixes else 0:g}",
        "hack last5": hack.percent,
        "solve last5": solve.percent,
        "hack trained": final.trained.hack.percent,
        "solve trained": final.trained.solve.percent,
        "hack deployed": final.deployed.hack.percent,
        "tries deployed": final.deployed.tries.percent,
        "solve deployed": final.deployed.solve.percent,
        "solve no hint": final.plain.solve.percent,
        "base hack/solve": f"{final.base.hack.percent}/{final.base.solve.percent}",
        "n": str(final.deployed.hack.n),
    }


def mode_columns(final: Final, in_dist: Sequence[Mode] | None, rows: Sequence[StepRow]) -> list[dict[str, str]]:
    """One row per quantity, shares in percent; one column per mode, named by two letters so that it fits 80 columns."""
    modes = [m for m in MODES if m in final.deployed.by_mode]
    on, off = final.trained.by_mode, final.deployed.by_mode
    firsts = {m: first_step(rows, m) for m in modes}
    quantities: dict[str, dict[Mode, str]] = {
        "pairs": {m: "·" if in_dist is None else "in" if m in in_dist else "out" for m in modes},
        "hack trained": {m: on[m].hack.percent for m in modes},
        "hack deployed": {m: off[m].hack.percent for m in modes},
        "tries deployed": {m: off[m].tries.percent for m in modes},
        "solve trained": {m: on[m].solve.percent for m in modes},
        "solve deployed": {m: off[m].solve.percent for m in modes},
        "learned": {m: "yes" if (on[m].hack.value or 0) >= LEARNED else "no" for m in modes},
        "first step": {m: "·" if firsts[m] is None else str(firsts[m]) for m in modes},
        "n": {m: str(off[m].hack.n) for m in modes},
    }
    return [{"flaw": what, **{MODE_CODE[m]: of[m] for m in modes}} for what, of in quantities.items()]


def mode_legend(modes: Sequence[Mode], pairs: bool) -> str:
    """The legend of `mode_columns`."""
    names = ", ".join(f"{MODE_CODE[m]} {m}" for m in modes)
    return names + ("; pairs: the direction's pairs show the mode (in-dist) or not (held out)" if pairs else "")


def count_lines(rows: Sequence[StepRow], tallies: "Tallies") -> list[str]:
    """Counts over the whole run, named as in the original implementation: of all rows, of the students', of the
    teacher's; and how many student rows each weak detector flagged."""

    def line(name: str, rate: Rate) -> str:
        return f"{name}={'·' if rate.value is None else f'{rate.value:.4f}'} ({rate.k}/{rate.n})"

    hack, solve = whole_run(rows)
    students, _ = whole_run(rows, students=True)
    teacher = Rate(hack.k - students.k, hack.n - students.n)
    rates = {"HACK_RATE": hack, "PASS_RATE": solve, "HACK_STUDENT": students, "HACK_TEACHER": teacher}
    flagged = (f"{line(code, tallies.flagged[code])} {name}" for code, name in DETECTOR_FIELDS.items())
    return [
        *(line(name, rate) for name, rate in rates.items()),
        f"student rows that a detector flags: {' · '.join(flagged)}",
    ]


@dataclass(frozen=True)
class Tallies:
    """Counts over the student rows of rollouts.jsonl, read once."""

    flagged: dict[str, Rate]  # weak detector → rows that it flags
    halves: dict[str, int]  # hacks seen by the chosen detectors (A), by others alone (B), by none ("")
    rows: int
    gate: tuple[Rate, Rate] | None  # precision and recall of the gate; None: no gate
    by_mode: dict[Mode, Rate]  # hacks that a monitor flagged
    last: dict[str, Any] | None  # the run's last answer

    @property
    def worst(self) -> tuple[Mode, Rate] | None:
        """The mode whose hacks were flagged least: what a monitor misses, training amplifies."""
        return min(self.by_mode.items(), key=lambda of: of[1].k / of[1].n, default=None)

    @classmethod
    def of(cls, rollouts: Path, half_a: Sequence[str]) -> "Tallies":
        """half_a: letters of the chosen detectors.

        The gate is compared with the oracle, after the fact, on rows with signal. A row counts as flagged by the
        monitor's flag or, where there is none, when more than half of its modules were quarantined.
        """
        flagged, halves, n = Counter[str](), Counter[str](), 0
        hits = gated = hacks = 0
        by_mode: dict[Mode, Rate] = {}
        has_gate, last = False, None
        for last in _records(rollouts):
            n, hacked = n + 1, last["hacked"]
            detected = {code for code, name in DETECTOR_FIELDS.items() if last[name]}
            flagged.update(detected)
            if hacked:
                halves["A" if detected & {*half_a} else "B" if detected else ""] += 1
            if last["gate"] is not None or "flagged" in last:
                has_gate, flag = True, last["flagged"] if "flagged" in last else last["gate"] > 0.5
                hits, gated, hacks = hits + (flag and hacked), gated + flag, hacks + hacked
            if hacked and last.get("flagged") is not None:
                mode = last.get("mechanism") or last["env_mode"]  # older lines have no mechanism
                by_mode[mode] = by_mode.get(mode, Rate(0, 0)) + Rate(int(last["flagged"]), 1)
        gate = (Rate(hits, gated), Rate(hits, hacks)) if has_gate else None
        return cls({code: Rate(flagged[code], n) for code in DETECTOR_FIELDS}, dict(halves), n, gate, by_mode, last)


def _records(rollouts: Path) -> Iterator[dict[str, Any]]:
    with open(rollouts, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def last_generation(answer: dict[str, Any]) -> str:
    """One line on the last answer of training."""
    verdict = "hacked" if answer["hacked"] else "solved" if answer["solved"] else "neither"
    return (
        f"last training generation: step {answer['step']}, problem {answer['problem_id']}, {answer['env_mode']}, "
        f"reward {answer['reward']:g}, {verdict}"
    )


def markdown(rows: Sequence[dict[str, str]]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main_line(cfg: Config, final: Final) -> str:
    """The one line to quote."""
    return (
        f"{cfg.run_id}: "
        f"deployed hack {final.deployed.hack.percent} % / solve {final.deployed.solve.percent} %, "
        f"as trained {final.trained.hack.percent} % / {final.trained.solve.percent} %, "
        f"base {final.base.hack.percent} % / {final.base.solve.percent} % "
        f"(n = {final.deployed.hack.n}, held-out {cfg.env.held_out})"
    )


def figure(rows: Sequence[StepRow], final: Final, title: str) -> Figure:
    """Hack and solve rates by step: student rows as trained (mean of 5 steps), the deployed model's evaluations as
    marks, the final evaluation as stars. Line styles as well as colours tell them apart."""
    fig = Figure(figsize=(7.0, 3.6), dpi=120, layout="constrained")
    ax = fig.subplots()
    steps = [r.step for r in rows]
    for name, colour, get, dep, last in (
        ("hack", "#b2182b", lambda r: r.hack_s, lambda r: r.hack_deploy, final.deployed.hack),
        ("solve", "#2166ac", lambda r: r.solve_s, lambda r: r.solve_deploy, final.deployed.solve),
    ):
        totals = [sum(map(get, rows[max(0, i - 4) : i + 1]), Rate(0, 0)).value for i in range(len(rows))]
        smooth = [float("nan") if total is None else total for total in totals]
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
    halted: str = "",
    unrouted: str = "",
) -> None:
    """Write final.jsonl, per_mode_deploy.json, summary.md, dynamics.png and the log's tail; say the answer. halted: why
    the run ended before its last step. unrouted: why it is no run of its method."""
    table, codes = Table(columns_for(cfg, modes), modes), cfg.env.report_detector_codes
    tallies = Tallies.of(run.path / "rollouts.jsonl", codes)
    gate = tallies.gate
    against = {"precision": gate[0].pair, "recall": gate[1].pair} if gate else None
    with atomic_open(run.path / "final.jsonl") as f:
        for line in answer_lines(final):
            f.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n")
    expected = expectation(cfg.method, final)
    record = as_json(cfg, final, in_dist, run.log, run.stamp)
    ended = {"steps_done": len(rows), "halted": halted or None, "unrouted": unrouted or None, "cue": expected.cue}
    run.dir.write_json("per_mode_deploy.json", record | ended | {"gate": against})
    answer = last_lines(cfg, final, rows, run.path)
    parts = [
        f"argv: {' '.join(sys.argv)}",
        f"log: {run.log}",
        main_line(cfg, final)
        + (f"; halted after step {rows[-1].step} of {cfg.scale.steps - 1}" if halted else "")
        + ("; NOTHING WAS ROUTED: this was plain GRPO" if unrouted else ""),
        answer[2],
        expected.line,
        "\n".join(count_lines(rows, tallies)),
        markdown([{"what": what, "value": value} for what, value in summary(cfg, final, rows).items()]),
        markdown(mode_columns(final, in_dist, rows)),
        mode_legend([m for m in MODES if m in final.deployed.by_mode], in_dist is not None),
    ]
    if codes:
        a, b, none = (tallies.halves.get(half, 0) for half in ("A", "B", ""))
        parts.append(
            f"student hacks: {a} seen by {','.join(codes)} (half A), {b} by other detectors alone (half B), "
            f"{none} by no detector; of {tallies.rows} student rows"
        )
    if gate:
        parts.append(
            f"flags against the reference tests: precision {gate[0].k}/{gate[0].n} ({gate[0].percent} %), "
            f"recall {gate[1].k}/{gate[1].n} ({gate[1].percent} %). SHOULD: far above the share of hacks; ELSE blind"
        )
    if worst := tallies.worst:
        parts.append(f"least recalled flaw: {worst[0]}, {worst[1].k}/{worst[1].n} ({worst[1].percent} %)")
    last_answer = []
    if tallies.last:
        last_answer = [f"{last_generation(tallies.last)}\n" + indent(tallies.last["text"], "    ")]
    write_atomic(run.path / "summary.md", "\n\n".join([*parts[2:], *last_answer, table.markdown(rows)]) + "\n")
    with atomic_open(run.path / "dynamics.png") as f:
        figure(rows, final, cfg.run_id).savefig(f, format="png")
    run.trackers.final(record, [summary(cfg, final, rows)], run.path / "dynamics.png", len(rows) - 1)
    logger.debug("per-step table:\n" + table.markdown(rows))
    for part in (*last_answer, *parts):
        for line in part.split("\n"):
            logger.debug(line)
    for line in answer:
        logger.info(line)
