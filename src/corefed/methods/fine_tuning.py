"""Fine-tuning at evaluation: a shared model after some steps on a client's training data.

A step takes every m-th point of a client, m = ceil(n / points), each time another residue: m steps
are an epoch. So there is no randomness, points that lie sorted by class are mixed, and padding and
the other clients do not matter. Test data are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.types import Batch, ClientData
from corefed.bayes import optim
from corefed.methods.fedavg import gradient
from corefed.models.network import Model


def fine_tune(
    model: Model, theta: Tensor, data: ClientData, rate: float | Tensor, steps: int, points: int
) -> Tensor:
    """theta [C, P] after `steps` plain steps of size `rate` on `points` points each."""
    theta = theta.clone()
    for number in range(steps):
        _, slope = gradient(model, theta, every_mth(data, number, points))
        optim.descend(theta, slope, rate)
    return theta


def every_mth(data: ClientData, number: int, points: int) -> Batch:
    """The minibatch of a step: points `number` mod m, and every m-th after it, of each client."""
    n = data.size.unsqueeze(-1)  # [C, 1]
    order = torch.argsort((data.weight == 0).to(torch.int8), dim=-1, stable=True)  # real ones first
    m = ((n + points - 1) // points).clamp_min(1)
    width = min(points, data.weight.shape[1])
    at = number % m + m * torch.arange(width, device=order.device)  # [C, width]
    real = at < n
    rows = order.gather(1, at.clamp_max(order.shape[1] - 1))
    clients = torch.arange(len(rows), device=rows.device).unsqueeze(-1)
    weight = data.weight[clients, rows] * real
    scale = weight / real.sum(-1, keepdim=True).clamp_min(1)
    return Batch(data.x[clients, rows], data.y[clients, rows], scale)
