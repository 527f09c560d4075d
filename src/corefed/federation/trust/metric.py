"""How far two messages are apart, in a unit that everyone knows: the Fisher metric at v.

Everyone has the broadcast v, so lengths measured at v need neither secrets nor trust. For a
posterior v = (mu, rho), sigma = softplus(rho), the Fisher information is 1/sigma^2 for mu and
2/sigma^2 for sigma; with d sigma / d rho = sigmoid(rho) = 1 - exp(-sigma), units of length are

    s_mu = sigma_v,    s_rho = sigma_v / (sqrt(2) (1 - exp(-sigma_v))),

and ||d / s||^2 is 2 KL(v + d || v) up to terms of third order. A step of one posterior standard
deviation counts the same for every weight, certain or not. 1 - exp(-sigma) with the floored
sigma, and not sigmoid(rho), keeps s_rho finite where rho lies below the floor: it tends to
1/sqrt(2). Weights without a posterior have no such scale: s = 1, the Euclidean length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from corefed.base.types import Tree
from corefed.bayes import gaussian


def scale(broadcast: Tree, posteriors: Collection[str]) -> Tree:
    """The unit of length s of every entry, in float64; [..., 2, P] for a posterior."""
    return {name: _unit(value, name in posteriors) for name, value in broadcast.items()}


def length(difference: Mapping[str, Tensor], unit: Mapping[str, Tensor]) -> Tensor:
    """||d / s|| over all entries together, in float64: [] for one client, [S] for S stacked.

    Names that only `unit` has are left out: a message need not hold all that the server sent.
    """
    squares = []
    for name, value in difference.items():
        s = unit[name]
        clients = value.shape[: value.ndim - s.ndim]
        squares.append((value.double() / s).square().reshape(*clients, -1).sum(-1))
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros((), dtype=torch.float64)


def _unit(v: Tensor, posterior: bool) -> Tensor:
    if not posterior:
        return torch.ones_like(v, dtype=torch.float64)
    sigma = gaussian.sigma(v[..., 1, :].double())
    return torch.stack([sigma, sigma / (-math.sqrt(2) * torch.expm1(-sigma))], -2)
