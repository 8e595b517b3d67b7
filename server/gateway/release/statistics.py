"""Intervals that hold at every look: what is known of a mean while its observations still come in.

A release is looked at again with every answer. A test or an interval for one look would raise a false alarm sooner or
later, whatever the weights are. Both intervals here are *confidence sequences*: with probability 1 - alpha at least,
the mean lies in the interval of every look at once, however often somebody looks and whenever they stop. Both need
counts and sums alone (`Tally`), so each gateway counts for itself and the tallies are added up.

Values between 0 and 1 (errors, shares, most rewards): Robbins' beta-binomial mixture (H. Robbins, "Statistical methods
related to the law of the iterated logarithm", Ann. Math. Stat. 41, 1970; for all bounded values by S. Howard, A.
Ramdas, J. McAuliffe, J. Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Ann. Stat. 49, 2021,
section 3.1). With the uniform prior, n values of sum s exclude a mean p once

    B(1 + s, 1 + n - s) / (p^s (1 - p)^(n - s)) >= 1 / alpha.

The left side is a supermartingale for every distribution on [0, 1] of mean p, since a convex function lies below its
chord; the interval is exact, not asymptotic.

Values without bounds (seconds, tokens, log-probs): the asymptotic confidence sequence (I. Waudby-Smith, D. Arbour, R.
Sinha, E. H. Kennedy, A. Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", Ann. Stat. 52,
2024, theorem 2.2), with the sample's mean m and deviation d:

    m +- d sqrt( 2 (n r^2 + 1) / (n r)^2  log( sqrt(n r^2 + 1) / alpha ) ).

It is narrowest near `NARROWEST` observations, and is nothing at all before `LEAST` of them.

Observations that were drawn for a version together, as all of one key, are not independent. `clustered` compares the
variance of the mean over whole clusters with that of as many independent observations (the design effect: L. Kish,
"Survey sampling", 1965), and the intervals reckon with as many observations fewer. How many clusters there are in
effect is n^2 / sum(n_i^2); below `LEAST_CLUSTERS` their variance is not known well enough, and nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

LEAST_CLUSTERS = 20
LEAST = 100  # observations, below which the central limit theorem is not relied upon
NARROWEST = 1_000
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Tally:
    """The observations of one metric under one version: their number, their sum, and the sum of their squares.

    `effect` is by how much fewer independent ones are worth as much, and `clusters` how many independent clusters they
    are in effect.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    effect: float = 1.0
    clusters: float = math.inf

    @classmethod
    def of(cls, values: Iterable[float]) -> Tally:
        """Of all of `values`, which are finite."""
        found = tuple(values)
        return cls(len(found), math.fsum(found), math.fsum(value * value for value in found))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """NaN where there is nothing."""
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Of the sample, unbiased; NaN for less than two observations."""
        if self.count < 2:
            return math.nan
        return max(0.0, self.squares - self.total * self.mean) / (self.count - 1)


NOTHING = Tally()


@dataclass(frozen=True, slots=True)
class Interval:
    """The means that are not excluded."""

    low: float
    high: float


def clustered(single: Tally, clusters: Iterable[Tally]) -> Tally:
    """One tally of observations that were drawn one by one, and of `clusters` of such as were drawn together."""
    found = tuple(clusters)
    whole = sum(found, single)
    if not found or not whole.count:
        return whole
    m, groups = whole.mean, single.count + len(found)
    apart = single.squares - 2 * m * single.total + m * m * single.count
    together = apart + sum((each.total - m * each.count) ** 2 for each in found)
    independent = whole.squares - whole.total * m
    in_effect = whole.count**2 / (single.count + sum(each.count**2 for each in found))
    unknown = whole.count / in_effect  # while all observations are equal
    effect = together / independent * groups / max(1, groups - 1) if independent > 0 else unknown
    return replace(whole, effect=max(1.0, effect), clusters=in_effect)


def bounded(tally: Tally, alpha: float) -> Interval:
    """The mean of values between 0 and 1, at every look with probability 1 - `alpha`."""
    n, s = tally.count / tally.effect, min(max(tally.total, 0.0), float(tally.count)) / tally.effect
    if n == 0 or tally.clusters < LEAST_CLUSTERS:
        return Interval(0.0, 1.0)
    mixture = math.lgamma(1 + s) + math.lgamma(1 + n - s) - math.lgamma(2 + n)

    def excluded(p: float) -> bool:
        return mixture - s * math.log(p) - (n - s) * math.log1p(-p) >= -math.log(alpha)

    at = s / n
    low = 0.0 if s == 0 else _edge(excluded, 0.0, at)
    high = 1.0 if s == n else _edge(excluded, 1.0, at)
    return Interval(low, high)


def unbounded(tally: Tally, alpha: float) -> Interval:
    """The mean of values of any size and finite variance; asymptotic, and unlimited before `LEAST` observations."""
    n = tally.count / tally.effect
    if n < LEAST or tally.clusters < LEAST_CLUSTERS:
        return Interval(-math.inf, math.inf)
    twice = -2 * math.log(alpha)
    spread = n * (twice + math.log(twice + 1)) / NARROWEST  # n r^2
    radius = math.sqrt(tally.variance * 2 * (spread + 1) / (n * spread) * math.log(math.sqrt(spread + 1) / alpha))
    return Interval(tally.mean - radius, tally.mean + radius)


def _edge(excluded: Callable[[float], bool], outside: float, inside: float) -> float:
    """Where the interval ends between an end of [0, 1] and the mean: rounded outwards."""
    for _ in range(_HALVINGS):
        middle = (outside + inside) / 2
        if middle in (outside, inside):
            break
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside
