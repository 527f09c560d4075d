"""Per-FedAvg: the meta-gradient on quadratics and networks, and what makes a model personal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from quadratics import EXACT, Quadratics, quadratics, run, settled, times
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData, Update
from corefed.bayes import elbo
from corefed.bayes.batches import batches, parts
from corefed.methods import per_fedavg
from corefed.methods.per_fedavg import Config, adapt, full_gradient, hessian_times, meta_gradient
from corefed.models.likelihood import Categorical
from corefed.models.network import Model, mlp
from corefed.training.evaluate import evaluate

ALPHA = 0.2
HF = Config(variant="hf", alpha=ALPHA, beta=0.5)
FO = replace(HF, variant="fo")
IDENTITY = torch.eye(4, dtype=torch.float64)


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def anywhere(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three_batches() -> tuple[list[Batch], list[Quadratics]]:
    """D, D', D'' with Hessians and minima of their own."""
    each = [quadratics(seed=seed) for seed in (0, 5, 6)]
    return [one.whole for one in each], each


# The meta-gradient


def test_on_quadratics_it_is_exact(task: Quadratics) -> None:
    """(I - alpha H'') H' (w - alpha H (w - a) - a'); first-order leaves the first factor out."""
    w = anywhere(3, 4)
    minibatches, (one, two, three) = three_batches()
    outer = two.slope(w - ALPHA * one.slope(w))
    for delta in (1e-4, 1.0, 30.0):  # a quadratic has no third derivative: any distance will do
        config = replace(HF, delta=delta)
        _, found = meta_gradient(config, task.model, w, minibatches)
        expected = outer - ALPHA * times(three.hessian, outer)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    loss, found = meta_gradient(FO, task.model, w, minibatches[:2])
    torch.testing.assert_close(found, outer, **EXACT)
    assert (ALPHA * times(three.hessian, outer)).abs().max() > 0.1  # what was left out
    at_adapted = per_fedavg.gradient(task.model, w - ALPHA * one.slope(w), minibatches[1])[0]
    torch.testing.assert_close(loss, at_adapted)


def test_with_one_batch_it_is_the_gradient_of_the_loss_after_a_step(task: Quadratics) -> None:
    """Autograd through the step, on a smooth model that is no quadratic: softmax regression."""
    model = mlp((3, 4), Categorical(4))
    x, y = anywhere(2, 9, 3), torch.arange(18).reshape(2, 9) % 4
    batch = Batch(x, y, torch.full((2, 9), 1 / 9, dtype=torch.float64))
    w = anywhere(2, model.size, seed=2).requires_grad_()
    loss = elbo.weighted_nll(model, w.unsqueeze(1), batch).sum()
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    after = elbo.weighted_nll(model, (w - ALPHA * slope).unsqueeze(1), batch)
    (expected,) = torch.autograd.grad(after.sum(), w)
    errors = []
    for delta in (0.4, 0.2, 0.1):
        config = replace(HF, delta=delta)
        value, found = meta_gradient(config, model, w.detach(), [batch] * 3)
        torch.testing.assert_close(value, after.detach())
        errors.append((found - expected).norm().item())
    # The error is of second order: half the distance, a quarter of the error.
    assert errors[1] / errors[0] == pytest.approx(1 / 4, rel=0.02)
    assert errors[2] / errors[1] == pytest.approx(1 / 4, rel=0.02)
    assert errors[2] < 1e-4 * expected.norm().item()


class Network:
    """A ReLU network with three clients of 400 points, and where its training would start."""

    def __init__(self) -> None:
        self.model: Model = mlp((6, 20, 3), Categorical(3))
        x = anywhere(3, 400, 6)
        y = (x[..., :2].sum(-1) > 0).long() + (x[..., 2] > 1).long()
        self.data = ClientData(x, y, torch.ones(3, 400, dtype=torch.float64))
        self.w = 0.5 * anywhere(3, self.model.size, seed=2)

    def minibatches(self, count: int, size: int = 20) -> list[Batch]:
        streams = Streams([Who(0, c) for c in range(3)], 0)
        return list(batches(self.data, self.data.weight, streams, count, size))


def exact_product(model: Model, w: Tensor, g: Tensor, batch: Batch) -> Tensor:
    """Hessian times g by differentiating twice."""
    w = w.detach().requires_grad_()
    loss = elbo.weighted_nll(model, w.unsqueeze(1), batch).sum()
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    (product,) = torch.autograd.grad((slope * g).sum(), w)
    return product


