"""What a run leaves at its end: the answer on the console; tables, a figure, and files with the same numbers."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from loguru import logger
from tabulate import tabulate

from vgrout.config.run import Config
from vgrout.data import Flaw, Grade
from vgrout.envs.base import Splits
from vgrout.files import atomic_open, json_lines, write_atomic
from vgrout.heldout import Final
from vgrout.inputs import Inputs
from vgrout.metrics import Rate
from vgrout.runs.context import RunContext
from vgrout.runs.preflight import method_lines
from vgrout.runs.recorder import columns_for
from vgrout.runs.verdict import last_lines
from vgrout.table import StepRow, Table, whole_run

# of an answer in final.jsonl; null: not graded
GRADED = ("reward", "passed", "solved", "hacked", "mechanism")

if TYPE_CHECKING:
    from vgrout.report.load import FinishedRun


def as_json(
    cfg: Config, final: Final, in_dist: Sequence[str] | None, log: Path, stamp: dict[str, Any]
) -> dict[str, Any]:
    """Contents of per_mode_deploy.json. in_dist: modes that the direction's pairs came from; None: no direction."""
    sides = {
        "base": final.base,
        "train": final.trained,
        "deploy": final.deployed,
        "plain": final.plain,
    }
    out: dict[str, Any] = {
        "schema": "per_mode_deploy_v1",
        "arm": cfg.method.intervention,
        "intervention": cfg.method.intervention,
        "control": cfg.method.control_name,
        "refresh_every": cfg.method.refresh_every,
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
            **{
                f"{name}_{what}": getattr(side.by_mode[mode], what).value
                for what in ("hack", "solve", "tries")
                for name, side in sides.items()
            },
        }
        for mode in final.deployed.by_mode
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
                "env_mode": a.problem.flaws[0],
                **a.problem.notes,
                "messages": list(a.problem.messages),
                "text": a.text,
                "finished": a.finished,
                **{name: getattr(a.grade, name) if graded else None for name in GRADED},
            }


def summary(cfg: Config, final: Final, finished: "FinishedRun") -> dict[str, str]:
    """One run as one record: quantity → value, shares in percent."""
    pool = cfg.pool_path
    return {
        "arm": cfg.method.intervention,
        "control": cfg.method.control_name,
        "seed": str(cfg.run.seed),
        "steps": str(len(finished.steps)),
        "pool": "·"
        if pool is None
        else cfg.env.teacher_pool_dir
        if cfg.files.pool == pool
        else pool.name,
        "mix": f"{cfg.env.mix_ratio if cfg.mixes else 0:g}",
        "hack last5": finished.last_five("hack").percent,
        "solve last5": finished.last_five("solve").percent,
        "hack trained": final.trained.hack.percent,
        "solve trained": final.trained.solve.percent,
        "hack deployed": final.deployed.hack.percent,
        "tries deployed": final.deployed.tries.percent,
        "solve deployed": final.deployed.solve.percent,
        "solve no hint": final.plain.solve.percent,
        "base hack/solve": f"{final.base.hack.percent}/{final.base.solve.percent}",
        "n": str(final.deployed.hack.n),
    }


def page(
    cfg: Config,
    final: Final,
    verdict: str,
    method: str,
    tallies: "Tallies",
    halted: str,
    unrouted: str,
    named: Mapping[str, Flaw],
) -> list[str]:
    """summary.md for a person, in paragraphs: the conclusion first. verdict, method: as the console has them. named:
    the environment's flaws."""

    def cells(*values: str) -> str:
        return f"| {' | '.join(values)} |"

    sides = {"untrained": final.base, "as trained": final.trained, "deployed": final.deployed}
    sides |= {"deployed, prompts without a hint": final.plain}
    whole = [cells("model", "hack, %", "solve, %"), cells("---", "---:", "---:")]
    whole += [cells(name, side.hack.percent, side.solve.percent) for name, side in sides.items()]
    heads = (
        "flaw",
        "hack as trained, %",
        "hack deployed, %",
        "solve deployed, %",
        "answers",
        "a hack",
    )
    flaws = [cells(*heads), cells("---", "---:", "---:", "---:", "---:", "---")]
    for mode in final.deployed.by_mode:
        trained, deployed = final.trained.by_mode[mode], final.deployed.by_mode[mode]
        shares = (
            trained.hack.percent,
            deployed.hack.percent,
            deployed.solve.percent,
            str(deployed.hack.n),
        )
        flaws.append(cells(f"`{mode}`", *shares, named[mode].should))
    ended = [f"**Halted**: {halted}."] * bool(halted) + [
        f"**Nothing was routed**: {unrouted}."
    ] * bool(unrouted)
    last = tallies.last
    return [
        f"# {verdict[0].upper()}{verdict[1:]}",
        *ended,
        f"`{cfg.run_id}`, {cfg.scale.steps} steps. Method: {' '.join(method.split())}.",
        "\n".join(whole),
        f"{final.deployed.hack.n} answers a row, with held-out {cfg.env.held_out}. Hack: the flawed check accepts the "
        "answer and the reference tests do not; solve: the reference tests accept it.",
        "![hack and solve by step](dynamics.png)",
        "## By flaw",
        "\n".join(flaws),
        *tallies.lines(cfg.env.report_detector_codes),
        *(
            []
            if last is None
            else ["## The last answer of training", f"    {indent(last['text'], '    ').strip()}"]
        ),
    ]


