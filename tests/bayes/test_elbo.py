"""The client objective and its minibatch estimator: gradients by autograd, means by counting.

The estimator is linear in the points' losses, so any numbers serve as losses: here the value x of
each point, which makes a batch's estimate sum_j scale_j x_j.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.network import mlp

# Gradients


def problem(likelihood: Likelihood, draws: int) -> tuple[object, Tensor, Tensor, Batch, Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    clients, points = 3, 5
    model = mlp((4, 6, likelihood.outputs), likelihood)
    q = torch.stack([normal(clients, model.size), normal(clients, model.size) - 1], 1)
    z = torch.stack([normal(clients, model.size), normal(clients, model.size) - 1], 1)
    x = normal(clients, points, 4)
    if isinstance(likelihood, Categorical):
        y = torch.randint(likelihood.classes, (clients, points), generator=g)
    else:
        y = normal(clients, points, likelihood.targets)
    scale = torch.rand(clients, points, generator=g, dtype=torch.float64)
    scale[1, 3:] = 0  # padding
    return model, q, z, Batch(x, y, scale), normal(clients, draws, model.size)


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize(
    "likelihood", [Categorical(3), Gaussian(2, 0.5), Gaussian(2, 0.5, learn_noise=True)]
)
def test_gradient_and_closed_forms_are_autograd_of_the_objective(
    likelihood: Likelihood, draws: int
) -> None:
    model, q, z, batch, noise = problem(likelihood, draws)
    zeta_over_n = torch.tensor([0.1, 2.0, 0.0], dtype=torch.float64)
    leaves = q.clone().requires_grad_(), z.clone().requires_grad_()
    value = elbo.objective(model, *leaves, zeta_over_n, batch, noise)
    by_q, by_z = torch.autograd.grad(value.sum(), leaves)

    sigma_q, sigma_z = gaussian.sigma(q[:, 1]), gaussian.sigma(z[:, 1])
    with torch.no_grad():  # as in training: the gradient opens its own graph
        loss, by_mu, by_sigma = elbo.gradient(model, q[:, 0], sigma_q, batch, noise)
    assert not loss.requires_grad
    prior = zeta_over_n.unsqueeze(-1)
    kl_mu, kl_sigma = gaussian.kl_grads(q, z, sigma_q, sigma_z)
    torch.testing.assert_close(by_mu + prior * kl_mu, by_q[:, 0])
    torch.testing.assert_close(
        gaussian.to_rho(by_sigma + prior * kl_sigma, q[:, 1]), by_q[:, 1], rtol=1e-6, atol=1e-9
    )
    kl_mu, kl_sigma = gaussian.kl_grads_reference(q, z, sigma_q, sigma_z)
    torch.testing.assert_close(prior * kl_mu, by_z[:, 0])
    torch.testing.assert_close(gaussian.to_rho(prior * kl_sigma, z[:, 1]), by_z[:, 1])
    torch.testing.assert_close(loss + zeta_over_n * gaussian.kl(q, z), value)


def test_objective_by_hand() -> None:
    """Client by client, draw by draw and point by point."""
    model, q, z, batch, noise = problem(Categorical(3), 2)
    zeta_over_n = torch.tensor([0.1, 2.0, 0.0], dtype=torch.float64)
    found = elbo.objective(model, q, z, zeta_over_n, batch, noise)
    for c in range(3):
        total = zeta_over_n[c] * gaussian.kl(q[c], z[c])
        for k in range(2):
            theta = q[c, 0] + torch.nn.functional.softplus(q[c, 1]) * noise[c, k]
            logits = model.forward(theta.view(1, 1, -1), batch.x[c : c + 1])[0, 0]
            for j in range(5):
                nll = torch.nn.functional.cross_entropy(logits[j], batch.y[c, j])
                total = total + batch.scale[c, j] * nll / 2
        torch.testing.assert_close(found[c], total)


def test_padding_and_other_clients_do_not_matter() -> None:
    model, q, _, batch, noise = problem(Categorical(3), 2)
    sigma = gaussian.sigma(q[:, 1])
    loss, by_mu, by_sigma = elbo.gradient(model, q[:, 0], sigma, batch, noise)
    batch.x[1, 3:] = 100.0  # padding of client 1
    batch.x[2] = -100.0  # another client
    again = elbo.gradient(model, q[:, 0], sigma, batch, noise)
    for before, after in zip((loss, by_mu, by_sigma), again, strict=True):
        assert torch.equal(before[:2], after[:2])


# Minibatches


def clients(*supports: tuple[int, int], n: int, seed: int = 0) -> tuple[ClientData, Tensor]:
    """A client for each (number of points, size of support), with random values and weights."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(supports), n, 1, generator=g)
    real, weight = torch.zeros(len(supports), n), torch.zeros(len(supports), n)
    for c, (points, m) in enumerate(supports):
        real[c, :points] = 1
        rows = torch.randperm(points, generator=g)[:m]
        weight[c, rows] = 0.1 + 3 * torch.rand(m, generator=g)
    return ClientData(x, torch.arange(n).expand(len(supports), n), real), weight


