"""IVON against the paper's own algorithm, and against posteriors in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from exact import exact_mean_field
from torch import Tensor

from corefed.base.types import Batch
from corefed.bayes import elbo, gaussian, ivon
from corefed.data.synthetic import linear_gaussian
from corefed.models.likelihood import Gaussian
from corefed.models.network import mlp

POINTS, FEATURES, ZETA = 8, 3, 0.7
SIZE = FEATURES + 1
MODEL = mlp((FEATURES, 1), Gaussian(1, 1.0))
PRIOR_MEAN = torch.tensor([0.5, -0.3, 0.2, 0.4], dtype=torch.float64)
PRIOR_STD = torch.tensor([0.5, 0.8, 0.3, 0.4], dtype=torch.float64)


def points() -> tuple[Tensor, Tensor]:
    data = linear_gaussian(1, POINTS, FEATURES, 1.0, seed=3, correlation=0.5)
    return data.x.double(), data.y.double() + 0.7


def optimum() -> tuple[Tensor, Tensor]:
    """Mean and variance of the best mean-field posterior; zeta tempers the likelihood."""
    x, y = points()
    design = torch.cat([x, torch.ones(POINTS, 1)], 1)
    weight = torch.full((POINTS,), 1 / ZETA, dtype=torch.float64)
    return exact_mean_field(design, y, weight, PRIOR_MEAN, PRIOR_STD, 1.0)


def start(clients: int) -> tuple[Tensor, Tensor, Batch, Tensor]:
    """(mu, rho) at the prior, all points as a batch, and k = zeta / n."""
    x, y = points()
    rho = gaussian.rho_of(PRIOR_STD)
    batch = Batch(
        x.expand(clients, -1, -1), y.expand(clients, -1, -1),
        torch.full((clients, POINTS), 1 / POINTS, dtype=torch.float64),
    )  # fmt: skip
    k = torch.full((clients, 1), ZETA / POINTS, dtype=torch.float64)
    return PRIOR_MEAN.repeat(clients, 1), rho.repeat(clients, 1), batch, k


def test_it_is_the_algorithm_of_the_paper() -> None:
    """Algorithm 1 of Shen et al. in its own letters, on gradients from anywhere."""
    g = torch.Generator().manual_seed(0)
    k, std, alpha = 0.01, 0.3, 0.1
    lam, delta = 1 / k, k / std**2
    m = torch.randn(1, 5, generator=g, dtype=torch.float64)
    sigma = torch.rand(1, 5, generator=g, dtype=torch.float64) / 10 + 0.05
    h = 1 / (lam * sigma.square()) - delta
    mu, rho = m.clone(), gaussian.rho_of(sigma)
    state, momentum = ivon.init(mu), torch.zeros_like(m)
    for t in range(1, 8):
        noise = torch.randn(1, 5, generator=g, dtype=torch.float64)
        slope = torch.randn(1, 5, generator=g, dtype=torch.float64)
        prior = (
            0.0,
            torch.tensor(std**-2, dtype=torch.float64),
            torch.tensor([[k]], dtype=torch.float64),
        )
        ivon.update(mu, rho, (slope, slope * noise), prior, alpha, state)

        sigma = (lam * (h + delta)).rsqrt()
        h_hat = slope * (sigma * noise) / sigma.square()
        momentum = ivon.BETA_1 * momentum + (1 - ivon.BETA_1) * slope
        r = 1 - ivon.BETA_2
        h = ivon.BETA_2 * h + r * h_hat + 0.5 * r**2 * (h - h_hat).square() / (h + delta)
        m = m - alpha * (momentum / (1 - ivon.BETA_1**t) + delta * m) / (h + delta)
        torch.testing.assert_close(mu, m, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            gaussian.sigma(rho), (lam * (h + delta)).rsqrt(), rtol=1e-9, atol=0
        )


def test_it_ends_at_the_mean_field_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quadrature in the place of draws; both errors shrink by a tenth in each step."""
    monkeypatch.setattr(ivon, "BETA_2", 0.9)
    mu, rho, batch, k = start(1)
    half = math.sqrt(SIZE) * torch.eye(SIZE, dtype=torch.float64)
    noise, state = torch.cat([half, -half]).unsqueeze(0), ivon.init(mu)
    prior = (PRIOR_MEAN, PRIOR_STD.pow(-2), k)
    for _ in range(400):
        _, *slope = elbo.gradient(MODEL, mu, gaussian.sigma(rho), batch, noise)
        ivon.update(mu, rho, (slope[0], slope[1]), prior, 0.1, state)
    mean, variance = optimum()
    torch.testing.assert_close(mu[0], mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(gaussian.sigma(rho[0]).square(), variance, rtol=1e-9, atol=0)


def test_it_settles_there_with_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over clients within 4.5 standard errors, 8 of them: probability 1e-4.

    The quadratic term is never negative. Where S settles it adds r Var(G) / 2 to the drift's
    equation, r (S* - E S) + r^2 Var(G) / (2 S*) = 0; S itself has variance r Var(G) / 2, so that
    E[G^2] is larger by that. G's variance is measured at the optimum, from 4000 gradients.
    """
    clients, draws, r = 40, 16, 0.01
    monkeypatch.setattr(ivon, "BETA_2", 1 - r)
    mean, variance = optimum()
    S = 1 / variance
    g = torch.Generator().manual_seed(1)

    many = 4000
    _, _, batch, k = start(many)
    noise = torch.randn(many, draws, SIZE, generator=g, dtype=torch.float64)
    _, _, by_sigma = elbo.gradient(
        MODEL, mean.expand(many, -1), variance.sqrt().expand(many, -1), batch, noise
    )
    G = by_sigma / (variance.sqrt() * k)
    torch.testing.assert_close(G.mean(0) + PRIOR_STD.pow(-2), S, rtol=0, atol=0.1 * float(S.max()))
    spread = G.var(0)

    mu, rho, batch, k = start(clients)
    rho += (gaussian.rho_of(variance.sqrt()) - rho) * 0.9  # near, so that 5 / r steps forget it
    state = ivon.init(mu)
    for _ in range(500):
        noise = torch.randn(clients, draws, SIZE, generator=g, dtype=torch.float64)
        _, *slope = elbo.gradient(MODEL, mu, gaussian.sigma(rho), batch, noise)
        ivon.update(mu, rho, (slope[0], slope[1]), (PRIOR_MEAN, PRIOR_STD.pow(-2), k), 0.05, state)
    found = gaussian.sigma(rho).pow(-2)
    error = found.std(0) / math.sqrt(clients)
    bias = r * spread / (2 * S)
    forgotten = math.exp(-5) * 0.1 * (S - PRIOR_STD.pow(-2)).abs()
    assert (bias < 0.3 * S).all()
    assert ((found.mean(0) - S - bias).abs() < 4.5 * error + forgotten + bias.square() / S).all()
    error = mu.std(0) / math.sqrt(clients)
    assert (error < 0.05).all()
    assert ((mu.mean(0) - mean).abs() < 4.5 * error).all()


def test_precisions_stay_positive_and_points_stay_points() -> None:
    """A curvature that is as negative as it may be; a masked weight keeps its width."""
    mu, rho = torch.zeros(1, 3), torch.full((1, 3), -3.0)
    slope = (torch.ones(1, 3), torch.tensor([[-1e4, 1e4, 1.0]]))
    mask = torch.tensor([True, True, False])
    prior = (0.0, torch.tensor(1.0), torch.tensor([[1e-3]]))
    ivon.update(mu, rho, slope, prior, 0.1, ivon.init(mu), mask)
    assert rho.isfinite().all()
    assert (gaussian.sigma(rho) > 0).all()
    assert rho[0, 2] == -3.0
    assert (mu < 0).all()
