"""Hamiltonian Monte Carlo for a small regression, to say how good its Laplace posterior is.

Positions are z with theta = m + L z, where N(m, L L^T) is the Laplace posterior. Where that is
right the target is a standard normal, so one step size serves every problem. All chains move
together, one row per chain. Step sizes are jittered, so that a trajectory does not return to its
start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.bayes.regression import Family, Normal

STEP = 0.35
LEAPS = 6
"""Of a standard normal in 16 dimensions 0.96 are accepted, and a trajectory is two radians long."""

WIDE = 1.5
"""Chains start from draws this much wider than Laplace's, so that R-hat can tell."""


class Chains(NamedTuple):
    theta: Tensor  # [draws, chains, d]
    acceptance: float

    @property
    def mean(self) -> Tensor:
        return self.theta.flatten(0, 1).mean(0)

    @property
    def std(self) -> Tensor:
        return self.theta.flatten(0, 1).std(0)

    def standard_error(self) -> Tensor:
        """[d], of the mean: the spread of the chains' means, which owe each other nothing."""
        error: Tensor = self.theta.mean(0).std(0) / self.theta.shape[1] ** 0.5
        return error

    def r_hat(self) -> Tensor:
        """[d], of chains cut in two: sqrt of the pooled variance over that within a half."""
        half = len(self.theta) // 2
        parts = torch.cat([self.theta[:half], self.theta[half : 2 * half]], 1)
        within = parts.var(0).mean(0)
        between = parts.mean(0).var(0)
        return ((half - 1) / half + between / within).sqrt()


def sample(
    family: Family,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    prior: Normal,
    laplace: Normal,
    *,
    chains: int,
    draws: int,
    generator: torch.Generator,
) -> Chains:
    """`draws` of each chain, after a quarter as many that are thrown away."""
    x, y, weight = (each[weight > 0] for each in (x, y, weight))
    factor: Tensor = torch.linalg.cholesky(laplace.covariance)
    precision = torch.cholesky_inverse(torch.linalg.cholesky(prior.covariance))

    def energy(z: Tensor) -> tuple[Tensor, Tensor]:
        """-log posterior [chains] and its gradient in z [chains, d]."""
        theta = laplace.mean + z @ factor.T
        off = theta - prior.mean
        eta, observed = x @ theta.T, y.unsqueeze(-1)
        value = (off @ precision * off).sum(-1) / 2 - weight @ family.log_p(eta, observed)
        slope = off @ precision - (family.slope(eta, observed).T * weight) @ x
        return value, slope @ factor

    z = WIDE * torch.randn(chains, len(laplace.mean), generator=generator, dtype=x.dtype)
    value, slope = energy(z)
    kept, accepted = [], []
    warm = draws // 4
    for i in range(warm + draws):
        momentum = torch.randn(z.shape, generator=generator, dtype=x.dtype)
        luck = torch.rand(2, chains, 1, generator=generator, dtype=x.dtype)
        step = STEP * (0.8 + 0.4 * luck[0])
        new_z, new_value, new_slope, p = z, value, slope, momentum
        for _ in range(LEAPS):
            p = p - step * new_slope / 2
            new_z = new_z + step * p
            new_value, new_slope = energy(new_z)
            p = p - step * new_slope / 2
        gain = value - new_value + (momentum.square() - p.square()).sum(-1) / 2
        accept = luck[1, :, 0].log() < gain
        z = torch.where(accept.unsqueeze(-1), new_z, z)
        slope = torch.where(accept.unsqueeze(-1), new_slope, slope)
        value = torch.where(accept, new_value, value)
        if i >= warm:
            kept.append(laplace.mean + z @ factor.T)
            accepted.append(float(accept.double().mean()))
    return Chains(torch.stack(kept), sum(accepted) / len(accepted))
