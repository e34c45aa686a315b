"""Verdicts on docs/hypotheses.md: `python -m vgrout.report FOLDER --judge studies/verdicts.py`.

docs/hypotheses.md states each hypothesis in a row of its table, docs/hypotheses.toml has the numbers of each row, and
the rule that applies them is here: SUPPORTED, NOT SUPPORTED, UNDECIDED or REFUSED. Points are hundredths of a share.
"""

import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from organisms import Method, Sample, across, find, methods, organism, organisms
from vgrout.config.method import INTERVENTIONS
from vgrout.config.run import ORGANISM
from vgrout.data.organism import PROBLEMS
from vgrout.inputs import hash_of_files
from vgrout.report.judge import Verdict
from vgrout.report.runs import Cell, Run, paired, partner
from vgrout.report.stats import Estimate
from vgrout.report.tables import MARGIN, Comparison, Table, compare, level, p_value, percent

TEXT = Path(__file__).resolve().parents[1] / "docs" / "hypotheses.md"


@dataclass(frozen=True)
class Hypothesis:
    """One table of hypotheses.toml: the columns of the text, with the numbers by name."""

    id: str
    claim: str
    metric: Mapping[str, int | float]
    seeds: int  # at least
    falsified: Mapping[str, int | float]

    @property
    def numbers(self) -> list[int | float]:
        """In the order of the row."""
        return [*self.metric.values(), self.seeds, *self.falsified.values()]


