"""Intervals and tests over few seeds, with a note where there are too few seeds or no variance.

Shares are fractions. Methods are scipy's where it has them; it has no two-level bootstrap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import stats

from vgrout.ground.metrics import Rate

LEVEL = 0.95
# Resampling n seeds never leaves their range, which holds their median with probability
# 1 - 2^(1-n): 75 % for three seeds, 88 % for four, 94 % for five. Simulated for the mean of seeds
# that are spread evenly about it: 80, 89 and 94 %. No interval of few seeds sees a rare one that
# fails: where one in six ends at 26 % and the others at 1, five seeds cover the mean in 60 %.
ENOUGH_SEEDS = 5
# Their own noise moves an end by 0.1 points: expanded, the percentiles of five seeds are the outermost
# 0.1 %.
RESAMPLES = 100_000
MOST_DRAWS = 2**25  # resamples times units, for all of which there is room in memory
ROUNDING = 1e-9  # shares of finitely many answers that differ by less are equal

How = Literal["bootstrap", "t", "Wilson", "none"]
Note = Literal["", "DEGENERATE", "n too small"]


def _all_equal(values: Float[np.ndarray, " n"] | Sequence[float]) -> bool:
    return float(np.ptp(values)) < ROUNDING


def _all_zero(values: Sequence[float]) -> bool:
    return max(map(abs, values)) < ROUNDING


@dataclass(frozen=True)
class Stratum:
    """Exchangeable units of one seed: the problems of one mode, with their shares or differences.

    Strata of one name in several seeds have their units in common. Without names for its units,
    every value is a unit of its own.
    """

    values: Float[np.ndarray, " units"]
    weight: float  # in the seed's mean; negative for what is subtracted
    name: str = ""
    units: tuple[int, ...] = ()


def mean_of(seed: Sequence[Stratum]) -> float:
    """Return the mean of one seed, given as its strata."""
    return float(sum(s.weight * s.values.mean() for s in seed))


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds with its interval, or with a note on why it has none."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    how: How
    note: Note = ""

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval lies below 0.

        A difference that is the same in every unit of every seed has no interval; its value
        decides.
        """
        top = self.value if self.note == "DEGENERATE" else self.high
        return top is not None and top < 0

    def above(self, other: "Estimate", margin: float) -> bool | None:
        """Return whether this is more than `margin` above another, independent estimate.

        None: the 95 % interval of their difference does not tell. It is made from the intervals of
        both (Newcombe 1998).
        """
        ends = self.value, self.low, self.high, other.value, other.low, other.high
        if None in ends:
            return None
        value, low, high, other_value, other_low, other_high = np.asarray(ends, dtype=float)
        apart = value - other_value - margin
        if apart - math.hypot(value - low, other_high - other_value) > 0:
            return True
        if apart + math.hypot(high - value, other_value - other_low) > 0:
            return None
        return False


@dataclass(frozen=True)
class PValue:
    """A p value, the smallest that n allows, and a note where it says nothing."""

    p: float | None
    smallest: float | None
    note: Note = ""