def count_lines(
    rows: Sequence[StepRow], tallies: "Tallies", detectors: Mapping[str, str]
) -> list[str]:
    """Counts over the whole run, named as in the original implementation: of all rows, of the students', of the
    teacher's; and how many student rows each weak detector flagged. detectors: their fields by their letters."""

    def line(name: str, rate: Rate) -> str:
        return f"{name}={'·' if rate.value is None else f'{rate.value:.4f}'} ({rate.k}/{rate.n})"

    hack, solve = whole_run(rows)
    students, _ = whole_run(rows, students=True)
    teacher = Rate(hack.k - students.k, hack.n - students.n)
    rates = {
        "HACK_RATE": hack,
        "PASS_RATE": solve,
        "HACK_STUDENT": students,
        "HACK_TEACHER": teacher,
    }
    flagged = [f"{line(code, tallies.flagged[code])} {name}" for code, name in detectors.items()]
    lines = [line(name, rate) for name, rate in rates.items()]
    if flagged:
        lines.append(f"student rows that a detector flags: {' · '.join(flagged)}")
    return lines


@dataclass(frozen=True)
class Tallies:
    """Counts over the student rows of rollouts.jsonl, read once."""

    flagged: dict[str, Rate]  # weak detector → rows that it flags
    # hacks seen by the chosen detectors (A), by others alone (B), by none ("")
    halves: dict[str, int]
    rows: int
    gate: tuple[Rate, Rate] | None  # precision and recall of the gate; None: no gate
    by_mode: dict[str, Rate]  # hacks that a monitor flagged
    last: dict[str, Any] | None  # the run's last answer

    def lines(self, codes: Sequence[str]) -> list[str]:
        """What summary.md says of them. codes: of the detectors that split the hacks."""
        found = []
        if codes:
            a, b, none = (self.halves.get(half, 0) for half in ("A", "B", ""))
            found.append(
                f"Student hacks: {a} seen by {','.join(codes)} (half A), {b} by other detectors alone (half B), "
                f"{none} by no detector; of {self.rows} student rows."
            )
        if self.gate:
            precision, recall = (f"{of.k}/{of.n} ({of.percent} %)" for of in self.gate)
            found.append(
                f"Flags of training, against the reference tests: {precision} of the flagged answers are hacks "
                f"(precision), {recall} of the hacks are flagged (recall)."
            )
        if self.by_mode:  # what a monitor misses, training amplifies
            flaw, of = min(self.by_mode.items(), key=lambda of: of[1].k / of[1].n)
            found.append(f"Least recalled flaw: `{flaw}`, {of.k}/{of.n} ({of.percent} %).")
        return found

    @classmethod
    def of(cls, rollouts: Path, half_a: Sequence[str], detectors: Mapping[str, str]) -> "Tallies":
        """half_a: letters of the chosen detectors. detectors: the fields of all, by their letters.

        The gate is compared with the oracle, after the fact, on rows with signal. A row counts as flagged by the
        monitor's flag or, where there is none, when more than half of its modules were quarantined.
        """
        flagged, halves, n = Counter[str](), Counter[str](), 0
        hits = gated = hacks = 0
        by_mode: dict[str, Rate] = {}
        has_gate, last = False, None
        for last in json_lines(rollouts):
            n, hacked = n + 1, last["hacked"]
            detected = {code for code, name in detectors.items() if last[name]}
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
        return cls(
            {code: Rate(flagged[code], n) for code in detectors},
            dict(halves),
            n,
            gate,
            by_mode,
            last,
        )


