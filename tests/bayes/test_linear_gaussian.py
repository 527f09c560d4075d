"""Where the answer is known: PFedBayes on linear-Gaussian clients finds the mean-field posterior.

With z held at the broadcast (eta_2 = 0), the client's objective (1/n)[sum_j w_j E_q nll_j + zeta
KL(q || z)] is zeta / n times the variational objective of the prior z and the likelihood to the
power w / zeta. `exact_mean_field` gives its minimiser. The model has a bias: a last feature of 1.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import pytest
import torch
from exact import exact_mean_field
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import Batch, ClientData, Tree, Work
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches
from corefed.data.synthetic import linear_gaussian
from corefed.methods import pfedbayes, random_subset
from corefed.models.likelihood import Gaussian
from corefed.models.network import Model, mlp
from corefed.training import client_side

POINTS, FEATURES, NOISE = 8, 3, 1.0
SIZE = FEATURES + 1  # P: the bias is the last entry


class Problem(NamedTuple):
    """One client in float64, and a prior that matters and differs between the weights."""

    x: Tensor  # [n, d]
    y: Tensor  # [n, 1]
    prior: Tensor  # v = (mu, rho): [2, P]
    model: Model

    def mean_field(self, weight: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and variance of the best q, the prior's standard deviations times `scale`."""
        design = torch.cat([self.x, torch.ones(POINTS, 1)], 1)
        std = gaussian.sigma(self.prior[1]) * scale
        return exact_mean_field(design, self.y, weight, self.prior[0], std, NOISE)


def problem() -> Problem:
    data = linear_gaussian(1, POINTS, FEATURES, NOISE, seed=3, correlation=0.5)
    prior_mean = torch.tensor([0.5, -0.3, 0.2, 0.4]).double()
    prior_std = torch.tensor([0.5, 0.8, 0.3, 0.4]).double()
    prior = torch.stack([prior_mean, gaussian.rho_of(prior_std)])
    y = data.y.double() + 0.7  # a bias worth finding
    return Problem(data.x.double(), y, prior, mlp((FEATURES, 1), Gaussian(1, NOISE)))


FULL = torch.ones(POINTS, dtype=torch.float64)
SUBSET = torch.tensor([0, 2.5, 0, 0, 1.0, 4.0, 0, 0.5], dtype=torch.float64)
"""4 points that stand for all 8."""


# To the last digit: a quadrature in the place of Monte-Carlo


def quadrature(size: int) -> Tensor:
    """2P points +-sqrt(P) e_i with mean 0 and covariance 1: exact for any quadratic of theta."""
    half = math.sqrt(size) * torch.eye(size, dtype=torch.float64)
    return torch.cat([half, -half]).unsqueeze(0)


def descend(
    weight: Tensor,
    zeta: float,
    eta_2: float = 0.0,
    steps: int = 2000,
    optimizer: Literal["sgd", "adam"] = "sgd",
    rates: tuple[float, ...] = (0.3,),
) -> Tree:
    """Noise-free descent by the method's own step, from q = z = prior; a round for each rate."""
    one = problem()
    broadcast = {"v": one.prior.unsqueeze(0)}
    data = ClientData(one.x.unsqueeze(0), one.y.unsqueeze(0), FULL.unsqueeze(0))
    batch = Batch(data.x, data.y, weight.unsqueeze(0) / POINTS)
    noise = quadrature(SIZE)
    private: Tree = {}
    for rate in rates:
        settings = pfedbayes.Config(
            zeta=zeta, eta_1=rate, eta_2=eta_2, monte_carlo=2 * SIZE, optimizer=optimizer
        )
        method = pfedbayes.build(settings, one.model)
        private = private or method.init_client(broadcast, data)
        working = method.begin(broadcast, private, data, Streams([], 0))
        for _ in range(steps):
            working, _ = method.step(working, batch, noise)
        message, private = method.end(broadcast, working)
        assert torch.equal(message["v"], private["z"])
    return private


