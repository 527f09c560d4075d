"""Is one run better than another? Paired tests, over seeds or over test points.

Two runs that share three or more seeds are paired by seed (`show/pairs.py`). Otherwise they are
paired by the test points of the first seed that both have. The test is McNemar's exact test on the
points that only one run has right (regression: a t-test). Points of a client are correlated, so the
interval's variance is that of the clients' sums. Client c has n_c of the M points, and D_c is the
sum of their differences:

    d = sum_c D_c / M,    var(d) = C / (C - 1) sum_c (D_c - n_c d)^2 / M^2.

P-values of all comparisons on a page are corrected together by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from corefed.base.types import Tree
from corefed.show.page.content import Missing
from corefed.show.page.gather import RunFolder
from corefed.show.pairs import FEWEST_SEEDS, LEVEL, Difference, by_seed, differs

Values = npt.NDArray[np.float64]


def compare(run: RunFolder, baseline: RunFolder) -> Difference | Missing:
    """The difference between two runs, paired by seeds or test points."""
    differing = differs(run.summary["config"], baseline.summary["config"])
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


def by_point(
    gains: npt.ArrayLike, clients: npt.ArrayLike, *, classification: bool
) -> tuple[float, float, float, float]:
    """Mean, interval and p-value of the gains of test points, which are grouped in clients."""
    from scipy.stats import binomtest  # takes a second
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
    """P-values corrected for multiple tests (Holm 1979); NaN, no test, stays."""
    tests = sorted((p, place) for place, p in enumerate(values) if not math.isnan(p))
    found, largest = list(values), 0.0
    for rank, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        found[place] = largest
    return found


def _scores(run: RunFolder, seeds: Sequence[int]) -> list[float]:
    each = run.metrics[f"{run.main}_{run.score}"]["per_seed"]
    return [each[run.seeds.index(seed)] for seed in seeds]


def _by_point(run: RunFolder, baseline: RunFolder, seed: int) -> Difference | Missing:
    mine, theirs = _predictions(run, seed), _predictions(baseline, seed)
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


def _predictions(run: RunFolder, seed: int) -> Tree | Missing:
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
