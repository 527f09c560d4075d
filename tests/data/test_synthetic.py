"""Synthetic data against what is known about them; closed forms against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from exact import exact_mean_field, exact_posterior
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.synthetic import linear_gaussian, smooth_regression


class Problem:
    """One client with uneven weights and a prior that matters."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        data = linear_gaussian(1, 40, 4, noise=0.5, seed=7)
        self.x, self.y, self.noise = data.x, data.y, data.noise
        self.weight = torch.rand(40, generator=draws) * 3
        self.weight[::4] = 0
        self.prior_mean = torch.randn(4, generator=draws)
        self.prior_std = torch.rand(4, generator=draws) + 0.1

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.x, self.y, self.weight, self.prior_mean, self.prior_std, self.noise

    def log_posterior(self, coefficients: Tensor) -> Tensor:
        """Unnormalised, written out datum by datum."""
        x, y, weight = self.x.double(), self.y.double()[:, 0], self.weight.double()
        total = torch.zeros((), dtype=torch.float64)
        for j in range(len(x)):
            residual = (y[j] - x[j] @ coefficients) / self.noise
            total = total - 0.5 * weight[j] * residual**2
        standard = (coefficients - self.prior_mean.double()) / self.prior_std.double()
        return total - 0.5 * (standard**2).sum()


def test_exact_posterior_is_the_mode_and_the_inverse_curvature() -> None:
    problem = Problem()
    mean, covariance = exact_posterior(*problem.arguments())
    assert mean.dtype == covariance.dtype == torch.float64
    gradient = torch.func.grad(problem.log_posterior)(mean)
    curvature = -torch.func.jacrev(torch.func.grad(problem.log_posterior))(mean)
    assert float(gradient.abs().max()) < 1e-10 * float(curvature.abs().max())
    torch.testing.assert_close(curvature @ covariance, torch.eye(4).double(), atol=1e-10, rtol=0)


def test_weights_are_repetitions_and_zero_is_absence() -> None:
    data = linear_gaussian(1, 6, 3, seed=0)
    weight = torch.tensor([0, 1, 2, 3, 0, 1])
    rows = torch.arange(6).repeat_interleave(weight)
    weighted = exact_posterior(data.x, data.y, weight, 0.0, 1.0, 0.5)
    listed = exact_posterior(data.x[rows], data.y[rows], torch.ones(len(rows)), 0.0, 1.0, 0.5)
    for first, second in zip(weighted, listed, strict=True):
        torch.testing.assert_close(first, second, atol=1e-12, rtol=0)


def test_no_data_is_the_prior() -> None:
    data = linear_gaussian(1, 6, 3, seed=0)
    mean, covariance = exact_posterior(data.x, data.y, torch.zeros(6), 2.0, 0.5, 0.5)
    torch.testing.assert_close(mean, torch.full((3,), 2.0).double())
    torch.testing.assert_close(covariance, 0.25 * torch.eye(3).double())


def test_exact_mean_field_minimises_the_kl() -> None:
    problem = Problem()
    posterior_mean, covariance = exact_posterior(*problem.arguments())
    mean, variance = exact_mean_field(*problem.arguments())
    target = torch.distributions.MultivariateNormal(posterior_mean, covariance)

    q_mean = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    log_std = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [q_mean, log_std], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def kl() -> Tensor:
        optimiser.zero_grad()
        q = torch.distributions.MultivariateNormal(q_mean, torch.diag((2 * log_std).exp()))
        divergence = torch.distributions.kl_divergence(q, target)
        divergence.backward()  # type: ignore[no-untyped-call]
        return divergence

    optimiser.step(kl)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mean, q_mean.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(variance, (2 * log_std.detach()).exp(), atol=0, rtol=1e-4)
    torch.testing.assert_close(mean, posterior_mean)
    assert (variance < covariance.diagonal()).all()


