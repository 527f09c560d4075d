"""BNFed as a method: what the server makes of uploads, and where clients go on from.

The contract tests of `test_runtimes.py` and the matching's own in `test_matching.py` come on top.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corefed import resolve, train
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.methods import bnfed, registry
from corefed.methods.layers import join, split, take
from corefed.methods.pfnm import Prior, match_networks
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.modules import from_module
from corefed.models.network import Model, mlp
from corefed.settings import config as configuration
from corefed.training import client_side
from corefed.training.local import LocalClients

pytest.importorskip("scipy")

WIDTHS = (5, 6, 4, 3)
MODEL = mlp(WIDTHS, Categorical(3))
CLIENTS = 4
WORK = Work(steps=3, batch=8)


def build(model: Model = MODEL, **settings: Any) -> Method:
    return registry.build("bnfed", bnfed.Config(**settings), model)


def data(clients: int = CLIENTS, n: int = 12) -> ClientData:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, n, WIDTHS[0], generator=g).double()
    y = torch.randint(3, (clients, n), generator=g)
    return ClientData(x, y, torch.ones(clients, n).double())


def first_server(method: Method, seed: int = 0) -> Tree:
    return {k: v.double() for k, v in method.init_server(Streams([Who(seed, SERVER)], 0)).items()}


def to_all(server: Tree, clients: int = CLIENTS) -> Tree:
    return {k: v.expand(clients, *v.shape) for k, v in server.items()}


def streams(round_: int = 0, clients: int = CLIENTS) -> Streams:
    return Streams([Who(0, i) for i in range(clients)], round_)


def uploads(thetas: Tensor) -> Update:
    size = len(thetas)
    return Update(tuple(range(size)), {"theta": thetas}, torch.full((size,), 12))


def random_networks(model: Model, clients: int = CLIENTS, std: float = 1.0) -> Tensor:
    return torch.stack(
        [model.init(torch.Generator().manual_seed(i), std).double() for i in range(clients)]
    )


def outputs(method: Method, tree: Tree, x: Tensor) -> Tensor:
    return method.predict(tree, x, torch.zeros(len(x), 1, 0))


# The server


def test_the_initial_network_is_padded_with_nothing() -> None:
    method = build(growth=3)
    server = first_server(method)
    theta = MODEL.init(Streams([Who(0, SERVER)], 0).generators("init")[0], 0.1).double()
    x = data().x[:1]
    found = outputs(method, {"theta": server["theta"][None]}, x)
    torch.testing.assert_close(found, outputs(method, {"theta": theta[None]}, x))
    assert server["theta"].shape == (mlp((5, 18, 12, 3), Categorical(3)).size,)
    assert server["members"].tolist() == [1.0] * 6 + [0.0] * 12 + [1.0] * 4 + [0.0] * 8
    assert server["clients"] == 0


def test_aggregation_is_the_matching_of_uploads() -> None:
    method = build(sigma=0.5, sigma_0=2.0)
    thetas = random_networks(MODEL)
    server = method.aggregate(first_server(method), uploads(thetas))
    networks = [split(theta.numpy(), WIDTHS) for theta in thetas]
    world = match_networks(networks, Prior(sigma=0.5, sigma_0=2.0), [30, 20])
    wide = (5, 30, 20, 3)
    np.testing.assert_array_equal(server["theta"].numpy(), join(world.network, wide))
    members = server["members"].split([30, 20])
    for found, expected in zip(members, world.counts, strict=True):
        assert found[found > 0].tolist() == expected.tolist()
    assert server["clients"] == CLIENTS


def test_permuted_clients_are_one_network() -> None:
    """Both hidden layers shuffled; sigma_0 >> sigma makes the posterior factor 1 - 2.5e-9."""
    method = build(sigma=0.1, sigma_0=1000.0)
    original = random_networks(MODEL, 1, std=2.0)[0]
    g = np.random.default_rng(0)
    orders = [[g.permutation(6), g.permutation(4)] for _ in range(3)]
    others = [take(split(original.numpy(), WIDTHS), order) for order in orders]
    thetas = torch.stack([original, *(torch.from_numpy(join(n, WIDTHS)) for n in others)])
    server = method.aggregate(first_server(method), uploads(thetas))
    assert server["members"].tolist() == [4.0] * 6 + [0.0] * 24 + [4.0] * 4 + [0.0] * 16
    x = data().x[:1]
    found = outputs(method, {"theta": server["theta"][None]}, x)
    expected = outputs(method, {"theta": original[None]}, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_server_does_not_care_about_the_order_of_clients_to_the_bit() -> None:
    method = build(sigma=0.3)
    thetas, order = random_networks(MODEL), [2, 0, 3, 1]
    server = first_server(method)
    one = method.aggregate(server, uploads(thetas))
    other = method.aggregate(
        server, Update(tuple(order), {"theta": thetas[order]}, torch.full((4,), 12))
    )
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("growth", [1, 2])
def test_growth_bounds_the_width(growth: int) -> None:
    method = build(growth=growth, sigma=0.01)
    server = method.aggregate(first_server(method), uploads(random_networks(MODEL)))
    widths = [(m > 0).sum().item() for m in server["members"].split([6 * growth, 4 * growth])]
    assert widths == [6 * growth, 4 * growth]
    sizes = {1: MODEL.size, 2: mlp((5, 12, 8, 3), Categorical(3)).size}
    assert len(server["theta"]) == sizes[growth]


def test_a_learnt_noise_is_averaged() -> None:
    model = mlp((5, 6, 1), Gaussian(1, 0.5, learn_noise=True))
    method = build(model)
    server = first_server(method)
    assert server["theta"][-1].item() == pytest.approx(math.log(0.5))
    thetas = random_networks(model)
    thetas[:, -1] = torch.tensor([0.0, 1.0, 2.0, 5.0])
    after = method.aggregate(server, uploads(thetas))
    assert after["theta"][-1] == 2.0
    assert after["theta"][-2] == pytest.approx(thetas[:, -2].mean().item())  # output bias
    private = method.init_client(to_all(after), data())
    assert private["theta"][:, -1].tolist() == [2.0] * 4


# The clients


def test_first_networks_are_each_clients_own() -> None:
    method = build()
    private = method.init_client(to_all(first_server(method)), data())
    server = to_all(first_server(method))
    working = method.begin(server, private, data(), streams())
    for client in range(CLIENTS):
        own = Streams([Who(0, client)], 0).generators("init")[0]
        assert torch.equal(working["theta"][client], MODEL.init(own, 0.1).double())
    _, joined = method.end(server, working)
    again = method.begin(server, {**private, **joined}, data(), streams())
    assert not torch.equal(again["theta"], working["theta"])  # drawn once


def test_first_networks_may_be_shared() -> None:
    method = build(initial="shared")
    server = first_server(method)
    private = method.init_client(to_all(server), data())
    working = method.begin(to_all(server), private, data(), streams())
    theta = MODEL.init(Streams([Who(0, SERVER)], 0).generators("init")[0], 0.1).double()
    assert torch.equal(working["theta"], theta.expand(CLIENTS, -1))


@pytest.mark.parametrize("sigma", [1.0, 0.05])
def test_clients_go_on_from_the_neurons_they_were_matched_to(sigma: float) -> None:
    """In their own order, so that neurons keep their places; with sigma 0.05 all are their own."""
    method = build(sigma=sigma, sweeps=50)
    server = first_server(method)
    private = method.init_client(to_all(server), data())
    trained = client_side.train(method, to_all(server), private, data(), streams(), WORK)
    thetas = trained.message["theta"]
    after = method.aggregate(server, uploads(thetas))
    working = method.begin(to_all(after), trained.private, data(), streams())
    networks = [split(theta.numpy(), WIDTHS) for theta in thetas]
    world = match_networks(networks, Prior(sigma=sigma, sweeps=50), [30, 20])
    for client in range(CLIENTS):
        mine = take(world.network, [layer[client] for layer in world.assigned])
        np.testing.assert_array_equal(working["theta"][client].numpy(), join(mine, WIDTHS))
    counted = method.traits.report(working)
    assert counted["global_width_1"].tolist() == [len(world.counts[0])] * CLIENTS
    assert counted["global_width_2"].tolist() == [len(world.counts[1])] * CLIENTS


def test_who_joins_later_starts_from_the_neurons_that_most_share() -> None:
    method = build(growth=2)
    server = method.aggregate(first_server(method), uploads(random_networks(MODEL)))
    server["members"][:12] = torch.tensor([1.0, 2, 1, 4, 1, 3, 1, 1, 2, 0, 0, 0])
    server["members"][12:] = torch.tensor([0.0, 1, 1, 0, 0, 1, 2, 0])
    private = method.init_client(to_all(server), data())
    working = method.begin(to_all(server), private, data(), streams())
    world = split(server["theta"].numpy(), (5, 12, 8, 3))
    expected = join(take(world, [np.array([3, 5, 1, 8, 0, 2]), np.array([6, 1, 2, 5])]), WIDTHS)
    # The federation has begun: nobody draws a network of its own.
    np.testing.assert_array_equal(working["theta"][0].numpy(), expected)


def test_a_new_server_starts_its_clients_anew() -> None:
    """A client kept its state, the server lost its own: nothing has been matched yet."""
    method = build(initial="shared")
    server = first_server(method)
    fresh = method.init_client(to_all(server), data())
    trained = client_side.train(method, to_all(server), fresh, data(), streams(), WORK)
    working = method.begin(to_all(server), trained.private, data(), streams())
    assert torch.equal(working["theta"], fresh["theta"])


def test_adam_starts_anew_in_each_round() -> None:
    """Its first step is learning_rate in every weight with a gradient, whatever came before."""
    method = build(learning_rate=0.03)
    server = first_server(method)
    private = method.init_client(to_all(server), data())
    for round_ in range(2):
        trained = client_side.train(
            method, to_all(server), private, data(), streams(round_), Work(steps=1, batch=12)
        )
        start = method.begin(to_all(server), private, data(), streams(round_))["theta"]
        step = (trained.message["theta"] - start).abs()
        moved = step[step > 0]
        assert len(moved) > 0.5 * step.numel()
        assert moved.median().item() == pytest.approx(0.03, rel=1e-4)
        assert moved.max().item() < 0.03 * (1 + 1e-6)
        private, server = (
            trained.private,
            method.aggregate(server, uploads(trained.message["theta"])),
        )


# A run


def test_it_learns_and_its_width_changes() -> None:
    """digits with two disjoint groups of labels; a guess is right for one point in ten."""
    lines = []
    flags = {
        "method": "bnfed", "data": "digits", "clients": 6, "rounds": 6, "local_steps": 15,
        "hidden": (20,), "seeds": (0,), "device": "cpu", "evaluate_every": 1,
    }  # fmt: skip
    experiment = resolve(flags=flags, assignments=["sigma=0.7"])
    trained = train(experiment, on_round=lines.append)
    accuracy = [line["metrics"]["global_accuracy"][0] for line in lines]
    assert accuracy[-1] > 0.7
    assert accuracy[-1] > accuracy[0]
    widths = [line["coreset"]["global_width_1"][0] for line in lines]
    assert widths[0] == 20
    assert all(20 <= width <= 100 for width in widths)
    assert len(set(widths)) > 1
    assert lines[0]["bytes_up"] == [4 * 6 * (65 * 20 + 21 * 10)]
    assert lines[0]["bytes_down"] == [4 * 6 * (65 * 100 + 101 * 10 + 100 + 1)]  # padded
    assert set(trained.summary["metrics"]) >= {"global_accuracy", "localized_accuracy"}


def test_one_client_and_one_point() -> None:
    method = build()
    only = ClientData(*(field[:1, :1] for field in data()))
    clients = LocalClients(method, only, (0,), [first_server(method)], WORK, 1)
    server = first_server(method)
    for t in range(3):
        (update,), _, _ = clients.train(t, [server], [[0]])
        server = method.aggregate(server, update)
    half = split(update.message["theta"][0].numpy(), WIDTHS).weights[0] / 2  # sigma = sigma_0
    found = split(server["theta"].numpy(), (5, 30, 20, 3)).weights[0]
    np.testing.assert_allclose(found[:6], half)
    assert not found[6:].any()


# What is refused


def test_models_without_hidden_neurons_are_refused() -> None:
    with pytest.raises(UserError, match="this model has no hidden layer; set hidden"):
        build(mlp((5, 3), Categorical(3)))
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(1, 1, 5, 5))
    with pytest.raises(UserError, match=r"is convolutional .* use model=mlp, or use fedavg"):
        build(from_module(module, Categorical(3)))


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    with pytest.raises(UserError, match="growth is 1000000, which makes a global network"):
        build(growth=1_000_000)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sigma=0", "sigma is 0.0; it must be between 0.0001 and 10000"),
        ("sigma=1e-5", "sigma is 1e-05; it must be between 0.0001 and 10000"),
        ("sigma_0=1e5", "sigma_0 is 100000.0; it must be between"),
        ("gamma=-1", "gamma is -1.0; it must be above 0"),
        ("growth=0", "growth is 0; it must be at least 1"),
        ("sweeps=0", "sweeps is 0; it must be at least 1"),
        ("initial=mine", "it must be 'own' or 'shared'"),
    ],
)
def test_settings_out_of_range(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        configuration.resolve(flags={"method": "bnfed"}, assignments=[setting])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_client_is_named(bad: float) -> None:
    method = build()
    thetas = random_networks(MODEL)
    thetas[2, 7] = bad
    with pytest.raises(UserError, match="client 2 has weights that are not finite"):
        method.aggregate(first_server(method), uploads(thetas))
