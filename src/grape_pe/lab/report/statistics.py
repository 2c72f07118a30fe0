"""Mean, spread and confidence intervals over a handful of seeds, by Student's t.

Seeds are few (often three), so the normal distribution would promise far too much: with three seeds a 95%
interval is 4.3 standard errors wide on each side, not 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


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


def summarize(values: Sequence[float], confidence: float = CONFIDENCE) -> Summary | None:
    """The summary of what was measured; None where nothing was."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(mean, 1)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    margin = student_quantile(confidence, n - 1) * spread / math.sqrt(n)
    return Summary(mean, n, spread, mean - margin, mean + margin)


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], comparisons: int = 1
) -> Summary | None:
    """ours - theirs over the seeds both have, with the interval widened for several comparisons (Bonferroni).

    A seed fixes data order and, where shapes agree, the initial weights, so differences within a seed
    are steadier than the losses themselves.
    """
    common = sorted(ours.keys() & theirs.keys())
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    return summarize([ours[seed] - theirs[seed] for seed in common], confidence)


def student_probability(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom, in closed form (a finite trigonometric sum)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine2 = math.sin(theta), math.cos(theta) ** 2
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):  # the terms cos, 2/3 cos^3, … or 1, 1/2 cos^2, …
        total += term
        term *= cosine2 * k / (k + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def student_quantile(confidence: float, degrees: int) -> float:
    """t with P(|T| <= t) = confidence, by bisection."""
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"expected degrees >= 1 and 0 < confidence < 1, got degrees={degrees} and confidence={confidence}"
        )
    low, high = 0.0, 1.0
    while student_probability(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2
