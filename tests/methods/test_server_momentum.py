"""The server's momentum on quadratics: a heavy ball's recursion, and the fixed points of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quadratics import EXACT, Quadratics, after, quadratics, run, settled

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Method, Update
from corefed.methods import fedavg, registry
from corefed.methods.fedavg import Config
from corefed.settings.config import resolve
from corefed.training import client_side

RATE = 0.1


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def build(name: str, task: Quadratics, **settings: Any) -> Method:
    return registry.build(name, resolve(flags={"method": name, **settings}).settings, task.model)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("beta", [0.3, 0.8])
def test_errors_follow_a_heavy_ball(task: Quadratics, beta: float, steps: int) -> None:
    """e_{t+1} = (1 + beta - A) e_t - beta e_{t-1}, A = sum_i p_i (I - (I - eta H_i)^R)."""
    weights = task.shares.view(-1, 1, 1) * after(task.hessian, RATE, steps)
    best, way = settled(weights, task.optimum), weights.sum(0)
    method = fedavg.build(Config(learning_rate=RATE, server_momentum=beta), task.model)
    before = last = run(method, task.data, 0, steps).server["theta"] - best
    for _ in range(12):
        before, last = last, last + beta * (last - before) - way @ last
    ended = run(method, task.data, 12, steps)
    torch.testing.assert_close(ended.server["theta"] - best, last, **EXACT)
    torch.testing.assert_close(ended.server["velocity"], last - before, **EXACT)


@pytest.mark.parametrize("steps", [1, 5])
def test_it_settles_where_fedavg_does(task: Quadratics, steps: int) -> None:
    """The slowest error has the factor sqrt(beta) at best: 0.8^(300 / 2) is 3e-15."""
    weights = task.shares.view(-1, 1, 1) * after(task.hessian, RATE, steps)
    method = fedavg.build(Config(learning_rate=RATE, server_momentum=0.8), task.model)
    ended = run(method, task.data, 300, steps)
    torch.testing.assert_close(ended.server["theta"], settled(weights, task.optimum), **EXACT)


def test_some_clients_per_round(task: Quadratics) -> None:
    """Of two clients' average; the third's points do not count."""
    method = fedavg.build(Config(learning_rate=RATE, server_momentum=0.8), task.model)
    ended = run(method, task.data, 300, 5, cohort=(0, 2))
    shares = torch.tensor([16.0, 0.0, 64.0]).double() / 80
    weights = shares.view(-1, 1, 1) * after(task.hessian, RATE, 5)
    torch.testing.assert_close(ended.server["theta"], settled(weights, task.optimum), **EXACT)


def test_without_it_fedavg_is_the_plain_one(task: Quadratics) -> None:
    settings = Config(learning_rate=RATE)
    ended = run(fedavg.build(settings, task.model), task.data, 5, 3)
    plain = run(fedavg.plain(settings, task.model), task.data, 5, 3)
    assert set(ended.server) == {"theta"}
    assert torch.equal(ended.server["theta"], plain.server["theta"])


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "shared-start", "coreset-shared-start"])
def test_clients_never_get_the_velocity(task: Quadratics, name: str) -> None:
    """A message is as large as without."""
    start = Streams([Who(0, SERVER)], 0)
    method = build(name, task, server_momentum=0.8)
    server = method.init_server(start)
    assert torch.equal(server["velocity"], torch.zeros_like(server["velocity"]))
    without = build(name, task, server_momentum=0.0)
    assert set(client_side.sent(method, server)) == set(without.init_server(start))


def test_it_is_on_the_shared_means_alone(task: Quadratics) -> None:
    """Widths of shared-start are averaged as without: they are no part of the heavy ball."""
    method = build("shared-start", task, server_momentum=0.5)
    v = torch.zeros(2, 4, dtype=torch.float64)
    server = {"v": v, "velocity": torch.full((4,), 2.0, dtype=torch.float64)}
    uploads = torch.stack([v + 1, v + 4])
    after = method.aggregate(server, Update((0, 1), {"v": uploads}, torch.tensor([1, 2])))
    torch.testing.assert_close(after["velocity"], torch.full((4,), 4.0).double())  # 0.5 * 2 + 3
    torch.testing.assert_close(after["v"][0], torch.full((4,), 4.0).double())
    torch.testing.assert_close(after["v"][1], torch.full((4,), 3.0).double())


@pytest.mark.parametrize("method", ["fedavg", "shared-start"])
@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_a_momentum_that_never_settles_is_refused(method: str, beta: float) -> None:
    with pytest.raises(UserError, match=r"server_momentum .* at least 0 and below 1"):
        resolve(flags={"method": method, "server_momentum": beta})
