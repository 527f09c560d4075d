"""The convolutional network, held to an nn.Module of the same layers, and in a federation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from method_rows import (
    PAPER_CUDA,
    SINGLE_CUDA,
    SMALL,
    TIGHT,
    assert_same,
    cuda,
    on,
    proper_float32,
    run,
)
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Method
from corefed.bayes.predict import predictive
from corefed.methods import registry
from corefed.models import cnn as module
from corefed.models import network as networks
from corefed.models.cnn import cnn, image_shape
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.network import Model
from corefed.selectors.potentials import draw
from corefed.settings.config import resolve
from corefed.settings.fields import from_flat, list_settings
from corefed.training.local import chunk_for
from corefed.training.setup import concrete, prepare

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""Sums of some hundred products of numbers around 1 in float64, where one rounding is 1e-16."""

NETWORKS: dict[str, tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...]]] = {
    "grey": ((1, 8, 8), (3,), (5,)),
    "colour": ((3, 8, 8), (4, 2), (6, 5)),
    "odd sizes": ((2, 11, 9), (2, 3, 2), (4,)),
    "deeper than the image": ((1, 8, 8), (2, 2, 3, 2, 2), ()),  # 8, 4, 2, 1, 1 pixels
}
CLASSES, POINTS = 3, 5

every_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(params=["one by one", "grouped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of convolving, whatever the device would choose."""
    chosen = frozenset({"cpu"}) if request.param == "one by one" else frozenset()
    monkeypatch.setattr(networks, "IN_TURN", chosen)
    return str(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def network(name: str, likelihood: Likelihood | None = None) -> Model:
    return cnn(*NETWORKS[name], likelihood or Categorical(CLASSES))


def sequential(name: str, outputs: int = CLASSES) -> nn.Sequential:
    """The same layers, with ReLU before pooling, as they are usually written."""
    (fan_in, *size), channels, hidden = NETWORKS[name]
    layers: list[nn.Module] = []
    for fan_out in channels:
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU()]
        if min(size) > 1:
            layers.append(nn.MaxPool2d(2))
            size = [side // 2 for side in size]
        fan_in = fan_out
    layers.append(nn.Flatten())
    fan_in *= math.prod(size)
    for width in hidden:
        layers += [nn.Linear(fan_in, width), nn.ReLU()]
        fan_in = width
    return nn.Sequential(*layers, nn.Linear(fan_in, outputs)).double()


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


# The network


@every_network
@pytest.mark.parametrize(("clients", "draws"), [(1, 1), (1, 3), (3, 1), (2, 4)])
def test_values_and_gradients_of_an_nn_module(
    name: str, clients: int, draws: int, way: str
) -> None:
    model, reference = network(name), sequential(name)
    assert model.size == sum(p.numel() for p in reference.parameters())
    x = normal(clients, POINTS, *NETWORKS[name][0], seed=1)
    direction = normal(clients, draws, POINTS, CLASSES, seed=2)
    found, expected = [], []
    for results, f in ((found, model.forward), (expected, lambda t, x: called(reference, t, x))):
        theta = normal(clients, draws, model.size).requires_grad_()
        output = f(theta, x)
        assert output.shape == (clients, draws, POINTS, CLASSES)
        results += [output.detach(), *torch.autograd.grad((output * direction).sum(), theta)]
    torch.testing.assert_close(found, expected, **EXACT)


@every_network
def test_blocks_of_points_change_nothing(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(name)
    theta, x = normal(2, 3, model.size), normal(2, 7, *NETWORKS[name][0], seed=1)
    whole = model.forward(theta, x)
    for points in (1, 3):
        monkeypatch.setattr(networks, "BLOCK_ONE", points * model.activation)
        monkeypatch.setattr(module, "BLOCK_ALL", 6 * points * model.activation)
        torch.testing.assert_close(model.forward(theta, x), whole, **EXACT)


def test_memory_is_bounded_without_gradients(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of an evaluation and of a selection never hold more than a block."""
    model = network("colour")
    shape = NETWORKS["colour"][0]
    monkeypatch.setattr(networks, "BLOCK_ONE", 4 * model.activation)
    monkeypatch.setattr(module, "BLOCK_ALL", 24 * model.activation)
    seen: list[tuple[int, int]] = []
    chosen = "grouped" if way == "grouped" else "one_by_one"
    original = getattr(module, chosen)

    def recorded(layers: list[module.Layer], parts: list[Tensor], images: Tensor) -> Tensor:
        seen.append((math.prod(parts[0].shape[:2]), images.shape[1]))
        output: Tensor = original(layers, parts, images)
        return output

    monkeypatch.setattr(module, chosen, recorded)
    x, y = normal(2, 30, *shape), torch.zeros(2, 30, dtype=torch.int64)
    v, noise = normal(2, 2, model.size), normal(2, 3, model.size)
    predictive(model, v, x, noise)
    data, streams = ClientData(x, y, torch.ones(2, 30).double()), Streams([Who(0, 0), Who(0, 1)], 0)
    draw(model, v, data, 12, streams, "test", feature_draws=3)
    assert len(seen) > 2
    assert all(points <= 4 for _, points in seen)
    assert {networks for networks, _ in seen} == {6}
    seen.clear()
    model.forward(theta := v.requires_grad_(), x)  # back-propagation keeps all of it anyway
    assert seen == [(4, 30)]
    assert theta.requires_grad


@every_network
@pytest.mark.parametrize("learn_noise", [False, True])
def test_features_and_head_make_up_the_network(name: str, learn_noise: bool, way: str) -> None:
    model = network(name, Gaussian(2, 0.5, learn_noise))
    assert model.size == sum(p.numel() for p in sequential(name, 2).parameters()) + learn_noise
    assert model.head is not None
    theta, x = normal(2, 3, model.size), normal(2, POINTS, *NETWORKS[name][0], seed=1)
    features = model.head.features(theta, x)
    assert features.shape == (2, 3, POINTS, model.head.width)
    weight = theta[..., model.head.weight].unflatten(-1, (2, model.head.width))
    bias = theta[..., model.head.bias].unsqueeze(2)
    torch.testing.assert_close(features @ weight.mT + bias, model.forward(theta, x), **EXACT)
    y = normal(2, POINTS, 2, seed=3)
    assert model.log_likelihood(theta, x, y).shape == (2, 3, POINTS)


def test_flat_points_are_folded_up() -> None:
    model = network("grey")
    theta, x = normal(2, 3, model.size), normal(2, POINTS, 1, 8, 8, seed=1)
    assert torch.equal(model.forward(theta, x.flatten(2)), model.forward(theta, x))


@every_network
def test_directional_derivatives_under_vmap(name: str, way: str) -> None:
    """As the KL rows of a selection take them: many tangents at once through jvp."""
    model = network(name)
    theta, x = normal(2, 2, model.size), normal(2, POINTS, *NETWORKS[name][0], seed=1)
    tangents = normal(3, 2, 2, model.size, seed=2)

    def along(tangent: Tensor) -> Tensor:
        return jvp(lambda t: model.forward(t, x), (theta,), (tangent,))[1]

    step = 1e-6  # of central differences: truncation 1e-12, rounding 1e-16 / 1e-6, times the slopes
    ahead, behind = (model.forward(theta + s * tangents[1], x) for s in (step, -step))
    found = vmap(along)(tangents)
    torch.testing.assert_close(found[1], (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.stack([along(t) for t in tangents]), **EXACT)


def test_initial_weights_follow_the_fan_in() -> None:
    model = cnn((3, 16, 16), (32, 64), (100,), Gaussian(10, 0.5, learn_noise=True))
    g = torch.Generator().manual_seed(0)
    mu = model.init(g, 0.1)
    assert mu.shape == (model.size,)
    fans = [(27, 32), (9 * 32, 64), (64 * 16, 100), (100, 10)]
    start = 0
    for fan_in, fan_out in fans:
        weights = mu[start : start + fan_in * fan_out]
        spread = math.sqrt(2 / fan_in)
        # The standard error of a standard deviation is s / sqrt(2 m); 5 of them.
        assert abs(weights.std() - spread) < 5 * spread / math.sqrt(2 * len(weights))
        start += fan_in * fan_out + fan_out
        assert (mu[start - fan_out : start] == 0).all()
    assert mu[start:].tolist() == pytest.approx([math.log(0.5)])
    doubled = model.init(torch.Generator().manual_seed(0), 0.2)
    torch.testing.assert_close(doubled[:-1], 2 * mu[:-1])
    assert doubled[-1] == mu[-1]


def test_signals_neither_grow_nor_vanish() -> None:
    """He's argument: features keep about the size of the pixels through every layer."""
    model = cnn((3, 32, 32), (32, 64, 64), (100,), Categorical(10))
    theta = model.init(torch.Generator().manual_seed(0), 0.1).view(1, 1, -1)
    x = torch.rand(1, 20, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert 0.1 < model.forward(theta, x).std() < 10
    assert model.size == 896 + 18496 + 36928 + 102500 + 1010


# What it is built for


def test_shape_of_an_image() -> None:
    assert image_shape((3, 32, 40), "x") == (3, 32, 40)
    assert image_shape((784,), "mnist") == (1, 28, 28)
    for point in ((10,), (4, 16), (2, 2, 2, 2)):
        with pytest.raises(UserError, match=r"needs images; a point of table has .* Use model=mlp"):
            image_shape(point, "table")


@pytest.mark.parametrize(
    ("shape", "channels", "words"),
    [((1, 7, 28), (4,), "7 x 28 pixels are too small"), ((1, 8, 8), (), "channels of at least 1"),
     ((1, 8, 8), (4, 0), "channels of at least 1")],
)  # fmt: skip
def test_networks_that_cannot_be(
    shape: tuple[int, int, int], channels: tuple[int, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        cnn(shape, channels, (5,), Categorical(2))


def test_the_record_says_which_network_and_scale() -> None:
    chosen = {"cifar10": "cnn", "digits": "mlp", "mnist": "mlp", "synthetic-linear": "mlp"}
    for data, model in chosen.items():
        run = concrete(resolve(flags={"data": data})).run
        assert (run.model, run.scale) == (model, "standard" if model == "cnn" else "unit")
    asked = resolve(flags={"data": "cifar10", "model": "mlp"})
    assert concrete(asked).run.model == "mlp"
    assert concrete(asked).run.scale == "unit"
    asked = resolve(flags={"data": "cifar10", "scale": "unit"})
    assert concrete(asked).run.scale == "unit"


@pytest.mark.parametrize("value", ["", "0", "4,-1", "4.5"])
def test_channels_that_are_none(value: str) -> None:
    with pytest.raises(UserError, match="channels"):
        resolve(assignments=[f"channels={value}"])


def test_a_run_on_flat_images() -> None:
    """digits are rows of 64 features, which a convolutional network folds up to 8 x 8."""
    flags = {"method": "fedavg", "clients": 2, "model": "cnn", "device": "cpu", "channels": "4,6"}
    setup = prepare(resolve(flags=flags))
    # Two poolings leave 2 x 2 pixels of 6 channels; then 100 hidden units.
    assert setup.model.size == (9 * 4 + 4) + (9 * 4 * 6 + 6) + (24 * 100 + 100) + 1010
    assert setup.clients.chunk == 2
    _, loss, _ = setup.clients.train(0, setup.servers, [[0, 1]])
    assert loss.isfinite().all()


def test_tables_have_no_images() -> None:
    flags = {"data": "synthetic-linear", "model": "cnn", "device": "cpu"}
    with pytest.raises(UserError, match="needs images"):
        prepare(resolve(flags=flags))


def test_chunks_leave_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ClientData(torch.zeros(8, 1, 1), torch.zeros(8, 1), torch.ones(8, 1))
    server = {"v": torch.zeros(2, 10)}
    assert chunk_for(server, data, 1) == 8
    assert chunk_for(server, data, 4096, 1 << 18) == 7  # 8 MiB of cache, 1 MiB and 80 B a client
    assert chunk_for(server, data, 4, 1 << 18) == 3  # 5/4 MiB each on the way back
    assert chunk_for(server, data, 1, 1 << 30) == 1


# In a federation


def images(dtype: torch.dtype = torch.float64) -> ClientData:
    """Unequal clients, one with a single point."""
    sizes = torch.tensor([9, 20, 1])
    weight = (torch.arange(20) < sizes.unsqueeze(-1)).to(dtype)
    y = torch.arange(20).remainder(CLASSES).expand(3, -1) * weight.long()
    shift = y.view(3, 20, 1, 1, 1)
    x = (normal(3, 20, 2, 8, 8) + shift).to(dtype) * weight.view(3, 20, 1, 1, 1)
    return ClientData(x, y, weight)


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("pfedbayes", {"monte_carlo": 2}),
    ("random-subset", {"redraw_every": 2}),
    ("coreset-pfedbayes", {"check_every": 2, "refresh_every": 3}),
    ("coreset-pfedbayes", {"preset": "paper", "kl_weight": 1.0}),
]


every_method = pytest.mark.parametrize(("name", "settings"), METHODS)


def build(name: str, settings: dict[str, Any]) -> Method:
    config = registry.config_class(name)
    fields = {each.name for each in list_settings(config)}
    small = {key: value for key, value in SMALL.items() if key in fields}
    model = cnn((2, 8, 8), (3, 2), (4,), Categorical(CLASSES))
    return registry.build(name, from_flat(config, {**small, **settings}), model)


@every_method
def test_loop_and_vmap_agree(name: str, settings: dict[str, Any], way: str) -> None:
    method, rounds = build(name, settings), 1 if "preset" in settings else 2
    one, all_ = (run(method, images(), chunk=chunk, rounds=rounds) for chunk in (1, 3))
    assert all(value.isfinite().all() for value in one.messages[-1].values())
    assert_same(all_, one, **TIGHT)


@pytest.mark.usefixtures("one_thread")
def test_it_learns() -> None:
    """A bright spot on the left or on the right, which no single pixel gives away."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (2, 60), generator=g)
    x = 0.3 * torch.randn(2, 60, 1, 12, 12, generator=g)
    rows, columns = (
        torch.randint(12, (2, 60), generator=g),
        torch.randint(6, (2, 60), generator=g),
    )
    for c in range(2):
        for j in range(60):
            x[c, j, 0, rows[c, j], columns[c, j] + 6 * y[c, j]] += 4
    data = ClientData(x, y, torch.ones(2, 60))
    model = cnn((1, 12, 12), (6, 6), (10,), Categorical(2))
    config = registry.config_class("fedavg")(learning_rate=0.1)
    losses = run(registry.build("fedavg", config, model), data, rounds=60).losses
    assert losses[-1].item() < 0.25 * math.log(2) < math.log(2) < 2 * losses[0].item()


# CUDA


@cuda
@every_network
def test_cuda_has_the_values_and_gradients_of_the_cpu(name: str) -> None:
    """There one grouped convolution, here one network after the other."""
    model, x = network(name), normal(2, POINTS, *NETWORKS[name][0], seed=1)
    direction = normal(2, 3, POINTS, CLASSES, seed=2)
    results = []
    for device in ("cuda", "cpu"):
        theta = normal(2, 3, model.size).to(device).requires_grad_()
        output = model.forward(theta, x.to(device))
        slope = torch.autograd.grad((output * direction.to(device)).sum(), theta)
        results.append([output.detach().cpu(), slope[0].cpu()])
    torch.testing.assert_close(results[0], results[1], **EXACT)


@cuda
@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loop_and_vmap_agree_on_cuda(
    name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    method, data = build(name, settings), on("cuda", images(dtype))
    double = dtype is torch.float64
    rounds = 2 if double and "preset" not in settings else 1
    with proper_float32():
        one, all_ = (run(method, data, chunk=chunk, rounds=rounds) for chunk in (1, 3))
    single = PAPER_CUDA if "preset" in settings else SINGLE_CUDA
    assert_same(all_, one, **(TIGHT if double else single))


@cuda
@every_method
def test_cuda_agrees_with_the_cpu_on_the_same_numbers(name: str, settings: dict[str, Any]) -> None:
    """As in `test_runtimes`."""
    method, rounds = build(name, settings), 1 if "preset" in settings else 2
    here, there = (run(method, on(device, images()), rounds=rounds) for device in ("cpu", "cuda"))
    assert_same(there, here, rtol=1e-6, atol=1e-6)