@cache
def wilson(k: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share k / n (Wilson 1927).

    It takes answers as independent: it is for one run, not for several seeds.
    """
    interval = stats.binomtest(k, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def one_run(rate: Rate) -> Estimate:
    """Return a share of one run's answers with Wilson's interval."""
    if rate.value is None:
        return Estimate(None, None, None, 1, "none", "n too small")
    low, high = wilson(rate.k, rate.n)
    return Estimate(rate.value, low, high, 1, "Wilson")


@cache
def _draws(n: int, resamples: int, which: int) -> Float[np.ndarray, "resamples n"]:
    """Return how often each of n is drawn when n are drawn with replacement.

    which: each has draws of its own.
    """
    rng = np.random.default_rng([0, n, which])
    drawn = rng.integers(0, n, (resamples, n))
    drawn += n * np.arange(resamples)[:, None]
    times = np.bincount(drawn.ravel(), minlength=resamples * n)
    return times.reshape(resamples, n).astype(np.float32)


def two_level(rows: Sequence[Sequence[Stratum]], resamples: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the mean over seeds, by a two-level bootstrap.

    Seeds and, within each stratum, units are resampled.

    A problem that several seeds answered is drawn for all of them at once: an easy one is easy for
    every seed, and ten seeds on the same 192 problems have seen no more problems than one has (the
    pigeonhole bootstrap, Owen 2007, doi 10.1214/07-AOAS122). Drawn for each seed separately, the
    intervals of simulated studies of ten seeds held the truth in 66 %.

    The percentiles are expanded for few seeds, to those at which the bootstrap of a normal mean of
    n values is Student's interval, Φ(−t √(n / (n − 1))) (Hesterberg 2015, doi
    10.1080/00031305.2015.1089789). There are many problems, so their draws are narrowed by as much.

    The interval is conservative if the answers' own noise is as large as the seeds' (simulated: 96
    to 100 %), since seed means have that noise already (Davison & Hinkley 1997, §3.8).

    Args:
        rows: the strata of each seed.
        resamples: how many; 0: RESAMPLES, or as many as there is room for.
    """
    n = len(rows)
    units = _shared_units(rows)
    most = max(map(len, units.values()))
    resamples = resamples or min(RESAMPLES, MOST_DRAWS // max(most, 1))
    at_tail = stats.t.ppf((1 + LEVEL) / 2, n - 1) * math.sqrt(n / (n - 1))
    expanded = at_tail / stats.norm.ppf((1 + LEVEL) / 2)
    picked = _draws(n, resamples, 0)  # how often each seed
    rng = np.random.default_rng(0)
    sums = np.zeros(resamples)  # of the picked seeds' means
    shared = {name: np.zeros((len(of_name), 2, n), np.float32) for name, of_name in units.items()}
    for seed, row in enumerate(rows):
        for stratum in row:
            if stratum.units:
                place = {unit: i for i, unit in enumerate(units[stratum.name])}
                at = [place[unit] for unit in stratum.units]
                shared[stratum.name][at, 0, seed] = stratum.weight * stratum.values
                shared[stratum.name][at, 1, seed] = 1.0
            else:  # a mean depends only on how often each distinct value is drawn
                distinct, counts = np.unique(stratum.values, return_counts=True)
                k = counts.sum()
                times = rng.multinomial(picked[:, seed].astype(int) * k, counts / k)
                sums += stratum.weight * (times @ distinct) / k
    for which, of_units in enumerate(shared.values(), 1):
        # One draw serves all seeds; where a seed lacks a unit, the others have its weight.
        draws = _draws(len(of_units), resamples, which)
        columns = of_units.reshape(len(of_units), 2 * n)
        all_once = columns.sum(axis=0)
        narrowed = all_once + (draws @ columns - all_once) / np.float32(expanded)
        total, weight = narrowed[:, :n], narrowed[:, n:]
        has_units = all_once[n:] > 0
        sums += (picked[:, has_units] * total[:, has_units] / weight[:, has_units]).sum(axis=1)
    tail = stats.norm.cdf(-at_tail)
    low, high = np.quantile(sums / n, [tail, 1 - tail])
    return float(low), float(high)


def _shared_units(rows: Sequence[Sequence[Stratum]]) -> dict[str, list[int]]:
    """Return the units of all strata of a name, in order."""
    units: dict[str, set[int]] = {}
    for row in rows:
        for stratum in row:
            units.setdefault(stratum.name, set()).update(stratum.units)
    return {name: sorted(shared) for name, shared in units.items()}


def over_seeds(means: Sequence[float], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Return the mean of the seeds' means with Student's interval, cut at [low, high].

    There is no interval of fewer than two seeds, nor if the seeds agree by chance.
    """
    n = len(means)
    mean = float(np.mean(means)) if means else None
    if mean is None or n < 2 or _all_equal(means):
        return Estimate(mean, None, None, n, "none", "n too small")
    interval = stats.ttest_1samp(means, 0.0).confidence_interval(LEVEL)
    return Estimate(mean, max(float(interval.low), low), min(float(interval.high), high), n, "t")


def estimate(rows: Sequence[Sequence[Stratum]], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Return the mean over seeds of their means; the interval is cut at [low, high].

    It is the bootstrap's from five seeds on, Student's for two to four. Where every unit of every
    seed is the same, neither has a width. A share then has Wilson's, of as many independent units:
    no hack in two seeds of 12 problems does not show that there is none. A difference has no
    interval: DEGENERATE.

    rows: the strata of each seed.
    """
    n = len(rows)
    means = [mean_of(row) for row in rows]
    values = [stratum.values for row in rows for stratum in row]
    if rows and _all_equal(units := np.concatenate(values)):
        value = float(np.mean(means))
        if low < 0:  # a difference
            return Estimate(value, None, None, n, "none", "DEGENERATE")
        return Estimate(value, *wilson(round(value * len(units)), len(units)), n, "Wilson")
    if n < ENOUGH_SEEDS:
        return over_seeds(means, low, high)
    lower, upper = two_level(rows)
    return Estimate(float(np.mean(means)), max(lower, low), min(upper, high), n, "bootstrap")


def sign_flip(differences: Sequence[float]) -> PValue:
    """Return the two-sided p of a mean difference under exchange of the two cells of each seed.

    All 2^n sign patterns are tried up to n = 13; beyond, 9,999 random ones. The smallest p that n
    allows is 2^(1−n): 0.25 of three seeds.
    """
    n = len(differences)
    if n == 0:
        return PValue(None, None, "n too small")
    if _all_zero(differences):
        return PValue(None, None, "DEGENERATE")
    if n == 1:  # with its one sign flipped it is as far from 0; scipy takes no single sample
        return PValue(1.0, 1.0, "n too small")
    exact = n <= 13
    smallest = 2.0 ** (1 - n) if exact else 2 / 10_000  # two-sided: twice that of one side
    found = stats.permutation_test(
        (np.asarray(differences),),
        np.mean,
        permutation_type="samples",
        n_resamples=np.inf if exact else 9_999,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    note = "n too small" if smallest > 1 - LEVEL else ""
    return PValue(float(found.pvalue), smallest, note)


def equivalent(differences: Sequence[float], margin: float) -> PValue:
    """Return the p of TOST, two one-sided t tests (Schuirmann 1987).

    It is small where |mean difference| < margin is shown.
    """
    if len(differences) < 2:
        return PValue(None, None, "n too small")
    if _all_zero(differences):
        return PValue(None, None, "DEGENERATE")
    if _all_equal(differences):  # by chance: as few as these have no spread to test with
        return PValue(None, None, "n too small")
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return PValue(float(max(above, below)), None)


def auc(positive: Sequence[float], negative: Sequence[float]) -> float | None:
    """Return the chance that a positive's value lies above a negative's, ties half.

    That is Mann–Whitney's U over the number of pairs; None where either is empty.
    """
    if not positive or not negative:
        return None
    u = stats.mannwhitneyu(positive, negative, method="asymptotic").statistic
    return float(u) / (len(positive) * len(negative))