def test_the_exact_variant_is_the_gradient_of_the_loss_after_a_step() -> None:
    """Autograd through the step, on a ReLU network; with one batch for all three."""
    network = Network()
    (batch,) = network.minibatches(1)
    w = network.w.clone().requires_grad_()
    loss = elbo.weighted_nll(network.model, w.unsqueeze(1), batch).sum()
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    after = elbo.weighted_nll(network.model, (w - ALPHA * slope).unsqueeze(1), batch)
    (expected,) = torch.autograd.grad(after.sum(), w)
    config = replace(HF, variant="exact")
    value, found = meta_gradient(config, network.model, network.w, [batch] * 3)
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(value, after.detach(), **EXACT)
    # Clipped, it has the same direction: each client's own length counts.
    lengths = found.norm(dim=-1)
    clip = float(lengths.sort().values[:2].mean())
    _, short = meta_gradient(replace(config, clip=clip), network.model, network.w, [batch] * 3)
    torch.testing.assert_close(short.norm(dim=-1), lengths.clamp_max(clip), **EXACT)
    torch.testing.assert_close(
        short * (lengths / lengths.clamp_max(clip)).unsqueeze(-1), found, **EXACT
    )


def test_differences_of_gradients_are_the_second_derivative() -> None:
    """On a ReLU network, at a distance that no unit's switch lies within; in float64.

    Of the digits of a gradient, 2e-16, subtraction leaves 2e-16 / r at best: 1e-8 of the product.
    """
    network = Network()
    batch, other = network.minibatches(2)
    _, g = per_fedavg.gradient(network.model, network.w, other)
    expected = exact_product(network.model, network.w, g, batch)
    found = hessian_times(network.model, network.w, g, batch, r=1e-7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert expected.norm() > 0.1 * g.norm()


def test_the_distance_of_one_step_is_a_good_one() -> None:
    """Minibatch products in float32 against those of all data, over distances delta alpha.

    Nearer by, jumps of ReLU units are divided by a small r; farther away the third derivative
    counts. A network of 20 units and batches of 20 points have few jumps: 10 is the best here.
    """
    network, alpha = Network(), 0.02
    whole = Batch(network.data.x, network.data.y, network.data.weight / 400)
    minibatches = network.minibatches(150)
    single = [Batch(b.x.float(), b.y, b.scale.float()) for b in minibatches]
    w = network.w.float()
    deltas = (0.01, 0.1, 1.0, 10.0, 300.0)
    squares, largest = dict.fromkeys(deltas, 0.0), {}
    for last in minibatches[:2]:  # in the directions of two minibatches
        _, g = per_fedavg.gradient(network.model, network.w, last)
        # All data, over a distance that many jumps lie within: that of the mean gradient.
        truth = hessian_times(network.model, network.w, g, whole, r=alpha)
        direction = g.float()
        for delta in deltas:
            r = delta * alpha
            stacked = torch.stack(
                [hessian_times(network.model, w, direction, b, r) for b in single]
            )
            squares[delta] += (stacked - truth).square().sum(-1).mean().item()
            largest[delta] = alpha * stacked.norm(dim=-1).max().item()
    errors = {delta: square**0.5 for delta, square in squares.items()}
    assert min(errors.values()) > 0.6 * errors[1.0], errors
    assert errors[0.01] > 10 * errors[1.0], errors
    assert errors[300.0] > 1.2 * errors[10.0], errors
    # At delta = 1 the correction is half a difference of gradients, and no larger than they are.
    size = max(
        per_fedavg.gradient(network.model, w + sign * alpha * direction, b)[1].norm(dim=-1).max()
        for b in single
        for sign in (-1, 1)
    )
    assert largest[1.0] <= size
    assert largest[0.01] > size  # the gradients that it corrects are no match for it


def test_a_gradient_of_zero_stays_finite(task: Quadratics) -> None:
    """At a minimum, and for a client without points."""
    nothing = task.whole._replace(scale=torch.zeros_like(task.whole.scale))
    for w, batch in ((task.optimum, task.whole), (anywhere(3, 4), nothing)):
        _, found = meta_gradient(HF, task.model, w, [batch] * 3)
        torch.testing.assert_close(found, torch.zeros_like(found), **EXACT)


# The federation


@pytest.mark.parametrize("config", [HF, FO], ids=["hf", "fo"])
def test_where_the_federation_settles(task: Quadratics, config: Config) -> None:
    """hf: the minimum of mean_i f_i(w - alpha grad f_i(w)); fo: elsewhere. Clients count alike."""
    method = per_fedavg.build(config, task.model)
    step = IDENTITY - ALPHA * task.hessian
    weights = task.hessian @ step
    if config.variant == "hf":
        weights = step @ weights
    found = run(method, task.data, 150).server["w"]
    torch.testing.assert_close(found, settled(weights, task.optimum), **EXACT)
    if config.variant == "hf":
        w = found.clone().requires_grad_()
        away = times(step, w - task.optimum)  # f_i after the step, up to a constant
        (slope,) = torch.autograd.grad((away * times(task.hessian, away)).sum() / 6, w)
        torch.testing.assert_close(slope, torch.zeros_like(slope), **EXACT)
        assert (found - settled(task.hessian @ step, task.optimum)).abs().max() > 0.01


def test_clients_of_any_size_count_alike() -> None:
    update = Update((0, 1), {"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([1, 100]))
    assert per_fedavg.aggregate({"w": torch.tensor([9.0])}, update)["w"].tolist() == [3.0]


def test_minibatches_of_a_step_are_different_points() -> None:
    """D, D' and D'' of a step share no point of a client's epoch; each has its own factors."""
    network = Network()
    data = network.data._replace(y=torch.arange(400).expand(3, -1))
    method = per_fedavg.build(HF, network.model)
    assert method.traits.batches == 3
    streams = Streams([Who(0, c) for c in range(3)], 0)
    for batch in batches(data, data.weight, streams, 5, 20, method.traits.batches):
        split = parts(batch, method.traits.batches)
        assert [b.y.shape for b in split] == [(3, 20)] * 3
        for client in range(3):
            drawn = torch.cat([b.y[client] for b in split]).tolist()
            assert len(set(drawn)) == 60
        assert all(torch.allclose(b.scale, torch.tensor(1 / 20).to(b.scale)) for b in split)


@pytest.mark.parametrize(("config", "gradients"), [(HF, 4), (FO, 2)], ids=["hf", "fo"])
def test_every_gradient_is_counted(task: Quadratics, config: Config, gradients: int) -> None:
    method = per_fedavg.build(config, task.model)
    clients = run(method, task.data, 0, steps=3, batch=32).clients
    _, _, examples = clients.train(0, [run(method, task.data, 0).server], [range(3)])
    assert examples.tolist() == [3 * gradients * (16 + 32 + 32)]


# The personal model


@pytest.mark.parametrize("steps", [1, 3])
def test_a_personal_model_is_steps_from_the_broadcast(task: Quadratics, steps: int) -> None:
    """w - a shrinks by I - alpha H with each: from the server's w now, not from the client's."""
    config = replace(HF, adapt_steps=steps)
    method = per_fedavg.build(config, task.model)
    ended = run(method, task.data, 3)
    broadcast = {"w": ended.server["w"].expand(3, -1)}
    models = method.models(broadcast, ended.clients.private, task.data)
    step = torch.linalg.matrix_power(IDENTITY - ALPHA * task.hessian, steps)
    expected = task.optimum + times(step, broadcast["w"] - task.optimum)
    torch.testing.assert_close(models["personal"]["w"], expected, **EXACT)
    assert torch.equal(models["global"]["w"], broadcast["w"])
    assert torch.equal(models["localized"]["w"], ended.clients.private["w"])
    assert not torch.allclose(models["localized"]["w"], broadcast["w"])


@pytest.mark.parametrize("points", [1, 7, 512])
def test_the_full_gradient_in_parts(task: Quadratics, points: int) -> None:
    """Clients of different sizes, padded: what lies behind a client's last point adds nothing."""
    w = anywhere(3, 4)
    spoilt = task.data.x.masked_fill((task.data.weight == 0).unsqueeze(-1), 1e6)
    found = full_gradient(task.model, w, task.data._replace(x=spoilt), points)
    torch.testing.assert_close(found, task.slope(w), **EXACT)


def test_full_batches_follow_the_weights(task: Quadratics) -> None:
    """A weight of 2 is a point twice, by the number of points that there are."""
    doubled = task.data._replace(weight=2 * task.data.weight)
    w = anywhere(3, 4)
    torch.testing.assert_close(full_gradient(task.model, w, doubled), 2 * task.slope(w), **EXACT)


def test_adaptation_sees_training_data_alone() -> None:
    """Other test data leave the personal model as it was; other training data do not."""
    network = Network()
    seen: list[Tensor] = []
    method = per_fedavg.build(HF, network.model)

    def predict(tree: dict[str, Tensor], x: Tensor, noise: Tensor) -> Tensor:
        seen.append(tree["w"].clone())
        return method.predict(tree, x, noise)

    watched: Any = method._replace(predict=predict)
    ended = run(watched, network.data, 1, batch=50)
    other = network.data._replace(x=network.data.x.flip(1))

    def personal(test: ClientData) -> Tensor:
        seen.clear()
        evaluate(ended.clients, watched, [ended.server], test, 0, draws=5, classes=3)
        return seen[0]

    first = personal(network.data)
    torch.testing.assert_close(first, adapt(HF, network.model, seen[1], network.data))
    assert torch.equal(personal(other), first)
    ended.clients.data = other
    assert not torch.allclose(personal(network.data), first)
