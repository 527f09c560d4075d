"""FedAvg on quadratics, where each round, and where it settles, has a closed form."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, after, quadratics, run, settled, times

from corefed.base.rng import Streams, Who
from corefed.base.types import Tree, Update, Work
from corefed.methods import fedavg
from corefed.methods.fedavg import Config
from corefed.training import client_side

RATE = 0.1


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def test_the_gradient_is_that_of_the_mean_loss(task: Quadratics) -> None:
    theta = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = theta.clone()
    loss, slope = fedavg.gradient(task.model, theta, task.whole)
    torch.testing.assert_close(slope, task.slope(theta), **EXACT)
    at_best, flat = fedavg.gradient(task.model, task.optimum, task.whole)
    torch.testing.assert_close(flat, torch.zeros_like(flat), **EXACT)
    gap = 0.5 * ((theta - task.optimum) * task.slope(theta)).sum(-1)
    torch.testing.assert_close(loss - at_best, gap, **EXACT)
    assert torch.equal(theta, kept)
    assert not theta.requires_grad


def test_one_step_a_round_is_gradient_descent_on_all_data(task: Quadratics) -> None:
    """On the loss of the pooled points, in which a client counts by how many it has."""
    method = fedavg.build(Config(learning_rate=RATE), task.model)
    w = run(method, task.data, 0).server["theta"]
    for _ in range(5):
        w = w - RATE * (task.shares.unsqueeze(-1) * task.slope(w.expand(3, -1))).sum(0)
    torch.testing.assert_close(run(method, task.data, 5).server["theta"], w, **EXACT)

    real = task.data.weight > 0
    design = torch.cat([task.data.x, torch.ones_like(task.data.y)], -1)[real]
    pooled = torch.linalg.lstsq(design, task.data.y[real]).solution.squeeze(-1)
    torch.testing.assert_close(run(method, task.data, 350).server["theta"], pooled, **EXACT)


@pytest.mark.parametrize(("steps", "rounds"), [(5, 80), (40, 12)])
def test_where_several_steps_a_round_settle(task: Quadratics, steps: int, rounds: int) -> None:
    """sum_i p_i (I - (I - eta H_i)^R) (w - a_i) = 0: not the pooled solution.

    Curvatures from 0.7 up: a round leaves at most 0.93^R of the distance.
    """
    method = fedavg.build(Config(learning_rate=RATE), task.model)
    ended = run(method, task.data, rounds, steps=steps)
    way = after(task.hessian, RATE, steps)
    shares = task.shares.view(-1, 1, 1)
    expected = settled(shares * way, task.optimum)
    torch.testing.assert_close(ended.server["theta"], expected, **EXACT)
    pooled = settled(shares * task.hessian, task.optimum)
    assert (expected - pooled).abs().max() > 0.01

    # The localized model is what a client has after its steps, before it is averaged away.
    local = expected + times(way, task.optimum - expected)
    models = method.models(ended.server, ended.clients.private, task.data)
    torch.testing.assert_close(models["localized"]["theta"], local, **EXACT)
    assert torch.equal(models["global"]["theta"], ended.server["theta"])
    assert "personal" not in models


def test_clients_count_by_their_points() -> None:
    uploads = torch.tensor([[1.0, 0.0], [5.0, -4.0]], dtype=torch.float64)
    update = Update((3, 7), {"theta": uploads}, torch.tensor([1, 2]))
    server = {"theta": torch.full((2,), 9.0, dtype=torch.float64)}
    expected = torch.tensor([11 / 3, -8 / 3], dtype=torch.float64)
    found = fedavg.aggregate(server, update)["theta"]
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)  # not in float32


def test_private_state_that_the_method_does_not_know_goes_through_a_round(task: Quadratics) -> None:
    method = fedavg.build(Config(), task.model)
    theta = torch.zeros(3, 4, dtype=torch.float64)
    private: Tree = {"theta": theta, "kept": torch.arange(3.0)}
    streams = Streams([Who(0, i) for i in range(3)], 0)
    trained = client_side.train(
        method, {"theta": theta}, private, task.data, streams, Work(steps=1, batch=8)
    )
    assert torch.equal(trained.private["kept"], private["kept"])
    assert set(trained.message) == {"theta"}  # and nothing of it leaves the client
    assert torch.equal(theta, torch.zeros_like(theta))
