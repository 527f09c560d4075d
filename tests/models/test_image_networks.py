"""The residual network, and those of published benchmarks, held to modules of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from corefed.base.errors import UserError
from corefed.base.types import Work
from corefed.models import cnn as convolutional
from corefed.models import network
from corefed.models.cnn import published
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.network import Model
from corefed.models.resnet import Residual, resnet
from corefed.settings.config import resolve
from corefed.training import local, variants
from corefed.training.compiled import Steps
from corefed.training.setup import concrete, prepare

EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""Sums of some thousand products of numbers around 1 in float64, where one rounding is 1e-16."""

CLASSES, POINTS = 3, 4


class Pair(NamedTuple):
    """A network both ways."""

    shape: tuple[int, int, int]
    flat: Callable[[Likelihood], Model]
    module: Callable[[int], nn.Module]


def _residual(shape: tuple[int, int, int], channels: tuple[int, ...]) -> Pair:
    return Pair(
        shape,
        lambda likelihood: resnet(shape, channels, likelihood),
        lambda outputs: Residual(shape, channels, outputs),
    )


def _valid(shape: tuple[int, int, int], sizes: tuple[int, ...], flat: int) -> nn.Sequential:
    """Convolutions without padding, ReLU before pooling, as they are usually written."""
    first, second, *hidden, outputs = sizes
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    ]  # fmt: skip
    for width in hidden:
        layers += [nn.Linear(flat, width), nn.ReLU()]
        flat = width
    return nn.Sequential(*layers, nn.Linear(flat, outputs))


PAIRS = {
    "residual": _residual((3, 8, 8), (4, 6)),
    "residual, odd sizes": _residual((2, 11, 9), (3, 3, 5)),
    "residual, groups of several channels": _residual((1, 8, 8), (16,)),
    "pfllib": Pair(
        (1, 16, 16),
        lambda likelihood: published("cnn-pfllib", (1, 16, 16), likelihood),
        lambda outputs: _valid((1, 16, 16), (32, 64, 512, outputs), 64),
    ),
    "niid": Pair(
        (3, 18, 20),
        lambda likelihood: published("cnn-niid", (3, 18, 20), likelihood),
        lambda outputs: _valid((3, 18, 20), (6, 16, 120, 84, outputs), 16 * 1 * 2),
    ),
}
SMALL = [name for name in PAIRS if name != "pfllib"]

