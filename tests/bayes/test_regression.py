"""Full-Gaussian regression: closed forms against autograd, brute force, Monte Carlo and scipy."""

from __future__ import annotations

import math

import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Poisson, kl_divergence

from corefed.bayes.regression import (
    Family,
    Normal,
    gaussian,
    kl,
    laplace,
    linear_posterior,
    log_likelihoods,
    logistic,
    poisson,
    potentials,
    tangent,
)

NOISE = 0.4
FAMILIES = [gaussian(NOISE), logistic, poisson]


def normal(seed: int, d: int) -> Normal:
    draws = torch.Generator().manual_seed(seed)
    factor = torch.randn(d, d, generator=draws, dtype=torch.float64)
    mean = torch.randn(d, generator=draws, dtype=torch.float64)
    return Normal(mean, factor @ factor.T / d + 0.1 * torch.eye(d, dtype=torch.float64))


class Points:
    """A design, a target each family could have made, uneven weights and a prior that matters."""

    def __init__(self, family: Family, n: int = 60, d: int = 4, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, d, generator=draws, dtype=torch.float64)
        eta = self.x @ torch.randn(d, generator=draws, dtype=torch.float64)
        noise = torch.randn(n, generator=draws, dtype=torch.float64)
        self.y = {
            "gaussian": eta + NOISE * noise,
            "logistic": (eta + noise > 0).double(),
            "poisson": (torch.nn.functional.softplus(eta) + noise.square()).floor(),
        }[family.name]
        self.weight = 3 * torch.rand(n, generator=draws, dtype=torch.float64)
        self.weight[::3] = 0
        self.prior = normal(seed + 1, d)

    def log_posterior(self, family: Family, theta: Tensor) -> Tensor:
        off = theta - self.prior.mean
        log_prior = -off @ torch.linalg.solve(self.prior.covariance, off) / 2
        return log_prior + (self.weight * family(theta, self.x, self.y)).sum()


def test_kl_is_torchs_and_zero_of_itself() -> None:
    p, q = normal(0, 6), normal(1, 6)
    expected = kl_divergence(MultivariateNormal(*p), MultivariateNormal(*q))
    torch.testing.assert_close(kl(p, q), expected, rtol=1e-12, atol=0)
    assert float(kl(p, p)) < 1e-28


def test_kl_of_nearly_equal_gaussians_does_not_cancel() -> None:
    """With covariances S and (1 + h) S the KL is d (log(1 + h) - h / (1 + h)) / 2, about d h^2 / 4.

    The textbook sum loses it at h = 1e-7 among terms of size d; cholesky's own rounding, 1e-16
    against h, leaves a relative error near 1e-8.
    """
    d, h = 300, 1e-7
    q = Normal(torch.zeros(d).double(), torch.eye(d).double())
    p = Normal(q.mean, q.covariance / (1 + h))
    assert float(kl(p, q)) == pytest.approx(d * h**2 / 4, rel=1e-5)


def test_samples_have_the_mean_and_the_covariance() -> None:
    """Means of N draws have std sqrt(S_ii / N), covariances sqrt((S_ii S_jj + S_ij^2) / N)."""
    p, draws = normal(3, 4), 40000
    theta = p.sample(draws, torch.Generator().manual_seed(0))
    variance = p.covariance.diagonal()
    assert ((theta.mean(0) - p.mean).abs() < 4 * (variance / draws).sqrt()).all()
    spread = ((torch.outer(variance, variance) + p.covariance.square()) / draws).sqrt()
    assert ((theta.T.cov() - p.covariance).abs() < 4 * spread).all()


def test_linear_posterior_is_the_mode_and_the_inverse_curvature() -> None:
    family = gaussian(NOISE)
    points = Points(family)
    mean, covariance = linear_posterior(points.x, points.y, points.weight, points.prior, NOISE)
    gradient = torch.func.grad(lambda t: points.log_posterior(family, t))(mean)
    curvature = -torch.func.hessian(lambda t: points.log_posterior(family, t))(mean)
    assert float(gradient.abs().max()) < 1e-10 * float(curvature.abs().max())
    torch.testing.assert_close(curvature @ covariance, torch.eye(4).double(), atol=1e-11, rtol=0)