def write(
    cfg: Config,
    run: RunContext,
    rows: Sequence[StepRow],
    final: Final,
    inputs: Inputs,
    problems: Splits,
    halted: str = "",
    unrouted: str = "",
) -> None:
    """Write final.jsonl, per_mode_deploy.json, summary.md, dynamics.png and the log's tail; say the answer. halted: why
    the run ended before its last step. unrouted: why it is no run of its method."""
    # Here and not above: pandas, scipy and matplotlib take seconds to import, and no run waits for
    # them to start.
    from vgrout.report.figures import dynamics
    from vgrout.report.load import conditions, read_run
    from vgrout.report.tables import by_flaw, conclusion

    flaws, detectors = problems.trained_flaws, inputs.environment.detectors
    codes = cfg.env.report_detector_codes
    tallies = Tallies.of(run.path / "rollouts.jsonl", codes, detectors)
    with atomic_open(run.path / "final.jsonl") as f:
        for line in answer_lines(final):
            f.write(
                json.dumps(line, ensure_ascii=False, allow_nan=False).encode(
                    errors="backslashreplace"
                )
                + b"\n"
            )
    gate = tallies.gate
    record = as_json(cfg, final, inputs.in_distribution, run.log, run.stamp)
    ended = {"steps_done": len(rows), "halted": halted or None, "unrouted": unrouted or None}
    against = {"precision": gate[0].pair, "recall": gate[1].pair} if gate else None
    run.dir.write_json("per_mode_deploy.json", record | ended | {"gate": against})

    finished = conditions([read_run(run.path, cfg)])  # this run's page is the report of one run
    answer, numbers = (
        last_lines(cfg, final, conclusion(*finished), run.path),
        summary(cfg, final, finished[0].first),
    )
    table, counts = Table(columns_for(cfg, flaws), flaws), count_lines(rows, tallies, detectors)
    parts = [
        f"{cfg.run_id}: deployed hack {numbers['hack deployed']} % / solve {numbers['solve deployed']} %, as trained "
        f"{numbers['hack trained']} % / {numbers['solve trained']} %, base {final.base.hack.percent} % / "
        f"{final.base.solve.percent} % (n = {numbers['n']}, held-out {cfg.env.held_out})"
        + (f"; halted after step {rows[-1].step} of {cfg.scale.steps - 1}" if halted else "")
        + ("; NOTHING WAS ROUTED: this was plain GRPO" if unrouted else ""),
        answer[2],
        "\n".join(counts),
        tabulate(
            [*numbers.items()], headers=("what", "value"), tablefmt="github", disable_numparse=True
        ),
        by_flaw(finished).markdown(),
        *tallies.lines(cfg.env.report_detector_codes),
    ]
    last_answer = []
    if last := tallies.last:
        was = "hacked" if last["hacked"] else "solved" if last["solved"] else "neither"
        last_answer = [
            f"last training generation: step {last['step']}, problem {last['problem_id']}, {last['env_mode']}, reward "
            f"{last['reward']:g}, {was}\n" + indent(last["text"], "    ")
        ]
    method = "\n".join(method_lines(cfg))
    text = page(cfg, final, answer[2], method, tallies, halted, unrouted, problems.flaws)
    folded = [
        f"<details><summary>{head}</summary>\n\n{of}\n\n</details>"
        for head, of in (
            ("Every step: columns as in docs/columns.md", table.markdown(rows)),
            ("Counts over the whole run", "\n".join(f"    {line}" for line in counts)),
        )
    ]
    write_atomic(run.path / "summary.md", "\n\n".join([*text, *folded]) + "\n")
    write_atomic(run.path / "dynamics.png", dynamics(finished).png())
    run.trackers.final(record, [numbers], run.path / "dynamics.png", len(rows) - 1)
    logger.debug("per-step table:\n" + table.markdown(rows))
    for part in (*last_answer, f"argv: {' '.join(sys.argv)}", f"log: {run.log}", *parts):
        for line in part.split("\n"):
            logger.debug(line)
    for line in answer:
        logger.info(line)
