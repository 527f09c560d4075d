"""How far an estimate may be off by chance, where points come from clients and seeds.

Every estimate here (a mean, a share, an area under a curve, a difference of two) is taken apart
into influences: psi_i is what point i adds to it, to first order, and they sum to 0. Points of a
client are alike, and all that a seed trains is. With clients c and seeds s as clusters,

    V_clients = C / (C - 1) sum_c (sum_{i in c} psi_i)^2,    V_seeds alike, V_cells of both,
    V = max(V_clients + V_seeds - V_cells, V_clients, V_seeds)

(two-way clustering: Cameron, Gelbach and Miller 2011), with Student's quantile of the smaller
number of clusters - 1. Of a single seed V is V_clients. Fewer than `CLIENTS` clients are not a
sample of clients: then they are taken as they are, and fewer than `SEEDS` seeds likewise. Where
clients are no sample and all seeds test the same points, each of these takes the place of a client:
seeds alone would tell how these points come out, and not others. Where neither clients nor seeds
are a sample, points are.

This is the one rule behind all intervals and tests of runs: the record's, those of `corefed
measures`, `corefed compare` and the report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
CLIENTS = 5
"""Fewest clients that count as a sample of clients."""
SEEDS = 3
"""An interval from two differences has one degree of freedom: 12.7 standard errors."""

Array = npt.NDArray[Any]


class Estimate(NamedTuple):
    value: float
    influence: Array  # [n]; sums to 0


class Spread(NamedTuple):
    """The standard error of an estimate."""

    error: float
    freedom: int
    over: str  # what was a sample: clients and seeds, points and seeds, clients, seeds, or points

    @property
    def reach(self) -> float:
        """Half of the 95 % interval."""
        return quantile(self.freedom) * self.error

    def p_value(self, value: float) -> float:
        """Of Student's test that the true value is 0; NaN without spread."""
        from scipy.special import stdtr  # of the t distribution, without all of scipy.stats

        if not self.error > 0:
            return math.nan
        return float(2 * stdtr(self.freedom, -abs(value) / self.error))


