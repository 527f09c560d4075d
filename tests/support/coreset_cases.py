"""What the tests of `corefed.coreset.build` share: a logistic model, its points, a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from corefed.coreset import Coreset

N, D = 300, 4
POSTERIOR = (torch.ones(D), torch.full((D,), 0.1))


def logistic(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    eta = x @ theta
    return y * eta - F.softplus(eta)


def make_points() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=g)
    return x, (torch.rand(N, generator=g) < torch.sigmoid(x.sum(-1))).float()


def same(a: Coreset, b: Coreset, tolerance: float = 1e-3) -> None:
    assert a.indices.tolist() == b.indices.tolist()
    torch.testing.assert_close(a.weights, b.weights, rtol=tolerance, atol=tolerance)
    assert a.diagnostics.held_out_error == pytest.approx(
        b.diagnostics.held_out_error, rel=0.05, abs=1e-6
    )


class Items(Dataset[Any]):
    """Map-style: an index and a length, and items of (x, y)."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, j: int) -> tuple[Tensor, Tensor]:
        return self.x[j], self.y[j]


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval()


def flat_parameters() -> Tensor:
    return torch.cat([p.detach().flatten() for p in network().parameters()])
