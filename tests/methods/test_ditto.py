"""Ditto on quadratics: FedAvg's global model, and the personal one at its fixed point."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, quadratics, run, times

from corefed.base.errors import UserError
from corefed.methods import ditto, fedavg
from corefed.methods.ditto import Config
from corefed.settings.config import resolve

LAMBDA = 1.5
SETTINGS = Config(learning_rate=0.1, personal_rate=0.15, penalty=LAMBDA)


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def test_the_global_model_is_fedavgs(task: Quadratics) -> None:
    """Minibatches and all: the personal model has no part in it."""
    one = run(ditto.build(SETTINGS, task.model), task.data, 4, steps=3, batch=8)
    base = fedavg.build(fedavg.Config(learning_rate=0.1), task.model)
    two = run(base, task.data, 4, steps=3, batch=8)
    assert torch.equal(one.server["theta"], two.server["theta"])
    assert torch.equal(one.clients.private["theta"], two.clients.private["theta"])
    assert set(one.message) == {"theta"}


def test_the_personal_model_settles_between_both_optima(task: Quadratics) -> None:
    """v_i = (H_i + lambda)^-1 (H_i a_i + lambda w), w where FedAvg settles."""
    method = ditto.build(SETTINGS, task.model)
    ended = run(method, task.data, 80, steps=5)
    w = ended.server["theta"]
    held = task.hessian + LAMBDA * torch.eye(4, dtype=torch.float64)
    expected = torch.linalg.solve(held, times(task.hessian, task.optimum) + LAMBDA * w)
    models = method.models(ended.server, ended.clients.private, task.data)
    torch.testing.assert_close(models["personal"]["theta"], expected, **EXACT)
    assert list(models) == ["personal", "global", "localized"]


def test_two_rounds_by_hand(task: Quadratics) -> None:
    """v goes on from round to round and is pulled to what was broadcast in this one."""
    method = ditto.build(SETTINGS, task.model)
    w = run(method, task.data, 0).server["theta"]
    v = w.expand(3, -1)
    for _ in range(2):
        theta = w.expand(3, -1)
        for _ in range(3):
            theta = theta - 0.1 * task.slope(theta)
            v = v - 0.15 * (task.slope(v) + LAMBDA * (v - w))
        w = (task.shares.unsqueeze(-1) * theta).sum(0)
    ended = run(method, task.data, 2, steps=3)
    torch.testing.assert_close(ended.clients.private["personal"], v, **EXACT)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_only_the_personal_rule_goes_on(name: str, task: Quadratics) -> None:
    """Two rounds of three steps are six steps of torch's rule on a client's own objective."""
    settings = Config(learning_rate=0.02, personal_rate=0.02, penalty=LAMBDA, optimizer=name)
    method = ditto.build(settings, task.model)
    start = run(method, task.data, 0).server["theta"]
    between = run(method, task.data, 1, steps=3).server["theta"]
    v = start.expand(3, -1).clone().requires_grad_()
    rule = (
        torch.optim.Adam([v], lr=0.02)
        if name == "adam"
        else torch.optim.SGD([v], lr=0.02, momentum=0.9)
    )
    for w in (start, between):
        for _ in range(3):
            v.grad = task.slope(v.detach()) + LAMBDA * (v.detach() - w)
            rule.step()
    ended = run(method, task.data, 2, steps=3)
    torch.testing.assert_close(ended.clients.private["personal"], v.detach(), **EXACT)
    assert "m" not in ended.clients.private  # of the shared model: gone with the round


def test_both_rates_are_refused_where_they_are_too_large() -> None:
    for name in ("learning_rate", "personal_rate"):
        rates = {"learning_rate": 0.005, "personal_rate": 0.005, name: 0.07}
        given = [f"{key}={value}" for key, value in rates.items()]
        with pytest.raises(UserError, match=f"{name} is 0.07 with optimizer=adam"):
            resolve(flags={"method": "ditto"}, assignments=[*given, "optimizer=adam"])
