"""The tables of a report, as rows of text. Shares are printed in percent."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape

import numpy as np
from tabulate import tabulate

from vgrout.config.checks import listed
from vgrout.files import printable
from vgrout.report import stats
from vgrout.report.runs import SIDES, WHATS, Cell, Reading, Run, What, bases, flagged, paired, partner
from vgrout.report.stats import Estimate, PValue, Stratum
from vgrout.types import MODES, Mode, Rate

MARGIN = 0.10  # "no difference" is claimed within ± 10 points, H1's margin for matched solve (docs/hypotheses.toml)
PHASES = ("gen", "grade", "fb", "eval")

TableRow = dict[str, str]


def one_line(text: str) -> str:
    """Text of unknown origin, for a terminal."""
    return printable(text).replace("\n", " ")


def inert(text: str) -> str:
    """The same for a Markdown file, in which it is neither HTML, a link, a picture nor another cell."""
    return escape(one_line(text), quote=False).replace("](", "]\\(").replace("|", "\\|")


@dataclass(frozen=True)
class Table:
    name: str  # as a heading
    caption: str
    rows: Sequence[TableRow]

    def markdown(self, shown: Callable[[str], str] = one_line) -> str:
        """shown: how a cell of any origin is written, in one line."""
        rows = [{shown(str(k)): shown(str(v)) for k, v in row.items()} for row in self.rows]
        return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def percent(e: Estimate) -> str:
    """`81.0 [80.1, 82.0]`; Student's interval is marked t, and a value without an interval has the note on why."""
    if e.value is None:
        return "·"
    value = f"{100 * e.value:.1f}"
    if e.low is None or e.high is None:
        return f"{value} ({'one seed' if e.n == 1 else e.note})"
    return f"{value} [{100 * e.low:.1f}, {100 * e.high:.1f}]{' t' if e.how == 't' else ''}"


def p_value(p: PValue) -> str:
    """`0.062 (≥ 0.062)`: with the smallest that n allows."""
    if p.p is None:
        return p.note
    least = "" if p.smallest is None else f" (≥ {p.smallest:.3f})"
    return f"{p.p:.3f}{least}{f' {p.note}' if p.note else ''}"


def spread(values: Iterable[float | None], scale: float = 100.0) -> str:
    """`mean ± standard deviation (lowest – highest)`; a single value stands alone."""
    xs = [scale * v for v in values if v is not None]
    if not xs:
        return "·"
    if len(xs) == 1:
        return f"{xs[0]:.1f}"
    return f"{statistics.mean(xs):.1f} ± {statistics.stdev(xs):.1f} ({min(xs):.0f}–{max(xs):.0f})"


def _by_mode(shares: Mapping[Mode, Mapping[int, float]]) -> list[Stratum]:
    """A seed's problems as strata by mode; other seeds have answered the same problems."""
    total = sum(map(len, shares.values()))
    return [
        Stratum(np.asarray(list(of.values()), dtype=float), len(of) / total, mode, tuple(of))
        for mode, of in shares.items()
        if of
    ]


@cache
def level(cell: Cell, side: str, what: What, mode: Mode | None = None) -> Estimate:
    """The cell's share in the final evaluation, over seeds."""
    rows = (_by_mode(r.shares(side, what, mode and {mode})) for r in cell.runs)
    return stats.estimate([row for row in rows if row])


@cache
def last_five(cell: Cell, what: What, mode: Mode | None = None) -> Estimate:
    """The students' share over the last five training steps, over seeds; each answer counts as of another problem."""
    rates = (r.last_five(what, mode) for r in cell.runs)
    return stats.estimate([[Stratum(np.repeat([1.0, 0.0], [r.k, r.n - r.k]), 1.0)] for r in rates if r.n])


@dataclass(frozen=True)
class Comparison:
    """One cell minus another, seed by seed and unit by unit, on the seeds that both have."""

    difference: Estimate
    p: PValue
    same: PValue  # TOST at ± MARGIN
    seeds: tuple[int, ...]