def run(data: ClientData, weight: Tensor, steps: int, size: int, round_: int = 0) -> list[Batch]:
    streams = Streams([Who(0, c) for c in range(len(weight))], round_)
    return list(batches(data, weight, streams, steps, size))


def estimates(made: list[Batch]) -> Tensor:
    """[steps, C]"""
    return torch.stack([(b.scale * b.x[..., 0]).double().sum(-1) for b in made])


def target(data: ClientData, weight: Tensor) -> Tensor:
    """(1/n) sum_j w_j x_j: [C]"""
    return (weight * data.x[..., 0]).double().sum(-1) / data.size


ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # sums of up to 100 float32 products of size about 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_epoch_averages_to_the_whole_sum_when_b_divides_m(epochs: int) -> None:
    data, weight = clients((30, 24), (24, 24), (40, 24), n=40)
    made = run(data, weight, steps=epochs * 4, size=6)
    torch.testing.assert_close(estimates(made).mean(0), target(data, weight), **ROUNDING)
    for c in range(3):  # each epoch has each point of the support once
        for epoch in range(epochs):
            drawn = torch.cat([b.y[c] for b in made[4 * epoch : 4 * epoch + 4]])
            assert drawn.sort().values.equal(weight[c].nonzero()[:, 0])


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    factor=st.integers(1, 4),
    b=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_number_of_whole_epochs_is_exact(
    sizes: list[int], factor: int, b: int, seed: int
) -> None:
    """After b epochs m b / b = m steps have passed: whole, whatever b and m are."""
    data, weight = clients(*[(m, m) for m in sizes], n=20, seed=seed)
    for c, m in enumerate(sizes):
        one = ClientData(*(field[c : c + 1] for field in data))
        made = run(one, weight[c : c + 1], steps=factor * m, size=b, round_=seed)
        found = estimates(made).mean(0)
        torch.testing.assert_close(found, target(one, weight[c : c + 1]), **ROUNDING)


