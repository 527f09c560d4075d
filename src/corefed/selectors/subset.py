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
    order = torch.full(data.weight.shape, 2.0)  # above every uniform: padding comes last
    generators = streams.generators("subset", host=True)
    for row, real, g in zip(order, data.weight.cpu() > 0, generators, strict=True):
        row[real] = torch.rand(int(real.sum()), generator=g)  # as many, whatever the padding
    rank = order.to(data.weight.device).argsort(-1).argsort(-1)
    chosen = rank < k.unsqueeze(-1)
    return chosen * (data.size / k).unsqueeze(-1).to(data.weight.dtype)