@cache
def compare(a: Cell, b: Cell, what: What) -> Comparison:
    """Cell a minus cell b, problem by problem, of the deployed models."""
    rows, seeds = [], []
    for run, other in paired(a, b):
        x, y = run.shares("deploy", what), other.shares("deploy", what)
        both = {m: sorted(x[m].keys() & y[m].keys()) for m in x if m in y}
        row = _by_mode({m: {u: x[m][u] - y[m][u] for u in shared} for m, shared in both.items()})
        if row:
            rows.append(row)
            seeds.append(run.seed)
    means = [stats.row_mean(row) for row in rows]
    return Comparison(
        difference=stats.estimate(rows, low=-1.0),
        p=stats.sign_flip(means),
        same=stats.equivalent(means, MARGIN),
        seeds=tuple(seeds),
    )


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Every table that these cells can fill. Cells of one seed have a table of their own, without means."""
    several = [c for c in cells if len(c.runs) > 1]
    single = [c for c in cells if len(c.runs) == 1]
    out = [
        overall(several),
        against_none(several),
        controls(several),
        per_mode(several),
        flags(cells),
        over_time(cells),
        base([r for c in several for r in c.runs]),
        masked(several),
        one_seed(single),
        times(cells),
    ]
    return [t for t in out if t.rows]


def _onsets(cell: Cell) -> str:
    return "/".join("·" if r.onset is None else str(r.onset) for r in cell.runs)


def overall(cells: Sequence[Cell]) -> Table:
    return Table(
        "Methods",
        "Held-out problems and marker names, final evaluation, % over seeds; last 5: the students' answers of the last "
        "five training steps; onset: first of five steps in which a tenth of the students' answers hack, by seed.",
        [
            {
                "method": c.title,
                "seeds": c.seeds,
                "onset": _onsets(c),
                "hack last 5": percent(last_five(c, "hack")),
                "solve last 5": percent(last_five(c, "solve")),
                "hack trained": percent(level(c, "train", "hack")),
                "solve trained": percent(level(c, "train", "solve")),
                "hack deployed": percent(level(c, "deploy", "hack")),
                "solve deployed": percent(level(c, "deploy", "solve")),
                "solve no hint": percent(level(c, "plain", "solve")),
                "modes learned (trained)": "/".join(str(r.learned("train")) for r in c.runs),
                "n a side": "/".join(sorted({str(r.answered()) for r in c.runs})),
            }
            for c in cells
        ],
    )


def _differences(c: Cell, other: Cell) -> TableRow:
    row: TableRow = {}
    for what in WHATS:
        found = compare(c, other, what)
        row |= {
            f"Δ {what}": percent(found.difference),
            f"p {what}": p_value(found.p),
            f"TOST {what}": p_value(found.same),
        }
    return row


def against_none(cells: Sequence[Cell]) -> Table:
    rows = []
    for c in cells:
        plain = partner(c, cells, "none")
        if plain is not None and plain is not c and (pairs := paired(c, plain)):
            rows.append({"method": c.title, "seeds": ",".join(str(a.seed) for a, _ in pairs)} | _differences(c, plain))
    return Table(
        "Deployed models against plain GRPO's",
        "Points, paired by seed and problem. p: sign flips over seeds, in brackets the smallest that n allows. "
        f'TOST: p for a difference within ± {100 * MARGIN:.0f} points; only a small one shows "no difference".',
        rows,
    )


def controls(cells: Sequence[Cell]) -> Table:
    """Methods beside their controls, in which the direction, the flags or the routing is replaced."""
    rows = []
    for c in cells:
        own = _beside(c, cells)
        less = {what: compare(c, own, what) for what in WHATS} if own and paired(c, own) else None
        close = [r.cosine_to_real for r in c.runs if r.cosine_to_real]
        gates = [r.final["gate"] for r in c.runs if r.final.get("gate")]
        rows.append(
            {
                "method · control": c.title,
                "seeds": c.seeds,
                "deployed hack": percent(level(c, "deploy", "hack")),
                "deployed solve": percent(level(c, "deploy", "solve")),
                "Δ hack": percent(less["hack"].difference) if less else "·",
                "Δ solve": percent(less["solve"].difference) if less else "·",
                "p hack": p_value(less["hack"].p) if less else "·",
                "cos with the real direction: median / 95 % / rms (chance)": (
                    " / ".join(f"{statistics.mean(k[name] for k in close):.2f}" for name in ("median", "p95", "rms"))
                    + f" ({statistics.mean(k['chance_rms'] for k in close):.2f})"
                    if close
                    else "·"
                ),
                "routed": spread(r.step_mean("routed") for r in c.runs),
                "gate precision / recall": f"{_pooled(gates, 'precision')} / {_pooled(gates, 'recall')}"
                if gates
                else "·",
            }
        )
    return Table(
        "Methods and controls",
        "%; Δ: points, seed by seed, from the same method without a control; of a method without a loophole from "
        "plain GRPO without one. |cos| of a control's direction with the real one, over modules.",
        rows if any(c.first.control != "none" for c in cells) else [],
    )


def _beside(control: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The cell that a control is compared with: its own method; without a loophole the ceiling, to show what the method
    costs by itself."""
    intervention, name = control.first.intervention, control.first.control
    if name == "no_loophole" and intervention != "none":
        return partner(control, cells, "none", name)
    return partner(control, cells, intervention) if name != "none" else None


