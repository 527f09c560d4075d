"""A posterior from a pilot, an automatic size, and what happens after sampling."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from coreset_cases import logistic
from torch import Tensor

from corefed.base.errors import UserError
from corefed.bayes import regression
from corefed.coreset import build, grow, pilot, sources
from corefed.coreset.again import tail_shape
from corefed.coreset.grow import OutOfReachError

D = 3


def prior(theta: Any) -> Tensor:
    return -0.5 * theta.square().sum()


def made(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g)
    return x, (torch.rand(n, generator=g) < torch.sigmoid(x.sum(-1))).float()


def exact(x: Tensor, y: Tensor, weight: Tensor | None = None) -> regression.Normal:
    unit = regression.Normal(torch.zeros(D).double(), torch.eye(D).double())
    w = torch.ones(len(y)) if weight is None else weight
    return regression.laplace(regression.logistic, x.double(), y.double(), w.double(), unit)


@pytest.mark.parametrize("part", [20_000, 500])
def test_the_pilot_is_the_laplace_approximation(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all points, and on a sixth of them with gradients of all."""
    monkeypatch.setattr(pilot, "PART", part)
    x, y = made(3000)
    source = sources.adapt((x, y), torch.float32)
    found = pilot.laplace(logistic, source, D, prior, 0)
    expected = exact(x, y)
    deviation = expected.covariance.diagonal().sqrt()
    off = (found.normal.mean - expected.mean).abs() / deviation
    assert float(off.max()) < 0.02
    # the curvature of m points has a relative error of about sqrt(2 / m)
    ratio = found.normal.covariance.diagonal().sqrt() / deviation
    assert float((ratio - 1).abs().max()) < 4 / math.sqrt(min(part, 3000))


def test_parameters_by_name() -> None:
    x, y = made(1000)

    def named(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return logistic(torch.cat([theta["a"].reshape(1), theta["b"]]), x, y)

    theta0 = {"a": np.zeros((), np.float32), "b": np.zeros(2, np.float32)}
    by_name = build(named, data=(x, y), size=20, posterior="laplace", theta0=theta0)
    flat = build(logistic, data=(x, y), size=20, posterior="laplace", theta0=D)
    assert by_name.indices.tolist() == flat.indices.tolist()


def nan_at_zero(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return logistic(theta, x, y) + torch.log(theta[0] - 1)


def no_mode(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x @ theta + 10 * theta.sum()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"log_likelihood": nan_at_zero}, "is nan at theta0"),
        ({"log_likelihood": no_mode}, "did not converge|not curved downwards"),
        ({"theta0": None}, "needs theta0"),
        ({"theta0": 0}, "theta0 is 0"),
        ({"theta0": 2000}, "at most 1000"),
        ({"theta0": torch.full((D,), torch.nan)}, "theta0 holds NaN"),
        ({"posterior": "vi"}, "posterior is 'vi'"),
        ({"posterior": None}, "theta0 and log_prior are for"),
        ({"draws": torch.randn(9, D)}, "not both"),
        ({"data": None}, "Give data"),
        ({"size": "auto", "target": 0}, "target is 0"),
        ({"size": "big"}, "size is 'big'"),
    ],
)
def test_bad_pilots(options: dict[str, Any], sentence: str) -> None:
    given = {
        "log_likelihood": logistic, "data": made(200), "size": 20, "posterior": "laplace",
        "theta0": D, **options,
    }  # fmt: skip
    with pytest.raises(UserError, match=sentence):
        build(given.pop("log_likelihood"), **given)


# --- an automatic size ----------------------------------------------------------------------------


def test_the_size_grows_until_the_target_is_reached() -> None:
    x, y = made(5000)
    found = build(logistic, data=(x, y), posterior="laplace", theta0=D, log_prior=prior)
    assert found.diagnostics.size == 50
    assert found.diagnostics.held_out_error <= 1e-3
    mine, full = exact(x[found.indices], y[found.indices], found.weights), exact(x, y)
    off = (mine.mean - full.mean).abs() / full.covariance.diagonal().sqrt()
    # an error of e moves a mean by at most sqrt(e P / 2) standard deviations
    assert float(off.max()) < math.sqrt(1e-3 * D / 2)


def test_many_parameters_begin_with_more_points_and_draws() -> None:
    """20 coefficients have 230 directions of a quadratic: 400 draws do, and 80 points begin."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 20, generator=draw)
    y = (torch.rand(4000, generator=draw) < torch.sigmoid(x.sum(1) / 4)).float()
    found = build(logistic, data=(x, y), posterior="laplace", theta0=20, log_prior=prior)
    assert found.diagnostics.held_out_error <= 1e-3
    assert found.diagnostics.draws == 400 and found.diagnostics.size in (80, 120, 180)
    assert grow._surveys(10) == [400, 1600, 6400]
    assert grow._surveys(32) == [840, 3360, 6400]
    assert grow._surveys(100) == [6400]
    assert grow._surveys(10_000) == [400, 1600, 6400]  # a network


def test_a_target_that_no_size_reaches() -> None:
    """The sentence says the best, and the best is not lost."""
    with pytest.raises(OutOfReachError, match=r"No coreset of up to .* the best, of") as caught:
        build(logistic, torch.randn(120, D) * 3, made(300), target=1e-12)
    assert caught.value.coreset.diagnostics.size > 40


# --- after sampling -------------------------------------------------------------------------------


def test_a_check_says_what_is_off() -> None:
    """A coreset made at the wrong place: its posterior's means are off, the check says by how much
    in nats; made anew there, it holds."""
    x, y = made(3000)
    full = exact(x, y)
    deviation = full.covariance.diagonal().sqrt().float()
    far = full.mean.float() + 25 * deviation
    wrong = build(logistic, (far, 0.3 * deviation), (x, y), 8, samples=40)

    def sampler(coreset: Any) -> Tensor:
        rows = coreset.indices
        near = exact(x[rows], y[rows], coreset.weights)
        return near.sample(400, torch.Generator().manual_seed(5)).float()

    first = wrong.check(sampler(wrong))
    assert not first.settled and first.outside > 0.9
    assert "outside the region" in str(first) and "rebuilt_at" in str(first)
    settled = build(logistic, (far, 0.3 * deviation), (x, y), 30, samples=200).sample_until_settled(
        sampler
    )
    assert settled.settled and len(settled.checks) <= 3
    assert "Settled after" in str(settled)
    off = (settled.draws.double().mean(0) - full.mean).abs() / deviation
    assert float(off.max()) < 0.1 + 4 / math.sqrt(400)


def test_a_check_knows_a_coreset_that_is_exact() -> None:
    x, y = made(500)
    everything = build(logistic, (torch.ones(D), torch.full((D,), 0.1)), (x, y), 500)
    draws = exact(x, y).sample(60, torch.Generator().manual_seed(0)).float()
    found = everything.check(draws)
    assert found.settled and found.spread < 1e-3 and found.ess > 0.999


def test_rounds_that_are_not_enough_are_said() -> None:
    x, y = made(500)
    coreset = build(logistic, (torch.ones(D), torch.full((D,), 0.01)), (x, y), 4, samples=20)
    wide = 5 * torch.randn(100, D, generator=torch.Generator().manual_seed(0))
    found = coreset.sample_until_settled(lambda _: wide, rounds=2, tolerance=1e-6)
    assert not found.settled and len(found.checks) == 2
    assert "Not settled after 2 rounds" in str(found)


def test_bad_checks(tmp_path: Any) -> None:
    x, y = made(300)
    coreset = build(logistic, (torch.ones(D), torch.full((D,), 0.1)), (x, y), 10)
    for draws, sentence in (
        (torch.ones(5, D), "at least 20"),
        ((torch.ones(D), 1.0), "not a distribution"),
        (torch.full((30, D), torch.nan), "NaN"),
    ):
        with pytest.raises(UserError, match=sentence):
            coreset.check(draws)
    with pytest.raises(UserError, match="rounds is 0"):
        coreset.sample_until_settled(lambda c: None, rounds=0)
    coreset.save(tmp_path / "kept")
    with pytest.raises(UserError, match="does not know its data"):
        type(coreset).load(tmp_path / "kept").check(torch.ones(30, D))


def test_the_tail_of_a_pareto() -> None:
    """Weights with a Pareto tail of shape k: the estimate, shrunk towards 0.5 by ten draws."""
    u = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in (0.2, 0.9):
        tail = 3 * 4000**0.5
        expected = (tail * shape + 5) / (tail + 10)
        assert tail_shape(-shape * u.log()) == pytest.approx(
            expected, abs=4 * (1 + shape) / tail**0.5
        )


def test_a_weight_that_dominates_is_named() -> None:
    x, y = made(300)
    coreset = build(logistic, (torch.ones(D), torch.full((D,), 0.1)), (x, y), 12)
    weights = torch.ones(len(coreset))
    weights[3] = 100.0
    d = dataclasses.replace(coreset.diagnostics, weight_sum=float(weights.sum()))
    text = str(dataclasses.replace(coreset, weights=weights, diagnostics=d))
    assert f"Point {int(coreset.indices[3])} alone has 90 % of the weight" in text
    assert "alone has" not in str(coreset)