def test_every_step_is_unbiased_when_b_does_not_divide_m() -> None:
    """The mean over N independent clients with the same data has std sd / sqrt N; 4.5 of them.

    With f_j = w_j x_j, of variance s^2 (m - 1 in its denominator), b positions from one epoch have
    Var = (m / (b n))^2 b s^2 (1 - b / m); a batch across two epochs is two such parts.
    """
    repetitions, m, b, steps, n = 2000, 10, 4, 5, 12
    one, weight = clients((n, m), n=n)
    many = ClientData(*(field.expand(repetitions, *field.shape[1:]).contiguous() for field in one))
    found = estimates(run(many, weight.expand(repetitions, -1).contiguous(), steps, b))
    s2 = float((weight * one.x[..., 0])[weight > 0].double().var())
    for r in range(steps):
        start, stop = r * b, (r + 1) * b
        edge = min(stop, (start // m + 1) * m)
        parts = [edge - start, stop - edge]
        variance = (m / (b * n)) ** 2 * sum(p * s2 * (1 - p / m) for p in parts)
        error = float(found[r].mean() - target(one, weight))
        assert abs(error) < 4.5 * math.sqrt(variance / repetitions)
        # The spread is the one derived; a variance estimate is good to about sqrt(2 / N).
        assert float(found[r].var()) == pytest.approx(variance, rel=6 * math.sqrt(2 / repetitions))


def test_scales_sum_to_the_mean_weight_in_expectation() -> None:
    """E[sum scale] = (1/n) sum_j w_j; exactly so in each batch where the weights are equal."""
    data, weight = clients((30, 24), (30, 6), n=30)
    made = run(data, weight, steps=24, size=5)  # 120 places: 5 epochs of 24, 20 of 6
    total = torch.stack([b.scale.double().sum(-1) for b in made]).mean(0)
    torch.testing.assert_close(total, weight.double().sum(-1) / 30, **ROUNDING)
    equal = torch.where(weight > 0, torch.tensor([[30 / 24], [30 / 6]]), 0.0)
    for batch in run(data, equal, steps=24, size=5):
        torch.testing.assert_close(batch.scale.sum(-1), torch.ones(2))
    for batch in run(data, data.weight, steps=3, size=5):  # all data: a plain mean
        torch.testing.assert_close(batch.scale, torch.full((2, 5), 1 / 5))


@pytest.mark.parametrize("m", [1, 4, 5])
def test_a_support_no_larger_than_a_batch_is_used_whole(m: int) -> None:
    data, weight = clients((9, m), (9, 9), n=9)
    for batch in run(data, weight, steps=4, size=5):
        assert batch.y[0, :m].equal(weight[0].nonzero()[:, 0])
        torch.testing.assert_close(batch.scale[0, :m], weight[0][weight[0] > 0] / 9)
        assert (batch.scale[0, m:] == 0).all()
    found = estimates(run(data, weight, steps=4, size=5))[:, 0]
    torch.testing.assert_close(found, target(data, weight)[0].expand(4), **ROUNDING)


def test_padding_is_never_drawn() -> None:
    """Points beyond a client's own have weight 0: they appear only where the scale is 0."""
    data, weight = clients((7, 7), (23, 23), (40, 40), (40, 3), n=40)
    for batch in run(data, weight, steps=30, size=8):
        assert batch.scale.shape == (4, 8)
        for c in range(4):
            used = batch.y[c][batch.scale[c] > 0]
            assert (weight[c][used] > 0).all()
            assert len(used) == min(8, int((weight[c] > 0).sum()))


def test_an_empty_support_gives_scale_zero() -> None:
    data, weight = clients((9, 0), (9, 9), n=9)
    for batch in run(data, weight, steps=3, size=4):
        assert (batch.scale[0] == 0).all()
        assert (batch.scale[1] > 0).all()
    for batch in run(data, torch.zeros_like(weight), steps=2, size=4):
        assert batch.scale.shape == (2, 1)
        assert (batch.scale == 0).all()
    model, q, _, batch, noise = problem(Categorical(3), 1)
    batch.scale[0] = 0
    loss, by_mu, by_sigma = elbo.gradient(model, q[:, 0], gaussian.sigma(q[:, 1]), batch, noise)
    assert loss[0] == 0
    assert not by_mu[0].any()
    assert not by_sigma[0].any()


def test_batches_of_a_client_depend_on_its_own_stream_only() -> None:
    """Alone or in company, with more padding or less."""
    data, weight = clients((20, 15), (30, 30), n=30)
    together = run(data, weight, steps=6, size=4)
    alone = ClientData(data.x[:1, :20], data.y[:1, :20], data.weight[:1, :20])
    for batch, mine in zip(together, run(alone, weight[:1, :20], 6, 4), strict=True):
        for first, second in zip(batch, mine, strict=True):
            assert torch.equal(first[:1], second)