def test_weight_zero_is_absence_and_two_is_twice() -> None:
    points = Points(gaussian(NOISE))
    weight = torch.arange(60) % 3
    rows = torch.arange(60).repeat_interleave(weight)
    weighted = linear_posterior(points.x, points.y, weight.double(), points.prior, NOISE)
    ones = torch.ones(len(rows), dtype=torch.float64)
    listed = linear_posterior(points.x[rows], points.y[rows], ones, points.prior, NOISE)
    assert float(kl(weighted, listed)) < 1e-20
    nothing = linear_posterior(points.x, points.y, torch.zeros(60).double(), points.prior, NOISE)
    assert float(kl(nothing, points.prior)) < 1e-20


def test_tangent_is_the_limit_of_the_potentials() -> None:
    """Products of Monte-Carlo potentials estimate covariances: S draws of (f_i - ..)(f_j - ..).

    Their spread is measured on the draws themselves, std / sqrt(S), entry by entry; five of them
    for 210 entries.
    """
    family = gaussian(NOISE)
    points = Points(family, n=20)
    posterior = linear_posterior(points.x, points.y, points.weight, points.prior, NOISE)
    g = tangent(points.x, points.y, posterior, NOISE)
    exact = g @ g.T
    draws = 100000
    thetas = posterior.sample(draws, torch.Generator().manual_seed(0))
    f = log_likelihoods(family, thetas, points.x, points.y)
    f = f - f.mean(-1, keepdim=True)
    estimate = f @ f.T / draws
    spread = ((f.square() @ f.square().T / draws - estimate.square()) / draws).sqrt()
    assert ((estimate - exact).abs() < 5 * spread).all()
    assert float((spread / exact.diagonal().mean()).mean()) < 0.02  # it says something


def test_tangent_of_one_coefficient_by_hand() -> None:
    """One point, theta ~ N(m, v): Var f = c (c / 2 + e^2) / noise^4 with c = b^2 v, e = y - b m."""
    b, y, m, v = 1.7, 0.9, 0.2, 0.6
    posterior = Normal(torch.tensor([m]).double(), torch.tensor([[v]]).double())
    g = tangent(torch.tensor([[b]]).double(), torch.tensor([y]).double(), posterior, NOISE)
    c, e = b * b * v, y - b * m
    assert float(g.square().sum()) == pytest.approx((c * c / 2 + e * e * c) / NOISE**4)


