"""Choose which predictions a person should review: a threshold with a guarantee.

A prediction is kept if its uncertainty u is below t. R(t) = P(wrong | u < t) is the error rate of
the kept ones. A threshold is chosen on n held-out points (u_i, wrong_i) such that

    P( R(t) > target ) <= delta = 1 - confidence

over the draw of these points, for any model, uncertainty and distribution. A better uncertainty
keeps more predictions; a bad one does not break the guarantee.

**One threshold.** Let t = u_(m+1), the (m+1)-th smallest uncertainty. Given t, the M points below
it are independent draws of u < t, so their errors e are Binomial(M, R(t)), and

    p = P( Binomial(M, target) <= e )

is a p-value of "R(t) > target". M = m unless uncertainties are tied; ties are kept together.

**The last threshold.** For m = n all held-out points are kept, and t is just above u_n, the largest
uncertainty: nothing is known of points beyond it. Given u_n, the n - 1 others are draws of u < t,
and p is computed for M = n - 1 with the errors of all n points. If only one point can be at u_n,
these are at least as many as those of the others, so p is valid. Where several can be tied there
and err more often than R(t), the errors of all n points are stochastically larger than those of
Binomial(n, R(t)); where they err less often, the others' larger than Binomial(n - 1, R(t)).

**Many thresholds.** The numbers m_1 < ... < m_K = n are fixed before any label is seen: evenly,
from the fewest points that could pass. They are tested in this order as in Wiens (2003), "A fixed
sequence Bonferroni procedure": test k has the level delta w_k, plus the level of test k - 1 if that
passed. The last threshold that passes is used. The first test gets half of delta, because the later
ones build on it. The others share the rest, so that one error among the most certain points does
not end the sequence.

The thresholds are quantiles of the same points; the p-values are valid all the same. Which
thresholds violate the target depends on how many points lie between the values where R crosses it.
Given these numbers, the points between two crossings err at the rate `target` and those after the
last at a higher rate, so the p-value of a violating threshold stays valid. With ties R can jump
across the target; the argument then needs a single crossing.

**Which targets can be reached.** For one m the largest error rate that the errors e allow is the
Clopper-Pearson limit U_m. At the level delta / K for each of K numbers m that are fixed in advance,
R(t_m) <= U_m holds for all of them at once with probability 1 - delta. So whoever picks one of them
after a look at all still has a promise. It is a promise of its own, beside that of a target that is
named before.

This is a Learn then Test procedure (Angelopoulos et al. 2021). It replaces the binary search of
Geifman & El-Yaniv (2017, "Selective classification for deep neural networks"), which tests
ceil(log2 n) thresholds at delta / ceil(log2 n) each. In 43 simulated cases (four shapes of R; n =
60 to 2000; targets 1 to 10 %; confidence 90 %) the search kept 41 % of the points on average,
Bonferroni over 16 thresholds 43 %, one fixed sequence 48 % (almost none where the most certain
points were not the best), this one 52 %. TESTS and FIRST were chosen on the same cases, by a script
outside the project, so the last number is optimistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.training import scoring

TESTS = 16
"""Thresholds that are tested; 8 and 32 kept no more in the simulations above."""
FIRST = 0.5
"""Share of delta for the first test."""
MOST = 1000
"""Upper limit of the suggested number of held-out points, as a multiple of the minimum."""

PARTS = (0.25, 0.5, 0.75, 1.0)
"""Of the held-out points: the numbers m of `reachable`. Few, since each costs a share of delta."""
TARGETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Round error rates to choose from where the default cannot be promised. Above the last one, a
promise would say little."""

Values = Tensor | npt.NDArray[np.floating] | Sequence[float]


class Threshold(NamedTuple):
    """Predictions with an uncertainty below `value` are kept."""

    value: float  # -inf: none
    points: int  # held-out points that it was chosen on
    kept: int  # those below the threshold
    wrong: int  # the wrong ones among the kept