def quantile(freedom: int) -> float:
    """Standard errors of Student's 95 % interval."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def spread(influence: Array, client: Array, seed: Array, point: Array | None = None) -> Spread:
    """Of an estimate of points [n], each of a client and a seed.

    `point` is the same number wherever seeds test the same point; None: nothing is known.
    """
    clients, at_client = np.unique(client, return_inverse=True)
    seeds, at_seed = np.unique(seed, return_inverse=True)
    C, S = len(clients), len(seeds)
    if S >= SEEDS:
        if C >= CLIENTS:
            return _crossed(influence, at_client, at_seed, "clients and seeds")
        if point is not None:
            points, at_point = np.unique(point, return_inverse=True)
            cells = len(np.unique(at_point * S + at_seed))
            if cells == len(influence) == len(points) * S:  # each seed tests all of them
                return _crossed(influence, at_point, at_seed, "points and seeds")
        return Spread(math.sqrt(_variance(influence, at_seed, S)), S - 1, "seeds")
    if C >= CLIENTS:
        return Spread(math.sqrt(_variance(influence, at_client, C)), C - 1, "clients")
    # The same point may be tested by several seeds; as a sample, they are those of one.
    n = len(influence) // max(1, S)
    if n < 2:
        return Spread(math.nan, 1, "points")
    alike = S * float(np.square(influence).sum()) * n / (n - 1)
    return Spread(math.sqrt(alike), n - 1, "points")


def _crossed(influence: Array, one: Array, seed: Array, over: str) -> Spread:
    """V where clients, or points, and seeds are clusters."""
    C, S = int(one.max()) + 1, int(seed.max()) + 1
    _, cell = np.unique(one * S + seed, return_inverse=True)
    by_one, by_seed = _variance(influence, one, C), _variance(influence, seed, S)
    both = by_one + by_seed - _variance(influence, cell, int(cell.max()) + 1)
    return Spread(math.sqrt(max(both, by_one, by_seed)), min(C, S) - 1, over)


def _variance(influence: Array, place: Array, clusters: int) -> float:
    if clusters < 2:
        return 0.0
    sums = np.bincount(place, influence, minlength=clusters)
    return float(clusters / (clusters - 1) * np.square(sums).sum())


def over_seeds(each: Sequence[Estimate | None], sizes: Sequence[int]) -> Estimate | None:
    """The mean of the seeds' estimates, of points one seed after the other.

    A seed whose points have no estimate takes no part; its points have no influence.
    """
    values = [one.value for one in each if one is not None]
    if not values:
        return None
    mean, S = math.fsum(values) / len(values), len(values)
    parts = [
        np.zeros(n) if one is None else (one.influence + (one.value - mean) / n) / S
        for one, n in zip(each, sizes, strict=True)
    ]
    return Estimate(mean, np.concatenate(parts))


# --- estimates ------------------------------------------------------------------------------------


def mean(values: Array) -> Estimate:
    found = float(values.mean())
    return Estimate(found, (values - found) / len(values))


def share(right: Array, among: Array) -> Estimate | None:
    """The share of the points `among` that are `right`: a sensitivity, a specificity."""
    count = int(among.sum())
    if not count:
        return None
    found = float((right & among).sum() / count)
    return Estimate(found, among * (right - found) / count)


def f1(truth: Array, positive: Array) -> Estimate | None:
    """2 TP / (2 TP + FP + FN); None for a class without points."""
    if not truth.any():
        return None
    both, whole = (truth & positive).astype(float), truth.astype(float) + positive
    found = 2 * float(both.sum()) / float(whole.sum())
    return Estimate(found, (2 * both - found * whole) / float(whole.sum()))


def auroc(truth: Array, score: Array) -> Estimate | None:
    """The share of pairs of a point of the class and another that are in order; ties count half.

    Influences are the placements of DeLong et al. (1988); with clusters, Obuchowski (1997).
    """
    ones, zeros = int(truth.sum()), int((~truth).sum())
    if not ones or not zeros:
        return None
    below = np.empty(len(truth))
    rank = _ranks(score)
    below[truth] = (rank[truth] - _ranks(score[truth])) / zeros  # of the others, by each point
    below[~truth] = 1 - (rank[~truth] - _ranks(score[~truth])) / ones
    found = float(below[truth].mean())
    return Estimate(found, (below - found) / np.where(truth, ones, zeros))


def auprc(truth: Array, score: Array) -> Estimate | None:
    """Average precision: the mean over points i of the class of P_i / N_i.

    N_i points, P_i of them of the class, have at least its score. Raising the weight of point k
    raises P_i and N_i of every i whose score is not above its own.
    """
    ones = int(truth.sum())
    if not ones or truth.all():
        return None
    order = np.argsort(-score, kind="stable")
    y, s = truth[order].astype(float), score[order]
    last = np.flatnonzero(np.append(np.diff(s) != 0, True))  # of points with the same score
    group = np.searchsorted(last, np.arange(len(s)))
    N, P = (last + 1.0)[group], np.cumsum(y)[last][group]
    found = float((y * P / N).sum() / ones)
    # Sums over points i of the class with s_i <= s_k: from the first of k's group on.
    first = np.append(0, last[:-1] + 1)[group]
    one, two = (_from(y * each, first) for each in (1 / N, P / N**2))
    influence = np.empty(len(s))
    influence[order] = (y * (P / N - found) + y * one - two) / ones
    return Estimate(found, influence)


def _ranks(score: Array) -> Array:
    """From 1; points with the same score share the mean of their ranks."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[place])


def _from(values: Array, first: Array) -> Array:
    """Sums from the places `first` to the end."""
    whole = np.append(np.cumsum(values[::-1])[::-1], 0.0)
    return np.asarray(whole[first])