def _pooled(gates: Sequence[dict[str, list[int]]], name: str) -> str:
    k, n = (sum(g[name][i] for g in gates) for i in (0, 1))
    return f"{100 * k / n:.0f}" if n else "·"


def _modes(cells: Sequence[Cell]) -> list[Mode]:
    """The flaws that any of these runs has problems of."""
    return [m for m in MODES if any(m in c.first.modes for c in cells)]


def per_mode(cells: Sequence[Cell]) -> Table:
    def cell(c: Cell, side: str, mode: Mode) -> str:
        if mode not in c.first.modes:
            return "·"
        return percent(level(c, side, "hack", mode) if side else last_five(c, "hack", mode))

    return Table(
        "Hack rate per mode",
        "%; pairs of: the modes that the direction's pairs show, all others are held out from it; students, last 5: "
        "their answers of the last five training steps, on training problems.",
        [
            {"method": c.title, "pairs of": ",".join(m for m in c.first.modes if c.first.in_distribution(m)) or "·"}
            | {"side": name}
            | {m: cell(c, side, m) for m in _modes(cells)}
            for c in cells
            for side, name in (("", "students, last 5"), ("train", "trained"), ("deploy", "deployed"))
        ],
    )


def flags(cells: Sequence[Cell]) -> Table:
    return Table(
        "What the monitors of text flagged",
        "% of the students' hacks in training, by mode, and of their solved answers; in brackets how many, over all "
        "seeds. AUC: of the scores, hacks against solved answers. The run's own monitor may not read groups without "
        "signal.",
        [
            {"method": c.title, "seeds": c.seeds, "monitor": _shadowed(c, name)}
            | {mode: _share(flagged(read).get(mode)) for mode in _modes(cells)}
            | {"solved": _share(flagged(read).get(None)), "AUC": "·" if (x := _auc(read)) is None else f"{x:.2f}"}
            for c in cells
            for name, read in _readings(c).items()
        ],
    )


PERIODS = 6  # equal parts of a run


def over_time(cells: Sequence[Cell]) -> Table:
    """Recall and false flags by period, where monitors flag in shadow: of flaws that no label shows, if some are."""

    def periods(c: Cell, read: Sequence[Reading]) -> TableRow:
        known, steps = known_modes(c.first), max(1, max(r.rows[-1]["step"] + 1 for r in c.runs))
        out = {}
        for i in range(PERIODS):
            first, last = steps * i // PERIODS, steps * (i + 1) // PERIODS
            part = flagged([r for r in read if first <= r.step < last])
            hacks = sum((rate for flaw, rate in part.items() if flaw is not None and flaw not in known), Rate(0, 0))
            out[f"{i + 1}/{PERIODS}"] = f"{_share(hacks)} / {_share(part.get(None))}"
        return out

    return Table(
        "What the monitors flagged over time",
        f"% of the students' hacks / of their solved answers, by {PERIODS} equal parts of the run; in brackets how "
        "many. Hacks of the flaws in --known-modes, which labels show, are left out.",
        [
            {"method": c.title, "monitor": _shadowed(c, name)} | periods(c, read)
            for c in cells
            if any(r.settings["method"].get("shadow") for r in c.runs)
            for name, read in _readings(c).items()
        ],
    )


def known_modes(run: Run) -> set[str]:
    """The flaws that a monitor with labels knows; empty: all, or there is none."""
    return {*listed(run.settings["method"]["known_modes"])}


