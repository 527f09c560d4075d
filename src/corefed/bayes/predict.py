"""The Monte-Carlo predictive: probabilities averaged over draws of theta."""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.bayes import gaussian
from corefed.models.network import Model


def predictive(model: Model, v: Tensor, x: Tensor, noise: Tensor, points: int = 512) -> Tensor:
    """(1/M) sum_m p(y | x, theta_m), theta_m = mu + sigma g_m, for noise g [C, M, P]."""
    return predictive_at(model, gaussian.sample(v, noise), x, points)


def predictive_at(model: Model, theta: Tensor, x: Tensor, points: int = 512) -> Tensor:
    """(1/M) sum_m p(y | x, theta_m) for given theta [C, M, P]; a point estimate is M = 1.

    Classification: [C, n, classes]. Regression: [C, n, 2 targets], means then variances. At most
    `points` inputs per client go through the network at once.
    """
    parts = [
        model.likelihood.predictive(theta, model.forward(theta, part))
        for part in x.split(points, dim=1)
    ]
    return torch.cat(parts, dim=1)
