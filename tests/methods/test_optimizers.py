"""The setting `optimizer` of the baselines, compared with torch.optim on quadratics."""

from __future__ import annotations

import pytest
import torch
from quadratics import EXACT, Quadratics, quadratics, run
from torch import Tensor

from corefed.base.errors import UserError
from corefed.bayes import optim
from corefed.methods import fedavg, independent, per_fedavg, pfedme
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.settings.config import resolve

RATE, ROUNDS, STEPS = 0.02, 3, 4

every_rule = pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def torchs(name: str, p: Tensor) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam([p], lr=RATE)
    return torch.optim.SGD([p], lr=RATE, momentum=0.9 if name == "momentum" else 0.0)


def descend(name: str, task: Quadratics, client: int, start: Tensor, steps: int) -> Tensor:
    """Where one client's steps on all of its points end."""
    p = start.clone().requires_grad_()
    rule = torchs(name, p)
    for _ in range(steps):
        p.grad = task.hessian[client] @ (p.detach() - task.optimum[client])
        rule.step()
    return p.detach()


@every_rule
def test_fedavg_restarts_in_each_round(name: str, task: Quadratics) -> None:
    method = fedavg.build(fedavg.Config(learning_rate=RATE, optimizer=name), task.model)
    w = run(method, task.data, 0).server["theta"]
    for _ in range(ROUNDS):
        w = task.shares @ torch.stack([descend(name, task, i, w, STEPS) for i in range(3)])
    ended = run(method, task.data, ROUNDS, steps=STEPS)
    torch.testing.assert_close(ended.server["theta"], w, **EXACT)
    assert set(ended.clients.private) == {"theta"}


@every_rule
def test_independent_goes_on(name: str, task: Quadratics) -> None:
    method = independent.build(independent.Config(learning_rate=RATE, optimizer=name), task.model)
    start = run(method, task.data, 0).server["theta"]
    expected = torch.stack([descend(name, task, i, start, ROUNDS * STEPS) for i in range(3)])
    ended = run(method, task.data, ROUNDS, steps=STEPS)
    torch.testing.assert_close(ended.clients.private["theta"], expected, **EXACT)
    assert ended.message == {}


@every_rule
def test_per_fedavg_restarts_in_each_round(name: str, task: Quadratics) -> None:
    """With every batch the same, a step's gradient is H (I - alpha H) (w - a), first-order."""
    config = per_fedavg.Config(alpha=0.05, beta=RATE, optimizer=name)
    method = per_fedavg.build(config, task.model)
    w = run(method, task.data, 0).server["w"]
    inner = torch.eye(4, dtype=torch.float64) - 0.05 * task.hessian
    adapted = task._replace(hessian=task.hessian @ inner)
    for _ in range(ROUNDS):
        w = torch.stack([descend(name, adapted, i, w, STEPS) for i in range(3)]).mean(0)
    ended = run(method, task.data, ROUNDS, steps=STEPS)
    torch.testing.assert_close(ended.server["w"], w, **EXACT)
    assert set(ended.clients.private) == {"w"}


@every_rule
def test_pfedmes_personal_model_goes_on(name: str, task: Quadratics) -> None:
    config = pfedme.Config(
        penalty=2.0, inner_steps=2, personal_rate=RATE, learning_rate=0.1, beta=1.0, optimizer=name
    )
    method = pfedme.build(config, task.model)
    w = run(method, task.data, 0).server["w"]
    thetas = [w.clone().requires_grad_() for _ in range(3)]
    rules = [torchs(name, theta) for theta in thetas]
    for _ in range(ROUNDS):
        uploads = []
        for i, (theta, rule) in enumerate(zip(thetas, rules, strict=True)):
            own = w.clone()
            for _ in range(STEPS):
                for _ in range(2):
                    gap = theta.detach() - task.optimum[i]
                    theta.grad = task.hessian[i] @ gap + 2.0 * (theta.detach() - own)
                    rule.step()
                own = own - 0.1 * 2.0 * (own - theta.detach())
            uploads.append(own)
        w = torch.stack(uploads).mean(0)
    ended = run(method, task.data, ROUNDS, steps=STEPS)
    torch.testing.assert_close(ended.server["w"], w, **EXACT)
    found = ended.clients.private["theta"]
    torch.testing.assert_close(found, torch.stack(thetas).detach(), **EXACT)


def test_adam_has_the_scale_of_the_bayesian_methods() -> None:
    """The first step of Adam is the rate times the sign: sqrt(100 / 400) of it in a wide layer."""
    model = mlp((400, 2), Categorical(2), 1.0)
    scale = model.scale()
    assert scale is not None
    rule = optim.of_weights("adam", RATE, scale)
    p = torch.zeros(1, model.size)
    rule.update(p, torch.ones_like(p), rule.init(p))
    torch.testing.assert_close(p, torch.full_like(p, -RATE / 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("method", "setting"),
    [("fedavg", "learning_rate"), ("independent", "learning_rate"), ("per-fedavg", "beta"),
     ("pfedme", "personal_rate"), ("submodular-logdet", "learning_rate")],
)  # fmt: skip
def test_adam_with_the_steps_of_sgd_is_refused(method: str, setting: str) -> None:
    large = [f"{setting}=0.07", "optimizer=adam"]
    with pytest.raises(UserError, match=rf"{setting} is 0.07 with optimizer=adam, .*0.005"):
        resolve(flags={"method": method}, assignments=large)
    resolve(flags={"method": method}, assignments=[f"{setting}=0.005", "optimizer=adam"])
