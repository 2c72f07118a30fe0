"""Means over seeds, and which differences between arms are beyond chance.

All arms of a seed share their data and first matrices, so a seed is a block: loss = arm + seed + residual.
The residual variance is estimated from all arms together, and all pairs of arms are judged at once (Tukey's
studentized range), because the best arm is only known after looking. Stretches of text are blocks as well; there
are enough of them for each pair of arms to have a variance of its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ...extras import require

CONFIDENCE = 0.95
#: an arm is called noisier than the others below this probability (shared by all arms)
NOISY = 0.01

Values = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Summary:
    """What seeds say together: `spread` is their standard deviation, `low` … `high` the mean's interval.

    With one seed there is neither: both are None.
    """

    mean: float
    count: int
    spread: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def summarize(values: Sequence[float]) -> Summary | None:
    """The summary of what was measured, with Student's interval; None where nothing was."""
    if not (n := len(values)):
        return None
    mean = statistics.fmean(values)
    if n == 1:
        return Summary(mean, 1)
    spread = statistics.stdev(values)
    margin = _student(n - 1) * spread / math.sqrt(n)
    return Summary(mean, n, spread, mean - margin, mean + margin)


@dataclass(frozen=True)
class Blocks:
    """Arms compared on the units (seeds, or stretches of text) that they all have.

    `margin` is the half width of the simultaneous 95% interval of any difference of two means, where pairs share
    it; `margins` are those of single pairs. Both are empty with fewer than two units or arms. `noisy` are arms that
    vary more than the others: they do not share the variance, their margins are from their own values.
    """

    units: tuple[int, ...] = ()
    means: Mapping[str, float] = field(default_factory=dict)
    residual: float | None = None
    margin: float | None = None
    margins: Mapping[frozenset[str], float] = field(default_factory=dict)
    noisy: tuple[str, ...] = ()

    @property
    def order(self) -> list[str]:
        """Arms by their means, the lowest first."""
        return sorted(self.means, key=lambda label: self.means[label])

    @property
    def best(self) -> str:
        return self.order[0]

    def difference(self, ours: str, theirs: str) -> Summary:
        """ours - theirs with its simultaneous interval."""
        gap = self.means[ours] - self.means[theirs]
        margin = self.margins.get(frozenset((ours, theirs)), self.margin)
        if margin is None or ours == theirs:
            return Summary(gap, len(self.units))
        return Summary(gap, len(self.units), None, gap - margin, gap + margin)

    def apart(self, ours: str, theirs: str) -> bool:
        """Whether two arms differ beyond chance."""
        return self.difference(ours, theirs).excludes_zero


def blocks(values: Values, *, pooled: bool = True) -> Blocks:
    """Arms by label, each with a value for each unit, compared unit by unit.

    Args:
        pooled: estimate one variance from all arms but noisy ones, as few units need. Without it every pair of
            arms has its own, from the differences of its two arms.
    """
    shared = set.intersection(*(set(each) for each in values.values())) if values else set()
    units = tuple(sorted(shared))
    if not units:
        return Blocks()
    means = {label: statistics.fmean(each[unit] for unit in units) for label, each in values.items()}
    arms, n = len(values), len(units)
    if arms < 2 or n < 2:
        return Blocks(units, means)
    if not pooled:
        return Blocks(units, means, margins=_own_margins(values, units))
    left = _residuals(values, units)
    if noisy := _noisy(left):
        left = _residuals({label: each for label, each in values.items() if label not in noisy}, units)
    degrees = (len(left) - 1) * (n - 1)
    residual = math.sqrt(math.fsum(r * r for each in left.values() for r in each) / degrees)
    margin = _tukey(arms, degrees) * residual * math.sqrt(2 / n)
    own = _own_margins(values, units) if noisy else {}
    margins = {pair: wide for pair, wide in own.items() if not pair.isdisjoint(noisy)}
    return Blocks(units, means, residual, margin, margins, noisy)


def _own_margins(values: Values, units: Sequence[int]) -> dict[frozenset[str], float]:
    """Games and Howell's intervals for paired values."""
    wide = _tukey(len(values), len(units) - 1) / math.sqrt(len(units))
    return {
        frozenset((a, b)): wide * statistics.stdev(values[a][unit] - values[b][unit] for unit in units)
        for a, b in itertools.combinations(values, 2)
    }


def _residuals(values: Values, units: Sequence[int]) -> dict[str, list[float]]:
    """What neither the arm nor the unit explains."""
    means = {label: statistics.fmean(each[unit] for unit in units) for label, each in values.items()}
    middle = statistics.fmean(means.values())
    shift = {unit: statistics.fmean(each[unit] for each in values.values()) - middle for unit in units}
    return {label: [values[label][unit] - means[label] - shift[unit] for unit in units] for label in values}


def _noisy(left: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Arms whose residual variance is above that of the others, by an F test; two arms at least are not."""
    arms, units = len(left), len(next(iter(left.values())))
    if arms < 3:
        return ()
    squares = {label: math.fsum(r * r for r in each) for label, each in left.items()}
    degrees = (arms - 1) * (units - 1)
    total, own = math.fsum(squares.values()), degrees / arms
    f = require("scipy.stats", "lab").f

    def noisier(square: float) -> bool:
        others = (total - square) / (degrees - own)
        return others > 0 and f.sf(square / own / others, own, degrees - own) < NOISY / arms

    found = [label for label, square in squares.items() if noisier(square)]
    return tuple(found) if len(found) <= arms - 2 else ()


@lru_cache
def _student(degrees: int) -> float:
    return float(require("scipy.stats", "lab").t.ppf((1 + CONFIDENCE) / 2, degrees))


@lru_cache
def _tukey(arms: int, degrees: int) -> float:
    """How many standard errors of a difference two of so many means may lie apart by chance."""
    quantile = require("scipy.stats", "lab").studentized_range.ppf(CONFIDENCE, arms, degrees)
    return float(quantile) / math.sqrt(2)