def test_tangent_has_the_rank_of_its_space() -> None:
    """Quadratics of d = 3 coefficients, without constants: 3 + 6 dimensions, whatever n is."""
    points = Points(gaussian(NOISE), n=50, d=3)
    posterior = linear_posterior(points.x, points.y, points.weight, points.prior, NOISE)
    assert tangent(points.x, points.y, posterior, NOISE).shape == (50, 9)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_one_product_is_the_vmapped_likelihood(family: Family) -> None:
    points = Points(family)
    thetas = points.prior.sample(7, torch.Generator().manual_seed(0))
    each = torch.func.vmap(lambda t: family(t, points.x, points.y))(thetas)
    together = log_likelihoods(family, thetas, points.x, points.y)
    torch.testing.assert_close(together, each.T, rtol=1e-13, atol=1e-13)
    g = potentials(family, thetas, points.x, points.y)
    torch.testing.assert_close(g @ g.T, together.cov(correction=0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_derivatives_are_autograds_and_curvature_is_never_negative(family: Family) -> None:
    eta = torch.linspace(-60, 60, 241, dtype=torch.float64)
    y = (torch.arange(241) % (2 if family.name == "logistic" else 5)).double()
    slope = torch.func.grad(lambda e: family.log_p(e, y).sum())(eta)
    torch.testing.assert_close(family.slope(eta, y), slope, rtol=1e-10, atol=1e-12)
    curvature = -torch.func.grad(lambda e: family.slope(e, y).sum())(eta)
    torch.testing.assert_close(family.curvature(eta, y), curvature, rtol=1e-7, atol=1e-12)
    assert (family.curvature(eta, y) >= 0).all()


def test_likelihoods_are_normalised_and_named_right() -> None:
    eta = torch.tensor([-2.0, 0.0, 3.0]).double()
    counts = torch.arange(100).double()
    rate = torch.nn.functional.softplus(eta)
    ours = poisson.log_p(eta.unsqueeze(-1), counts)
    torch.testing.assert_close(ours, Poisson(rate.unsqueeze(-1)).log_prob(counts))
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(3).double())
    both = logistic.log_p(eta.unsqueeze(-1), torch.tensor([0.0, 1.0]).double()).exp()
    torch.testing.assert_close(both[:, 1], torch.sigmoid(eta))
    torch.testing.assert_close(both.sum(-1), torch.ones(3).double())
    at_mean = gaussian(NOISE).log_p(eta, eta)
    torch.testing.assert_close(at_mean.exp(), torch.full_like(eta, (2 * math.pi) ** -0.5 / NOISE))


def test_log_rates_stay_finite_far_out() -> None:
    eta = torch.tensor([-1e4, -800.0, -30.0001, -29.9999, 800.0], dtype=torch.float64)
    y = torch.full_like(eta, 3.0)
    for part in (poisson.log_p, poisson.slope, poisson.curvature):
        assert torch.isfinite(part(eta, y)).all()
    across = poisson.log_p(eta, y)
    assert float(across[3] - across[2]) == pytest.approx(3 * 0.0002, rel=1e-8)


def test_laplace_of_the_gaussian_family_is_exact() -> None:
    points = Points(gaussian(NOISE))
    arguments = (points.x, points.y, points.weight, points.prior)
    approximate = laplace(gaussian(NOISE), *arguments)
    exact = linear_posterior(*arguments, NOISE)
    assert float(kl(approximate, exact)) < 1e-20


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_laplace_is_at_the_mode(family: Family) -> None:
    """The slope, in posterior standard deviations, is as good as zero; the curvature is torch's."""
    points = Points(family)
    mode = laplace(family, points.x, points.y, points.weight, points.prior)
    gradient = torch.func.grad(lambda t: points.log_posterior(family, t))(mode.mean)
    assert float((gradient @ mode.covariance @ gradient).sqrt()) < 1e-8
    curvature = -torch.func.hessian(lambda t: points.log_posterior(family, t))(mode.mean)
    torch.testing.assert_close(
        curvature @ mode.covariance, torch.eye(4).double(), atol=1e-8, rtol=0
    )


@pytest.mark.parametrize("family", [logistic, poisson], ids=lambda f: f.name)
def test_laplace_finds_the_mode_that_scipy_finds(family: Family) -> None:
    points = Points(family, seed=3)
    mode = laplace(family, points.x, points.y, points.weight, points.prior)

    def negative(theta: Tensor) -> Tensor:
        return -points.log_posterior(family, theta)

    found = scipy.optimize.minimize(
        lambda t: float(negative(torch.from_numpy(t))),
        points.prior.mean.numpy(),
        jac=lambda t: torch.func.grad(negative)(torch.from_numpy(t)).numpy(),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    spread = mode.covariance.diagonal().sqrt()
    assert ((torch.from_numpy(found.x) - mode.mean).abs() < 1e-6 * spread).all()


@pytest.mark.parametrize("scale", [1e-3, 1e2])
def test_laplace_does_not_diverge_from_a_bad_start(scale: float) -> None:
    """Separable labels, a vast prior, features of any size: whole Newton steps overshoot here."""
    x = scale * torch.tensor([[1.0, -3], [1, -1], [1, 2], [1, 40]]).double()
    y = torch.tensor([0.0, 0, 1, 1]).double()
    far = torch.tensor([30.0, -30.0]).double()
    prior = Normal(far, 1e6 * torch.eye(2).double())
    mode = laplace(logistic, x, y, torch.full((4,), 1e3).double(), prior)
    off = (mode.mean - prior.mean) / 1e6
    slope = x.T @ (1e3 * logistic.slope(x @ mode.mean, y)) - off
    assert float((slope @ mode.covariance @ slope).sqrt()) < 1e-6


def test_laplace_ends_where_values_are_rounding() -> None:
    """Few points, features near 100, weights up to 400: log-likelihoods that cancel leave a noise
    of 1e-10 in the function's value, more than a late Newton step promises."""
    for seed in range(50):
        draws = torch.Generator().manual_seed(seed)
        x = 100 * torch.rand(6, 16, generator=draws, dtype=torch.float64)
        y = (340 * torch.rand(6, generator=draws, dtype=torch.float64)).round()
        weight = 400 * torch.rand(6, generator=draws, dtype=torch.float64).square()
        prior = Normal(torch.zeros(16).double(), torch.eye(16).double())
        mode = laplace(poisson, x, y, weight, prior)
        gradient = mode.mean - x.T @ (weight * poisson.slope(x @ mode.mean, y))
        assert float((gradient @ mode.covariance @ gradient).sqrt()) < 1e-8
