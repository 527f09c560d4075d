"""Posteriors of `synthetic.linear_gaussian` in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_posterior(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    prior_mean: Tensor | float,
    prior_std: Tensor | float,
    noise: float,
) -> tuple[Tensor, Tensor]:
    """Mean [d] and covariance [d, d] of b given sum_j w_j log N(y_j; x_j . b, noise^2), in float64.

    The prior is N(prior_mean, diag(prior_std^2)). A KL weight zeta tempers the likelihood: pass
    weight / zeta.
    """
    precision, shift = _natural_parameters(x, y, weight, prior_mean, prior_std, noise)
    factor = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(shift[:, None], factor)[:, 0]
    return mean, torch.cholesky_inverse(factor)


def exact_mean_field(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    prior_mean: Tensor | float,
    prior_std: Tensor | float,
    noise: float,
) -> tuple[Tensor, Tensor]:
    """Mean [d] and variance [d] of the mean-field Gaussian q that minimises KL(q || posterior).

    With posterior precision A, KL = 1/2 sum_k [A_kk s_k - log s_k] + 1/2 (m - mean)^T A (m - mean)
    + const: hence the posterior's mean and s = 1 / diag(A), below the true marginal variances.
    """
    precision, shift = _natural_parameters(x, y, weight, prior_mean, prior_std, noise)
    return torch.linalg.solve(precision, shift), 1 / precision.diagonal()


def _natural_parameters(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    prior_mean: Tensor | float,
    prior_std: Tensor | float,
    noise: float,
) -> tuple[Tensor, Tensor]:
    """A = P + X^T W X / noise^2 and A mean = P prior_mean + X^T W y / noise^2, P = prior_std^-2."""
    x = x.double()
    dimension = x.shape[-1]
    mean = torch.as_tensor(prior_mean, dtype=torch.float64).expand(dimension)
    prior_precision = torch.as_tensor(prior_std, dtype=torch.float64).expand(dimension) ** -2
    weighted = x * (weight.double() / noise**2)[:, None]
    precision = prior_precision.diag() + x.T @ weighted
    return precision, prior_precision * mean + weighted.T @ y.double().reshape(-1)
