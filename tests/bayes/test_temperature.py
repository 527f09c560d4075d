"""Temperatures: what they do to predictions, and that the right one is found.

The maximum-likelihood T of n points has a standard error of 1 / sqrt(n I) in log T, with I the
information of a point: for classes the mean variance of log p_T under p_T (at the true T), for a
Gaussian target 2. Tolerances are four standard errors, or follow from the equation that is solved.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from corefed.bayes import temperature
from corefed.bayes.temperature import ALL, CLIENTS, GRID, LEAST, MOST
from corefed.bayes.uncertainty import Prediction, entropy
from corefed.training import scoring

ONE = torch.ones(1, dtype=torch.float64)
VAGUE = 1e4
"""A spread so wide that the prior says nothing."""


def made_up(number: int, factor: float, classes: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [1, n, classes] that are `factor` times too sure, labels, and which are real.

    Labels are drawn from softmax(z), and the model says softmax(factor z): T = factor is right.
    """
    g = torch.Generator().manual_seed(3)
    z = 2 * torch.randn(1, number, classes, generator=g, dtype=torch.float64)
    y = torch.multinomial(torch.softmax(z[0], -1), 1, generator=g).view(1, -1)
    return torch.softmax(factor * z, -1), y, torch.ones(1, number, dtype=torch.bool)


def found(p: Tensor, y: Tensor, real: Tensor, spread: float = VAGUE, around: float = 1.0) -> float:
    slope = temperature.slopes(p, y, real, p.shape[-1])
    return temperature.solve(slope, around * ONE, spread).item()


# --- predictions ----------------------------------------------------------------------------------


def test_probabilities_by_hand() -> None:
    p = torch.tensor([[[0.8, 0.2], [0.5, 0.5]], [[0.8, 0.2], [1.0, 0.0]]])
    said = temperature.temper(p, torch.tensor([0.5, 2.0]), 2)
    assert said[0, 0].tolist() == pytest.approx([0.64 / 0.68, 0.04 / 0.68])
    assert said[0, 1].tolist() == [0.5, 0.5]
    root = math.sqrt(0.8) + math.sqrt(0.2)
    assert said[1, 0].tolist() == pytest.approx([math.sqrt(0.8) / root, math.sqrt(0.2) / root])
    assert said[1, 1].tolist() == [1.0, 0.0]


def test_a_regressions_standard_deviation_is_multiplied() -> None:
    outputs = torch.tensor([[[1.0, 7.0, 4.0, 9.0]]])  # two means, two variances
    said = temperature.temper(outputs, torch.tensor([0.5]), 0)
    assert said.tolist() == [[[1.0, 7.0, 1.0, 2.25]]]


@pytest.mark.parametrize("T", [0.2, 0.7, 1.5, 5.0])
def test_parts_of_the_uncertainty_keep_their_shares(T: float) -> None:
    """The total is the entropy of p_T, the parts add up to it, and none is negative."""
    each = torch.softmax(
        4 * torch.randn(6, 50, 3, generator=torch.Generator().manual_seed(0)), -1
    ).double()
    mean = each.mean(0)
    mean[0], each[:, 0] = torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 0, 0])  # all draws are sure
    raw = Prediction(mean, entropy(mean), entropy(each).mean(0))
    said = temperature.temper_prediction(raw, T, 3)
    assert torch.equal(said.mean.argmax(-1), mean.argmax(-1))
    torch.testing.assert_close(said.total, entropy(said.mean))
    torch.testing.assert_close(said.aleatoric + said.epistemic, said.total)
    assert bool((said.epistemic >= 0).all()) and bool((said.aleatoric >= 0).all())
    torch.testing.assert_close(said.aleatoric * raw.total, raw.aleatoric * said.total)
    assert said.total[0] == said.aleatoric[0] == 0
    narrow = temperature.temper_prediction(raw, T, 0)
    assert torch.equal(narrow.mean, raw.mean)
    torch.testing.assert_close(narrow.epistemic, T**2 * raw.epistemic)


# --- fitting --------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_nll() -> None:
    p, y, real = made_up(40, 1.7)
    g = torch.Generator().manual_seed(5)
    outputs = torch.rand(1, 30, 4, generator=g, dtype=torch.float64) + 0.1
    target = torch.randn(1, 30, 2, generator=g, dtype=torch.float64)
    known = torch.ones(1, 30, dtype=torch.bool)

    def nll(T: Tensor, classes: int) -> Tensor:
        if classes:
            return scoring.score_classes(temperature.temper(p, T, 5), y)["nll"].sum()
        return scoring.score_targets(temperature.temper(outputs, T, 0), target)["nll"].sum()

    for classes, slope in (
        (5, temperature.slopes(p, y, real, 5)),
        (0, temperature.slopes(outputs, target, known, 0)),
    ):
        for place in (3, 32, 60):
            T = GRID[place : place + 1]
            step = 1e-4
            rise = nll(T * math.exp(step), classes) - nll(T * math.exp(-step), classes)
            assert slope[0, place].item() == pytest.approx(
                T.item() * rise.item() / (2 * step), 1e-6
            )
        assert bool((slope.diff() > 0).all())  # so there is one solution


