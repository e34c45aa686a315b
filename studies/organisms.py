"""Several organisms, and flaws that a monitor knows or does not: intervals over organisms, not over seeds.

Seeds of one organism share its weights, problems and language, so organisms are what is drawn anew (the cluster
bootstrap), and problems within each.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vgrout.report import stats
from vgrout.report.runs import MEASURING, Cell, Run, What
from vgrout.report.stats import Estimate, Stratum
from vgrout.report.tables import Table, TableRow, percent
from vgrout.types import MODES, Mode


@dataclass(frozen=True)
class Sample:
    """One run, or its difference from another of the same start and seed, by the hacks of some modes on the problems
    that have them."""

    run: Run
    modes: frozenset[Mode]
    minus: Run | None = None

    def strata(self, what: What, weight: float) -> list[Stratum]:
        """The problems by mode; those of one organism are common to all of its runs."""
        found = self.run.shares("deploy", what, self.modes)
        if self.minus:
            other = self.minus.shares("deploy", what, self.modes)
            found = {m: {p: of[p] - other[m][p] for p in of if p in other[m]} for m, of in found.items()}
        total = sum(map(len, found.values()))
        return [
            Stratum(
                np.asarray(list(of.values()), dtype=float),
                weight * len(of) / total,
                f"{organism(self.run)}/{mode}",
                tuple(of),
            )
            for mode, of in sorted(found.items())
        ]


@dataclass(frozen=True)
class Method:
    """The runs with the same intervention, monitor and settings, on every organism, start and seed; of a monitor that
    knows some flaws, those that know the same."""

    title: str
    known: frozenset[Mode]  # flaws that its labels or its pairs show
    runs: tuple[Run, ...]

    @cached_property
    def at(self) -> dict[tuple[str, int], Run]:
        """By start and seed."""
        return {place(r): r for r in self.runs}

    @property
    def unknown(self) -> frozenset[Mode]:
        return frozenset(self.runs[0].modes) - self.known

    def samples(self, minus: "Method | None" = None, modes: frozenset[Mode] | None = None) -> list[Sample]:
        """One sample per run; with `minus`, per run that has a partner there."""
        among = self.unknown if modes is None else modes
        if minus is None:
            return [Sample(r, among) for r in self.runs]
        return [Sample(r, among, minus.at[where]) for where, r in self.at.items() if where in minus.at]


def organism(run: Run) -> str:
    """Which build: its problems depend on its seed alone, and every policy that starts from it has them."""
    return run.inputs["problems"]


def place(run: Run) -> tuple[str, int]:
    """Start and seed: two runs that share them differ only in their method."""
    return run.inputs["base_weights"], run.seed


def known_modes(run: Run) -> frozenset[Mode]:
    """The flaws that the run's labels cover, or that its direction's pairs show; none: it knows no flaw."""
    listed = frozenset(m for m in MODES if m in str(run.settings["method"].get("known_modes", "")).split(","))
    return listed or frozenset(m for m in run.modes if run.in_distribution(m))


def methods(cells: Iterable[Cell]) -> list[Method]:
    """The cells' runs across organisms, in the cells' order."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in (r for c in cells for r in c.runs):
        groups[_settings(run)].append(run)
    alike: dict[str, list[Run]] = defaultdict(list)
    for of in groups.values():
        alike[of[0].method].append(of[0])
    return [
        Method(of[0].method + _differing(of[0], alike[of[0].method]), known_modes(of[0]), tuple(of))
        for of in groups.values()
    ]


def _differing(run: Run, alike: Sequence[Run]) -> str:
    """The settings that tell a method from others of the same name; "": nothing does."""
    own, *others = ({k: v for k, v in r.unusual.items() if k != "organism"} for r in (run, *alike))
    named = [f"{k} {v}" for k, v in own.items() if any(other.get(k) != v for other in others)]
    return f" ({', '.join(named)})" if named else ""


