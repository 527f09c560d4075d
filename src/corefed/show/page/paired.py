"""Is one run better than another? Differences of pairs, and what they are pairs of.

Of seeds, where three or more are shared: the same seed deals the same points and starts from the
same weights, so the differences d_s of the scores are a sample, with Student's interval

    mean(d) +- t_{S-1} std(d) / sqrt(S).

Otherwise of test points, of the first seed that both have: McNemar's exact test on the points that
one run has right and the other wrong (regression: a t-test), and an interval of the difference
whose variance is that of the clients' sums (clients c of M points together, D_c their differences'
sum and n_c their number), since points of a client stand or fall together:

    d = sum_c D_c / M,    var(d) = C / (C - 1) sum_c (D_c - n_c d)^2 / M^2.

P-values of all comparisons on a page are corrected together by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.types import Tree
from corefed.show.page.content import Missing
from corefed.show.page.gather import RunFolder

LEVEL = 0.95
FEWEST_SEEDS = 3
"""An interval from two differences has one degree of freedom: 12.7 standard errors."""
SAME = (
    "data", "partition", "clients", "classes", "embedding", "bad_images", "target",
    "client_column", "missing", "task", "smallest_client",
)  # fmt: skip
"""Settings that decide which test points a seed has."""

Values = npt.NDArray[np.float64]


class Difference(NamedTuple):
    """Of a run's score minus the baseline's."""

    mean: float
    low: float  # NaN: there is no interval
    high: float
    p: float  # NaN: there is no test
    pairs: str  # what was paired, in words


def compare(run: RunFolder, baseline: RunFolder) -> Difference | Missing:
    """The difference between two runs, paired by seeds or else by test points."""
    differing = _differing(run, baseline)
    if differing:
        return Missing(f"not comparable: {differing} differs")
    if not run.score or run.score != baseline.score:
        return Missing("not comparable: no score that both have")
    seeds = [seed for seed in run.seeds if seed in baseline.seeds]
    if not seeds:
        return Missing("not comparable: no seed that both have")
    if len(seeds) >= FEWEST_SEEDS:
        return by_seed(_scores(run, seeds), _scores(baseline, seeds))
    return _by_point(run, baseline, seeds[0])


def by_seed(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """A paired t-test; without spread there is no test."""
    from scipy.stats import ttest_rel

    mean = float(np.mean(np.subtract(scores, others)))
    words = f"{len(scores)} seeds"
    if np.ptp(np.subtract(scores, others)) <= 1e-12 * max(1.0, abs(mean)):
        return Difference(mean, math.nan, math.nan, math.nan, f"{words}, all alike")
    found = ttest_rel(scores, others)
    low, high = found.confidence_interval(LEVEL)
    return Difference(mean, float(low), float(high), float(found.pvalue), words)


def by_point(
    gains: npt.ArrayLike, clients: npt.ArrayLike, *, classification: bool
) -> tuple[float, float, float, float]:
    """Mean, interval and p-value of what each test point gains, of points in clients."""
    from scipy.stats import binomtest
    from scipy.stats import t as student

    d: Values = np.asarray(gains, dtype=np.float64)
    _, index = np.unique(np.asarray(clients), return_inverse=True)
    mean = float(d.mean())
    sums, sizes = np.bincount(index, d), np.bincount(index)
    C, M = len(sums), len(d)
    low = high = p = math.nan
    if C > 1:
        error = math.sqrt(C / (C - 1) * np.square(sums - sizes * mean).sum()) / M
        reach = float(student.ppf((1 + LEVEL) / 2, C - 1)) * error
        low, high = mean - reach, mean + reach
        if not classification and error > 0:
            p = float(2 * student.sf(abs(mean) / error, C - 1))
    if classification:
        better, worse = int((d > 0).sum()), int((d < 0).sum())
        p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return mean, low, high, p


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected for being many (Holm 1979); NaN is no test and stays."""
    tests = sorted((p, place) for place, p in enumerate(values) if not math.isnan(p))
    found, largest = list(values), 0.0
    for rank, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        found[place] = largest
    return found


def _differing(run: RunFolder, baseline: RunFolder) -> str:
    own, other = run.summary["config"], baseline.summary["config"]
    return next((key for key in SAME if own.get(key) != other.get(key)), "")


def _scores(run: RunFolder, seeds: Sequence[int]) -> list[float]:
    each = run.metrics[f"{run.main}_{run.score}"]["per_seed"]
    return [each[run.seeds.index(seed)] for seed in seeds]


def _by_point(run: RunFolder, baseline: RunFolder, seed: int) -> Difference | Missing:
    mine, theirs = _of_seed(run, seed), _of_seed(baseline, seed)
    if isinstance(mine, Missing):
        return Missing(f"no paired test: {mine}")
    if isinstance(theirs, Missing):
        return Missing(f"no paired test: {theirs}")
    same = all(
        mine[name].shape == theirs[name].shape and bool((mine[name] == theirs[name]).all())
        for name in ("row", "point", "y")
    )
    if not same:
        return Missing("no paired test: the test points are not the same")
    classification = run.score == "accuracy"
    gains = _losses(theirs, classification) - _losses(mine, classification)
    if not classification:
        gains = -gains  # the difference of squared errors: below 0 is better, as for RMSE
    found = by_point(gains, mine["row"].numpy(), classification=classification)
    words = "test points (McNemar)" if classification else "test points, squared errors"
    return Difference(*found, f"{len(gains)} {words}, seed {seed}")


def _of_seed(run: RunFolder, seed: int) -> Tree | Missing:
    if isinstance(run.held_out, Missing):
        return run.held_out
    per_run = run.summary["clients"]
    g = run.seeds.index(seed)
    row = run.held_out["row"]
    mine = (row >= g * per_run) & (row < (g + 1) * per_run)
    kind = "personal" if "personal.mean" in run.held_out else "global"
    found = {name: run.held_out[name][mine] for name in ("row", "point", "y")}
    return {**found, "row": found["row"] - g * per_run, "mean": run.held_out[f"{kind}.mean"][mine]}


def _losses(found: Tree, classification: bool) -> Values:
    """1 for a wrong point, or the squared error."""
    if classification:
        wrong = found["mean"].argmax(-1) != found["y"]
        return np.asarray(wrong.double().numpy())
    return np.asarray((found["mean"].double() - found["y"].double()).square().mean(-1).numpy())
