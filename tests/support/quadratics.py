"""Clients whose losses are quadratics with a known Hessian and minimum, in float64.

A linear model with Gaussian noise has f_i(theta) = (1/2) (theta - a_i)' H_i (theta - a_i) + const,
H_i = X_i' X_i / (n_i noise^2) with a column of ones for the intercept, a_i the least squares fit.
Batches carry their factors in float32; with powers of two for n_i these are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Batch, ClientData, Method, Tree, Work
from corefed.models.likelihood import Gaussian
from corefed.models.network import Model, mlp
from corefed.training.local import LocalClients

FEATURES, NOISE = 3, 0.8
SIZES = (16, 32, 64)
EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""Hundreds of float64 operations on values of order 1; a wrong formula is off by 1e-3 and more."""


class Quadratics(NamedTuple):
    model: Model
    data: ClientData
    hessian: Tensor  # [C, P, P]
    optimum: Tensor  # [C, P]

    @property
    def whole(self) -> Batch:
        """All points of every client, as one batch."""
        return Batch(self.data.x, self.data.y, self.data.weight / self.data.size.unsqueeze(-1))

    @property
    def shares(self) -> Tensor:
        """n_i / n, [C]."""
        return self.data.size / self.data.size.sum(dtype=torch.float64)

    def slope(self, theta: Tensor) -> Tensor:
        """grad f_i(theta_i), [C, P]."""
        return times(self.hessian, theta - self.optimum)


def quadratics(sizes: Sequence[int] = SIZES, seed: int = 0) -> Quadratics:
    """Clients that disagree: each has its own regression line and its own spread of inputs."""
    g = torch.Generator().manual_seed(seed)
    clients, n = len(sizes), max(sizes)
    weight = (torch.arange(n) < torch.tensor(sizes).unsqueeze(-1)).double()
    spread = torch.rand(clients, 1, FEATURES, generator=g, dtype=torch.float64) / 2 + 0.75
    x = torch.randn(clients, n, FEATURES, generator=g, dtype=torch.float64) * spread
    line = torch.randn(clients, FEATURES, 1, generator=g, dtype=torch.float64)
    y = x @ line + 0.3 * torch.randn(clients, n, 1, generator=g, dtype=torch.float64)
    x, y = x * weight.unsqueeze(-1), y * weight.unsqueeze(-1)
    design = torch.cat([x, weight.unsqueeze(-1)], -1)  # theta is [slopes, intercept]
    size = torch.tensor(sizes).double().view(-1, 1, 1)
    return Quadratics(
        mlp((FEATURES, 1), Gaussian(1, NOISE)),
        ClientData(x, y, weight),
        design.mT @ design / (size * NOISE**2),
        torch.linalg.lstsq(design, y).solution.squeeze(-1),
    )


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """[..., P, P] times [..., P]."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def settled(weights: Tensor, optimum: Tensor) -> Tensor:
    """The w with sum_i A_i (w - a_i) = 0, for weights A [C, P, P]."""
    return torch.linalg.solve(weights.sum(0), times(weights, optimum).sum(0))


def after(matrix: Tensor, rate: float, steps: int) -> Tensor:
    """I - (I - rate M)^R: how much of the way to its minimum a client goes in R steps."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return identity - torch.linalg.matrix_power(identity - rate * matrix, steps)


class Ended(NamedTuple):
    server: Tree
    clients: LocalClients
    message: Tree  # of the last round


def run(
    method: Method,
    data: ClientData,
    rounds: int,
    steps: int = 1,
    batch: int = 1000,
    cohort: Sequence[int] | None = None,
    seed: int = 0,
) -> Ended:
    """A federation in the data's precision; by default on full batches."""
    start = method.init_server(Streams([Who(seed, SERVER)], 0))
    server = {name: value.to(data.x) for name, value in start.items()}
    work = Work(steps, batch)
    clients = LocalClients(method, data, [seed], [server], work, chunk=len(data.weight))
    message: Tree = {}
    for t in range(rounds):
        (update,), _, _ = clients.train(t, [server], [cohort or range(len(data.weight))])
        server, message = method.aggregate(server, update), update.message
    return Ended(server, clients, message)
