"""The threshold keeps its promise where the risk is known; curves against hand-worked values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import binom

from corefed.training import scoring
from corefed.use import selective
from corefed.use.selective import Threshold

Array = npt.NDArray[np.float64]

REPEATS, CONFIDENCE = 600, 0.9
ALLOWED = binom.ppf(0.999, REPEATS, 1 - CONFIDENCE) / REPEATS
"""A promise that is broken with probability 0.1 exactly exceeds this once in a thousand tests."""


# --- the promise ----------------------------------------------------------------------------------


def rising(v: Array) -> Array:
    return 0.02 + 0.16 * v


def steep(v: Array) -> Array:
    return 0.6 * v**5 + 0.003


def best_in_the_middle(v: Array) -> Array:
    """The most certain points are not the best: the error among the kept crosses 10 % twice."""
    return np.where(v < 0.1, 0.12, 0.35 * np.clip(v - 0.3, 0, None))


def blind(v: Array) -> Array:
    """The uncertainty knows nothing, and the error is just above 5 %."""
    return np.full_like(v, 0.0501)


def kept_error(risk: Callable[[Array], Array]) -> Callable[[float], float]:
    """R(t) for a uniform v: the mean of the risk below t, by the midpoint rule."""
    grid = (np.arange(100_000) + 0.5) / 100_000
    sums = np.concatenate([[0.0], np.cumsum(risk(grid))])
    return lambda t: sums[round(t * 100_000)] / max(1, round(t * 100_000))


@pytest.mark.parametrize(
    ("risk", "points", "target"),
    [
        (rising, 300, 0.1),
        (rising, 2000, 0.1),
        (steep, 100, 0.05),
        (steep, 1000, 0.02),
        (best_in_the_middle, 500, 0.1),
        (blind, 400, 0.05),
    ],
)
@pytest.mark.parametrize("ties", [0, 20])
def test_the_promise(risk: Callable[[Array], Array], points: int, target: float, ties: int) -> None:
    """Over draws of the held-out points the true error of the kept is above the target rarely.

    With ties, v is known by its first digits only, and thresholds lie on these.
    """
    error = kept_error(risk)
    rng = np.random.default_rng(points)
    broken = 0
    for _ in range(REPEATS):
        v = rng.random(points)
        wrong = rng.random(points) < risk(v)
        u = np.floor(v * ties) / ties if ties else v
        found = selective.threshold(u, wrong, target, CONFIDENCE)
        if found.kept:
            broken += error(min(found.value, 1.0)) > target
    assert broken / REPEATS <= ALLOWED


def test_more_is_kept_than_by_a_binary_search() -> None:
    """Geifman & El-Yaniv's search on the same points, with the same promise."""
    rng = np.random.default_rng(0)
    ours, theirs = 0, 0
    for _ in range(200):
        v = rng.random(500)
        wrong = rng.random(500) < steep(v)
        ours += selective.threshold(v, wrong, 0.05).kept
        errors = np.cumsum(wrong[np.argsort(v)])
        low, high, best, steps = 0, 500, 0, math.ceil(math.log2(500))
        for _ in range(steps):
            m = math.ceil((low + high) / 2)
            if binom.cdf(errors[m - 1], m, 0.05) <= 0.1 / steps:
                low = best = m
            else:
                high = m
        theirs += best
    assert ours > theirs


# --- one threshold by hand ------------------------------------------------------------------------


def test_the_fewest_points() -> None:
    """0.95^45 = 0.0994 <= 0.1 < 0.95^44: 45 points without an error, and the largest."""
    assert selective.fewest(0.05, 0.9) == 46
    u = np.arange(46.0)
    assert selective.threshold(u[:45], np.zeros(45), 0.05) == Threshold(-math.inf, 45, 0, 0)
    found = selective.threshold(u, np.zeros(46), 0.05)
    assert found == Threshold(just_above(45), 46, 46, 0)


def just_above(largest: float) -> float:
    return float(np.nextafter(np.float32(largest), np.float32(math.inf)))


@pytest.mark.parametrize("largest", [0.0, 1.61, 1 / 3, 1e-30, 1e30])
def test_nothing_above_the_largest_uncertainty_is_kept(largest: float) -> None:
    """All held-out points are kept, those at the largest too; as predictions are compared."""
    u = torch.rand(200, generator=torch.Generator().manual_seed(0)) * largest
    u[:3] = largest
    found = selective.threshold(u, torch.zeros(200), 0.05)
    (promise,) = selective.reachable(u, torch.zeros(200))
    assert found.kept == promise.threshold.kept == 200
    for value in (found.value, promise.threshold.value):
        assert bool((u < value).all())
        above = torch.nextafter(u[0], torch.tensor(math.inf))
        assert not bool(above < value)
        assert not bool(torch.tensor(math.inf) < value)


def test_no_points_at_all() -> None:
    assert selective.threshold([], [], 0.05) == Threshold(-math.inf, 0, 0, 0)
    assert selective.points_needed([], [], 0.05, 0.9) == 46


def test_errors_at_the_uncertain_end_are_left_out() -> None:
    """1000 points, the last 200 wrong. The tests are at 59, 122, 184, ... 1000 points kept.

    59 is the first m with 0.95^m <= 0.05, half of delta; 749 kept have no error, 812 have 12 and
    pass too (the binomial's 812 x 5 % = 41), 875 have 75 and do not.
    """
    u, wrong = np.arange(1000.0), np.arange(1000) >= 800
    assert selective.threshold(u, wrong, 0.05) == Threshold(812.0, 1000, 812, 12)


