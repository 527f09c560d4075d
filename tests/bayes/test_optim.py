"""Stacked optimisers against torch.optim, one instance a client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corefed.base.types import Tree
from corefed.bayes import optim

SCHEDULE = [[0], [0, 2], [0, 1, 2], [0], [0, 1, 2], [1, 2], [0, 1, 2]] * 5
"""Clients that make each step: they come and go, so their step counts differ."""

TORCH = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def gradients(step: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Of sizes from 1e-6 to 10, so that epsilon and both corrections matter."""
    g = torch.Generator().manual_seed(step)
    size = 10 ** (7 * torch.rand(shape, generator=g, dtype=torch.float64) - 6)
    return (size * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)


def run_stacked(name: str, start: Tensor, rate: float) -> tuple[Tensor, Tree]:
    """Rows that take part are gathered, updated and put back, as the runtime does."""
    optimizer = optim.OPTIMIZERS[name](rate)
    p, state = start.clone(), optimizer.init(start)
    for step, rows in enumerate(SCHEDULE):
        part = p[rows]
        mine = {key: value[rows] for key, value in state.items()}
        optimizer.update(part, gradients(step, p.shape, p.dtype)[rows], mine)
        p[rows] = part
        for key, value in mine.items():
            state[key][rows] = value
    return p, state


def run_torch(name: str, start: Tensor, rate: float) -> Tensor:
    parameters = [row.clone().requires_grad_() for row in start]
    optimizers = [TORCH[name]([p], lr=rate) for p in parameters]
    for step, rows in enumerate(SCHEDULE):
        gradient = gradients(step, start.shape, start.dtype)
        for c in rows:
            parameters[c].grad = gradient[c].clone()
            optimizers[c].step()
    return torch.stack([p.detach() for p in parameters])


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 5)])
def test_against_torch(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """T steps of two programs differ by at most T eps (|p| + 8 |step|), with |p| below 4 here.

    A step of Adam is at most rate (1 - b1) / sqrt(1 - b2) = 3.2 rate; of SGD, rate times the
    largest gradient, below 40.
    """
    rate, steps = 0.01, len(SCHEDULE)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(99)).to(dtype)
    found, state = run_stacked(name, start, rate)
    expected = run_torch(name, start, rate)
    eps = torch.finfo(dtype).eps
    allowed = steps * eps * (4 + 8 * rate * (3.2 if name == "adam" else 40))
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)
    assert not torch.allclose(found, start, atol=rate)
    taken = [sum(c in rows for rows in SCHEDULE) for c in range(3)]
    assert state["step"].tolist() == taken
    assert len(set(taken)) == 3


def test_a_first_step_of_adam_is_the_rate_times_the_sign() -> None:
    p, gradient = torch.zeros(1, 4), torch.tensor([[1e-3, -5.0, 2.0, 0.0]])
    optimizer = optim.adam(0.1)
    optimizer.update(p, gradient, optimizer.init(p))
    torch.testing.assert_close(p, torch.tensor([[-0.1, 0.1, -0.1, 0.0]]), rtol=2e-5, atol=0)


def test_clients_do_not_interact() -> None:
    """The same client, with the step count of another in the same tensor."""
    optimizer = optim.adam(0.01)
    alone, together = torch.ones(1, 3), torch.ones(2, 3)
    first, second = optimizer.init(alone), optimizer.init(together)
    second["step"][1] = 1000.0
    for step in range(5):
        gradient = gradients(step, torch.Size((1, 3)), torch.float32)
        optimizer.update(alone, gradient.clone(), first)
        optimizer.update(together, torch.cat([gradient, torch.ones(1, 3)]), second)
    assert torch.equal(alone[0], together[0])


def test_init_starts_from_nothing() -> None:
    p = torch.ones(4, 2, 3)
    state = optim.adam(0.1).init(p)
    assert {k: v.shape for k, v in state.items()} == {"m": p.shape, "v": p.shape, "step": (4,)}
    assert all((v == 0).all() for v in state.values())
    assert list(optim.sgd(0.1).init(p)) == ["step"]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_rate_per_client(name: str) -> None:
    """Runs with different rates side by side: each as it is alone."""
    start = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rates = torch.tensor([0.01, 0.1, 0.003], dtype=torch.float64)
    optimizer = optim.OPTIMIZERS[name](rates)
    p, state = start.clone(), optimizer.init(start)
    for step in range(20):
        optimizer.update(p, gradients(step, p.shape, p.dtype), state)
    for row, rate in enumerate(rates.tolist()):
        alone = optim.OPTIMIZERS[name](rate)
        one, own = start[row : row + 1].clone(), alone.init(start[row : row + 1])
        for step in range(20):
            gradient = gradients(step, p.shape, p.dtype)[row : row + 1].clone()
            alone.update(one, gradient, own)
        torch.testing.assert_close(p[row], one[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("together", [True, False])
def test_a_rate_per_weight(together: bool) -> None:
    """Adam with a scale is torch's with a group per rate, also where clients are not in step."""
    start = torch.randn(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scale = torch.tensor([1.0, 1.0, 0.3, 0.3, 0.3, 0.1], dtype=torch.float64)
    optimizer = optim.adam(0.01, scale)
    p, state = start.clone(), optimizer.init(start)
    if not together:
        state["step"][1] = 5.0
    weights = [start[0, place : place + 1].clone().requires_grad_() for place in range(6)]
    groups = [{"params": [w], "lr": 0.01 * s} for w, s in zip(weights, scale.tolist(), strict=True)]
    theirs = torch.optim.Adam(groups)
    for step in range(15):
        gradient = gradients(step, p.shape, p.dtype)
        for place, weight in enumerate(weights):
            weight.grad = gradient[0, place : place + 1].clone()
        theirs.step()
        optimizer.update(p, gradient, state)
    expected = torch.cat([weight.detach() for weight in weights])
    torch.testing.assert_close(p[0], expected, rtol=1e-9, atol=1e-9)