every_network = pytest.mark.parametrize("name", PAIRS)
small_networks = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(params=["one by one", "grouped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of convolving, whatever the device would choose."""
    chosen = frozenset({"cpu"}) if request.param == "one by one" else frozenset()
    monkeypatch.setattr(network, "IN_TURN", chosen)
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def called(reference: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """functional_call for each client and draw on its own."""
    named = [(name, p.shape, p.numel()) for name, p in reference.named_parameters()]
    outputs = []
    for c in range(theta.shape[0]):
        for one in theta[c]:
            parts = one.split([numel for *_, numel in named])
            weights = {n: p.view(shape) for (n, shape, _), p in zip(named, parts, strict=True)}
            outputs.append(functional_call(reference, weights, (x[c],)))
    return torch.stack(outputs).unflatten(0, theta.shape[:2])


@every_network
@pytest.mark.parametrize(("clients", "draws"), [(1, 1), (3, 1), (2, 3)])
def test_values_and_gradients_of_an_nn_module(
    name: str, clients: int, draws: int, way: str
) -> None:
    pair = PAIRS[name]
    model, reference = pair.flat(Categorical(CLASSES)), pair.module(CLASSES).double()
    assert model.size == sum(p.numel() for p in reference.parameters())
    x = normal(clients, POINTS, *pair.shape, seed=1)
    direction = normal(clients, draws, POINTS, CLASSES, seed=2)
    found, expected = [], []
    for results, f in ((found, model.forward), (expected, lambda t, x: called(reference, t, x))):
        theta = normal(clients, draws, model.size).requires_grad_()
        output = f(theta, x)
        assert output.shape == (clients, draws, POINTS, CLASSES)
        results += [output.detach(), *torch.autograd.grad((output * direction).sum(), theta)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * theirs.abs().max().item())


@small_networks
def test_gradients_are_slopes(name: str, way: str) -> None:
    """Central differences along random directions."""
    pair = PAIRS[name]
    model = pair.flat(Categorical(CLASSES))
    x, y = normal(2, POINTS, *pair.shape, seed=1), torch.tensor([[0, 1, 2, 0], [1, 1, 2, 0]])
    start = 0.3 * normal(2, 2, model.size)

    def value(theta: Tensor) -> Tensor:
        return model.log_likelihood(theta, x, y).sum()

    theta = start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(theta), theta)
    step = 1e-8  # rounding 1e-15 / 1e-8; a longer step meets kinks of ReLU and pooling
    for seed in range(3):
        along = normal(2, 2, model.size, seed=10 + seed)
        gap = (value(start + step * along) - value(start - step * along)) / (2 * step)
        expected = (slope * along).sum()
        assert abs(gap - expected) < 1e-4 * slope.norm() * along.norm() / along.numel() ** 0.5


@small_networks
def test_blocks_of_points_change_nothing(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = PAIRS[name]
    model = pair.flat(Categorical(CLASSES))
    theta, x = 0.3 * normal(2, 3, model.size), normal(2, 7, *pair.shape, seed=1)
    whole = model.forward(theta, x)
    for points in (1, 3):
        monkeypatch.setattr(network, "BLOCK_ONE", points * model.activation)
        monkeypatch.setattr(convolutional, "BLOCK_ALL", 6 * points * model.activation)
        torch.testing.assert_close(model.forward(theta, x), whole, **EXACT)


@small_networks
def test_features_and_head_make_up_the_network(name: str, way: str) -> None:
    pair = PAIRS[name]
    model = pair.flat(Gaussian(2, 0.5, learn_noise=True))
    assert model.head is not None
    theta, x = 0.3 * normal(2, 3, model.size), normal(2, POINTS, *pair.shape, seed=1)
    features = model.head.features(theta, x)
    assert features.shape == (2, 3, POINTS, model.head.width)
    weight = theta[..., model.head.weight].unflatten(-1, (2, model.head.width))
    bias = theta[..., model.head.bias].unsqueeze(2)
    torch.testing.assert_close(features @ weight.mT + bias, model.forward(theta, x), **EXACT)
    flat = model.forward(theta, x.flatten(2))
    assert torch.equal(flat, model.forward(theta, x))


@pytest.mark.parametrize("name", ["residual", "niid"])
def test_directional_derivatives_under_vmap(name: str, way: str) -> None:
    """As the KL rows of a selection take them: many tangents at once through jvp."""
    pair = PAIRS[name]
    model = pair.flat(Categorical(CLASSES))
    theta, x = 0.3 * normal(2, 2, model.size), normal(2, POINTS, *pair.shape, seed=1)
    tangents = normal(3, 2, 2, model.size, seed=2)

    def along(tangent: Tensor) -> Tensor:
        return jvp(lambda t: model.forward(t, x), (theta,), (tangent,))[1]

    found = vmap(along)(tangents)
    torch.testing.assert_close(found, torch.stack([along(t) for t in tangents]), **EXACT)


def test_sizes_of_the_networks() -> None:
    grey, colour = (1, 28, 28), (3, 32, 32)
    likelihood = Categorical(10)
    # PFLlib's: 832 + 51264 + (1024 or 1600) * 512 + 512 + 5130.
    assert published("cnn-pfllib", grey, likelihood).size == 582_026
    assert published("cnn-pfllib", colour, likelihood).size == 878_538
    assert published("cnn-niid", colour, likelihood).size == 62_006
    assert 100_000 < resnet(colour, (32, 64, 64), likelihood).size < 300_000


def test_the_residual_network_starts_well() -> None:
    model = resnet((3, 32, 32), (32, 64, 64), Gaussian(10, 0.5, learn_noise=True))
    mu = model.init(torch.Generator().manual_seed(0), 0.1)
    stem = mu[: 27 * 32]
    spread = math.sqrt(2 / 27)
    assert abs(stem.std() - spread) < 5 * spread / math.sqrt(2 * len(stem))  # 5 standard errors
    gains, offsets = mu[27 * 32 :][:32], mu[27 * 32 :][32:64]
    assert (gains == 1).all()
    assert (offsets == 0).all()
    assert mu[-1].item() == pytest.approx(math.log(0.5))
    x = torch.rand(1, 20, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    outputs = model.forward(mu.view(1, 1, -1), x)
    assert 0.1 < outputs.std() < 10
    doubled = model.init(torch.Generator().manual_seed(0), 0.2)
    torch.testing.assert_close(doubled[: 27 * 32], 2 * stem)
    assert (doubled[27 * 32 :][:32] == 1).all()  # a gain is no weight


def test_scales_by_layer() -> None:
    """sqrt(100 / inputs) for kernels of more than 100 inputs; gains and offsets keep 1."""
    model = resnet((3, 16, 16), (16, 32), Categorical(10))
    scale = model.scale()
    assert scale is not None
    assert scale.shape == (model.size,)
    first = 27 * 16
    assert (scale[: first + 32] == 1).all()  # 27 inputs, then a gain and an offset
    assert scale[first + 32].item() == pytest.approx((100 / 144) ** 0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: resnet((1, 7, 28), (4,), Categorical(2)), "7 x 28 pixels are too small"),
        (lambda: resnet((1, 8, 8), (), Categorical(2)), "channels of at least 1"),
        (lambda: published("cnn-niid", (1, 8, 8), Categorical(2)), "too small for cnn-niid"),
    ],
)
def test_networks_that_cannot_be(make: Callable[[], Model], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_names_on_the_command_line() -> None:
    for model in ("resnet", "cnn-pfllib", "cnn-niid"):
        run = concrete(resolve(flags={"data": "mnist", "model": model})).run
        assert (run.model, run.scale) == (model, "standard")
    with pytest.raises(UserError, match="needs images"):
        prepare(resolve(flags={"data": "synthetic-linear", "model": "resnet", "device": "cpu"}))


@pytest.mark.parametrize("method", ["pfedbayes", "coreset-pfedbayes"])
def test_traced_steps_are_the_steps(method: str, way: str) -> None:
    """What a GPU replays: the step as a graph of operations, here without a GPU."""
    flags: dict[str, Any] = {
        "method": method, "clients": 2, "model": "resnet", "channels": "4,6", "device": "cpu",
        "local_steps": 2, "batch_size": 8, "monte_carlo": 2,
    }  # fmt: skip
    after = []
    for traced in (False, True):
        setup = prepare(resolve(flags=flags))
        if traced:
            run = setup.experiment.run
            at = variants.step_settings(run, [setup.experiment.settings], setup.model)
            steps = Steps(Work(run.local_steps, run.batch_size), fuse=False)
            setup.clients.compiled = local.Compiled(steps, at)
        updates, loss, _ = setup.clients.train(0, setup.servers, [[0, 1]])
        if traced:
            assert not steps.given_up
        after.append((loss, updates[0].message))
    assert after[0][0].isfinite().all()
    torch.testing.assert_close(after[1], after[0], rtol=1e-4, atol=1e-5)
