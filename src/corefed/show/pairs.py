"""When two runs can be compared, and their difference paired by seeds.

The same seed gives the same split and the same initial weights. So the differences d_s of two runs'
scores are a sample, with Student's interval

    mean(d) +- t_{S-1} std(d) / sqrt(S).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.95
ALPHA = 0.05
"""A p-value up to this, corrected for all comparisons beside it, tells two runs apart."""
FEWEST_SEEDS = 3
"""An interval from two differences has one degree of freedom: 12.7 standard errors."""
SAME = (
    "data", "partition", "clients", "classes", "embedding", "bad_images", "target",
    "client_column", "missing", "task", "smallest_client", "evaluate_clients",
)  # fmt: skip
"""Settings that decide which test points a seed has."""


class Difference(NamedTuple):
    """A run's score minus the baseline's."""

    mean: float
    low: float  # NaN: there is no interval
    high: float
    p: float  # NaN: there is no test
    pairs: str  # what was paired


def differs(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first setting that gives two runs other test points; empty if there is none."""
    # A run of an older version lacks what is empty or 0 by default, and held out a fifth.
    fractions = (run.get("test_fraction", 0.2) for run in (own, other))
    if len(set(fractions)) > 1:
        return "test_fraction"
    return next((key for key in SAME if (own.get(key) or 0) != (other.get(key) or 0)), "")


def by_seed(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """A paired t-test; without spread there is no test."""
    from scipy.stats import ttest_rel  # takes a second

    mean = float(np.mean(np.subtract(scores, others)))
    words = f"{len(scores)} seeds"
    if np.ptp(np.subtract(scores, others)) <= 1e-12 * max(1.0, abs(mean)):
        return Difference(mean, math.nan, math.nan, math.nan, f"{words}, all the same")
    found = ttest_rel(scores, others)
    low, high = found.confidence_interval(LEVEL)
    return Difference(mean, float(low), float(high), float(found.pvalue), words)


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected for multiple tests (Holm 1979); NaN, no test, stays."""
    tests = sorted((p, place) for place, p in enumerate(values) if not math.isnan(p))
    found, largest = list(values), 0.0
    for rank, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        found[place] = largest
    return found
