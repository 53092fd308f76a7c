"""Intervals of medians and of ratios, from SciPy.

Times of calls are skewed and have outliers, so they are summarized by medians. The interval of a
median is that of the sign test (`scipy.stats.quantile_test`): two of the sorted values, whatever
their distribution. It depends only on the order of the values, so ratios need no logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The probability with which an interval contains the true median.
CONFIDENCE = 0.95

#: The minimum number of values: fewer cannot reach the confidence that `unpaired_ratio` needs.
LEAST = 7


@dataclass(frozen=True)
class Interval:
    """A median, and the confidence interval that contains it."""

    median: float
    low: float
    high: float

    @property
    def precision(self) -> float:
        """Half of the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median of at least `LEAST` values, and its exact interval of the sign test."""
    from scipy.stats import quantile_test

    found = quantile_test(values, p=0.5).confidence_interval(confidence)
    return Interval(float(np.median(values)), float(found.low), float(found.high))


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the median of the ratios of times that were measured in the same rounds.

    A slowdown of the machine that lasts longer than a round affects both times, and cancels.
    """
    return median_interval([a / b for a, b in zip(times, reference, strict=True)])


def unpaired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the ratio of the medians of times that were measured separately.

    The interval is that of two medians at once, by Bonferroni: each is in its own interval of half
    the error, so the ratio is between the quotients of their ends. This is conservative.
    """
    apart = (1 + CONFIDENCE) / 2
    a, b = (median_interval(each, apart) for each in (times, reference))
    return Interval(a.median / b.median, a.low / b.high, a.high / b.low)