def _readings(cell: Cell) -> dict[str, list[Reading]]:
    """By monitor, over all seeds."""
    names = dict.fromkeys(name for r in cell.runs for name in r.readings)
    return {name: [x for r in cell.runs for x in r.readings.get(name, [])] for name in names}


def _shadowed(cell: Cell, name: str) -> str:
    return name if name == cell.first.monitor_name else f"{name}, in shadow"


def _share(rate: Rate | None) -> str:
    return f"{100 * rate.value:.1f} ({rate.n})" if rate is not None and rate.value is not None else "·"


def _auc(read: Sequence[Reading]) -> float | None:
    """Of the scores, where there are some."""
    scored = [(r.flaw is not None, r.score) for r in read if r.score is not None]
    return stats.auc([x for hack, x in scored if hack], [x for hack, x in scored if not hack])


def base(runs: Sequence[Run]) -> Table:
    """The untrained models, each seed once."""
    return Table(
        "The base",
        "The adapter off, the same problems; each seed once.",
        [
            {
                "model": side.title,
                "seeds": side.seeds,
                "hack": percent(level(side, "base", "hack")),
                "solve": percent(level(side, "base", "solve")),
            }
            for side in bases(runs)
            if len(side.runs) > 1
        ],
    )


def masked(cells: Sequence[Cell]) -> Table:
    """Share of tokens without policy gradient, where losses are compared."""
    if len({c.first.loss for c in cells}) < 2:
        return Table("Losses", "", [])
    return Table(
        "Losses",
        "Share of tokens without policy gradient, %, mean over the steps; by the sign of the advantage.",
        [
            {
                "method": c.title,
                "onset": _onsets(c),
                "masked": spread(r.step_mean("is_masked") for r in c.runs),
                "masked A>0": spread(r.step_mean("masked_positive") for r in c.runs),
                "masked A<0": spread(r.step_mean("masked_negative") for r in c.runs),
            }
            for c in cells
        ],
    )


def one_seed(cells: Sequence[Cell]) -> Table:
    def alone(r: Run, side: str, what: What) -> str:
        rate, n = r.rate(side, what), r.answered()
        if rate is None or not n:
            return "·"
        low, high = stats.wilson(round(rate * n), n)
        return f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    return Table(
        "One seed only",
        "%, Wilson's interval for the answers of one run: it knows nothing of other seeds, so it cannot be compared "
        "with means over seeds.",
        [
            {
                "method": c.title,
                "seed": c.seeds,
                "onset": _onsets(c),
                "hack trained": alone(c.first, "train", "hack"),
                "solve trained": alone(c.first, "train", "solve"),
                "hack deployed": alone(c.first, "deploy", "hack"),
                "solve deployed": alone(c.first, "deploy", "solve"),
                "n a side": str(c.first.answered()),
            }
            for c in cells
        ],
    )


def times(cells: Sequence[Cell]) -> Table:
    return Table(
        "Time",
        "Shares of a step are means over the run; seconds per run: of runs that were not resumed.",
        [
            {
                "method": c.title,
                "seconds per run": spread((r.seconds for r in c.runs), 1.0),
                "seconds per step": spread((r.seconds_a_step for r in c.runs), 1.0),
            }
            | {
                f"{phase} %": spread(
                    sum(row[phase] or 0 for row in r.rows) / sum(row["sec"] for row in r.rows) for r in c.runs
                )
                for phase in PHASES
            }
            for c in cells
        ],
    )


def examine(run: Run) -> None:
    """Ask a run for everything that a report may ask of it. Raises whatever a file of wrong content raises."""
    alone, twice = Cell(run.method, (run,)), Cell(run.method, (run, run))
    for asked in (overall, controls, per_mode, flags, over_time, masked, times, against_none):
        asked([twice])
    one_seed([alone])
    base([run])
    _differences(twice, twice)
    run_rows([alone])
    mode_rows([alone])
    monitor_rows([alone])
    for _ in (
        [h + s + 0.0 for _, h, s in run.evaluations()],
        run.gates,
        run.unusual,
        run.learns,
        run.seed_name,
        run.inputs,
        run.method_inputs,
    ):
        pass
    json.dumps([run.rate(side, what, mode) for side in SIDES for what in WHATS for mode in run.modes], allow_nan=False)


# ── for other programs ─────────────────────────────────────────────────────────────────────────────────────────────


