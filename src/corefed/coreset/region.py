"""Where draws lie: how far another draw is from them, in their own standard deviations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.coreset.draws import Draws, leaves

WIDEST = 1000
"""Numbers of a draw up to which a region is kept."""


class Region(NamedTuple):
    """An ellipsoid: mean, inverse factor of the covariance, and the farthest of the draws."""

    mean: Tensor  # [P] float64
    whiten: Tensor  # [P, P], or [P] where there were too few draws for a covariance
    reach: float  # squared distance of the farthest draw

    @staticmethod
    def of(draws: Draws) -> Region | None:
        """The region of some draws; none where a draw has too many numbers."""
        if draws.width > WIDEST:
            return None
        theta = flat(draws)
        mean, spread = theta.mean(0), theta.std(0).clamp_min(1e-300)
        whiten = spread.reciprocal()
        if len(theta) >= 2 * theta.shape[1]:
            scaled = (theta - mean) / spread
            correlation = scaled.T @ scaled / (len(theta) - 1)
            correlation.diagonal().add_(1e-9)
            lower, failed = torch.linalg.cholesky_ex(correlation)
            if not int(failed):
                eye = torch.eye(len(lower), dtype=lower.dtype)
                whiten = torch.linalg.solve_triangular(lower, eye, upper=False) / spread
        region = Region(mean, whiten, 0.0)
        return region._replace(reach=float(region.distance2(theta).max()))

    def distance2(self, theta: Tensor) -> Tensor:
        """[S] squared Mahalanobis distances of theta [S, P]."""
        off = theta - self.mean
        white = off @ self.whiten.T if self.whiten.dim() == 2 else off * self.whiten
        return white.square().sum(-1)


def flat(draws: Draws) -> Tensor:
    """[S, P] float64, on the CPU."""
    theta = draws.block(0, draws.number)
    return torch.cat([t.reshape(len(t), -1).double().cpu() for t in leaves(theta)], 1)