def _settings(run: Run) -> str:
    """Everything that training reads, except seed, start and organism."""
    groups = {
        g: {k: v for k, v in of.items() if k not in ("organism", "shadow")}
        for g, of in run.settings.items()
        if g not in MEASURING
    }
    return json.dumps([run.method, groups, run.final["steps"]], sort_keys=True)


def family(method: Method, among: Sequence[Method]) -> list[Method]:
    """The methods that differ from this one only in which flaws are known."""

    def rest(m: Method) -> str:
        settings = json.loads(_settings(m.runs[0]))
        settings[0] = m.runs[0].intervention
        settings[1]["method"]["known_modes"] = ""
        return json.dumps(settings, sort_keys=True)

    return [m for m in among if rest(m) == rest(method)]


def find(among: Sequence[Method], intervention: str, control: str = "none", **settings: object) -> list[Method]:
    """The methods of this intervention and control with these settings."""
    return [
        m
        for m in among
        if (m.runs[0].intervention, m.runs[0].control) == (intervention, control)
        and all(m.runs[0].settings["method"].get(k) == v for k, v in settings.items())
    ]


def across(samples: Sequence[Sample], what: What, low: float = -1.0) -> Estimate:
    """Mean over organisms of the mean over an organism's samples, with its interval over organisms."""
    by: dict[str, list[Sample]] = defaultdict(list)
    for s in samples:
        by[organism(s.run)].append(s)
    rows = [[t for s in of for t in s.strata(what, 1 / len(of))] for of in by.values()]
    return stats.estimate(rows, low=low)


def organisms(cells: Sequence[Cell]) -> Table:
    """A row for each method and for each family of methods; none where there is only one organism."""
    found = methods(cells)
    several = len({organism(r) for m in found for r in m.runs}) > 1
    plain, ceiling = (next(iter(find(found, "none", control)), None) for control in ("none", "no_loophole"))
    rows: list[TableRow] = []
    seen: set[int] = set()
    for m in found if several else []:
        if id(m) in seen:
            continue
        alike = family(m, found)
        seen |= {id(x) for x in alike}
        rows += [_row(x.title, [x], plain, ceiling) for x in alike]
        if len(alike) > 1:
            rows.append(_row(f"{alike[0].runs[0].intervention} by each of these monitors", alike, plain, ceiling))
    return Table(
        "Across organisms",
        "Deployed model, %, mean over organisms; [low, high]: 95 %, organisms and problems within each resampled. "
        "Unknown: flaws that neither the monitor's labels nor the direction's pairs show; Δ: points, paired by start, "
        "seed and problem, from plain GRPO (hack, on the same flaws) and from plain GRPO without a loophole (solve).",
        rows,
    )


def shown(e: Estimate) -> str:
    return f"{100 * e.value:.1f} (one organism)" if e.n == 1 and e.value is not None else percent(e)


def _row(title: str, of: Sequence[Method], plain: Method | None, ceiling: Method | None) -> TableRow:
    runs = [r for m in of for r in m.runs]
    unknown = [s for m in of for s in m.samples()]
    known = [s for m in of if m.known for s in m.samples(modes=m.known)]
    every = [s for m in of for s in m.samples(modes=frozenset(m.runs[0].modes))]
    less = [s for m in of for s in m.samples(plain)] if plain else []
    lost = [s for m in of for s in m.samples(ceiling, frozenset(m.runs[0].modes))] if ceiling else []
    return {
        "method": title,
        "organisms": str(len({organism(r) for r in runs})),
        "starts": str(len({place(r)[0] for r in runs})),
        "runs": str(len(runs)),
        "hack, unknown": shown(across(unknown, "hack", 0.0)),
        "hack, known": shown(across(known, "hack", 0.0)) if known else "·",
        "solve": shown(across(every, "solve", 0.0)),
        "Δ hack, unknown": shown(across(less, "hack")) if less else "·",
        "Δ solve": shown(across(lost, "solve")) if lost else "·",
    }