def test_posterior_covers_the_true_coefficients() -> None:
    """b_i has prior N(0, 1 + heterogeneity^2): its squared z-scores average to 1.

    The mean of N chi-squared values has std sqrt(2 / N); allow four of them. The coefficients of
    one seed share b, so use one client from each of many seeds.
    """
    scores = []
    for seed in range(200):
        data = linear_gaussian(1, 20, 3, noise=0.5, heterogeneity=0.3, seed=seed)
        std = math.sqrt(1 + 0.3**2)
        mean, covariance = exact_posterior(data.x, data.y, torch.ones(20), 0.0, std, 0.5)
        error = data.coefficients[0] - mean
        scores.append(error @ torch.linalg.solve(covariance, error) / 3)
    average = float(torch.stack(scores).mean())
    assert abs(average - 1) < 4 * math.sqrt(2 / 600)


def test_linear_gaussian_shapes_noise_and_heterogeneity() -> None:
    data = linear_gaussian(20, 500, 6, noise=0.2, heterogeneity=0.4, seed=0)
    assert data.x.shape == (10000, 6)
    assert data.y.shape == (10000, 1)
    assert data.x.dtype == data.y.dtype == torch.float32
    assert data.groups.bincount().tolist() == [500] * 20
    residual = data.y[:, 0] - (data.x.double() * data.coefficients[data.groups]).sum(-1)
    assert abs(float(residual.std()) / 0.2 - 1) < 4 / math.sqrt(2 * 10000)
    spread = float(data.coefficients.std(0).square().mean().sqrt())
    assert abs(spread / 0.4 - 1) < 4 / math.sqrt(2 * 19 * 6)
    assert abs(float(data.x.T.corrcoef()[0, 1]) - 0.5) < 4 * 0.75 / math.sqrt(10000)


def test_smooth_regression_lies_on_a_plane_and_knows_its_noise() -> None:
    data = smooth_regression(10, 400, ambient=12, intrinsic=3, noise=0.3, seed=2)
    assert data.x.shape == (4000, 12)
    singular = torch.linalg.svdvals(data.x)
    assert int((singular > 1e-3 * singular[0]).sum()) == 3
    assert abs(float(data.x.square().mean()) - 1) < 0.05
    residual = data.y - data.signal
    assert abs(float(residual.std()) / 0.3 - 1) < 4 / math.sqrt(2 * 4000)
    assert float(data.signal.std()) > 1.5 * data.noise


def test_smooth_regression_is_not_linear_and_differs_by_client() -> None:
    data = smooth_regression(2, 400, noise=0.01, seed=0)
    mine, other = data.groups == 0, data.groups == 1
    design = torch.cat([data.x, torch.ones(800, 1)], dim=1)

    def unexplained(rows: Tensor) -> float:
        fit = torch.linalg.lstsq(design[rows].double(), data.y[rows].double(), driver="gelsd")
        residual = data.y[rows].double() - design[rows].double() @ fit.solution
        return float(residual.var() / data.y[rows].var())

    assert unexplained(mine) > 0.05
    assert unexplained(other) > 0.05
    alike = smooth_regression(2, 400, noise=0.01, heterogeneity=0, seed=0)
    assert torch.equal(alike.x, data.x)
    assert not torch.allclose(alike.signal, data.signal, atol=0.1)


def test_data_depend_on_seed_and_client_only() -> None:
    for make in (linear_gaussian, smooth_regression):
        few, many = make(2, seed=5), make(4, seed=5)
        assert torch.equal(few.x, many.x[: len(few.x)])
        assert torch.equal(few.y, many.y[: len(few.y)])
        assert not torch.equal(few.x, make(2, seed=6).x)


def test_bad_arguments() -> None:
    for message, arguments in (
        ("clients must be at least 1", {"clients": 0}),
        ("dimension must be at least 1", {"dimension": 0}),
        ("heterogeneity must be 0 or more", {"heterogeneity": -1}),
        ("from 0 up", {"seed": -1}),
    ):
        with pytest.raises(UserError, match=message):
            linear_gaussian(**arguments)
    with pytest.raises(UserError, match="noise must be a positive"):
        linear_gaussian(noise=math.nan)
    with pytest.raises(UserError, match="correlation"):
        linear_gaussian(correlation=1.0)
    with pytest.raises(UserError, match="below the ambient 5"):
        smooth_regression(ambient=5, intrinsic=5)
