"""FedProx on quadratics: a round and where it settles, in closed form."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, after, quadratics, run, settled, times

from corefed.methods import fedavg, fedprox
from corefed.methods.fedprox import Config

RATE, MU = 0.2, 1.0


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


@pytest.mark.parametrize(("steps", "rounds"), [(3, 70), (8, 40)])
def test_where_it_settles(task: Quadratics, steps: int, rounds: int) -> None:
    """R steps on h_i go I - (I - eta (H + mu))^R of the way to prox_i(w), which is H / (H + mu) of
    the way to a_i: sum_i p_i way_i (prox_i(w) - w) = 0."""
    method = fedprox.build(Config(learning_rate=RATE, proximal=MU), task.model)
    ended = run(method, task.data, rounds, steps=steps)
    held = task.hessian + MU * torch.eye(4, dtype=torch.float64)
    way = after(held, RATE, steps) @ torch.linalg.solve(held, task.hessian)
    w = settled(task.shares.view(-1, 1, 1) * way, task.optimum)
    torch.testing.assert_close(ended.server["theta"], w, **EXACT)
    models = method.models(ended.server, ended.clients.private, task.data)
    torch.testing.assert_close(
        models["localized"]["theta"], w + times(way, task.optimum - w), **EXACT
    )


def test_clients_stay_nearer_than_with_fedavg(task: Quadratics) -> None:
    """Which brings the server nearer to the pooled optimum, as the paper has it."""
    near = run(fedprox.build(Config(learning_rate=0.1, proximal=8.0), task.model), task.data, 60, 5)
    far = run(fedavg.build(fedavg.Config(learning_rate=0.1), task.model), task.data, 30, 5)
    pooled = settled(task.shares.view(-1, 1, 1) * task.hessian, task.optimum)
    gaps = [(each.server["theta"] - pooled).norm() for each in (near, far)]
    assert gaps[0] < 0.5 * gaps[1]


def test_next_to_no_pull_is_fedavg(task: Quadratics) -> None:
    for optimizer in ("sgd", "momentum", "adam"):
        settings = {"learning_rate": 0.02, "optimizer": optimizer}
        one = run(fedprox.build(Config(**settings, proximal=1e-14), task.model), task.data, 3, 4)
        two = run(fedavg.build(fedavg.Config(**settings), task.model), task.data, 3, 4)
        torch.testing.assert_close(one.server["theta"], two.server["theta"], **EXACT)
