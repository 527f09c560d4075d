"""Weights for a chosen support: non-negative least squares, shrunk towards the plain weight n/k.

    minimise ||y - Phi w||^2 + lambda ||w - n/k||^2   over   w >= 0 on the support

With few draws, or draws from the wrong place, the data say little about some weights; shrinkage
leaves those at n/k, where a uniform subset would have them, instead of at 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def refit(
    phi: Tensor, y: Tensor, support: Tensor, plain: Tensor, shrink: float, iterations: int = 200
) -> Tensor:
    """[C, n] weights on `support` [C, n] bool; `plain` [C] is n/k.

    lambda = shrink times the mean squared norm of the support's columns, so that it means the same
    whatever the scale of the potentials. Solved by accelerated projected gradients (FISTA with
    restarts) on the k x k Gram matrix; `shrink` > 0 makes that problem well conditioned.
    """
    k, plain = int(support.sum(-1).max()), plain.to(phi.dtype)
    order = support.to(torch.int8).topk(k, dim=-1)
    index, real = order.indices, order.values > 0  # [C, k]; clients with fewer points are padded
    columns = phi.gather(2, index.unsqueeze(1).expand(-1, phi.shape[1], -1))
    columns = columns * real.unsqueeze(1)
    gram = torch.bmm(columns.mT, columns)
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1) / real.sum(-1).clamp_min(1)
    ridge = (shrink * scale).view(-1, 1)
    target = torch.bmm(columns.mT, y.unsqueeze(-1)).squeeze(-1) + ridge * plain.unsqueeze(-1)
    lipschitz = _eigenvalue_bound(gram).unsqueeze(-1) + ridge
    step = 1 / lipschitz.clamp_min(torch.finfo(y.dtype).tiny)
    u = plain.unsqueeze(-1) * real
    v, momentum = u, torch.ones_like(step)
    for _ in range(iterations):
        slope = torch.bmm(gram, v.unsqueeze(-1)).squeeze(-1) + ridge * v - target
        u_next = ((v - step * slope).clamp_min(0.0)) * real
        restart = ((v - u_next) * (u_next - u)).sum(-1, keepdim=True) > 0
        momentum = torch.where(restart, 1.0, momentum)
        following = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        v = u_next + ((momentum - 1) / following) * (u_next - u)
        u, momentum = u_next, following
    return torch.zeros_like(phi[:, 0]).scatter(1, index, u)


def _eigenvalue_bound(gram: Tensor) -> Tensor:
    """[C] ||G^2||_F^{1/2}: at least the largest eigenvalue, and at most k^{1/4} times it.

    Power iteration approaches that from below, and not at all from a start that G sends to 0.
    """
    norm = gram.square().sum((-2, -1)).sqrt().clamp_min(torch.finfo(gram.dtype).tiny)
    unit = gram / norm.view(-1, 1, 1)
    return norm * torch.bmm(unit, unit).square().sum((-2, -1)).pow(0.25)
