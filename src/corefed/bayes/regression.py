"""Regressions whose posterior is a full Gaussian, exactly or by Laplace, and their tangent space.

    theta ~ N(m0, S0),    log p(y_j | theta) = l(eta_j, y_j),    eta_j = x_j^T theta

with point j counted w_j times. Here coresets can be judged without training noise: the posterior of
all data, that of the coreset and the KL between them are closed forms. Everything is float64: the
precision of a few hundred overlapping radial bases has a condition number near 1e8.

    x [n, d] rows x_j    y [n]    weight [n]    theta [d]    thetas [S, d]    eta = x^T theta
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEWTON_STEPS = 200
"""Bound on damped Newton steps. The log-posteriors here are concave and take about ten."""

NEAR, NOTHING = 1e-6, 1e-20
"""Decrements of a Newton step (squared distances to the mode in posterior standard deviations).
Below the first, whole steps converge. The second counts as 0."""

ROUNDING, SHORTEST = 1e-11, 1e-12
"""Relative rounding error of the function's value, with room for sums that cancel, and the smallest
step size tried."""

RATE_SMALL = -30.0
"""Below it log(1 + e^eta) is computed as e^eta (1 - e^eta / 2), equal to float64's last digit."""


class Normal(NamedTuple):
    """A Gaussian with a full covariance."""

    mean: Tensor  # [d]
    covariance: Tensor  # [d, d]

    def sample(self, draws: int, generator: torch.Generator) -> Tensor:
        """[draws, d]."""
        noise = torch.randn(draws, len(self.mean), generator=generator, dtype=self.mean.dtype)
        factor: Tensor = torch.linalg.cholesky(self.covariance)
        return self.mean + noise @ factor.T


def kl(p: Normal, q: Normal) -> Tensor:
    """KL(p || q) = 1/2 [ tr(Sq^-1 Sp) - d - log det(Sq^-1 Sp) + |mp - mq|^2 in Sq^-1 ].

    With L = Lq^-1 Lp lower triangular the first three terms are a sum over the diagonal of
    l^2 - 1 - log l^2 and over the rest of l^2. No term is negative and nothing cancels, so the KL
    of two nearly equal Gaussians is accurate too.
    """
    factor = torch.linalg.cholesky(q.covariance)
    L = _solve(factor, torch.linalg.cholesky(p.covariance))
    excess = L.diagonal().square() - 1
    shape = L.tril(-1).square().sum() + (excess - excess.log1p()).sum()
    shift = _solve(factor, (p.mean - q.mean).unsqueeze(-1)).square().sum()
    return (shape + shift) / 2


# --- the exact Gaussian case ----------------------------------------------------------------------


def linear_posterior(x: Tensor, y: Tensor, weight: Tensor, prior: Normal, noise: float) -> Normal:
    """Of y_j ~ N(x_j^T theta, noise^2), point j counted w_j times.

    S^-1 = S0^-1 + X^T W X / noise^2,    S^-1 m = S0^-1 m0 + X^T W y / noise^2
    """
    x, y, weight = _support(x, y, weight)
    scaled = x * (weight / noise**2).unsqueeze(-1)
    prior_precision = _inverse(prior.covariance)
    precision = prior_precision + scaled.T @ x
    factor = torch.linalg.cholesky(precision)
    linear = prior_precision @ prior.mean + scaled.T @ y
    mean = torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    return Normal(mean, torch.cholesky_inverse(factor))


def tangent(x: Tensor, y: Tensor, posterior: Normal, noise: float) -> Tensor:
    """Potentials without Monte Carlo: g [n, r] whose products are the covariances of the points.

    Of f_j(theta) = -(y_j - x_j^T theta)^2 / (2 noise^2), theta ~ N(m, S), by Isserlis' theorem

        Cov(f_i, f_j) = (c_ij^2 / 2 + e_i e_j c_ij) / noise^4,    c = X S X^T,  e = y - X m.

    A solver can use any factor of that matrix. This one is made of its eigenvectors, without those
    that are rounding errors.
    """
    c = x @ posterior.covariance @ x.T
    e = y - x @ posterior.mean
    gram = (c.square() / 2 + torch.outer(e, e) * c) / noise**4
    value, vector = torch.linalg.eigh((gram + gram.T) / 2)
    kept = value > len(value) * torch.finfo(value.dtype).eps * value[-1]
    factor: Tensor = vector[:, kept] * value[kept].sqrt()
    return factor


# --- families of likelihoods ----------------------------------------------------------------------

Elementwise = Callable[[Tensor, Tensor], Tensor]  # (eta, y) -> the shape of both, broadcast


class Family(NamedTuple):
    """A likelihood of one number given eta = x^T theta, with its first two derivatives in eta."""

    name: str
    log_p: Elementwise
    slope: Elementwise  # d log p / d eta
    curvature: Elementwise  # -d^2 log p / d eta^2, never negative here

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """log p(y_j | theta) per point: theta [d], x [b, d], y [b] -> [b]; fit for vmap."""
        return self.log_p(x @ theta, y)