def test_an_error_at_the_certain_end_does_not_end_it_all() -> None:
    wrong = np.zeros(1000)
    wrong[10] = 1  # the first test, of 59 points, allows none
    assert selective.threshold(np.arange(1000.0), wrong, 0.05).kept == 1000


def test_ties_are_never_divided() -> None:
    """All tied: everything or nothing. In three groups: whole groups."""
    same = np.zeros(200)
    assert selective.threshold(same, np.zeros(200), 0.05).value == just_above(0)
    many = np.arange(200) < 40
    assert selective.threshold(same, many, 0.05).kept == 0
    u = np.repeat([0.0, 1.0, 2.0], 200)
    found = selective.threshold(u, u == 2, 0.05)
    assert found == Threshold(2.0, 600, 400, 0)
    order = np.random.default_rng(0).permutation(600)
    assert selective.threshold(u[order], (u == 2)[order], 0.05) == found


def test_points_that_say_nothing_are_not_kept() -> None:
    """NaN and infinity come last; `kept` counts what is below the threshold."""
    u = np.concatenate([np.arange(300.0), [math.nan] * 300])
    found = selective.threshold(u, np.isnan(u), 0.05)
    assert found == Threshold(just_above(299), 600, 300, 0)
    assert int((u < found.value).sum()) == 300
    u[300:] = math.inf
    assert selective.threshold(u, np.isinf(u), 0.05) == found
    assert selective.threshold([math.nan] * 99, np.zeros(99), 0.05).kept == 0


def test_wanted_points() -> None:
    """Without an error the fewest; with errors below the target more; above it none would do."""
    assert selective.points_needed(np.arange(10.0), np.zeros(10), 0.05, 0.9) == 46
    wrong = np.arange(40) == 39  # 2.5 %
    some = selective.points_needed(np.arange(40.0), wrong, 0.05, 0.9)
    assert some is not None
    assert binom.cdf(math.ceil(0.025 * some), some, 0.05) <= 0.1
    assert binom.cdf(math.ceil(0.025 * some * 0.8), round(some * 0.8), 0.05) > 0.1
    assert selective.points_needed(np.arange(100.0), np.arange(100) % 2, 0.05, 0.9) is None
    least = selective.fewest(1e-6, 1 - 1e-6)
    assert least > 10_000_000
    assert selective.points_needed(np.arange(10.0), np.zeros(10), 1e-6, 1 - 1e-6) == least


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="one uncertainty"):
        selective.threshold(np.zeros(3), np.zeros(4), 0.05)


# --- curves ---------------------------------------------------------------------------------------


def test_risk_coverage_by_hand() -> None:
    """Wrong is the third in order: risks 0, 0, 1/3, 1/4; the oracle's 0, 0, 0, 1/4."""
    found = selective.risk_coverage(torch.tensor([0.3, 0.1, 0.9, 0.2]), torch.tensor([1, 0, 0, 0]))
    assert found.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert found.risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert found.aurc == pytest.approx((1 / 3 + 1 / 4) / 4)
    assert found.excess == pytest.approx(1 / 12)


def test_a_perfect_order_has_no_excess() -> None:
    wrong = np.array([0, 0, 0, 1, 1])
    assert selective.risk_coverage(np.arange(5.0), wrong).excess == pytest.approx(0)
    assert selective.risk_coverage(np.arange(5.0), np.zeros(5))[2:] == (0.0, 0.0)


def test_tied_points_count_their_expectation() -> None:
    """The mean over all 4! orders of four tied points, one of them wrong, is 1/4 everywhere."""
    found = selective.risk_coverage(np.ones(4), np.array([0, 1, 0, 0]))
    assert found.risk.tolist() == pytest.approx([0.25] * 4)


def test_curves_without_points() -> None:
    found = selective.risk_coverage([], [])
    assert len(found.risk) == 0
    assert math.isnan(found.aurc)
    empty = selective.reliability(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert math.isnan(empty.ece)
    assert empty.points.sum() == 0


@pytest.mark.parametrize("classes", [2, 7])
def test_reliability_has_the_ece_of_the_evaluation(classes: int) -> None:
    g = torch.Generator().manual_seed(classes)
    p = (3 * torch.randn(500, classes, generator=g)).softmax(-1)
    y = torch.randint(classes, (500,), generator=g)
    each = scoring.score_classes(p, y)
    expected = scoring.metrics_of(scoring.totals(each, y, classes))["ece"]
    found = selective.reliability(p, y)
    assert found.ece == pytest.approx(expected)
    assert found.points.sum() == 500
    held = found.points > 0
    assert np.isnan(found.accuracy[~held]).all()
    edges = np.arange(1, scoring.BINS + 1)[held] / scoring.BINS
    assert (found.confidence[held] <= edges + 1e-12).all()
    assert (found.confidence[held] > edges - 1 / scoring.BINS).all()


def test_coverage_of_gaussian_targets() -> None:
    """68.27 % within one standard deviation; the error of 20000 draws is 0.35 % at most."""
    g = torch.Generator().manual_seed(0)
    mean, std = torch.randn(20_000, generator=g), torch.rand(20_000, generator=g) + 0.5
    y = mean + std * torch.randn(20_000, generator=g)
    levels = (0.5, math.erf(1 / math.sqrt(2)), 0.95)
    found = selective.coverage_curve(y, mean, std**2, levels)
    assert found.tolist() == pytest.approx(list(levels), abs=4 * 0.0035)
    narrow = selective.coverage_curve(y, mean, std**2 / 4, levels)
    assert (narrow < found).all()