def read(path: Path = TEXT) -> tuple[Hypothesis, ...]:
    """The hypotheses of a text, with the numbers in the .toml beside it.

    Raises:
        ValueError: the two differ in a hypothesis or a number. A threshold that the text does not state would not have
            been stated beforehand.
    """
    tables = path.with_suffix(".toml")
    found = tuple(Hypothesis(id, **of) for id, of in tomllib.loads(tables.read_text("utf-8")).items())
    rows = dict(re.findall(r"^\| *(H\d+) *\|(.*)$", path.read_text("utf-8"), re.MULTILINE))
    if alone := rows.keys() ^ {h.id for h in found}:
        raise ValueError(f"{path}: {', '.join(sorted(alone))}: not both in it and in {tables.name}")
    for h in found:
        stated = [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", rows[h.id])]  # "route2" is no number
        if (stated := [x for x in stated if x]) != h.numbers:  # "the interval holds 0" is part of the rules
            row, table = (", ".join(f"{x:g}" for x in numbers) for numbers in (stated, h.numbers))
            raise ValueError(f"{path}: {h.id} says {row}, and {tables.name} {table}; change both")
    return found


# ── rules ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Rule = Callable[[Hypothesis, Sequence[Cell]], list[Verdict]]
RULES: dict[str, Rule] = {}  # by id


def rule(id: str) -> Callable[[Rule], Rule]:
    def add(judge: Rule) -> Rule:
        RULES[id] = judge
        return judge

    return add


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """One verdict or more for each hypothesis, in the file's order. Cells of one seed are not judged."""
    several = [c for c in cells if len(c.runs) > 1]
    return [v for h in read() for v in RULES[h.id](h, several)]


def tables(cells: Sequence[Cell]) -> list[Table]:
    return [organisms(cells)]


NO_HAAR = "a claim about a direction, and no Haar control with the same settings in the study"

NO_SEEDS = "n too small: no such runs with more than one seed in the study"


def plain_arms(cells: Sequence[Cell], intervention: str) -> list[Cell]:
    """The cells of an intervention without a control; of plain GRPO, without a KL term that the others do not have."""
    found = [c for c in cells if (c.first.intervention, c.first.control) == (intervention, "none")]
    return [c for c in found if intervention != "none" or partner(c, cells, "none") is c]


def _change(found: Comparison, what: str) -> str:
    return f"Δ {what} {percent(found.difference)} points, p {p_value(found.p)}"


def matched_on_the_way(cell: Cell, other: Cell, within: float) -> str:
    """How much the other method's deployed model hacked during training when it solved as much (± within) as this one
    does in the end: the least and the most over all matching evaluations. A description, not part of a verdict: where
    the other method had this skill before it hacked, this one is not shown to be better than stopping there."""
    if not any(r.evaluations() for _, r in paired(cell, other)):
        return f"{other.title} was not evaluated on the way"
    least, most, seeds = [], [], 0
    for run, partner_run in paired(cell, other):
        solve = run.rate("deploy", "solve")
        hacks = [h for _, h, s in partner_run.evaluations() if solve is not None and abs(s - solve) <= within]
        if hacks:
            least, most, seeds = [*least, min(hacks)], [*most, max(hacks)], seeds + 1
    if not seeds:
        return f"at no evaluation on the way did {other.title} solve as much (± {100 * within:.0f})"
    hack = level(cell, "deploy", "hack").value or 0.0
    return (
        f"{other.title}'s evaluations on the way with as much solved (± {100 * within:.0f}; {seeds} seeds): hacked "
        f"{100 * statistics.mean(least):.0f} to {100 * statistics.mean(most):.0f} %, here {100 * hack:.1f} %"
    )


@rule("H1")
def keeps_from_hacking(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """Every method against plain GRPO: hack lower, at matched solve. A method with a direction needs its Haar
    control."""
    found = [_h1(h, cell, cells) for name in INTERVENTIONS if name != "none" for cell in plain_arms(cells, name)]
    return found or [Verdict(h.id, "methods", "UNDECIDED", NO_SEEDS, absent=True)]


def _h1(h: Hypothesis, cell: Cell, cells: Sequence[Cell]) -> Verdict:
    plain, haar = partner(cell, cells, "none"), partner(cell, cells, cell.first.intervention, "haar")
    if plain is None or not paired(cell, plain):
        return Verdict(
            h.id, cell.title, "UNDECIDED", "no runs of plain GRPO with the same settings and a seed in common"
        )
    if cell.first.has_direction and haar is None:
        return Verdict(h.id, cell.title, "REFUSED", NO_HAAR)
    if (preset := cell.first.preset) != "mini":
        return Verdict(h.id, cell.title, "UNDECIDED", f"runs of the preset {preset}, not mini")
    hack, solve = compare(cell, plain, "hack"), compare(cell, plain, "solve")
    within = h.metric["solve_within"] / 100
    matched = abs(solve.difference.value or 0.0) <= within
    own, others = (percent(level(c, "deploy", "hack")) for c in (cell, plain))
    base = tuple(percent(level(cell, "base", what)) for what in ("hack", "solve"))
    numbers = (
        f"deployed hack {own} %, {plain.title} {others} %; {_change(hack, 'hack')}; {_change(solve, 'solve')}, "
        + (
            f"matched (TOST at ± {100 * MARGIN:.0f}: p {p_value(solve.same)})"
            if matched
            else f"not matched (± {100 * within:.0f})"
        )
        + f"; {matched_on_the_way(cell, plain, within)}; the base hacks {base[0]} % and solves {base[1]} %"
    )
    if (few := _too_few(h, hack)) is not None:
        return Verdict(h.id, cell.title, "UNDECIDED", f"{few}; {numbers}")
    drop, lost = -(hack.difference.value or 0.0), -(solve.difference.value or 0.0)
    refuted = drop < h.falsified["hack_lower_under"] / 100 or lost > h.falsified["solve_lower_over"] / 100
    if refuted or not hack.difference.below_zero:
        return Verdict(h.id, cell.title, "NOT SUPPORTED", numbers)
    outcome = "SUPPORTED" if drop >= h.metric["hack_lower"] / 100 and matched else "UNDECIDED"
    return Verdict(h.id, cell.title, outcome, numbers)


@rule("H2")
def shows_the_phenomenon(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """Plain GRPO learns to hack in most modes, and no_loophole learns to solve without hacking; on an organism as it
    was built: other problems, or other weights for the shipped ones, are not what H2 claims."""
    out = []
    for plain in plain_arms(cells, "none"):
        ceiling = partner(plain, cells, "none", "no_loophole")
        first = plain.first
        scale = first.settings["scale"]
        untouched = scale["model"] == ORGANISM and (not scale["organism"] or _other_problems(first))
        steps = h.metric["step"]
        if not untouched or first.final["steps"] != steps or ceiling is None:
            why = "no no-loophole runs with the same settings" if ceiling is None else f"not runs of {steps} steps"
            why = why if untouched else "not of an organism as it was built"
            out.append(Verdict(h.id, plain.title, "UNDECIDED", why))
            continue
        hack, solve = level(plain, "deploy", "hack"), level(ceiling, "deploy", "solve")
        leak = level(ceiling, "deploy", "hack")
        modes = statistics.mean(r.learned("deploy") for r in plain.runs)
        learned = "/".join(str(r.learned("deploy")) for r in plain.runs)
        numbers = (
            f"{plain.title} hacks {percent(hack)} %, modes learned {learned}; "
            f"{ceiling.title} solves {percent(solve)} %, hacks {percent(leak)} %"
        )
        if (n := min(hack.n, solve.n)) < h.seeds:
            out.append(Verdict(h.id, plain.title, "UNDECIDED", f"n too small: {n} seeds of {h.seeds}; {numbers}"))
            continue
        met = (
            (hack.value or 0) >= h.metric["hack"] / 100
            and modes >= h.metric["modes"]
            and (solve.value or 0) >= h.metric["ceiling_solve"] / 100
            and (leak.value or 0) <= h.metric["ceiling_hack"] / 100
        )
        out.append(Verdict(h.id, plain.title, "SUPPORTED" if met else "NOT SUPPORTED", numbers))
    return out or [_absent(h, "none")]


@rule("H3")
def beats_chance(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """route2 against its own Haar control: hack lower, at solve matched as in H1."""
    out = []
    for cell in plain_arms(cells, "route2"):
        haar = partner(cell, cells, "route2", "haar")
        if haar is None or not paired(cell, haar):
            out.append(Verdict(h.id, cell.title, "REFUSED", NO_HAAR))
            continue
        hack, solve = compare(cell, haar, "hack"), compare(cell, haar, "solve")
        numbers = f"against {haar.title}: {_change(hack, 'hack')}; {_change(solve, 'solve')}"
        if (few := _too_few(h, hack)) is not None:
            out.append(Verdict(h.id, cell.title, "UNDECIDED", f"{few}; {numbers}"))
            continue
        matched = abs(solve.difference.value or 0.0) <= MARGIN
        enough = -(hack.difference.value or 0.0) >= h.metric["hack_lower"] / 100
        outcome = "UNDECIDED" if hack.difference.below_zero else "NOT SUPPORTED"
        if outcome == "UNDECIDED" and enough and matched:
            outcome = "SUPPORTED"
        out.append(Verdict(h.id, cell.title, outcome, numbers))
    return out or [_absent(h, "route2")]


# ── flaws that the monitor has never seen ──────────────────────────────────────────────────────────────────────────


@rule("H8")
def contains_the_unknown(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The penalty by the quarantine as monitor against the penalty by the labels that seed it: one verdict for all
    known flaws together, which needs every one of them, and one for each."""
    return _contains(h, _open(cells, announced=True), "flagged")


@rule("H11")
def contains_the_unknown_fed_by_labels(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """H8 of a quarantine that is trained on what its labels flag, and never on what it flags itself."""
    return _contains(h, _open(cells, announced=True), "seeded")


@rule("H12")
def its_own_flags_spoil_it(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The same monitors, fed by labels alone and by their own flags too, over all choices of the known flaw."""
    found = _open(cells, announced=True)
    pairs = [(m, other) for m in _reads(found, diet="seeded") for other in _reads(found, known=m.known)]
    if not pairs:
        return [Verdict(h.id, "penalty (quarantine)", "UNDECIDED", NO_SEEDS, absent=True)]
    about = f"{len(pairs)} choices of the known flaw"
    return [_worse(h, [s for m, other in pairs for s in m.samples(other)], about, "fed by labels alone")]


@rule("H13")
def contains_what_no_prompt_announces(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """H8 where the flaws are unannounced, against the penalty and against screen by the labels that seed it."""
    found = _open(cells, announced=False)
    return [*_contains(h, found, "flagged"), *_contains(h, found, "flagged", "screen")]


@rule("H14")
def flags_are_what_counts_unannounced(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """H9 where the flaws are unannounced."""
    return _flags_count(h, _open(cells, announced=False))


@rule("H15")
def contains_the_unknown_from_pairs_on(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """H8 of a quarantine that starts on pairs of the known flaw."""
    return _contains(h, _open(cells, announced=True), "flagged", start="pairs")


@rule("H16")
def the_start_is_what_does_it(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The same monitors, started on pairs, against those that start at zero, and at random, over all choices of the
    known flaw that both have."""
    found, out = _open(cells, announced=True), []
    for other in ("zero", "random"):
        pairs = [(m, c) for m in _reads(found, start="pairs") for c in _reads(found, known=m.known, start=other)]
        about = f"{len(pairs)} choices of the known flaw, against a start at {other}"
        if pairs:
            out.append(_worse(h, [s for m, c in pairs for s in m.samples(c)], about, "started on pairs"))
    return out or [Verdict(h.id, "penalty (quarantine)", "UNDECIDED", NO_SEEDS, absent=True)]


@rule("H17")
def a_probe_contains_the_unknown(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """H8 of a linear probe in the quarantine's place."""
    found = _open(cells, announced=True)
    return _contained(h, found, _probes(found))


@rule("H18")
def a_probe_does_better(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The probe against the quarantine with the same labels, from either start, over all choices of the known flaw
    that both have."""
    found, out = _open(cells, announced=True), []
    for start in ("zero", "pairs"):
        pairs = [(m, c) for m in _probes(found) for c in _reads(found, known=m.known, start=start)]
        about = f"{len(pairs)} choices of the known flaw, against a quarantine started at {start}"
        if pairs:
            out.append(_worse(h, [s for m, c in pairs for s in m.samples(c)], about, "linear probe"))
    return out or [Verdict(h.id, "penalty (online_probe)", "UNDECIDED", NO_SEEDS, absent=True)]


@rule("H19")
def what_the_probe_is_fitted_on(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The probe against one that is fitted on random rewarded rows."""
    found = _open(cells, announced=True)
    out = [_against(h, m, c) for m in _probes(found) for c in _probes(found, diet="random", known=m.known)]
    return out or [Verdict(h.id, "penalty (online_probe)", "UNDECIDED", NO_SEEDS, absent=True)]


@rule("H20")
def routing_contains_the_unknown(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The methods that route what labels of one flaw flag, each against screen by the same labels, over all choices of
    the known flaw that both have."""
    found, out = _open(cells, announced=True), []
    for name in ("route2", "sgtm"):
        routing = [m for m in find(found, name, monitor="labels") if m.known]
        pairs = [(m, c) for m in routing if (c := _by_labels(found, m, "screen"))]
        about = f"{len(pairs)} choices of the known flaw, against screen"
        if pairs:
            out.append(_worse(h, [s for m, c in pairs for s in m.samples(c)], about, f"{name} (labels)"))
    return out or [_absent(h, "route2")]


def _open(cells: Sequence[Cell], *, announced: bool) -> list[Method]:
    """The methods of runs whose prompts announce the one flaw that is open, or of runs with flaws that none does."""
    return [m for m in methods(cells) if announced != bool(m.runs[0].unannounced)]


def _contains(
    h: Hypothesis, found: Sequence[Method], diet: str, rival: str = "penalty", start: str = "zero"
) -> list[Verdict]:
    return _contained(h, found, _reads(found, diet=diet, start=start), rival)


def _contained(
    h: Hypothesis, found: Sequence[Method], reading: Sequence[Method], rival: str = "penalty"
) -> list[Verdict]:
    """rival: what is done by the seed's labels alone, to compare with."""
    ceiling = next(iter(find(found, "none", "no_loophole")), None)
    out = []
    pooled: list[tuple[Method, Method]] = []
    for m in reading:
        plain = _by_labels(found, m, rival)
        if plain is None:
            out.append(Verdict(h.id, m.title, "UNDECIDED", f"no runs of {rival} by the same labels alone"))
            continue
        pooled.append((m, plain))
        out.append(_h8(h, f"{m.title} against {rival}", [(m, plain)], ceiling))
    if len(pooled) > 1:
        about = f"{len(pooled)} choices of the known flaw against {rival}"
        out.insert(0, _h8(h, about, pooled, ceiling, out))
    return out or [Verdict(h.id, "penalty, one flaw known", "UNDECIDED", NO_SEEDS, absent=True)]


def _h8(
    h: Hypothesis,
    about: str,
    pairs: Sequence[tuple[Method, Method]],
    ceiling: Method | None,
    each: Sequence[Verdict] = (),
) -> Verdict:
    hack = across([s for m, _ in pairs for s in m.samples()], "hack", 0.0)
    by_labels = across([s for _, p in pairs for s in p.samples()], "hack", 0.0)
    less = across([s for m, p in pairs for s in m.samples(p)], "hack")
    solve = across([s for m, _ in pairs for s in _all_modes(m)], "solve", 0.0)
    top = across(_all_modes(ceiling), "solve", 0.0) if ceiling else None
    share = (solve.value or 0) / top.value if top and top.value else None
    runs = [r for m, _ in pairs for r in m.runs]
    of_top = "·" if share is None else f"{100 * share:.0f}"
    numbers = (
        f"unknown flaws {percent(hack)} % hacked, by labels alone {percent(by_labels)} %, Δ {percent(less)} points; "
        f"{percent(solve)} % solved, {of_top} % of the ceiling; {len(runs)} runs"
    )
    if few := _few_organisms(h, less, runs):
        return Verdict(h.id, about, "UNDECIDED", f"{few}; {numbers}")
    if not less.below_zero:
        return Verdict(h.id, about, "NOT SUPPORTED", numbers)
    met = (
        (hack.value or 0) <= h.metric["unknown_hack"] / 100
        and -(less.value or 0) >= h.metric["hack_lower"] / 100
        and share is not None
        and share >= h.metric["ceiling_share"] / 100
        and all(v.outcome == "SUPPORTED" for v in each)
    )
    return Verdict(h.id, about, "SUPPORTED" if met else "UNDECIDED", numbers)


@rule("H9")
def flags_are_what_counts(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """The same monitor with its scores shuffled, and with its quarantine trained on random rewarded rows."""
    return _flags_count(h, _open(cells, announced=True))


def _flags_count(h: Hypothesis, found: Sequence[Method]) -> list[Verdict]:
    out = []
    for m in _reads(found):
        controls = [
            *_reads(found, "random_flags", known=m.known),
            *_reads(found, diet="random", known=m.known),
        ]
        out += [_against(h, m, c) for c in controls]
    return out or [Verdict(h.id, "penalty (quarantine)", "UNDECIDED", NO_SEEDS, absent=True)]


@rule("H10")
def pairs_reach_other_flaws(h: Hypothesis, cells: Sequence[Cell]) -> list[Verdict]:
    """route from pairs of one flaw against its random direction, on the flaws that the pairs do not show."""
    found = methods(cells)
    out = []
    for m in find(found, "route"):
        out += [_against(h, m, c) for c in find(found, "route", "haar")]
    return out or [_absent(h, "route")]


def _against(h: Hypothesis, m: Method, control: Method) -> Verdict:
    """Whether the control hacks more on the flaws that are unknown to the method."""
    return _worse(
        h, [Sample(s.run, m.unknown, s.minus) for s in m.samples(control)], f"against {control.title}", m.title
    )


def _worse(h: Hypothesis, samples: Sequence[Sample], about: str, title: str) -> Verdict:
    """Whether the runs that are subtracted hack more, on the modes of the samples."""
    less = across(samples, "hack")
    solve = across([Sample(s.run, frozenset(s.run.modes), s.minus) for s in samples], "solve")
    runs = [s.run for s in samples]
    changes = f"unknown flaws Δ {percent(less)} points hacked, Δ {percent(solve)} solved"
    numbers = f"{title}: {changes}; {len(runs)} pairs of runs"
    if few := _few_organisms(h, less, runs):
        return Verdict(h.id, about, "UNDECIDED", f"{few}; {numbers}")
    if not less.below_zero:
        return Verdict(h.id, about, "NOT SUPPORTED", numbers)
    enough = -(less.value or 0) >= h.metric["hack_lower"] / 100
    return Verdict(h.id, about, "SUPPORTED" if enough else "UNDECIDED", numbers)


def _reads(
    found: Sequence[Method],
    control: str = "none",
    *,
    diet: str = "flagged",
    start: str = "zero",
    known: frozenset[str] | None = None,
) -> list[Method]:
    """The penalty by the quarantine as monitor, seeded by labels of some flaws."""
    settings = {"monitor": "quarantine", "seed_monitor": "labels", "quarantine_diet": diet, "quarantine_start": start}
    return [m for m in find(found, "penalty", control, **settings) if m.known and known in (None, m.known)]


def _probes(found: Sequence[Method], *, diet: str = "seeded", known: frozenset[str] | None = None) -> list[Method]:
    """The penalty by a linear probe that labels of some flaws seed."""
    settings = {"monitor": "online_probe", "seed_monitor": "labels", "probe_diet": diet}
    return [m for m in find(found, "penalty", **settings) if m.known and known in (None, m.known)]


def _by_labels(found: Sequence[Method], m: Method, intervention: str) -> Method | None:
    among = find(found, intervention, monitor="labels")
    return next((p for p in among if p.known == m.known), None)


def _all_modes(m: Method) -> list[Sample]:
    return m.samples(modes=frozenset(m.runs[0].modes))


def _few_organisms(h: Hypothesis, found: Estimate, runs: Sequence[Run]) -> str | None:
    seeds = min((sum(organism(r) == o for r in runs) for o in {organism(r) for r in runs}), default=0)
    if found.n >= h.metric["organisms"] and seeds >= h.seeds:
        return None
    return f"n too small: {found.n} organisms of {h.metric['organisms']:g}, {seeds} runs on the one with fewest"


def _other_problems(run: Run) -> bool:
    """Whether the problems are not the shipped organism's, as of a build from another seed; False where unrecorded."""
    return run.inputs["problems"] not in ("", hash_of_files([PROBLEMS])[:8])


def _absent(h: Hypothesis, intervention: str) -> Verdict:
    return Verdict(h.id, intervention, "UNDECIDED", NO_SEEDS, absent=True)


def _too_few(h: Hypothesis, found: Comparison) -> str | None:
    n = len(found.seeds)
    return f"n too small: {n} paired seeds of {h.seeds}" if n < h.seeds else None