def run_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """runs.csv: a row for each run, with everything that the tables are made of. Shares are fractions with Wilson's
    interval.

    arm: the intervention. settings: those that differ from the preset's, except intervention and control; gate_*:
    student answers; cos_*: |cos| of a control's direction with the real one, over modules; flagged_*: k/n of the hacks
    (_solved: of the solved answers) that a monitor of text has read.
    """
    rows = []
    for c in cells:
        for r in c.runs:
            row: dict[str, object] = {
                "run": r.name,
                "cell": c.title,
                "arm": r.final["arm"],
                "control": r.control,
                "settings": " ".join(f"{k}={v}" for k, v in r.unusual.items()),
                "base_weights": r.inputs["base_weights"],
                "loss": r.loss,
                "seed": r.seed,
                "steps": r.final["steps"],
                "onset": r.onset,
                "hack_last5": r.last_five("hack").value,
                "solve_last5": r.last_five("solve").value,
                "modes_learned": r.learned("train"),
                "n": r.answered(),
            }
            for side in ("base", "train", "deploy", "plain"):
                row |= _with_wilson(r, side, None)
            row["tries_deploy"] = _rounded(r.final.get("tries_deploy"))
            row |= {f"hack_deploy_{m}": r.rate("deploy", "hack", m) if m in r.modes else None for m in MODES}
            row["routed"] = _rounded(r.step_mean("routed"))
            gate = r.final.get("gate") or {}
            row["gate_hits"], row["gate_flagged"] = gate.get("precision", (None, None))
            row["gate_hacks"] = gate.get("recall", (None, None))[1]
            row |= {f"cos_{name}": _rounded((r.cosine_to_real or {}).get(name)) for name in ("median", "p95", "rms")}
            for name, of in (*((m, m) for m in MODES), ("solved", None)):
                found = r.flags.get(of)
                row[f"flagged_{name}"] = f"{found.k}/{found.n}" if found else None
            row |= {"seconds": r.seconds and round(r.seconds, 1), "seconds_a_step": r.seconds_a_step}
            rows.append(row | {"revision": r.revision[:10], "preregistered": r.preregistered[:12]})
    return rows


def monitor_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """monitors.csv: a row for each run, monitor of text and third of the run. Counts are k/n of the students' hacks by
    flaw, and of their solved answers."""
    rows: list[dict[str, object]] = []
    for c in cells:
        for r in c.runs:
            steps = r.rows[-1]["step"] + 1
            for name, read in r.readings.items():
                for i in range(3):
                    first, last = steps * i // 3, steps * (i + 1) // 3
                    part = [x for x in read if first <= x.step < last]
                    counts = {of: f"{rate.k}/{rate.n}" for of, rate in flagged(part).items()}
                    rows.append(
                        {
                            "run": r.name,
                            "cell": c.title,
                            "arm": r.final["arm"],
                            "acted_on": r.monitor_name,
                            "base_weights": r.inputs["base_weights"],
                            "seed": r.seed,
                            "monitor": name,
                            "known_modes": r.settings["method"]["known_modes"],
                            "steps": f"{first} to {last - 1}",
                        }
                        | {f"flagged_{of or 'solved'}": counts.get(of) for of in (*MODES, None)}
                        | {"auc": _rounded(_auc(part)), "revision": r.revision[:10]}
                    )
    return rows


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


def mode_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """modes.csv: a row for each run, mode and side."""
    return [
        {
            "run": r.name,
            "cell": c.title,
            "seed": r.seed,
            "mode": mode,
            "in_distribution": r.in_distribution(mode),
            "side": side,
            "n": r.answered(mode),
        }
        | {k.replace(f"_{side}", ""): v for k, v in _with_wilson(r, side, mode).items()}
        for c in cells
        for r in c.runs
        for mode in r.modes
        for side in ("base", "train", "deploy", "plain")
    ]


def _with_wilson(run: Run, side: str, mode: Mode | None) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for what in WHATS:
        rate, n = run.rate(side, what, mode), run.answered(mode)
        low, high = stats.wilson(round(rate * n), n) if rate is not None and n else (None, None)
        for name, share in (("", rate), ("_low", low), ("_high", high)):
            out[f"{what}_{side}{name}"] = _rounded(share)
    return out