def gaussian(noise: float) -> Family:
    constant = -0.5 * math.log(2 * math.pi * noise**2)
    return Family(
        "gaussian",
        lambda eta, y: constant - (y - eta).square() / (2 * noise**2),
        lambda eta, y: (y - eta) / noise**2,
        lambda eta, y: torch.full_like(eta, noise**-2),
    )


logistic = Family(
    "logistic",
    lambda eta, y: y * eta - _softplus(eta),
    lambda eta, y: y - torch.sigmoid(eta),
    lambda eta, y: torch.sigmoid(eta) * torch.sigmoid(-eta),
)
"""y in {0, 1}, P(y = 1) = 1 / (1 + e^-eta)."""


def _poisson_curvature(eta: Tensor, y: Tensor) -> Tensor:
    """-(log s)'' y + s'', (log s)'' = t (1 - sigma - t), t = (log s)'; both parts are >= 0."""
    sigma, t = torch.sigmoid(eta), _log_rate_slope(eta)
    return sigma * torch.sigmoid(-eta) + y * (t * (t + sigma - 1)).clamp_min(0)


poisson = Family(
    "poisson",
    lambda eta, y: y * _log_rate(eta) - _softplus(eta) - torch.lgamma(y + 1),
    lambda eta, y: y * _log_rate_slope(eta) - torch.sigmoid(eta),
    _poisson_curvature,
)
"""y in {0, 1, ..}, with rate s = log(1 + e^eta), the link the coreset literature uses."""


def _softplus(eta: Tensor) -> Tensor:
    """log(1 + e^eta); torch's softplus is linear from 20 on, an error of 2e-9."""
    return torch.logaddexp(eta, torch.zeros_like(eta))


def _log_rate(eta: Tensor) -> Tensor:
    """log log(1 + e^eta), finite for every eta."""
    small = eta < RATE_SMALL
    return torch.where(
        small, eta - eta.clamp_max(0).exp() / 2, _softplus(eta.clamp_min(RATE_SMALL)).log()
    )


def _log_rate_slope(eta: Tensor) -> Tensor:
    """sigma(eta) / log(1 + e^eta)."""
    held = eta.clamp_min(RATE_SMALL)
    usual = torch.sigmoid(held) / _softplus(held)
    return torch.where(eta < RATE_SMALL, 1 - eta.clamp_max(0).exp() / 2, usual)


def log_likelihoods(family: Family, thetas: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[n, S]: every point under every draw, by one product."""
    return family.log_p(x @ thetas.T, y.unsqueeze(-1))


def potentials(family: Family, thetas: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """g_j = (log p_j - its mean over draws) / sqrt S: [n, S]."""
    f = log_likelihoods(family, thetas, x, y)
    return (f - f.mean(-1, keepdim=True)) / math.sqrt(f.shape[-1])


# --- Laplace --------------------------------------------------------------------------------------


def laplace(family: Family, x: Tensor, y: Tensor, weight: Tensor, prior: Normal) -> Normal:
    """The mode of the weighted log-posterior and its inverse curvature there.

    Newton's steps on a convex function. Far from the mode, a step is halved until it lowers the
    function by a quarter of the predicted decrease, so it cannot diverge. Near the mode that
    decrease is smaller than rounding errors. There whole steps are taken, each of which squares the
    error, until they no longer help.
    """
    x, y, weight = _support(x, y, weight)
    precision = _inverse(prior.covariance)

    def value(theta: Tensor) -> Tensor:
        off = theta - prior.mean
        return off @ precision @ off / 2 - weight @ family(theta, x, y)

    theta, before = prior.mean, math.inf
    for _ in range(NEWTON_STEPS):
        slope = weight * family.slope(x @ theta, y)
        gradient = precision @ (theta - prior.mean) - x.T @ slope
        factor = torch.linalg.cholesky(_curvature(family, x, y, weight, precision, theta))
        step = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
        promise, now, size = float(gradient @ step), float(value(theta)), 1.0
        near = promise <= NEAR + ROUNDING * abs(now)
        while not near and not float(value(theta - size * step)) <= now - size * promise / 4:
            size /= 2
            if size < SHORTEST:
                raise ArithmeticError("Newton's direction does not descend: check x, y and weight")
        theta = theta - size * step
        if near and (promise <= NOTHING or promise >= before / 2):
            curvature = _curvature(family, x, y, weight, precision, theta)
            return Normal(theta, _inverse(curvature))
        before = promise if near else math.inf
    raise ArithmeticError(f"no mode found in {NEWTON_STEPS} Newton steps")


def _curvature(
    family: Family, x: Tensor, y: Tensor, weight: Tensor, precision: Tensor, theta: Tensor
) -> Tensor:
    return precision + x.T @ (x * (weight * family.curvature(x @ theta, y)).unsqueeze(-1))


# --- small linear algebra -------------------------------------------------------------------------


def _support(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The points that count: a coreset's posterior costs what its k points cost."""
    rows = weight.nonzero().squeeze(-1)
    return x[rows], y[rows], weight[rows]


def _inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(lower, right, upper=False)
    return solution
