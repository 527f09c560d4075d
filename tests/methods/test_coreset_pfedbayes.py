"""CoreSet-PFedBayes: the plain Algorithm 1, the refresh rule, the limits of the fraction."""

import pytest
import torch

from corefed import selectors
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Work
from corefed.methods import coreset_pfedbayes as method
from corefed.methods import pfedbayes
from corefed.methods.algorithm_1 import algorithm_1
from corefed.models import network
from corefed.models.likelihood import Categorical, Gaussian
from corefed.selectors import matching
from corefed.selectors.frame import Choice
from corefed.selectors.quality import judge
from corefed.selectors.subset import subset_size
from corefed.settings.fields import from_flat
from corefed.training.local import LocalClients

SIZES = (40, 25, 33)


def config_with(**values):
    return from_flat(method.Config, values)


def federation(dtype=torch.float32, classes=3, features=6):
    g = torch.Generator().manual_seed(0)
    n = max(SIZES)
    x = torch.randn(len(SIZES), n, features, generator=g, dtype=dtype)
    truth = torch.randn(features, classes, generator=g, dtype=dtype)
    weight = torch.zeros(len(SIZES), n, dtype=dtype)
    for row, size in zip(weight, SIZES, strict=True):
        row[:size] = 1
    return ClientData(x, (x @ truth).argmax(-1), weight)


def train(config, data, rounds, work, chunk=3, build=method.build, hidden=8):
    model = network.mlp((data.x.shape[-1], hidden, 3), Categorical(3))
    built = build(config, model)
    server = built.init_server(Streams([Who(0, SERVER)], 0))
    clients = LocalClients(built, data, [0], [server], work, chunk)
    for t in range(rounds):
        updates, _, _ = clients.train(t, [server], [range(len(SIZES))])
        server = built.aggregate(server, updates[0])
    return server, clients


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("kl_weight", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_method_is_algorithm_1(kl_weight, optimizer):
    """Preset paper under the runtime equals the paper's loop in plain code.

    In float64, since a last bit can change which point is the k-th largest; with few iterations of
    the solver, whose momentum amplifies rounding from one iteration to the next, and one round with
    the KL term, whose rows amplify it further. Without it, three rounds agree as closely.
    """
    config = config_with(
        preset="paper", widths=(1.0,), solver="aiht", shrink=0.0, fraction=0.25,
        kl_weight=kl_weight, zeta=10.0, beta=0.7, optimizer=optimizer, eta_1=0.01,
        eta_2=0.001, initial_rho=-3.0, anneal=0.0, max_iterations=25, kl_rows=6,
    )  # fmt: skip
    data, work = federation(torch.float64), Work(5, 10)
    rounds = 1 if kl_weight else 3
    server, clients = train(config, data, rounds, work)
    alone = [ClientData(*(field[i : i + 1, :n] for field in data)) for i, n in enumerate(SIZES)]
    model = network.mlp((6, 8, 3), Categorical(3))
    v, qs, ws = algorithm_1(config, model, alone, rounds=rounds, work=work)
    torch.testing.assert_close(server["v"], v, rtol=0, atol=1e-6)
    for i, (q, w) in enumerate(zip(qs, ws, strict=True)):
        torch.testing.assert_close(clients.private["q"][i], q, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            clients.private["subset.weight"][i, : SIZES[i]], w, rtol=0, atol=1e-6
        )
        assert (w > 0).sum() <= subset_size(torch.tensor([SIZES[i]]), 0.25)


def test_fraction_one_is_pfedbayes():
    data, work = federation(), Work(7, 10)
    _, small = train(method.Config(fraction=1.0), data, 3, work)
    _, full = train(pfedbayes.Config(), data, 3, work, build=pfedbayes.build)
    assert torch.equal(small.private["q"], full.private["q"])


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 3, 120])
def test_coreset_is_within_its_size_at_any_setting(fraction, steps):
    data = federation()
    _, clients = train(method.Config(fraction=fraction), data, 2, Work(steps, 10))
    weight, k = clients.private["subset.weight"], subset_size(data.size, fraction)
    assert ((weight > 0).sum(-1) <= k).all()
    assert (weight >= 0).all()
    assert (weight[data.weight == 0] == 0).all()
    assert clients.private["q"].isfinite().all()


def test_refresh_at_the_latest_after_the_bound():
    """20 steps a round, checks never stale: a refresh in rounds 0, 3, 6, 9 for a bound of 60."""
    config = config_with(refresh_every=60, check_every=1000, stale=1e9, fraction=0.3)
    _, clients = train(config, federation(), 10, Work(20, 10))
    assert clients.private["subset.refreshes"].tolist() == [4, 4, 4]


def test_refresh_inside_a_round():
    config = config_with(refresh_every=60, check_every=1000, stale=1e9, fraction=0.3)
    _, clients = train(config, federation(), 1, Work(200, 10))
    assert clients.private["subset.refreshes"].tolist() == [4, 4, 4]  # at steps 0, 60, 120, 180


