"""How many points a subset has, and the plainest one: drawn uniformly."""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData


def subset_size(size: Tensor, fraction: float) -> Tensor:
    """k_i = ceil(fraction n_i), at least 1: [C] int64."""
    return torch.ceil(size.double() * fraction - 1e-9).long().clamp_min(1)


def uniform(data: ClientData, fraction: float, streams: Streams) -> Tensor:
    """Weight n/k on k points chosen uniformly without replacement: [C, n]."""
    k = subset_size(data.size, fraction)
    order = random_order(data.weight > 0, streams, "subset")
    chosen = order.argsort(-1).argsort(-1) < k.unsqueeze(-1)
    return chosen * (data.size / k).unsqueeze(-1).to(data.weight.dtype)


def random_order(mask: Tensor, streams: Streams, purpose: str) -> Tensor:
    """[C, n] uniforms to sort each client's points by; padding has 2 and comes last.

    Drawn on the host, one number per real point: neither padding nor the device changes them.
    """
    order = torch.full(mask.shape, 2.0)
    for row, real, g in zip(order, mask.cpu(), streams.generators(purpose, host=True), strict=True):
        row[real] = torch.rand(int(real.sum()), generator=g)
    return order.to(mask.device)
