"""Influences against scikit-learn and derivatives, variances against closed forms and draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from corefed.training import clustered

Array = Any


@pytest.fixture(scope="module")
def points() -> tuple[Array, Array]:
    """Scores with ties."""
    g = np.random.default_rng(0)
    truth = g.random(80) < 0.3
    return truth, np.round(g.normal(size=80) + truth, 1)


AREAS = [
    (clustered.auroc, roc_auc_score),
    (clustered.auprc, average_precision_score),
    (lambda y, s: clustered.f1(y, s > 0.5), lambda y, s, **k: f1_score(y, s > 0.5, **k)),
]


@pytest.mark.parametrize(("mine", "theirs"), AREAS, ids=["auroc", "auprc", "f1"])
def test_values_and_influences_are_those_of_scikit_learn(
    points: tuple[Array, Array], mine: Callable[..., Any], theirs: Callable[..., float]
) -> None:
    """The influence of a point is the derivative by its weight."""
    found = mine(*points)
    assert found.value == pytest.approx(theirs(*points), abs=1e-12)
    assert found.influence.sum() == pytest.approx(0, abs=1e-12)
    step = 1e-6
    for k in range(0, 80, 9):
        up, down = np.ones(80), np.ones(80)
        up[k], down[k] = 1 + step, 1 - step
        slope = (theirs(*points, sample_weight=up) - theirs(*points, sample_weight=down)) / (
            2 * step
        )
        assert found.influence[k] == pytest.approx(slope, abs=1e-7)


def test_one_kind_of_points_has_no_area() -> None:
    ones, score = np.ones(3, bool), np.arange(3.0)
    assert clustered.auroc(ones, score) is clustered.auroc(~ones, score) is None
    assert clustered.auprc(ones, score) is clustered.auprc(~ones, score) is None
    assert clustered.share(ones, ~ones) is clustered.f1(~ones, ones) is None


def test_clients_by_hand() -> None:
    """Six clients of two points with sums D_c: var = C / (C - 1) sum (D_c - n_c d)^2 / M^2."""
    gains = np.array([1.0, 1, 0, 1, -1, 0, 0, 0, 1, 1, -1, -1])
    client = np.repeat(np.arange(6), 2)
    found = clustered.spread(clustered.mean(gains).influence, client, np.zeros(12))
    sums, d = gains.reshape(6, 2).sum(1), gains.mean()
    assert found.error == pytest.approx(math.sqrt(6 / 5 * np.square(sums - 2 * d).sum()) / 12)
    assert (found.freedom, found.over) == (5, "clients")
    assert found.reach == pytest.approx(float(t.ppf(0.975, 5)) * found.error)


def test_seeds_alone_are_students_test() -> None:
    """Four seeds of three clients, too few to be a sample: the paired t-test over seeds."""
    g = np.random.default_rng(1)
    each = [clustered.mean(g.normal(0.3, size=n)) for n in (12, 15, 12, 9)]
    sizes = [len(one.influence) for one in each]
    whole = clustered.over_seeds(each, sizes)
    assert whole is not None
    found = clustered.spread(
        whole.influence,
        np.concatenate([np.arange(n) % 3 for n in sizes]),
        np.repeat(range(4), sizes),
    )
    test = ttest_1samp([one.value for one in each], 0)
    assert found.over == "seeds" and found.freedom == 3
    assert found.p_value(whole.value) == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert (whole.value - found.reach, whole.value + found.reach) == pytest.approx((low, high))


def test_without_a_sample_of_clients_or_seeds_points_are_one() -> None:
    gains = np.array([0.0, 1, 1, 1])
    one = clustered.mean(gains)
    found = clustered.spread(one.influence, np.zeros(4), np.zeros(4))
    assert found.error == pytest.approx(gains.std(ddof=1) / 2) and found.over == "points"
    twice = clustered.over_seeds([one, one], [4, 4])  # the same points, tested twice
    assert twice is not None
    again = clustered.spread(twice.influence, np.zeros(8), np.repeat([0, 1], 4))
    assert again.error == pytest.approx(found.error)


def test_a_seed_without_an_estimate_takes_no_part() -> None:
    one = clustered.mean(np.array([1.0, 3.0]))
    found = clustered.over_seeds([one, None], [2, 3])
    assert (
        found is not None and found.value == 2 and found.influence.tolist() == [-0.5, 0.5, 0, 0, 0]
    )
    assert clustered.over_seeds([None], [2]) is None


@pytest.mark.parametrize("metric", ["mean", "auroc"])
def test_intervals_hold_where_clients_and_seeds_differ(metric: str) -> None:
    """Eight clients and four seeds, each with an effect of its own on the difference, of mean 0.

    In 400 draws at most 5 % and three standard errors of intervals may miss 0. Points taken one by
    one miss it far more often.
    """
    g, missed, naive = np.random.default_rng(2), 0, 0
    C, S, n = 8, 4, 10
    client, seed = np.tile(np.repeat(np.arange(C), n), S), np.repeat(np.arange(S), C * n)
    for _ in range(400):
        effect = 0.4 * g.normal(size=C)[client] + 0.4 * g.normal(size=S)[seed]
        if metric == "mean":
            gains = effect + g.normal(size=len(client))
            each = [clustered.mean(gains[seed == s]) for s in range(S)]
        else:  # of 0.5: scores of one class are moved by the effect
            truth = g.random(len(client)) < 0.5
            score = g.normal(size=len(client)) + np.where(truth, effect, 0.0)
            areas = [clustered.auroc(truth[seed == s], score[seed == s]) for s in range(S)]
            each = [clustered.Estimate(a.value - 0.5, a.influence) for a in areas if a]
        found = clustered.over_seeds(each, [C * n] * S)
        assert found is not None
        spread = clustered.spread(found.influence, client, seed)
        missed += abs(found.value) > spread.reach
        naive += abs(found.value) > 1.96 * math.sqrt(float(np.square(found.influence).sum()))
    assert missed / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert naive / 400 > 0.25


@pytest.mark.parametrize(("C", "S"), [(2, 3), (4, 5)])
@pytest.mark.parametrize("seeds_differ", [0.0, 1.0])
def test_intervals_hold_where_few_clients_have_the_same_points_in_every_seed(
    C: int, S: int, seeds_differ: float
) -> None:
    """Seven tenths of a point's gain are the same in all seeds, and seeds have an effect as large
    as the points' together. In 400 draws at most 5 % and three standard errors of intervals may
    miss 0. Seeds alone miss it two to six times as often where they differ little."""
    g, missed, seeds_alone, n = np.random.default_rng(3), 0, 0, 50
    client, seed = np.tile(np.repeat(np.arange(C), n), S), np.repeat(np.arange(S), C * n)
    point = np.tile(np.arange(C * n), S)
    for _ in range(400):
        shared = math.sqrt(0.7) * g.normal(size=C * n)
        own = math.sqrt(0.3) * g.normal(size=(S, C * n))
        effect = math.sqrt(seeds_differ * S / (C * n)) * g.normal(size=(S, 1))
        gains = shared + own + effect
        found = clustered.over_seeds([clustered.mean(each) for each in gains], [C * n] * S)
        assert found is not None
        spread = clustered.spread(found.influence, client, seed, point)
        assert (spread.over, spread.freedom) == ("points and seeds", S - 1)
        missed += abs(found.value) > spread.reach
        seeds_alone += abs(found.value) > clustered.spread(found.influence, client, seed).reach
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert missed / 400 <= most
    assert seeds_differ or seeds_alone / 400 > most


def test_points_that_seeds_draw_again_are_as_unknown() -> None:
    """One point that a seed does not share, and the rule is that of seeds alone."""
    g = np.random.default_rng(4)
    client, seed = np.zeros(30, int), np.repeat(np.arange(3), 10)
    influence, point = g.normal(size=30), np.tile(np.arange(10), 3)
    same = clustered.spread(influence, client, seed, point)
    order = g.permutation(10)  # a seed may have them in another order
    mixed = np.concatenate([influence[:10][order], influence[10:]])
    assert clustered.spread(
        mixed, client, seed, np.concatenate([order, point[10:]])
    ).error == pytest.approx(same.error)
    point[0] = 99
    assert clustered.spread(influence, client, seed, point) == clustered.spread(
        influence, client, seed
    )