def threshold(
    uncertainty: Values, wrong: Values, target: float, confidence: float = 0.9
) -> Threshold:
    """The threshold that keeps most, with an error rate of at most `target` among the kept."""
    from scipy.special import bdtr  # the binomial distribution; scipy takes time to import

    delta = 1 - confidence
    u, e = _ordered(uncertainty, wrong)
    n = len(u)
    errors = np.concatenate([[0.0], np.cumsum(e)])
    best, passed = Threshold(-math.inf, n, 0, 0), 0.0
    for m, share in _tests(n, target, delta):
        value, kept, draws = _below(u, m)
        level = delta * share + passed
        p = float(bdtr(errors[kept], draws, target)) if errors[kept] < draws else 1.0
        passed = level if p <= level else 0.0
        if p <= level:
            best = Threshold(value, n, kept, round(float(errors[kept])))
    return best


def _below(u: npt.NDArray[np.float64], m: int) -> tuple[float, int, int]:
    """The threshold for m of the sorted points, the points below it, and M."""
    known = int(np.isfinite(u).sum())
    if m < known:
        kept = int(np.searchsorted(u, u[m]))  # fewer than m where u_(m) is tied
        return float(u[m]), kept, kept
    if not known:
        return -math.inf, 0, 0
    with np.errstate(over="ignore"):
        last = np.float32(u[known - 1])  # predictions are compared in float32
    return float(np.nextafter(last, np.float32(math.inf))), known, known - 1


def _tests(n: int, target: float, delta: float) -> list[tuple[int, float]]:
    """(m_k, w_k): points to keep, and share of delta."""
    if n < fewest(target, 1 - delta):
        return []
    start = min(n, fewest(target, 1 - FIRST * delta) - 1)
    numbers = np.unique(np.linspace(start, n, TESTS).round().astype(int)).tolist()
    rest = len(numbers) - 1
    shares = [FIRST, *[(1 - FIRST) / rest] * rest] if rest else [1.0]
    return list(zip(numbers, shares, strict=True))


def fewest(target: float, confidence: float) -> int:
    """The fewest points that can pass, without errors: M with (1 - target)^M <= 1 - confidence,
    and one more, which says where the threshold is."""
    return math.ceil(math.log(1 - confidence) / math.log1p(-target)) + 1


class Promise(NamedTuple):
    """An error rate that holds among the kept, and the threshold for it."""

    target: float
    threshold: Threshold


def reachable(uncertainty: Values, wrong: Values, confidence: float = 0.9) -> list[Promise]:
    """Error rates that hold all at once, each for the threshold that keeps most; smallest first."""
    from scipy.special import betaincinv  # as above

    u, e = _ordered(uncertainty, wrong)
    n = len(u)
    errors = np.concatenate([[0.0], np.cumsum(e)])
    level = (1 - confidence) / len(PARTS)
    found: list[Promise] = []
    for part in PARTS if n else ():
        value, kept, draws = _below(u, math.ceil(part * n))
        count = round(float(errors[kept]))
        if draws > count:
            limit = float(betaincinv(count + 1, draws - count, 1 - level))
            found.append(Promise(limit, Threshold(value, n, kept, count)))
    best: list[Promise] = []
    for each in sorted(found, key=lambda each: (each.target, -each.threshold.kept)):
        if not best or each.threshold.kept > best[-1].threshold.kept:
            best.append(each)
    return best


def rounded(promises: Sequence[Promise]) -> list[Promise]:
    """The promises at the round TARGETS: for each that can be reached, what keeps most."""
    found = []
    for target in TARGETS:
        within = [each.threshold for each in promises if each.target <= target]
        if within:
            found.append(Promise(target, within[-1]))
    return found


