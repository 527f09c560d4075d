"""The quantities of the paper's theory: hand-worked values, slow references, ranges."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from corefed.base.errors import UserError
from corefed.bayes import gaussian
from corefed.bayes.regression import Normal, kl, linear_posterior
from corefed.models.likelihood import Gaussian
from corefed.models.network import mlp
from corefed_studies import theory

DEFAULT = theory.TheorySetting()
T, G = DEFAULT.parameter_count, DEFAULT.fraktur_g


# --- quantities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s_0", "L", "M", "outputs"), [(20, 1, 20, 1), (3, 2, 5, 1), (1, 4, 2, 3), (7, 1, 1, 2)]
)
def test_parameters_are_those_of_our_networks(s_0: int, L: int, M: int, outputs: int) -> None:
    widths = (s_0, *([M] * L), outputs)
    assert theory.network_parameters(s_0, L, M, outputs) == mlp(widths, Gaussian(outputs)).size


@pytest.mark.parametrize("L", [1, 2, 5])
@pytest.mark.parametrize("wanted", [1, 7, 100.5, 441, 12345])
def test_width_is_the_nearest(L: int, wanted: float) -> None:
    """Beside a search of all widths."""
    found = theory.width_for(wanted, 20, L)
    distance = [abs(theory.network_parameters(20, L, M) - wanted) for M in range(1, 1000)]
    assert abs(theory.network_parameters(20, L, found) - wanted) == min(distance)


def test_figures_worked_by_hand() -> None:
    """s_0 = 20, L = 1, M = 20: T = 20 * 21 + 21, G = 2 log 20 + log(20/21); at n = e^2."""
    assert T == 441
    assert pytest.approx(2 * math.log(20) + math.log(20 / 21), rel=1e-15) == G
    n = math.e**2
    assert theory.r_n(n, T, G) == pytest.approx(441 / n * (G + 1), rel=1e-15)
    assert theory.epsilon_n_squared(n, T, G, 1.5) == pytest.approx(8 * 441 / n * (G + 1), rel=1e-14)
    assert theory.epsilon_n(n, T, G, 1.5) ** 2 == pytest.approx(8 * 441 / n * (G + 1), rel=1e-14)


def test_r_n_is_the_printed_form() -> None:
    """((L+1) T/n) log M + (T/n) log(s_0 sqrt(n/T)), on an array."""
    n = np.geomspace(1, 1e9, 40)
    printed = 2 * T / n * math.log(20) + T / n * np.log(20 * np.sqrt(n / T))
    np.testing.assert_allclose(theory.r_n(n, T, G), printed, rtol=1e-13)


def test_a_and_sigma_of_assumption_3() -> None:
    """s_0 = 1, M = 2, L = 1, Omega = 1: tau = 2, bracket (2+1)^2 + 1/15 + 2/9."""
    a = 1 / math.log(6) / 4**4 / (9 + 1 / 15 + 2 / 9)
    log_a = theory.log_a(1, 1, 2, 1)
    assert log_a == pytest.approx(math.log(a), rel=1e-14)
    assert theory.sigma_n_squared(100, 7, log_a) == pytest.approx(7 * a / 800, rel=1e-13)
    # With one T the prior of n_k points is n/n_k times as wide, in squares.
    ratio = theory.sigma_n_squared(20, 7, log_a) / theory.sigma_n_squared(100, 7, log_a)
    assert ratio == pytest.approx(5, rel=1e-13)


def test_extreme_numbers_give_a_logarithm_or_a_sentence() -> None:
    """(2 tau)^(-2(L+1)) at 10^6 layers is e^(-7 * 10^6)."""
    log_a = theory.log_a(20, 10**6, 20, 1)
    assert log_a == pytest.approx(-2e6 * math.log(40), rel=1e-4)
    with pytest.raises(UserError, match="logarithm"):
        theory.sigma_n_squared(5000, T, log_a)
    with pytest.raises(UserError, match="range of a float"):
        theory.epsilon_n_squared(5000, T, G, 500)
    with pytest.raises(UserError, match="range of a float"):
        theory.c_f(1e-200, 1e-200)
    assert theory.c_f(1.0, 1e-300) == pytest.approx(1 / 4, rel=1e-12)
    assert theory.c_f(1e-160, 1.0) == pytest.approx(1 / 8, rel=1e-12)  # the limit F -> 0


def test_rates() -> None:
    """beta = 1, Lambda = 2: half; T = n^(1/2), xi = 1/T, n_k^(-1/2) log^3."""
    assert theory.rate_exponent(1, 2) == 0.5
    assert theory.proof_parameters(10000, 1, 2, C_1=3) == pytest.approx(300)
    assert theory.xi_bound(300, 1, 2, C_0=6) == pytest.approx(0.02)
    assert theory.lower_rate(100, 1, 2, C_3=2) == pytest.approx(0.2)
    assert theory.upper_rate(100, 1, 2, 1.5) == pytest.approx(0.1 * math.log(100) ** 3)
    assert theory.lower_bound_gap(400, 100, 1, 2) == pytest.approx(0.1 - 0.05)
    assert theory.c_f(1, 1) == pytest.approx((1 - math.exp(-0.5)) / 4, rel=1e-14)
    assert theory.c_f(1e-5, 1) == pytest.approx(1 / 8, rel=1e-9)


def test_both_forms_of_theorem_1() -> None:
    """Term by term from the definitions, with every constant of its own."""
    constants = theory.Constants(C=2, C_prime=3, C_second=5)
    n, n_k, zeta, xi = 5000, 500, 0.7, 0.01
    eps, r = theory.epsilon_n_squared, theory.r_n
    first = float(eps(n, T, G, 1.1) - eps(n_k, T, G, 1.1))
    printed = theory.drifts(n, n_k, T, G, 1.1, xi)
    assert printed.estimation_1 == first
    assert printed.estimation_2 == pytest.approx(n * r(n, T, G) - n_k * r(n_k, T, G), rel=1e-12)
    assert printed.approximation == pytest.approx(45)
    assert theory.im(printed, zeta, constants) == pytest.approx(
        2 * first + 0.7 * 3 * T / 2 * math.log(10) + 5 * 45, rel=1e-12
    )
    # With the 1/n kept it is the difference of the bounds of Eq. 18.
    kept = theory.drifts_per_point(n, n_k, T, G, 1.1, xi)
    bounds = [theory.error_bound(m, T, G, 1.1, xi, zeta, constants) for m in (n, n_k)]
    by_hand = 2 * eps(n, T, G, 1.1) + (3 + 5 / 0.7) * r(n, T, G) + 5 / 0.7 * xi
    assert bounds[0] == pytest.approx(by_hand, rel=1e-14)
    assert theory.im_per_point(kept, zeta, constants) == pytest.approx(
        bounds[0] - bounds[1], rel=1e-12
    )


@pytest.mark.parametrize("G", [-3.0, -0.3, 0.0, 0.4, 6.0, 1e6])
@pytest.mark.parametrize("delta", [1.01, 1.1, 4.0])
def test_turning_point_is_the_maximum(G: float, delta: float) -> None:
    """Beside a numerical maximum, whose place a flat top leaves uncertain by sqrt of rounding."""
    star = math.log(theory.turning_point(G, delta))
    start = max(0.0, -2 * G)

    def fall(log: float) -> float:
        return log - math.log(G + log / 2) - 2 * delta * math.log(log)

    best = minimize_scalar(fall, bounds=(start + 1e-9, start + 30), method="bounded")
    assert star == pytest.approx(best.x, abs=1e-4)
    # T = C_1 n^a, chosen anew for every n: n* to the power 1 / (1 - a).
    anew = minimize_scalar(
        lambda log: log / 2 - math.log(G + log / 4) - 2 * delta * math.log(log),
        bounds=(2 * start + 1e-9, 2 * start + 60),
        method="bounded",
    )
    assert math.log(theory.turning_point(G, delta, a=0.5)) == pytest.approx(anew.x, abs=1e-4)


def test_partner_and_where_the_bound_begins_to_say_something() -> None:
    for n, g in ((50, 0.3), (5000, G), (1e9, 2.0), (5000, -1.0)):
        k = theory.partner(n, g, 1.1)
        assert 1 < k < theory.turning_point(g, 1.1)
        assert theory.epsilon_n_squared(k, T, g, 1.1) == pytest.approx(
            theory.epsilon_n_squared(n, T, g, 1.1), rel=1e-6
        )
    n = theory.falls_below(1, T, G, 1.1)
    assert theory.epsilon_n_squared(n, T, G, 1.1) == pytest.approx(1, rel=1e-9)
    assert n == pytest.approx(2.1137e6, rel=1e-4)  # for a network of 441 parameters
    assert theory.falls_below(1e9, T, G, 1.1) == 1
    with pytest.raises(UserError, match="partner"):
        theory.partner(5, G, 1.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.TheorySetting(n_k=5001), "at most the n = 5000"),
        (lambda: theory.TheorySetting(n_k=0), "n_k is 0"),
        (lambda: theory.TheorySetting(beta=0), "beta"),
        (lambda: theory.TheorySetting(Lambda=0.5), "Lambda is 0.5"),
        (lambda: theory.TheorySetting(Lambda=21), "at most s_0 = 20"),
        (lambda: theory.TheorySetting(zeta=0), "zeta"),
        (lambda: theory.TheorySetting(delta=1), "delta is 1"),
        (lambda: theory.TheorySetting(F=-1), "F is -1"),
        (lambda: theory.TheorySetting(sigma=math.nan), "sigma is nan"),
        (lambda: theory.TheorySetting(Omega=math.inf), "finite"),
        (lambda: theory.TheorySetting(parameters=0.5), "T is 0.5"),
        (lambda: theory.TheorySetting(constants=theory.Constants(C=0)), "C is 0"),
        (lambda: theory.TheorySetting(M=2.5), "whole"),
        (lambda: theory.log_a(1, 1, 1, 1), "Omega M is 1"),
        (lambda: theory.r_n(np.array([10.0, 0.5]), 5, 1), "at least 1"),
        (lambda: theory.epsilon_n(3, 4, -math.log(2), 1.1), "no real number"),
        (lambda: theory.turning_point(1, 1.1, a=1), "below 1"),
        (lambda: theory.drifts(10, np.array([5, 11]), 4, 1, 1.1, 0), "at most the n"),
        (lambda: theory.error_certificate(0, 0, 10, alpha=1), "alpha"),
        (lambda: theory.error_certificate(0, 0, 10, power=1), "power"),
        (lambda: theory.error_certificate(0, -1, 10), "kl is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(UserError, match=words):
        call()


# --- the Hellinger distance -----------------------------------------------------------------------


@pytest.mark.parametrize(("s", "t"), [(0.5, 0.5), (0.3, 1.2), (2.0, 0.1)])
@pytest.mark.parametrize("difference", [0.0, 0.01, 1.0, 5.0])
def test_definition_1_is_the_hellinger_distance(difference: float, s: float, t: float) -> None:
    """1 - int sqrt(p q), by quadrature in pieces around both means."""
    ends = sorted({-12 * s, 0.0, difference, difference + 12 * t, 12 * s, difference - 12 * t})
    affinity = sum(
        quad(
            lambda y: math.sqrt(norm.pdf(y, 0, s) * norm.pdf(y, difference, t)), a, b, epsabs=1e-12
        )[0]
        for a, b in pairwise(ends)
    )
    found = theory.hellinger_gaussian(torch.tensor(difference, dtype=torch.float64), t, s)
    assert float(found) == pytest.approx(1 - affinity, abs=1e-9)
    if s == t:  # as the paper prints it
        assert float(found) == pytest.approx(1 - math.exp(-(difference**2) / (8 * s**2)), abs=1e-15)


def test_small_and_large_distances_are_exact() -> None:
    tiny = torch.tensor(1e-9, dtype=torch.float64)
    assert float(theory.hellinger_gaussian(tiny, 1.0)) == pytest.approx(1e-18 / 8, rel=1e-12)
    assert float(theory.hellinger_gaussian(torch.tensor(1e30), 1e-5)) == 1
    assert float(theory.hellinger_gaussian(torch.tensor(0.0), 1e-30, 1.0)) == pytest.approx(1)
    with pytest.raises(UserError, match="noise"):
        theory.hellinger_gaussian(tiny, 0.0)


def test_posterior_hellinger_is_the_closed_form() -> None:
    """f_theta - f ~ N(m, v^2) at every point: E d^2 = 1 - sqrt(r) exp(-m^2 r / (8 s^2)),
    r = 4 s^2 / (4 s^2 + v^2). Within four of its own standard errors."""
    m, v, s, draws, points = 0.3, 0.4, 0.5, 4000, 3
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(draws, 1, generator=generator, dtype=torch.float64) * v + m
    truth = torch.arange(points, dtype=torch.float64)
    found = theory.posterior_hellinger(truth + shift, truth, s)
    r = 4 * s**2 / (4 * s**2 + v**2)
    exact = 1 - math.sqrt(r) * math.exp(-(m**2) * r / (8 * s**2))
    assert abs(float(found.value) - exact) < 4 * float(found.draws_error)
    assert 0 < float(found.draws_error) < 0.01
    assert float(found.points_error) < 1e-15  # all points alike
    with pytest.raises(UserError, match="at least 2"):
        theory.posterior_hellinger(truth[None], truth, s)
    with pytest.raises(UserError, match="truth has the shape"):
        theory.posterior_hellinger(truth + shift, truth[:2], s)


@pytest.mark.parametrize("learn", [False, True])
def test_of_model_is_that_of_its_draws(learn: bool) -> None:
    """Two clients, more draws than are evaluated at once, beside the same draws all at once."""
    likelihood = Gaussian(1, 0.4, learn_noise=learn)
    model = mlp((2, 3, 1), likelihood)
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(2, 2, model.size, generator=generator)
    x, truth = torch.randn(2, 5, 2, generator=generator), torch.randn(2, 5, generator=generator)
    again = torch.Generator().manual_seed(2)
    found = theory.of_model(model, v, x, truth, 0.4, draws=40, generator=again)
    again.manual_seed(2)
    normals = [torch.randn(2, k, model.size, generator=again) for k in (16, 16, 8)]
    theta = gaussian.sample(v, torch.cat(normals, 1))
    own = theta[..., -1].exp() if learn else None
    beside = theory.posterior_hellinger(model.forward(theta, x).squeeze(-1), truth, 0.4, own)
    torch.testing.assert_close(found, beside)
    assert found.value.shape == (2,)


# --- the certificate ------------------------------------------------------------------------------

NOISE, DIMENSION = 0.5, 3
PRIOR = Normal(torch.zeros(DIMENSION).double(), torch.eye(DIMENSION).double())
THETA = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64)


def linear_data(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64)
    return x, x @ THETA + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)


def exact_d2(theta: torch.Tensor) -> torch.Tensor:
    """x ~ N(0, I): E_X exp(-(x^T u)^2 / (8 s^2)) = (1 + |u|^2 / (4 s^2))^(-1/2)."""
    return 1 - (1 + (theta - THETA).square().sum(-1) / (4 * NOISE**2)).rsqrt()


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75])
def test_the_expectation_behind_the_certificate_is_at_most_1(power: float) -> None:
    """E int exp(s l_n(P_theta, P) + 4s(1-s) n d^2) dz <= 1, over data sets and theta ~ z.

    n = 4 keeps the tail of the exponential light enough for a mean. At s = 1/2 the expectation is
    E_theta [(1 - d^2) e^(d^2)]^n in closed form, and the mean must have it.
    """
    n, sets = 4, 40000
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sets, n, DIMENSION, generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn(sets, n, generator=generator, dtype=torch.float64)
    theta = torch.randn(sets, DIMENSION, generator=generator, dtype=torch.float64)
    truth = x @ THETA
    outputs = torch.einsum("snd,sd->sn", x, theta).unsqueeze(1)
    ratio = theory.log_likelihood_ratio(outputs, truth, truth + noise, NOISE).squeeze(-1)
    d2 = exact_d2(theta)
    eta = torch.exp(-power * ratio + 4 * power * (1 - power) * n * d2)
    mean, error = float(eta.mean()), float(eta.std()) / sets**0.5
    assert mean <= 1 + 4 * error
    if power == 0.5:
        exact = ((1 - d2) * d2.exp()).pow(n).mean()
        assert abs(mean - float(exact)) < 4 * error
        assert 0.2 < mean < 1


@pytest.mark.parametrize("keep", [200, 20])
def test_the_certificate_holds_and_says_something(keep: int) -> None:
    """300 data sets, alpha = 0.1: misses at most binomial, 0.1 + 4 sqrt(0.1 * 0.9 / 300) = 0.17.

    For the posterior of all points and for one of the first 20 with weights 10: the same bound, on
    all points, holds for both. And without the truth, from alpha = 0.05 twice.
    """
    n, sets, draws = 200, 300, 200
    generator = torch.Generator().manual_seed(4)
    misses, blind_misses, bounds = 0, 0, []
    weight = torch.zeros(n, dtype=torch.float64)
    weight[:keep] = n / keep
    for _ in range(sets):
        x, y = linear_data(n, generator)
        q = linear_posterior(x, y, weight, PRIOR, NOISE)
        theta = q.sample(draws, generator)
        outputs = theta @ x.T
        error = float(exact_d2(theta).mean())
        ratio = theory.log_likelihood_ratio(outputs, x @ THETA, y, NOISE).mean()
        divergence = float(kl(q, PRIOR))
        bound = theory.error_certificate(float(ratio), divergence, n, alpha=0.1)
        misses += error > float(bound)
        bounds.append(float(bound))
        blind = theory.ratio_without_truth(outputs, y, NOISE, 0.05).mean()
        blind_misses += error > float(
            theory.error_certificate(float(blind), divergence, n, alpha=0.05)
        )
    assert misses / sets <= 0.17 and blind_misses / sets <= 0.17
    assert np.median(bounds) < (0.1 if keep == n else 0.3)  # d^2 <= 1 is what one knows without it


def test_likelihood_ratio_is_the_difference_of_log_densities() -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = linear_data(7, generator)
    theta = torch.randn(4, DIMENSION, generator=generator, dtype=torch.float64)
    found = theory.log_likelihood_ratio(theta @ x.T, x @ THETA, y, NOISE)
    of_truth = norm.logpdf(y.numpy(), (x @ THETA).numpy(), NOISE).sum()
    of_theta = norm.logpdf(y.numpy(), (theta @ x.T).numpy(), NOISE).sum(-1)
    np.testing.assert_allclose(found.numpy(), of_truth - of_theta, rtol=1e-10)
