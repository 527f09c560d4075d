"""What the tests of the selectors share: small clients with a network and a posterior."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import Model, mlp
from corefed.selectors.frame import Look

CASES = ["classes", "regression", "no head"]


def model_of(case: str) -> Model:
    if case == "regression":
        return mlp((4, 6, 2), Gaussian(2, noise=0.5, learn_noise=True))
    model = mlp((4, 6, 3), Categorical(3))
    return model._replace(head=None) if case == "no head" else model


def look_of(
    case: str, sizes: Sequence[int], keep: Sequence[int], *, padding: int = 0, seed: int = 0
) -> Look:
    """Clients of these sizes that are to keep so many; `seed` is of the selector's draws alone."""
    model, clients, n = model_of(case), len(sizes), max(sizes) + padding
    draws = torch.Generator().manual_seed(0)
    x, y, q = torch.zeros(clients, n, 4), torch.zeros(clients, n).long(), []
    if case == "regression":
        y = torch.zeros(clients, n, 2)
    for row, size in enumerate(sizes):
        x[row, :size] = torch.randn(size, 4, generator=draws)
        if case == "regression":
            y[row, :size] = torch.randn(size, 2, generator=draws)
        else:
            y[row, :size] = torch.randint(0, 3, (size,), generator=draws)
        mu = model.init(draws, 0.7)
        q.append(torch.stack([mu, torch.full_like(mu, -2.0)]))
    posterior = torch.stack(q)
    weight = (torch.arange(n) < torch.tensor(sizes).unsqueeze(-1)).float()
    who = [Who(seed, row) for row in range(clients)]
    return Look(
        model=model,
        q=posterior,
        z=posterior.clone(),
        data=ClientData(x, y, weight),
        k=torch.tensor(keep),
        memory=torch.zeros(clients, n),
        streams=Streams(who, 0),
    )
