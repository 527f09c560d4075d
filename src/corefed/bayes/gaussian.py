"""Mean-field Gaussians (Eq. 6) as two flat vectors, mu and rho, with sigma = softplus(rho).

A posterior is one tensor v of shape [..., 2, P]: v[..., 0, :] is mu, v[..., 1, :] is rho. Keeping
both in one tensor lets an optimiser update them in one pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SIGMA_FLOOR = 1e-6
"""Smallest sigma: with it the KL stays finite in float32, where sigma^2 is a denominator."""

POINT = -30.0
"""rho of a weight that is a point estimate, as predictions see it: its sigma is the floor."""


def sigma(rho: Tensor) -> Tensor:
    """Standard deviation softplus(rho), floored."""
    return F.softplus(rho).clamp_min_(SIGMA_FLOOR)


def rho_of(std: Tensor) -> Tensor:
    """The inverse of `sigma`: rho with softplus(rho) = std."""
    return std + torch.log(-torch.expm1(-std))


def sample(v: Tensor, noise: Tensor) -> Tensor:
    """theta = mu + sigma * g for standard normals g [..., K, P]; gives [..., K, P]."""
    mu, rho = v[..., 0, :].unsqueeze(-2), v[..., 1, :].unsqueeze(-2)
    return torch.addcmul(mu, sigma(rho), noise)


def kl(q: Tensor, z: Tensor) -> Tensor:
    """KL(q || z), Eq. 7's closed form for diagonal Gaussians, summed over parameters."""
    sigma_q, sigma_z = sigma(q[..., 1, :]), sigma(z[..., 1, :])
    ratio = (sigma_q / sigma_z).square()
    shift = ((q[..., 0, :] - z[..., 0, :]) / sigma_z).square()
    return 0.5 * (ratio + shift - 1 - ratio.log()).sum(-1)


def kl_grads(q: Tensor, z: Tensor, sigma_q: Tensor, sigma_z: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of KL(q || z) with respect to (mu_q, sigma_q), both [..., P]."""
    inverse = sigma_z.square().reciprocal_()
    mean = (q[..., 0, :] - z[..., 0, :]).mul_(inverse)
    std = inverse.mul_(sigma_q).sub_(sigma_q.reciprocal())
    return mean, std


def kl_grads_reference(
    q: Tensor, z: Tensor, sigma_q: Tensor, sigma_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of KL(q || z) with respect to (mu_z, sigma_z), both [..., P]."""
    precision = sigma_z.reciprocal()
    shift = (q[..., 0, :] - z[..., 0, :]).mul_(precision)
    mean = -(shift * precision)
    spread = (sigma_q * precision).square_().add_(shift.square_())
    return mean, spread.neg_().add_(1.0).mul_(precision)


def to_rho(grad_sigma: Tensor, rho: Tensor, out: Tensor | None = None) -> Tensor:
    """Chain rule d sigma / d rho = sigmoid(rho), into `out` where there is one."""
    return torch.mul(grad_sigma, torch.sigmoid(rho), out=out)


def widen(v: Tensor, factor: float) -> Tensor:
    """The same mean with sigma multiplied by `factor`: the weighting distribution pi-hat."""
    if factor == 1.0:
        return v
    return torch.stack([v[..., 0, :], rho_of(sigma(v[..., 1, :]) * factor)], dim=-2)


def narrowed(v: Tensor, mask: Tensor | None) -> Tensor:
    """The posterior in which weights outside of `mask` [P] are points; None: all stay."""
    if mask is None:
        return v
    rho = v[..., 1, :].masked_fill(~mask.to(v.device), POINT)
    return torch.stack([v[..., 0, :], rho], dim=-2)
