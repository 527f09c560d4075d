"""How many points a subset has, and the plainest one: drawn uniformly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import ClientData


def subset_size(size: Tensor, fraction: float, points: Tensor | None = None) -> Tensor:
    """k_i = ceil(fraction n_i), at least 1: [C] int64; or these `points`, at most n_i."""
    if points is not None:
        return torch.minimum(size, points)
    return torch.ceil(size.double() * fraction - 1e-9).long().clamp_min(1)


def subset_sizes(sizes: Sequence[int], fraction: float) -> list[int]:
    """The same of numbers on the host, and at most n_i."""
    return [min(n, max(1, math.ceil(n * fraction - 1e-9))) for n in sizes]


def uniform(
    data: ClientData, fraction: float, streams: Streams, points: Tensor | None = None
) -> Tensor:
    """Weight n/k on k points chosen uniformly without replacement: [C, n]."""
    k = subset_size(data.size, fraction, points)
    order = random_order(data.weight > 0, streams, "subset")
    chosen = order.argsort(-1).argsort(-1) < k.unsqueeze(-1)
    return chosen * (data.size / k).unsqueeze(-1).to(data.weight.dtype)


def random_order(mask: Tensor, streams: Streams, purpose: str) -> Tensor:
    """[C, n] uniforms to sort each client's points by; padding has 2 and comes last.

    Real points come first, so padding does not change their numbers.
    """
    return streams.uniform(purpose, mask.shape[-1]).masked_fill(~mask, 2.0)