def points_needed(
    uncertainty: Values, wrong: Values, target: float, confidence: float
) -> int | None:
    """About how many held-out points like these are needed to keep any; None: no number would do.

    Let r be the lowest error rate of the m most certain of the n points. M such points pass once
    P( Binomial(M - 1, target) <= r M ) <= delta, which takes M n / m points in all.
    """
    from scipy.special import bdtr  # as above

    _, e = _ordered(uncertainty, wrong)
    least, n = fewest(target, confidence), len(e)
    if not n:
        return least
    m = np.arange(min(least, n), n + 1)
    rates = np.cumsum(e)[m - 1] / m
    r, part = rates.min(), m[rates.argmin()] / n
    M = np.geomspace(least, MOST * least, 400).round().astype(int)
    passes = bdtr(np.ceil(r * M), M - 1, target) <= 1 - confidence
    return math.ceil(M[passes.argmax()] / part) if passes.any() else None


def _ordered(
    uncertainty: Values, wrong: Values
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both sorted by ascending uncertainty; NaN is last."""
    u, e = (np.asarray(values, dtype=np.float64) for values in (uncertainty, wrong))
    if u.ndim != 1 or u.shape != e.shape:
        raise ValueError(f"one uncertainty and one error per point, not {u.shape} and {e.shape}")
    order = np.argsort(u, kind="stable")
    return u[order], e[order]


# --- curves ---------------------------------------------------------------------------------------


class RiskCoverage(NamedTuple):
    """Entry i is for the i + 1 most certain points."""

    coverage: npt.NDArray[np.float64]  # [n] share of the points that is kept
    risk: npt.NDArray[np.float64]  # [n] error (mean loss) among them
    aurc: float  # the mean of `risk`; NaN without points
    excess: float  # over the AURC of an oracle that knows the errors; 0 is perfect


def risk_coverage(uncertainty: Values, wrong: Values) -> RiskCoverage:
    """The risk-coverage curve, its area, and the excess over an oracle (Geifman et al. 2019).

    `wrong` is 0 or 1, or any loss. Points of the same uncertainty all count their mean loss, the
    expectation over their orders.
    """
    u, loss = _ordered(uncertainty, wrong)
    if not len(u):
        return RiskCoverage(u, loss, math.nan, math.nan)
    _, group = np.unique(u, return_inverse=True)
    shared = (np.bincount(group, loss) / np.bincount(group))[group]
    number = np.arange(1, len(u) + 1)
    risk, oracle = np.cumsum(shared) / number, np.cumsum(np.sort(loss)) / number
    aurc = float(risk.mean())
    return RiskCoverage(number / len(u), risk, aurc, aurc - float(oracle.mean()))


class Reliability(NamedTuple):
    """Bins ((b-1)/B, b/B] of the confidence; confidence and accuracy are NaN in an empty one."""

    confidence: npt.NDArray[np.float64]  # [B] mean
    accuracy: npt.NDArray[np.float64]  # [B]
    points: npt.NDArray[np.int64]  # [B] how many
    ece: float  # the mean over points of |accuracy - confidence| of their bin


def reliability(
    probabilities: Tensor | npt.NDArray[np.floating], y: Tensor, bins: int = scoring.BINS
) -> Reliability:
    """For probabilities [n, classes] and labels [n]; the default bins give evaluate's ECE."""
    p, truth = torch.as_tensor(probabilities), torch.as_tensor(y)
    each = scoring.score_classes(p, truth)
    confidence, correct = each["confidence"].numpy(), each["correct"].numpy()
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):  # an empty bin is NaN
        conf, acc = (np.bincount(index, v, minlength=bins) / count for v in (confidence, correct))
    gap = float((count * np.nan_to_num(np.abs(acc - conf))).sum())
    return Reliability(conf, acc, count, gap / len(truth) if len(truth) else math.nan)


def coverage_curve(
    y: Values, mean: Values, variance: Values, levels: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Per level, the share of targets within the central interval of N(mean, variance)."""
    from scipy.special import ndtri  # as above

    truth, m, v = (np.asarray(each, dtype=np.float64) for each in (y, mean, variance))
    off = np.abs(truth - m) / np.sqrt(v)
    return np.array([(off <= ndtri((1 + level) / 2)).mean() for level in levels])
