"""Mean-field Gaussians against torch.distributions, autograd and Monte-Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from corefed.bayes import gaussian

MU = st.floats(-5, 5, width=32)
RHO = st.floats(-8, 4, width=32)  # sigma from 3e-4 to 4
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=4)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(q, z), both [..., 2, P] in float64."""
    shape = draw(SHAPES)

    def one() -> Tensor:
        mu = torch.from_numpy(draw(arrays.arrays("float64", shape, elements=MU)))
        rho = torch.from_numpy(draw(arrays.arrays("float64", shape, elements=RHO)))
        return torch.stack([mu, rho], -2)

    return one(), one()


def posterior(*shape: int, seed: int = 0) -> Tensor:
    """mu ~ N(0, 1) and sigma of about 0.05 to 1: [*shape, 2, P] for shape (..., P), in float64."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(*shape, generator=g, dtype=torch.float64)
    rho = 3 * torch.rand(*shape, generator=g, dtype=torch.float64) - 2.5
    return torch.stack([mu, rho], -2)


def as_normal(v: Tensor) -> Independent:
    return Independent(Normal(v[..., 0, :], gaussian.sigma(v[..., 1, :])), 1)


# KL


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_kl_is_that_of_torch_distributions(pair: tuple[Tensor, Tensor]) -> None:
    """Both cancel terms of order ratio^2 or |log ratio|, hence an absolute part in the tolerance.

    The largest term is (4 / 3e-4)^2 = 2e8, and float64 carries 16 digits: 1e-9 of the value, and
    1e-12 of what cancels when q is close to z.
    """
    q, z = pair
    expected = kl_divergence(as_normal(q), as_normal(z))
    torch.testing.assert_close(gaussian.kl(q, z), expected, rtol=1e-9, atol=1e-12)
    assert (gaussian.kl(q, z) >= -1e-12).all()
    assert (gaussian.kl(q, q) == 0).all()


def test_kl_is_the_mean_log_ratio() -> None:
    """KL(q || z) = E_q[log q - log z]: the mean of M draws has std sd / sqrt M; 4.5 of them."""
    draws = 20_000
    q, z = posterior(3, 5, seed=1), posterior(3, 5, seed=2)
    noise = torch.randn(3, draws, 5, generator=torch.Generator().manual_seed(3)).double()
    theta = gaussian.sample(q, noise).movedim(1, 0)
    log_ratio = as_normal(q).log_prob(theta) - as_normal(z).log_prob(theta)  # [M, 3]
    error = log_ratio.mean(0) - gaussian.kl(q, z)
    assert (error.abs() < 4.5 * log_ratio.std(0) / math.sqrt(draws)).all()


def test_kl_is_finite_at_the_floor() -> None:
    """In float32, at any rho: the sigma of a hopeless weight is floored, not zero."""
    narrow = torch.tensor([[0.3], [-200.0]])
    wide = torch.tensor([[0.0], [50.0]])
    assert gaussian.sigma(narrow[1]) == gaussian.SIGMA_FLOOR
    for q, z in ((narrow, wide), (wide, narrow), (narrow, narrow)):
        assert gaussian.kl(q, z).isfinite()
        both = gaussian.sigma(q[1]), gaussian.sigma(z[1])
        for gradient in (
            *gaussian.kl_grads(q, z, *both),
            *gaussian.kl_grads_reference(q, z, *both),
        ):
            assert gradient.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(pair=pairs())
def test_kl_gradients_are_those_of_autograd(pair: tuple[Tensor, Tensor]) -> None:
    """With respect to (mu, sigma) of q and of z, and by the chain rule to rho."""
    q, z = (v.clone().requires_grad_() for v in pair)
    by_q, by_z = torch.autograd.grad(gaussian.kl(q, z).sum(), (q, z))
    q, z = pair
    before = [v.clone() for v in pair]
    sigma_q, sigma_z = gaussian.sigma(q[..., 1, :]), gaussian.sigma(z[..., 1, :])
    found = (
        (by_q, q, gaussian.kl_grads(q, z, sigma_q, sigma_z)),
        (by_z, z, gaussian.kl_grads_reference(q, z, sigma_q, sigma_z)),
    )
    for expected, v, (mean, std) in found:
        rho = gaussian.to_rho(std.clone(), v[..., 1, :])
        # d KL / d sigma = sigma_q / sigma_z^2 - 1 / sigma_q cancels when q is close to z.
        torch.testing.assert_close(mean, expected[..., 0, :], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(rho, expected[..., 1, :], rtol=1e-9, atol=1e-11)
    for v, was in zip(pair, before, strict=True):
        assert torch.equal(v, was)
    assert torch.equal(sigma_q, gaussian.sigma(q[..., 1, :]))
    assert torch.equal(sigma_z, gaussian.sigma(z[..., 1, :]))


# sigma and rho


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rho_of_inverts_softplus_over_many_decades(dtype: torch.dtype) -> None:
    """From the floor to 1e6; naive log(exp(std) - 1) fails at both ends.

    Below 1, rho ~ log(std), so a rounding of rho is a relative error |rho| eps of sigma: at most
    14 eps. Above 20, F.softplus returns rho itself, which is off by exp(-20) / 20 = 1e-10.
    """
    std = torch.logspace(math.log10(2 * gaussian.SIGMA_FLOOR), 6, 500, dtype=dtype)
    back = gaussian.sigma(gaussian.rho_of(std))
    torch.testing.assert_close(back, std, rtol=32 * torch.finfo(dtype).eps + 1.1e-10, atol=0)


def test_sigma_is_the_softplus_above_the_floor() -> None:
    rho = torch.linspace(-13, 15, 200, dtype=torch.float64)
    torch.testing.assert_close(gaussian.sigma(rho), torch.log1p(rho.exp()), rtol=1e-12, atol=0)
    assert float(gaussian.sigma(torch.tensor(-100.0))) == pytest.approx(gaussian.SIGMA_FLOOR)


def test_widen_multiplies_sigma_alone() -> None:
    v = posterior(3, 6)
    for factor in (0.25, 1.0, 4.0, 100.0):
        wide = gaussian.widen(v, factor)
        assert torch.equal(wide[:, 0], v[:, 0])
        expected = factor * gaussian.sigma(v[:, 1])
        torch.testing.assert_close(gaussian.sigma(wide[:, 1]), expected, rtol=1e-9, atol=0)


# Samples


def test_samples_are_mu_plus_sigma_g() -> None:
    v = posterior(2, 3, 5)  # any leading axes
    noise = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(5)).double()
    theta = gaussian.sample(v, noise)
    assert theta.shape == (2, 3, 4, 5)
    expected = v[1, 2, 0] + gaussian.sigma(v[1, 2, 1]) * noise[1, 2, 3]
    torch.testing.assert_close(theta[1, 2, 3], expected)


def test_sample_moments() -> None:
    """M draws of N(mu, sigma^2): std of the mean sigma / sqrt M, of the variance sigma^2 sqrt(2/M).

    15 means, 15 variances and 30 covariances within 4.5 standard deviations: probability 4e-4.
    """
    draws = 20_000
    v = posterior(3, 5)
    mu, sigma = v[:, 0], gaussian.sigma(v[:, 1])
    noise = torch.randn(3, draws, 5, generator=torch.Generator().manual_seed(4)).double()
    theta = gaussian.sample(v, noise)
    assert ((theta.mean(1) - mu).abs() < 4.5 * sigma / math.sqrt(draws)).all()
    standard = (theta - mu.unsqueeze(1)) / sigma.unsqueeze(1)
    covariance = standard.mT @ standard / draws
    allowed = 4.5 * (1 + torch.eye(5)).sqrt() / math.sqrt(draws)
    assert ((covariance - torch.eye(5)).abs() < allowed).all()