def test_slopes_add_up_over_clients_without_padding() -> None:
    p, y, real = made_up(60, 0.8)
    whole = temperature.slopes(p, y, real, 5)
    two = [x.view(2, 30, *x.shape[2:]) for x in (p, y, real)]
    torch.testing.assert_close(temperature.slopes(*two, 5).sum(0, keepdim=True), whole)
    padded = [torch.cat([x, x[:, :7]], 1) for x in (p, y, real)]
    padded[2][:, 60:] = False
    padded[0][:, 60:] = torch.nan
    torch.testing.assert_close(temperature.slopes(*padded, 5), whole)
    padded[2][:] = True  # points whose prediction is not finite are left out
    torch.testing.assert_close(temperature.slopes(*padded, 5), whole)


@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0, 2.0, 4.0])
def test_the_right_temperature_is_found(factor: float) -> None:
    """Of models that are too sure, or not sure enough, and of one that is neither."""
    number = 10_000
    p, y, real = made_up(number, factor)
    true = temperature.temper(p, factor * ONE, 5)
    log_p = true.log()
    information = ((true * log_p.square()).sum(-1) - (true * log_p).sum(-1).square()).mean().item()
    error = 1 / math.sqrt(number * information)
    likely = found(p, y, real)
    assert abs(math.log(likely / factor)) < 4 * error
    # A prior of weight 1 / spread^2 moves it by that part of the way to its centre at most.
    for spread in (ALL, CLIENTS):
        weight = spread**-2 / (spread**-2 + number * information)
        shift = abs(math.log(found(p, y, real, spread) / likely))
        assert shift < 2 * weight * abs(math.log(factor)) + 2e-3
    assert abs(math.log(found(p, y, real, ALL) / likely)) < error


@pytest.mark.parametrize("spread", [ALL, CLIENTS, VAGUE])
def test_a_regression_has_a_closed_form(spread: float) -> None:
    """(n + nu) T^2 - nu T_0 T - sum of z^2 = 0; without a prior T is the root mean square of z."""
    g = torch.Generator().manual_seed(1)
    number, around, nu = 500, 1.3, spread**-2
    z = 2.5 * torch.randn(1, number, 1, generator=g, dtype=torch.float64)
    outputs = torch.cat([torch.zeros_like(z), torch.full_like(z, 4.0)], -1)  # two wide
    slope = temperature.slopes(outputs, 2 * z, torch.ones(1, number, dtype=torch.bool), 0)
    T = temperature.solve(slope, around * ONE, spread).item()
    squares = z.square().sum().item()
    wanted = nu * around + math.sqrt((nu * around) ** 2 + 4 * (number + nu) * squares)
    assert pytest.approx(wanted / (2 * (number + nu)), rel=1e-3) == T


@pytest.mark.parametrize(
    ("sure", "right"), [(0.6, True), (0.99, True), (0.6, False), (0.99, False)]
)
def test_one_point_moves_a_client_little(sure: float, right: bool) -> None:
    """By (log p(y) - E[log p]) / nu at most: 4.6 / 100 of a point that is wrong and 99 % sure."""
    p = torch.tensor([[[sure, 1 - sure]]], dtype=torch.float64)
    y, real = torch.tensor([[int(not right)]]), torch.ones(1, 1, dtype=torch.bool)
    T = found(p, y, real, CLIENTS, around=0.7)
    assert abs(T - 0.7) < 0.05
    assert (T < 0.7) == right


def test_without_points_it_is_the_priors() -> None:
    nothing = torch.zeros(3, len(GRID), dtype=torch.float64)
    around = torch.tensor([0.31, 1.0, 2.7], dtype=torch.float64)
    torch.testing.assert_close(temperature.solve(nothing, around, CLIENTS), around)


def test_it_stays_within_its_bounds() -> None:
    """All right at little confidence, or all wrong at much: no temperature would be enough."""
    p = torch.tensor([0.6, 0.4]).double().expand(1, 1000, 2)
    real = torch.ones(1, 1000, dtype=torch.bool)
    assert found(p, torch.zeros(1, 1000, dtype=torch.int64), real) == pytest.approx(LEAST)
    assert found(p, torch.ones(1, 1000, dtype=torch.int64), real) == pytest.approx(MOST)


def test_interpolation_against_bisection() -> None:
    """The slow twin: halve the interval until the slope of the points themselves is 0."""
    for factor in (0.37, 1.0, 1.9):
        p, y, real = made_up(200, factor)
        log_p = p[0].log()
        true = log_p.gather(-1, y[0].unsqueeze(-1)).sum()
        low, high = LEAST, MOST
        for _ in range(60):
            T = math.sqrt(low * high)
            slope = true - (torch.softmax(log_p / T, -1) * log_p).sum() + (T - 1) / ALL**2
            low, high = (T, high) if slope < 0 else (low, T)
        assert found(p, y, real, ALL) == pytest.approx(low, rel=1e-3)
