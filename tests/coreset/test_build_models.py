"""`corefed.coreset.build` over every kind of posterior and of model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from coreset_cases import (
    POSTERIOR,
    D,
    flat_parameters,
    logistic,
    make_points,
    network,
    same,
)
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from corefed.bayes import regression
from corefed.coreset import MeanField, build
from corefed.coreset.draws import Draws, hold, interpret


@pytest.fixture
def own_generator() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.fixture(scope="module")
def points() -> tuple[Tensor, Tensor]:
    return make_points()


# --- every posterior ------------------------------------------------------------------------------


def ensemble(members: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [
        {
            name: t + 0.1 * torch.randn(t.shape, generator=g) if t.is_floating_point() else t
            for name, t in network().state_dict().items()
            if "running_var" not in name
        }
        for _ in range(members)
    ]


def stacked(members: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([m[name] for m in members])
        for name, t in members[0].items()
        if t.is_floating_point()
    }


def factor(size: int) -> Tensor:
    return 0.1 * torch.eye(size) + 0.01 * torch.ones(size, size).tril(-1)


P = 74  # parameters of `network`: (4 + 1) 8 + 2 * 8 + (8 + 1) 2
POSTERIORS: dict[str, Callable[[], object]] = {
    "state_dicts": lambda: ensemble(20),
    "modules": lambda: [network().train(False) for _ in range(2)] + _moved_modules(10),
    "stacked dict": lambda: stacked(ensemble(20)),
    "some names": lambda: {"3.weight": torch.randn(20, 2, 8, generator=torch.Generator())},
    "flat draws": lambda: flat_parameters() + 0.1 * torch.randn(20, P, generator=torch.Generator()),
    "numpy": lambda: (flat_parameters() + 0.1 * torch.randn(20, P)).numpy(),
    "list of flat": lambda: list(flat_parameters() + 0.1 * torch.randn(20, P)),
    "mean and scale": lambda: (flat_parameters(), torch.full((P,), 0.1)),
    "mean and number": lambda: (flat_parameters(), 0.1),
    "mean and factor": lambda: (flat_parameters(), factor(P)),
    "dicts": lambda: (
        dict(network().named_parameters()),
        {name: torch.full_like(p, 0.1) for name, p in network().named_parameters()},
    ),
    "MeanField": lambda: MeanField(flat_parameters(), torch.full((P,), 0.1)),
    "Normal": lambda: regression.Normal(flat_parameters(), 0.01 * torch.eye(P)),
    "torch.distributions": lambda: torch.distributions.Normal(flat_parameters(), 0.1),
}


def _moved_modules(number: int) -> list[nn.Module]:
    members = []
    for state in ensemble(number):
        member = network()
        member.load_state_dict(state, strict=False)
        members.append(member)
    return members


@pytest.mark.parametrize("form", POSTERIORS)
def test_every_posterior(points: tuple[Tensor, Tensor], form: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        posterior = POSTERIORS[form]()
    x, y = points
    before = torch.random.get_rng_state()
    coreset = build(network(), posterior, (x, y.long()), 10, samples=30)
    assert torch.equal(before, torch.random.get_rng_state())  # the global generator is as it was
    d = coreset.diagnostics
    assert 0 <= d.held_out_error < math.inf
    if form in ("state_dicts", "stacked dict"):
        assert (d.draws, d.fresh_draws) == (16, 4)
    elif "scale" in form or "Mean" in form:
        assert (d.draws, d.fresh_draws) == (30, 100)


def test_a_list_of_state_dicts_is_its_stack(points: tuple[Tensor, Tensor]) -> None:
    data = points[0], points[1].long()
    members = ensemble(20)
    same(build(network(), members, data, 5), build(network(), stacked(members), data, 5))


def test_gaussian_draws_have_their_moments() -> None:
    """Sample mean and covariance of 20000 draws, within 5 standard errors of each entry."""
    L = torch.tensor([[1.0, 0.0], [0.8, 0.5]])
    make = interpret((torch.tensor([1.0, -1.0]), L))
    assert not isinstance(make, Draws)
    theta = make(20000, 0, "fitted").block(0, 20000)
    assert isinstance(theta, Tensor)
    assert bool(((theta.mean(0) - torch.tensor([1.0, -1.0])).abs() < 5 * 20000**-0.5).all())
    covariance = L @ L.T
    spread = (covariance.diagonal().outer(covariance.diagonal()) + covariance.square()).sqrt()
    assert bool(((theta.T.cov() - covariance).abs() < 5 * spread * 20000**-0.5).all())


def test_draws_do_not_depend_on_their_blocks() -> None:
    make = interpret(POSTERIOR)
    assert not isinstance(make, Draws)
    draws = make(10, 0, "fitted")
    whole, parts = draws.block(0, 10), [draws.block(0, 3), draws.block(3, 10)]
    assert torch.equal(whole, torch.cat(parts))  # type: ignore[arg-type]
    kept = hold(draws, torch.device("cpu"), 1 << 20)
    made_anew = hold(draws, torch.device("cpu"), 0)
    assert torch.equal(kept.block(4, 6), made_anew.block(4, 6))  # type: ignore[arg-type]


def test_samples_bounds_a_list_of_draws(points: tuple[Tensor, Tensor]) -> None:
    draws = torch.ones(D) + 0.1 * torch.randn(100, D, generator=torch.Generator())
    coreset = build(logistic, draws, points, 5, samples=40)
    assert (coreset.diagnostics.draws, coreset.diagnostics.fresh_draws) == (40, 20)


# --- every model ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_generator")
def test_a_users_own_cnn_in_ten_lines() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(200, 1, 8, 8), torch.randint(0, 3, (200,))
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    mean = {name: p.detach() for name, p in net.named_parameters()}
    scale = {name: torch.full_like(p, 0.1) for name, p in mean.items()}
    coreset = build(net, (mean, scale), TensorDataset(images, labels), size=20)
    loader = DataLoader(coreset.subset(TensorDataset(images, labels)), batch_size=10)
    x, y, w = next(iter(loader))
    loss = (w * F.cross_entropy(net(x), y, reduction="none")).sum()
    loss.backward()
    assert 1 <= len(coreset) <= 20
    assert coreset.diagnostics.ratio < 1


def by_value(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if float(theta.sum()) < -100:  # vmap cannot branch on a value
        raise AssertionError
    return logistic(theta, x, y)


def in_place(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    theta.mul_(1.0)  # spoils a draw unless each call has a copy
    out = torch.zeros(len(x))
    out += logistic(theta, x, y)  # an unbatched tensor cannot take a batched one under vmap
    theta.zero_()
    return out


def with_numpy(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    eta = torch.from_numpy(x.numpy() @ theta.numpy())
    return y * eta - F.softplus(eta)


@pytest.mark.parametrize("function", [by_value, in_place, with_numpy])
def test_functions_that_vmap_cannot_take(
    points: tuple[Tensor, Tensor], function: Callable[..., Tensor]
) -> None:
    draws = torch.ones(D) + 0.1 * torch.randn(60, D, generator=torch.Generator())
    before = draws.clone()
    same(build(logistic, draws, points, 5), build(function, draws, points, 5))
    assert torch.equal(draws, before)


def test_likelihoods_of_a_module(points: tuple[Tensor, Tensor]) -> None:
    x, y = points
    linear = nn.Linear(D, 1)
    posterior = torch.ones(5), torch.full((5,), 0.1)

    def by_hand(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.distributions.Normal(x @ theta[:4] + theta[4], 0.5).log_prob(y)

    expected = build(by_hand, posterior, points, 10)
    for target in (y, y.unsqueeze(1)):
        same(expected, build(linear, posterior, (x, target), 10, noise=0.5))
    own = build(
        linear, posterior, points, 10,
        likelihood=lambda out, y: torch.distributions.Normal(out[:, 0], 0.5).log_prob(y),
    )  # fmt: skip
    same(expected, own)
    coarse = build(linear, posterior, (x, y.long()), 10, likelihood="gaussian", noise=0.5)
    same(expected, coarse)


def test_draws_in_another_precision_than_the_module(points: tuple[Tensor, Tensor]) -> None:
    """What is not drawn, here BatchNorm's statistics, follows the draws."""
    posterior = flat_parameters().double(), 0.1
    coreset = build(network(), posterior, (points[0].double(), points[1].long()), 10)
    assert coreset.diagnostics.dtype == "float64"


def test_labels_for_every_pixel_are_summed_over() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 4, 4, generator=g), torch.randint(0, 3, (40, 4, 4), generator=g)
    net = nn.Conv2d(1, 3, 1)
    coreset = build(net, (torch.zeros(6), torch.ones(6)), (x, y), 8)
    theta = torch.ones(6)
    expected = -F.cross_entropy(
        F.conv2d(x, theta[:3].view(3, 1, 1, 1), theta[3:]), y, reduction="none"
    )
    whole = expected.sum((1, 2))[coreset.indices]
    torch.testing.assert_close(coreset.log_likelihood(theta), whole @ coreset.weights)
