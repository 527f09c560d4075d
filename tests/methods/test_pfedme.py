"""pFedMe on quadratics: the prox, the Moreau envelope and where the federation settles, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quadratics import EXACT, Quadratics, after, quadratics, run, settled, times
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.types import Tree, Update
from corefed.methods import pfedme
from corefed.methods.pfedme import Config
from corefed.settings.config import resolve

LAMBDA = 3.0
CONVERGED = Config(penalty=LAMBDA, inner_steps=25, personal_rate=0.2, learning_rate=0.4, beta=1.0)
"""Curvatures from 0.7 to 4: an inner step leaves at most 0.4 of the error, 25 of them 1e-10."""


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def anywhere(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prox(task: Quadratics, w: Tensor) -> Tensor:
    """argmin_theta f(theta) + (lambda / 2) ||theta - w||^2 = (H + lambda)^-1 (H a + lambda w)."""
    shifted = task.hessian + LAMBDA * torch.eye(4, dtype=torch.float64)
    return torch.linalg.solve(shifted, times(task.hessian, task.optimum) + LAMBDA * w)


def moreau(task: Quadratics) -> Tensor:
    """The Hessian of the envelope, lambda H (H + lambda)^-1: [C, P, P]."""
    identity = torch.eye(4, dtype=torch.float64)
    return LAMBDA * task.hessian @ torch.linalg.inv(task.hessian + LAMBDA * identity)


def test_the_inner_steps_reach_the_prox(task: Quadratics) -> None:
    w, theta = anywhere(1), anywhere(2)
    loss, _ = pfedme.gradient(task.model, theta, task.whole)
    reported = pfedme.approach(CONVERGED, task.model, theta, w, task.whole)
    torch.testing.assert_close(theta, prox(task, w), **EXACT)
    torch.testing.assert_close(reported, loss)  # of theta before it was fitted
    assert torch.equal(w, anywhere(1))


def test_a_local_step_is_gradient_descent_on_the_moreau_envelope(task: Quadratics) -> None:
    """lambda (w - theta(w)) against the closed form, and against autograd through the minimum."""
    w = anywhere(1).requires_grad_()
    theta = prox(task, w)
    away, apart = theta - task.optimum, theta - w
    envelope = 0.5 * (away * times(task.hessian, away)).sum() + LAMBDA / 2 * apart.square().sum()
    (slope,) = torch.autograd.grad(envelope, w)
    w = w.detach()
    torch.testing.assert_close(slope, times(moreau(task), w - task.optimum), **EXACT)

    method = pfedme.build(CONVERGED, task.model)
    working = method.begin(
        {"w": w}, method.init_client({"w": w}, task.data), task.data, Streams([], 0)
    )
    working, _ = method.step(working, task.whole, torch.empty(3, 0))
    torch.testing.assert_close((w - working["w"]) / CONVERGED.learning_rate, slope, **EXACT)


def test_two_rounds_of_one_inner_step_by_hand(task: Quadratics) -> None:
    """theta goes on from where it was, over steps and rounds; w_i restarts at the broadcast."""
    config = replace(CONVERGED, inner_steps=1, beta=1.5)
    method = pfedme.build(config, task.model)
    start = run(method, task.data, 0).server["w"]
    server, theta = start, start.expand(3, -1)
    w = theta
    for _ in range(2):
        w = server.expand(3, -1)
        for _ in range(2):
            theta = theta - config.personal_rate * (task.slope(theta) + LAMBDA * (theta - w))
            w = w - config.learning_rate * LAMBDA * (w - theta)
        server = (1 - config.beta) * server + config.beta * w.mean(0)
    ended = run(method, task.data, 2, steps=2)
    torch.testing.assert_close(ended.server["w"], server, **EXACT)
    torch.testing.assert_close(ended.clients.private["theta"], theta, **EXACT)
    torch.testing.assert_close(ended.clients.private["w"], w, **EXACT)


@pytest.mark.parametrize(("steps", "beta", "rounds"), [(1, 1.0, 90), (6, 0.8, 25), (6, 1.3, 25)])
def test_where_the_federation_settles(
    task: Quadratics, steps: int, beta: float, rounds: int
) -> None:
    """sum_i (I - (I - eta M_i)^R) (w - a_i) = 0, M_i of the envelopes; beta has no part in it."""
    method = pfedme.build(replace(CONVERGED, beta=beta), task.model)
    ended = run(method, task.data, rounds, steps=steps)
    way = after(moreau(task), CONVERGED.learning_rate, steps)
    w = settled(way, task.optimum)
    torch.testing.assert_close(ended.server["w"], w, **EXACT)
    models = method.models(ended.server, ended.clients.private, task.data)
    torch.testing.assert_close(models["localized"]["w"], w + times(way, task.optimum - w), **EXACT)
    before_last = w + times(
        after(moreau(task), CONVERGED.learning_rate, steps - 1), task.optimum - w
    )
    torch.testing.assert_close(models["personal"]["w"], prox(task, before_last), **EXACT)


def test_the_three_models_are_three_tensors(task: Quadratics) -> None:
    """A change of one leaves the others and the upload as they were."""
    method = pfedme.build(replace(CONVERGED, inner_steps=2), task.model)
    for rounds in (0, 1, 3):
        ended = run(method, task.data, rounds, steps=2)
        broadcast = {"w": ended.server["w"].expand(3, -1).clone()}
        models = method.models(broadcast, ended.clients.private, task.data)
        assert list(models) == ["personal", "global", "localized"]
        copies = {name: tree["w"].clone() for name, tree in models.items()}
        for changed in models:
            models[changed]["w"].add_(1.0)
            for name, tree in models.items():
                assert torch.equal(tree["w"], copies[name]) == (name != changed)
            models[changed]["w"].copy_(copies[changed])
        if rounds > 0:
            personal, shared, local = copies.values()
            assert not torch.allclose(personal, shared)
            assert not torch.allclose(personal, local)
            assert not torch.allclose(local, shared)


def test_clients_of_any_size_count_alike() -> None:
    update = Update((0, 1), {"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([1, 100]))
    server: Tree = {"w": torch.tensor([2.0])}
    assert pfedme.aggregate(Config(beta=1.0), server, update)["w"].tolist() == [3.0]
    assert pfedme.aggregate(Config(beta=2.0), server, update)["w"].tolist() == [4.0]
    assert server["w"].tolist() == [2.0]


def test_every_inner_step_is_counted(task: Quadratics) -> None:
    """Examples are points that went through a gradient: R K min(n, b) a client."""
    method = pfedme.build(replace(CONVERGED, inner_steps=4), task.model)
    clients = run(method, task.data, 0, steps=3, batch=32).clients
    _, _, examples = clients.train(0, [run(method, task.data, 0).server], [range(3)])
    assert examples.tolist() == [3 * 4 * (16 + 32 + 32)]


def test_a_beta_of_zero_freezes_nothing_because_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"beta is 0\.0; it must be above 0"):
        resolve(None, {"method": "pfedme"}, ["beta=0"])
    assert resolve(None, {"method": "pfedme"}, ["beta=2"]).settings == Config(beta=2.0)


def test_inner_steps_that_must_diverge_are_refused(task: Quadratics) -> None:
    with pytest.raises(UserError, match="their product must be below 2, so take personal_rate"):
        resolve(None, {"method": "pfedme"}, ["penalty=50", "personal_rate=0.05"])
    resolve(None, {"method": "pfedme"}, ["penalty=39", "personal_rate=0.05"])
    # And they do: with rate lambda = 2.1 a start a little off w gets farther away from it.
    flat = task.whole._replace(scale=torch.zeros_like(task.whole.scale))
    w = anywhere(1)
    theta = w + 1e-3
    config = Config(penalty=3.0, personal_rate=0.7, inner_steps=10)
    pfedme.approach(config, task.model, theta, w, flat)
    torch.testing.assert_close(theta - w, torch.full_like(w, 1e-3 * 1.1**10))