def test_stale_coreset_is_refreshed_early():
    """With a bound out of reach, only staleness refreshes; nothing is stale for a huge `stale`."""
    slack = config_with(refresh_every=10**6, check_every=20, stale=1e9, fraction=0.3)
    strict = config_with(refresh_every=10**6, check_every=20, stale=1e-9, fraction=0.3)
    _, never = train(slack, federation(), 5, Work(20, 10))
    _, always = train(strict, federation(), 5, Work(20, 10))
    assert never.private["subset.refreshes"].tolist() == [1, 1, 1]
    assert always.private["subset.refreshes"].tolist() == [5, 5, 5]


def test_staleness_is_by_client():
    """One client's coreset is spoilt; at the next check it alone is stale."""
    config = config_with(refresh_every=10**6, check_every=1, stale=0.9, fraction=0.5)
    data = federation()
    _, clients = train(config, data, 3, Work(20, 10))
    before = clients.private["subset.refreshes"].clone()
    clients.private["subset.weight"][1] = 25.0 * (
        torch.arange(data.weight.shape[1]) == 0
    )  # one point
    server = {"v": clients.private["z"][0]}
    clients.train(3, [server], [range(3)])
    after = clients.private["subset.refreshes"] - before
    assert after[1] == 1
    assert after[0] == after[2] == 0


def test_uniform_expectation_is_exact():
    """The closed form for uniform subsets against the mean over many, within 4 standard errors."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(1, 12, 30, generator=g, dtype=torch.float64)
    mask, k = torch.ones(1, 12, dtype=torch.bool), torch.tensor([4])
    errors = []
    for _ in range(4000):
        w = torch.zeros(1, 12, dtype=torch.float64)
        w[0, torch.randperm(12, generator=g)[:4]] = 12 / 4
        errors.append(judge(rows, w, k, mask).error)
    errors = torch.cat(errors)
    expected = judge(rows, w, k, mask).uniform
    assert abs(errors.mean() - expected) < 4 * errors.std() / len(errors) ** 0.5


def test_draws_follow_k_within_memory():
    for k in (1, 99, 101, 500, 2250):
        draws = matching.draws_for(k, 4500, 0, 2048)
        assert draws >= max(2 * k, matching.MINIMUM_DRAWS)
        assert draws <= 1.25 * max(2 * k, matching.MINIMUM_DRAWS)
    assert matching.draws_for(500, 1000, 50, 2048) == 50
    bounded = matching.draws_for(10**6, 10**6, 0, 64)
    assert matching.bytes_for(bounded, 10**6) <= 64 * 2**20


def test_weights_that_lose_to_a_uniform_subset_are_not_used(monkeypatch):
    """A selector gone wrong leaves the client with a plain random subset, where that is asked."""

    def absurd(look):
        weight = 1e6 * (torch.arange(look.data.weight.shape[1]) < 3) * look.data.weight
        return Choice(weight, look.memory)

    monkeypatch.setattr(selectors, "get", lambda name: absurd)
    data = federation()
    _, clients = train(config_with(fraction=0.3, stale=0.5), data, 1, Work(2, 10))
    k = subset_size(data.size, 0.3)
    for weight, size, kept in zip(clients.private["subset.weight"], SIZES, k.tolist(), strict=True):
        assert weight.max().item() == pytest.approx(size / kept)
        assert (weight > 0).sum() == kept
    assert clients.private["subset.over_uniform"].tolist() == [1, 1, 1]
    _, trusting = train(method.Config(fraction=0.3), data, 1, Work(2, 10))
    assert trusting.private["subset.weight"].max() == 1e6


def test_regression_with_learnt_noise():
    """A linear client: the learnt noise comes near the true one, coreset or not."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 400, 3, generator=g)
    y = x @ torch.randn(3, 1, generator=g) + 0.3 * torch.randn(2, 400, 1, generator=g)
    data = ClientData(x, y, torch.ones(2, 400))
    model = network.mlp((3, 1), Gaussian(1, noise=1.0, learn_noise=True))
    for fraction in (0.2, 1.0):
        config = method.Config(fraction=fraction, eta_1=0.02, eta_2=0.02, zeta=1.0)
        built = method.build(config, model)
        server = built.init_server(Streams([Who(0, SERVER)], 0))
        clients = LocalClients(built, data, [0], [server], Work(100, 100), 2)
        for t in range(8):
            updates, _, _ = clients.train(t, [server], [range(2)])
            server = built.aggregate(server, updates[0])
        noise = clients.private["q"][:, 0, -1].exp()
        # sd of an estimate of log noise from 400 points is 1 / sqrt(800) = 0.035; a coreset's is
        # larger by its held-out error, and Adam's last steps move it by 0.02 each.
        assert ((noise / 0.3).log().abs() < (0.15 if fraction == 1.0 else 0.4)).all(), noise
