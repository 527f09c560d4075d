"""Potentials against exact covariances, and shared feature draws against full ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.modules import from_module
from corefed.models.network import mlp
from corefed.selectors import sketches
from corefed.selectors.frame import Look
from corefed.selectors.potentials import draw, potentials, relative_error

LIKELIHOODS = [Categorical(3), Gaussian(2, 0.8), Gaussian(2, 0.8, learn_noise=True)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def streams(clients: int, round_: int = 0) -> Streams:
    return Streams([Who(0, c) for c in range(clients)], round_)


def repeat(data: ClientData, times: int) -> ClientData:
    """The same client again and again, each with its own random stream."""
    return ClientData(*(field.expand(times, *field.shape[1:]) for field in data))


def client(likelihood: Likelihood, points: int = 5, features: int = 2) -> ClientData:
    x = normal(1, points, features, seed=1)
    if isinstance(likelihood, Categorical):
        y = (torch.arange(points) % likelihood.classes).unsqueeze(0)
    else:
        y = normal(1, points, likelihood.targets, seed=2)
    return ClientData(x, y, torch.ones(1, points))


def posterior(size: int, std: float = 0.4) -> Tensor:
    rho = gaussian.rho_of(torch.full((1, size), std))
    return torch.stack([normal(1, size, seed=3), rho], 1)


# The definition


def test_potentials_are_centred_scaled_and_zero_on_padding() -> None:
    log_p = 3 * normal(2, 6, 7) - 4
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    before = log_p.clone()
    g = potentials(log_p, mask)
    assert torch.equal(log_p, before)
    assert (g[1, 3:] == 0).all()
    torch.testing.assert_close(g.sum(-1), torch.zeros(2, 6), rtol=0, atol=1e-5)
    for c, n in ((0, 6), (1, 3)):  # Phi^T Phi is the covariance of log-likelihoods over draws
        covariance = log_p[c, :n].cov(correction=0)
        torch.testing.assert_close(g[c, :n] @ g[c, :n].T, covariance)


def test_y_is_the_potential_of_all_data_and_errors_are_relative_to_it() -> None:
    log_p, mask = normal(2, 6, 9), torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    g = potentials(log_p, mask)
    total = (log_p * mask.unsqueeze(-1)).sum(1, keepdim=True)
    y = potentials(total, torch.ones(2, 1).bool())[:, 0]  # one point with all the likelihood
    torch.testing.assert_close(g.sum(1), y)
    everything = mask.float()
    # w = 1 leaves only the rounding of another order of summation.
    torch.testing.assert_close(relative_error(g, everything), torch.zeros(2), rtol=0, atol=1e-10)
    torch.testing.assert_close(relative_error(g, 0 * everything), torch.ones(2))
    torch.testing.assert_close(relative_error(g, 0.5 * everything), torch.full((2,), 0.25))
    w = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    expected = torch.stack(
        [(y[c] - w[c] @ g[c]).square().sum() / y[c].square().sum() for c in range(2)]
    )
    torch.testing.assert_close(relative_error(g, w), expected)
    torch.testing.assert_close(relative_error(100 * g, w), expected)
    assert (relative_error(0 * g, everything) == 0).all()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_full_draws_are_log_likelihoods_under_pi(likelihood: Likelihood) -> None:
    model = mlp((2, 4, likelihood.outputs), likelihood)
    data, pi = repeat(client(likelihood), 3), posterior(model.size).repeat(3, 1, 1)
    found = draw(model, pi, data, 8, streams(3), "coreset")
    theta = gaussian.sample(pi, streams(3).normal("coreset", 8, model.size))
    assert torch.equal(found, model.log_likelihood(theta, data.x, data.y).mT)
    assert found.shape == (3, 5, 8)


# Feature draws shared by many heads


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("widths", [(2,), (2, 4), (2, 4, 3)])
@pytest.mark.parametrize(("draws", "groups"), [(12, 4), (10, 4), (5, 1), (6, 6)])
def test_shared_features_are_full_draws_with_another_head(
    likelihood: Likelihood, widths: tuple[int, ...], draws: int, groups: int
) -> None:
    """Written out: draw s has all of feature draw s // (S / F), but for its own head."""
    model = mlp((*widths, likelihood.outputs), likelihood)
    assert model.head is not None
    data, pi = repeat(client(likelihood), 2), posterior(model.size).repeat(2, 1, 1)
    found = draw(model, pi, data, draws, streams(2), "coreset", groups)
    each = -(-draws // groups)
    same = streams(2)
    theta = gaussian.sample(pi, same.normal("coreset", groups, model.size))
    theta = theta.repeat_interleave(each, 1)
    head = slice(model.head.weight.start, model.head.bias.stop)
    own = same.normal("coreset/head", groups * each, head.stop - head.start)
    theta[..., head] = gaussian.sample(pi[..., head], own)
    expected = model.log_likelihood(theta, data.x, data.y)[:, :draws].mT
    assert found.shape == (2, 5, draws)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_a_head_or_with_few_draws_all_of_theta_is_drawn() -> None:
    likelihood = Categorical(3)
    data = client(likelihood)
    model = mlp((2, 4, 3), likelihood)
    pi = posterior(model.size)
    full = draw(model, pi, data, 6, streams(1), "coreset")
    assert torch.equal(draw(model, pi, data, 6, streams(1), "coreset", 7), full)
    module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    other = draw(from_module(module, likelihood), pi, data, 6, streams(1), "coreset", 2)
    torch.testing.assert_close(other, full)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_shared_features_have_the_distribution_of_full_draws(likelihood: Likelihood) -> None:
    """Each draw is one of pi-hat: the same mean and second moments of log-likelihoods.

    A client is a repetition: with R of them an average has std sd / sqrt R, measured over them.
    5 means and 15 moments in each of three cases within 4.5 of it: probability 4e-4.
    """
    repetitions, draws, groups = 1500, 24, 4
    model = mlp((2, 3, likelihood.outputs), likelihood)
    data = repeat(client(likelihood), repetitions)
    pi = posterior(model.size, 0.3).expand(repetitions, -1, -1)
    full, shared = (
        draw(model, pi, data, draws, streams(repetitions, f), "coreset", f).double()
        for f in (0, groups)
    )
    centre = full.mean((0, 2))
    rows, columns = torch.triu_indices(5, 5)

    def moments(log_p: Tensor) -> Tensor:  # [R, 20]
        away = log_p - centre.unsqueeze(-1)
        second = torch.einsum("ris,rjs->rij", away, away) / draws
        return torch.cat([away.mean(-1), second[:, rows, columns]], 1)

    first, second = moments(full), moments(shared)
    error = first.mean(0) - second.mean(0)
    std = ((first.var(0) + second.var(0)) / repetitions).sqrt()
    assert (error.abs() < 4.5 * std).all()

    # Phi^T Phi takes off the mean of the draws, which has Cov(full) / S or, if features are
    # shared, up to Cov / F: with it put back, the expected Gram matrices are the same.
    def gram(log_p: Tensor) -> Tensor:
        g = potentials(log_p, torch.ones(repetitions, 5).bool())
        return torch.einsum("ris,rjs->rij", g, g)

    grams = gram(full), gram(shared)
    lost = full.mean(-1).T.cov(), shared.mean(-1).T.cov()
    whole = [g.mean(0) + m for g, m in zip(grams, lost, strict=True)]
    std = sum(g.var(0) / repetitions for g in grams).sqrt()
    std = std + sum(m.diagonal().outer(m.diagonal()).sqrt() for m in lost) * math.sqrt(
        2 / repetitions
    )
    assert ((whole[0] - whole[1]).abs() < 4.5 * std).all()
    traces = [g.diagonal(dim1=1, dim2=2).sum(-1) for g in grams]  # [R]
    low, high = ((share * traces[0] - traces[1]) for share in (1 - 1 / groups, 1.0))
    assert low.mean() < 4.5 * low.std() / math.sqrt(repetitions)
    assert high.mean() > -4.5 * high.std() / math.sqrt(repetitions)


# A closed form


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("shared", [0, 50])
def test_gram_matrix_of_a_linear_gaussian_model_is_exact(features: int, shared: int) -> None:
    """log p_j = -u_j^2 / (2 s^2) + const with residuals u ~ N(m, C), C = A Sigma A^T, A = (x, 1).

    By Isserlis' theorem Cov(u_i^2, u_j^2) = 2 C_ij^2 + 4 m_i m_j C_ij, and Phi^T Phi, which divides
    by S what S - 1 deviations add up to, has (1 - 1/S) Cov(log p_i, log p_j) as its mean.
    A linear model has no features to draw: sharing them changes nothing.
    """
    repetitions, draws, points, noise = 200, 250, 6, 0.7
    model = mlp((features, 1), Gaussian(1, noise))
    one = client(Gaussian(1, noise), points, features)
    pi = posterior(model.size, 0.5)
    pi[:, 1] += 0.2 * torch.arange(model.size)  # not all of one width

    design = torch.cat([one.x[0], torch.ones(points, 1)], 1).double()
    mean = one.y[0, :, 0].double() - design @ pi[0, 0].double()
    spread = (design * gaussian.sigma(pi[0, 1].double()).square()) @ design.T
    exact = (spread.square() / 2 + mean.outer(mean) * spread) / noise**4

    data, many = repeat(one, repetitions), pi.expand(repetitions, -1, -1)
    log_p = draw(model, many, data, draws, streams(repetitions), "coreset", shared)
    g = potentials(log_p, data.weight > 0).double()
    gram = g @ g.mT
    std = gram.std(0) / math.sqrt(repetitions)
    # 21 different entries in each of four cases within 4.5 standard errors: probability 6e-4.
    assert ((gram.mean(0) - (1 - 1 / draws) * exact).abs() < 4.5 * std).all()
    # The error of one matrix is of order Cov / sqrt S: 200 of them are worth 50 000 draws.
    assert (std < 0.05 * exact.diagonal().outer(exact.diagonal()).sqrt()).all()


def test_draws_in_blocks_are_as_many_and_as_distributed(monkeypatch) -> None:
    """Blocks draw other numbers from the same stream; the potentials' size agrees in the mean."""
    model = mlp((3, 4, 2), Categorical(2))
    g = torch.Generator().manual_seed(0)
    data = ClientData(
        torch.randn(1, 6, 3, generator=g),
        torch.randint(0, 2, (1, 6), generator=g),
        torch.ones(1, 6),
    )
    pi = torch.stack([model.init(g, 1.0), torch.zeros(model.size)])[None]
    draws = 4000

    def spread() -> torch.Tensor:
        log_p = draw(model, pi, data, draws, Streams([Who(0, 0)], 0), "x")
        assert log_p.shape == (1, 6, draws)
        return log_p

    whole = spread()
    monkeypatch.setattr(
        "corefed.selectors.potentials.BLOCK", 7 * model.size
    )  # 571 blocks of 7 and one of 3
    blocks = spread()
    error = (whole.var(-1) / draws + blocks.var(-1) / draws).sqrt()
    assert ((whole.mean(-1) - blocks.mean(-1)).abs() < 5 * error).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_points_in_parts_have_the_same_potentials(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with many points is gone through in parts, with the same draws."""
    model = mlp((4, 7, classes), Categorical(classes))
    pi = torch.stack([normal(2, model.size), torch.full((2, model.size), -2.0)], 1)
    y = torch.arange(22).view(2, 11) % classes
    data = ClientData(normal(2, 11, 4), y, torch.ones(2, 11))
    look = Look(model, pi, pi, data, torch.tensor([3, 3]), torch.zeros(2, 11), streams(2))
    whole = sketches.sketch(look)
    monkeypatch.setattr("corefed.selectors.potentials.FEATURES", 2 * 4 * 7 * 3)
    parts = sketches.sketch(look._replace(streams=streams(2)))
    torch.testing.assert_close(parts.g, whole.g)
    torch.testing.assert_close(parts.norms, whole.norms)