@pytest.mark.parametrize("weight", [FULL, SUBSET], ids=["full", "subset"])
@pytest.mark.parametrize("zeta", [0.2, 1.0, 5.0])
def test_descent_ends_at_the_exact_mean_field_posterior(weight: Tensor, zeta: float) -> None:
    """The slowest mode is rho, of curvature 2 zeta / n: the steps leave exp(-30) of the start."""
    one = problem()
    steps = 2000 if zeta < 1 else 600
    private = descend(weight, zeta, steps=steps, rates=(0.3 / max(1.0, zeta),))  # below 2 / J
    mu, variance = private["q"][0, 0], gaussian.sigma(private["q"][0, 1]).square()
    mean, expected = one.mean_field(weight / zeta)  # zeta tempers the likelihood
    torch.testing.assert_close(mu, mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(variance, expected, rtol=1e-8, atol=0)
    assert torch.equal(private["z"][0], one.prior)

    # The same in the other sense: the prior's precision times zeta has the same mean, and
    # a variance that is zeta times smaller, since q is that of a likelihood to the power 1 / zeta.
    mean, smaller = one.mean_field(weight, scale=zeta**-0.5)
    torch.testing.assert_close(mu, mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(variance, zeta * smaller, rtol=1e-8, atol=0)


def test_adam_ends_there_too() -> None:
    """Its steps do not shrink by themselves: the distance is of the order of the last rate."""
    one = problem()
    q = descend(FULL, 1.0, steps=300, optimizer="adam", rates=(0.02, 0.002, 0.0002))["q"][0]
    mean, variance = one.mean_field(FULL)
    optimum = torch.stack([mean, gaussian.rho_of(variance.sqrt())])
    assert (one.prior - optimum).abs().max() > 0.5
    assert (q - optimum).abs().max() < 0.0002


def test_zeta_means_the_same_whatever_the_size_of_the_subset() -> None:
    """n copies of one point, or that point with weight n: the same posterior."""
    one = problem()
    alike = one._replace(x=one.x[:1].expand(POINTS, -1), y=one.y[:1].expand(POINTS, 1))
    single = torch.zeros(POINTS, dtype=torch.float64)
    single[0] = POINTS
    for first, second in zip(alike.mean_field(FULL), alike.mean_field(single), strict=True):
        torch.testing.assert_close(first, second)
    step_of_all, step_of_one = (
        elbo.gradient(
            one.model,
            one.prior[None, 0],
            gaussian.sigma(one.prior[None, 1]),
            Batch(alike.x[None], alike.y[None], weight[None] / POINTS),
            quadrature(SIZE),
        )
        for weight in (FULL, single)
    )
    for first, second in zip(step_of_all, step_of_one, strict=True):
        torch.testing.assert_close(first, second)


def test_a_free_z_follows_q_and_lets_it_go_to_the_data() -> None:
    """Both moving, KL(q || z) falls to 0, z = q, and q's mean goes to least squares."""
    one = problem()
    mean, variance = one.mean_field(FULL)
    start = gaussian.kl(torch.stack([mean, gaussian.rho_of(variance.sqrt())]), one.prior)
    private = descend(FULL, 1.0, eta_2=0.1)
    q, z = private["q"][0], private["z"][0]
    assert gaussian.kl(q, z) < 0.05 * start
    design = torch.cat([one.x, torch.ones(POINTS, 1)], 1)
    least_squares = torch.linalg.lstsq(design, one.y, driver="gelsd").solution[:, 0]
    assert (q[0] - least_squares).norm() < 0.5 * (mean - least_squares).norm()


# Through the runtime, with Monte-Carlo draws and minibatches

CLIENTS, DRAWS, RATE, STEPS = 40, 16, 0.05, 1600


class Stationary(NamedTuple):
    """The law of (mu, rho) that constant-rate SGD settles in, to first order in the rate."""

    optimum: Tensor  # [2P]
    covariance: Tensor  # [2P, 2P]
    slowest: float  # factor of one step on the slowest mode


def stationary(one: Problem, weight: Tensor, zeta: float, batch: int) -> Stationary:
    """v <- v - rate (J (v - v*) + xi): V = M V M + rate^2 C, M = 1 - rate J, C = Cov(xi).

    J is the Hessian at the optimum: in mu A / n, A the posterior's precision times zeta; in rho
    (d sigma / d rho)^2 (A_kk + zeta / sigma_k^2) / n = 2 (d sigma / d rho)^2 A_kk / n; none across.
    C is measured at the optimum from 4000 gradients, hence known to a few per cent. Draws without
    replacement in epochs only make the noise of a walk smaller.
    """
    mean, variance = one.mean_field(weight / zeta)
    design = torch.cat([one.x, torch.ones(POINTS, 1)], 1)
    precision = (design.T * weight) @ design / NOISE**2
    precision += zeta * gaussian.sigma(one.prior[1]).pow(-2).diag()
    rho = gaussian.rho_of(variance.sqrt())
    slope = torch.sigmoid(rho)
    hessian = torch.block_diag(precision, (2 * slope.square() * precision.diagonal()).diag())
    hessian /= POINTS

    many = 4000
    streams = Streams([Who(99, i) for i in range(many)], 0)
    data = ClientData(one.x.expand(many, -1, -1), one.y.expand(many, -1, -1), FULL.expand(many, -1))
    made = next(iter(batches(data, weight.expand(many, -1).contiguous(), streams, 1, batch)))
    noise = streams.normal("theta", DRAWS, SIZE).double()
    _, by_mu, by_sigma = elbo.gradient(
        one.model, mean.expand(many, -1), variance.sqrt().expand(many, -1), made, noise
    )
    xi = torch.cat([by_mu, by_sigma * slope], 1).T.cov()

    transfer = torch.eye(2 * SIZE).double() - RATE * hessian
    slowest = float(torch.linalg.eigvalsh(transfer).abs().max())
    covariance, power = RATE**2 * xi, transfer
    for _ in range(16):  # V = sum_t M^t (rate^2 C) M^t, twice as many terms each time
        covariance = covariance + power @ covariance @ power
        power = power @ power
    return Stationary(torch.cat([mean, rho]), covariance, slowest)


def repeated(one: Problem) -> ClientData:
    """The same client CLIENTS times, each with its own random stream."""
    x, y = one.x.float(), one.y.float()
    return ClientData(
        x.expand(CLIENTS, -1, -1).contiguous(),
        y.expand(CLIENTS, -1, -1).contiguous(),
        torch.ones(CLIENTS, POINTS),
    )


@pytest.mark.parametrize("batch", [POINTS, 3])
def test_sgd_settles_around_the_exact_posterior(batch: int) -> None:
    """Means over clients within 4.5 standard errors; 8 of them and two cases: probability 1e-4.

    To second order the curvature's slope moves the mean of rho by (1/2) (J' / J) V, about V.
    """
    one = problem()
    law = stationary(one, FULL, 1.0, batch)
    settings = pfedbayes.Config(eta_1=RATE, eta_2=0.0, monte_carlo=DRAWS, optimizer="sgd")
    method = pfedbayes.build(settings, one.model)
    data = repeated(one)
    broadcast = {"v": one.prior.float().expand(CLIENTS, -1, -1)}
    streams = Streams([Who(0, i) for i in range(CLIENTS)], 0)
    start = client_side.start(method, broadcast, data)
    trained = client_side.train(method, broadcast, start, data, streams, Work(STEPS, batch))

    deviation = trained.private["q"].double().flatten(1) - law.optimum
    variance = law.covariance.diagonal()
    forgotten = law.slowest**STEPS * (one.prior.flatten() - law.optimum).abs().max()
    assert forgotten < 1e-3 * variance.sqrt().min()
    bias = torch.cat([torch.zeros(SIZE), variance[SIZE:]])
    assert (deviation.mean(0).abs() < 4.5 * (variance / CLIENTS).sqrt() + bias).all()
    # Each client's spread is the one derived, or below it where epochs cancel noise.
    spread = deviation.square().mean(0) / variance
    allowed = 4.5 * math.sqrt(2 / CLIENTS)
    assert (spread < 1 + allowed).all()
    if batch == POINTS:
        assert (spread > 1 - min(0.9, allowed)).all()


def test_a_random_subset_settles_around_its_own_posterior() -> None:
    """Each client has its own subset, with weights n/k, and so its own closed form."""
    one, clients, zeta = problem(), 6, 2.0
    settings = random_subset.Config(
        zeta=zeta, eta_1=RATE, eta_2=0.0, monte_carlo=DRAWS, optimizer="sgd", fraction=0.4
    )
    method = random_subset.build(settings, one.model)
    data = ClientData(*(field[:clients] for field in repeated(one)))
    broadcast = {"v": one.prior.float().expand(clients, -1, -1)}
    streams = Streams([Who(5, i) for i in range(clients)], 0)
    start = client_side.start(method, broadcast, data)
    trained = client_side.train(method, broadcast, start, data, streams, Work(STEPS, POINTS))
    assert len(trained.private["subset.weight"].unique(dim=0)) == clients
    for q, weight in zip(trained.private["q"], trained.private["subset.weight"], strict=True):
        assert weight.unique().tolist() == [0.0, 2.0]
        assert int((weight > 0).sum()) == 4
        law = stationary(one, weight.double(), zeta, POINTS)
        variance = law.covariance.diagonal()
        deviation = q.double().flatten() - law.optimum
        assert (deviation.abs() < 4.5 * variance.sqrt() + variance).all()
