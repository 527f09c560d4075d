"""Which statements of the paper hold: each "yes" and each condition as a property, each "no" by a
counter-example with numbers. `docs/theory-study.md` names these tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from corefed.bayes.regression import Normal, kl, linear_posterior
from corefed_studies import theory

property_test = settings(max_examples=100, deadline=None)

SIZES = st.floats(1, 1e12)
DELTAS = st.floats(1.001, 10)
CONSTANTS = st.floats(-20, 200)  # G
PARAMETERS = st.floats(1, 1e9)
EXACT = 1e-12
"""Differences below this, relative to what is subtracted, are rounding."""


def slack(*values: float) -> float:
    return EXACT * max(map(abs, values))


# --- Definition 1, Lemma 1, C_F -------------------------------------------------------------------


@property_test
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_lemma_1_symmetry_and_range(difference: float, s: float, t: float) -> None:
    d = torch.tensor(difference, dtype=torch.float64)
    there = float(theory.hellinger_gaussian(d, s, t))
    assert there == pytest.approx(float(theory.hellinger_gaussian(-d, t, s)), rel=1e-12, abs=1e-15)
    assert 0 <= there <= 1


@property_test
@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_c_f_holds_inside_the_bound(a: float, b: float, F: float, sigma: float) -> None:
    """C_F u <= d^2 <= u / (8 sigma^2), u = (f_theta - f)^2; the right side needs no bound."""
    difference = torch.tensor((a - b) * F, dtype=torch.float64)
    u, d2 = float(difference.square()), float(theory.hellinger_gaussian(difference, sigma))
    assert theory.c_f(F, sigma) * u <= d2 * (1 + 1e-9)
    assert d2 <= u / (8 * sigma**2) * (1 + 1e-9)


@property_test
@given(st.floats(2.01, 1e3), st.floats(0.01, 100), st.floats(0.01, 100))
def test_c_f_fails_outside_the_bound(factor: float, F: float, sigma: float) -> None:
    """f = 0, |f_theta| > 2F: d^2 < C_F u, unless the noise hides the difference from a float."""
    assume(F / sigma > 1e-2)
    difference = torch.tensor(factor * F, dtype=torch.float64)
    d2 = float(theory.hellinger_gaussian(difference, sigma))
    assert d2 < theory.c_f(F, sigma) * float(difference.square())


def test_c_f_counter_example() -> None:
    """f = 0, f_theta = 10, F = 1, sigma = 1, as on the page; clipped to [-1, 1] it holds again."""
    d2 = float(theory.hellinger_gaussian(torch.tensor(10.0), 1.0))
    assert d2 == pytest.approx(0.999996, abs=1e-6)
    assert theory.c_f(1, 1) * 100 == pytest.approx(9.837, abs=1e-3)
    clipped = float(theory.hellinger_gaussian(torch.tensor(1.0), 1.0))
    assert clipped >= theory.c_f(1, 1)


# --- Assumption 3 ---------------------------------------------------------------------------------


@property_test
@given(
    st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 50), st.integers(2, 500),
    st.integers(1, 40), st.floats(0.6, 50),
)  # fmt: skip
def test_assumption_3_for_n_k_implies_that_for_n(
    n: int, n_k: int, s_0: int, M: int, L: int, Omega: float
) -> None:
    n, n_k = max(n, n_k), min(n, n_k)
    T, log_a = theory.network_parameters(s_0, L, M), theory.log_a(s_0, L, M, Omega)
    full, part = (theory.log_sigma_n_squared(size, T, log_a) for size in (n, n_k))
    assert part - full == pytest.approx(math.log(n / n_k), rel=1e-9, abs=1e-9)
    assert part >= full
    setting = theory.TheorySetting(
        n=n, n_k=n_k, s_0=s_0, M=M, L=L, Omega=Omega, Lambda=1, parameters=float(T)
    )
    named = {each.name: each for each in theory.judge(setting)}
    assert named["Assumption 3"].holds == (part <= 2 * math.log(Omega))


# --- Lemma 2 --------------------------------------------------------------------------------------


@property_test
@given(SIZES, SIZES, PARAMETERS, CONSTANTS)
def test_lemma_2_holds_whatever_g(n: float, n_k: float, T: float, G: float) -> None:
    """n r_n - n_k r_{n_k} = (T/2) log(n/n_k), up to the rounding of the two terms."""
    n, n_k = max(n, n_k), min(n, n_k)
    left, right = n * theory.r_n(n, T, G), n_k * theory.r_n(n_k, T, G)
    drift = theory.drifts(n, n_k, T, G, 1.1, 0).estimation_2
    assert abs(left - right - drift) <= slack(left, right, T * G)
    assert drift > 0 or n == n_k or n / n_k == 1


def test_lemma_2_where_its_proof_does_not_reach() -> None:
    """One neuron, one input: T = 4, G = -log 2. At n_k = 2, n = 3 both r are negative, the ratio
    of the proof is below 1, and the difference is positive all the same."""
    T = theory.network_parameters(1, 1, 1)
    G = theory.fraktur_g(T, 1, 1, 1)
    assert T == 4
    assert pytest.approx(-math.log(2)) == G
    ratio = 3 * theory.r_n(3, T, G) / (2 * theory.r_n(2, T, G))
    assert ratio == pytest.approx(0.415, abs=1e-3)
    assert 3 * theory.r_n(3, T, G) - 2 * theory.r_n(2, T, G) == pytest.approx(2 * math.log(1.5))


@property_test
@given(st.integers(1, 10**4), st.integers(1, 30), st.integers(2, 10**4))
@example(1, 1, 2)
def test_g_is_positive_for_every_network_from_width_2(s_0: int, L: int, M: int) -> None:
    """One output: M^(2(L+1)) s_0^2 > T, hence r_n > 0 and epsilon real for every n >= 1."""
    T = theory.network_parameters(s_0, L, M)
    assert theory.fraktur_g(T, s_0, L, M) > 0


@property_test
@given(SIZES, SIZES, st.floats(0.05, 0.95), CONSTANTS)
def test_lemma_2_with_t_chosen_anew(n: float, n_k: float, a: float, G: float) -> None:
    """T = n^a: n r_n = n^a (G + (1-a) log(n) / 2) rises from where the bracket is above
    -(1-a) / (2a), so wherever r_{n_k} >= 0; G is that of T = 1."""
    n, n_k = max(n, n_k), min(n, n_k)
    assume(n > n_k * 1.001)

    def total(size: float) -> float:
        return size**a * (G + (1 - a) * math.log(size) / 2)

    bracket = G + (1 - a) * math.log(n_k) / 2
    anew = n * theory.r_n(n, n**a, G - a * math.log(n) / 2)
    assert anew == pytest.approx(total(n), rel=1e-9, abs=slack(n**a * G) * 1e3)
    if bracket >= -(1 - a) / (2 * a):
        assert total(n) > total(n_k)
    elif G + (1 - a) * math.log(n) / 2 <= -(1 - a) / (2 * a):
        assert total(n) < total(n_k)


# --- Lemma 3 --------------------------------------------------------------------------------------


@property_test
@given(SIZES, SIZES, st.floats(-3, 200), DELTAS)
def test_lemma_3_holds_up_to_the_turning_point_and_is_reversed_beyond(
    n: float, n_k: float, G: float, delta: float
) -> None:
    n, n_k = max(n, n_k), min(n, n_k)
    assume(n > n_k * (1 + 1e-6) and G + math.log(n_k) / 2 > 1e-9)
    star = theory.turning_point(G, delta)
    full, part = (float(theory.epsilon_n_squared(size, 100, G, delta)) for size in (n, n_k))
    if n <= star:
        assert full >= part - slack(full, part)
    elif n_k >= star:
        assert full <= part + slack(full, part)
    else:
        partner = theory.partner(n, G, delta)
        assume(abs(n_k - partner) > 1e-6 * partner)
        assert (full > part) == (n_k < partner)


@property_test
@given(st.floats(0, 1e6), DELTAS)
def test_turning_point_lies_in_its_bracket(G: float, delta: float) -> None:
    """e^(2 delta) <= n* <= e^(2 delta + 1) for G >= 0, both of them limits."""
    log = math.log(theory.turning_point(G, delta))
    assert 2 * delta * (1 - EXACT) <= log <= (2 * delta + 1) * (1 + EXACT)


def test_lemma_3_counter_example() -> None:
    """The default numbers: s_0 = 20, L = 1, M = 20, delta = 1.1, n = 5000, n_k = 500."""
    setting = theory.TheorySetting()
    full, part = (
        theory.epsilon_n_squared(size, setting.parameter_count, setting.fraktur_g, 1.1)
        for size in (5000, 500)
    )
    assert (full, part) == (pytest.approx(100.2, abs=0.05), pytest.approx(444.2, abs=0.05))
    assert theory.turning_point(setting.fraktur_g, 1.1) == pytest.approx(10.65, abs=0.01)
    assert theory.partner(5000, setting.fraktur_g, 1.1) == pytest.approx(1.286, abs=1e-3)


@property_test
@given(
    st.integers(1, 1000), st.integers(1, 20), st.integers(2, 1000), DELTAS, st.integers(3, 10**9),
    st.integers(3, 10**9),
)  # fmt: skip
@example(1, 1, 2, 1.001, 4, 3)
@example(20, 1, 20, 1.1, 10, 3)
def test_where_lemma_3_holds_the_bound_says_nothing(
    s_0: int, L: int, M: int, delta: float, n: int, n_k: int
) -> None:
    """From n_k = 3 on, with C >= 1: epsilon_n^2 > epsilon_{n_k}^2 only where both exceed 1."""
    T = theory.network_parameters(s_0, L, M)
    G = float(theory.fraktur_g(T, s_0, L, M))
    full, part = (float(theory.epsilon_n_squared(size, T, G, delta)) for size in (n, n_k))
    if n > n_k and full > part * (1 + EXACT):
        assert part > 1


# --- Theorem 1 ------------------------------------------------------------------------------------


@property_test
@given(SIZES, SIZES, PARAMETERS, st.floats(-3, 200), DELTAS, st.floats(0, 10), st.floats(0.01, 100))
def test_theorem_1_with_1_over_n_is_not_positive_beyond_the_turning_point(
    n: float, n_k: float, T: float, G: float, delta: float, xi: float, zeta: float
) -> None:
    """Every term is <= 0 for n_k >= n*: fewer points, larger bound. (n* > e^(1-2G), from where on
    r_n falls.)"""
    n, n_k = max(n, n_k), min(n, n_k)
    star = theory.turning_point(G, delta)
    assume(n_k >= star)
    assert math.log(star) > 1 - 2 * G
    drifts = theory.drifts_per_point(n, n_k, T, G, delta, xi)
    for drift, size in zip(
        drifts,
        (theory.epsilon_n_squared(n_k, T, G, delta), theory.r_n(n_k, T, G), 0),
        strict=True,
    ):
        assert drift <= slack(float(size))
    assert theory.im_per_point(drifts, zeta) <= slack(
        theory.error_bound(n_k, T, G, delta, xi, zeta)
    )


@property_test
@given(SIZES, SIZES, PARAMETERS, st.floats(0, 10))
def test_approximation_drift_is_not_negative_as_printed(
    n: float, n_k: float, T: float, xi: float
) -> None:
    """(n - n_k) xi, with no assumption: xi_n and xi_{n_k} are infima over the same networks."""
    n, n_k = max(n, n_k), min(n, n_k)
    assert theory.drifts(n, n_k, T, 1, 1.1, xi).approximation >= 0
    assert theory.drifts_per_point(n, n_k, T, 1, 1.1, xi).approximation == 0


def test_theorem_1_as_printed_has_either_sign() -> None:
    """All constants 1, n = 5000: Im(500) > 0, Im(20) < 0; and C = 2 turns the first around."""
    setting = theory.TheorySetting()
    rest = (setting.parameter_count, setting.fraktur_g, setting.delta, setting.xi)
    at_500, at_20 = (theory.drifts(5000, n_k, *rest) for n_k in (500, 20))
    assert theory.im(at_500, 1) == pytest.approx(173.9, abs=0.1)
    assert theory.im(at_20, 1) == pytest.approx(-504.7, abs=0.1)
    assert theory.im(at_500, 1, theory.Constants(C=2)) < 0


def test_a_difference_of_bounds_bounds_no_difference() -> None:
    """Errors 0.4 <= 0.5 and 0.1 <= 0.45: the errors differ by 0.3, the bounds by 0.05."""
    error, bound, other_error, other_bound = 0.4, 0.5, 0.1, 0.45
    assert error <= bound and other_error <= other_bound
    assert error - other_error > bound - other_bound


# --- Theorem 2 ------------------------------------------------------------------------------------

BETAS, DIMENSIONS = st.floats(0.1, 5), st.floats(1, 20)


@property_test
@given(SIZES, SIZES, BETAS, DIMENSIONS, st.floats(0.1, 10))
def test_t_of_the_proof_leaves_a_factor(
    n: float, n_k: float, beta: float, Lambda: float, C_1: float
) -> None:
    """T / n_k = C_1 n_k^-a (n / n_k)^(1-a): the rate in n_k, times a power of n / n_k."""
    n, n_k = max(n, n_k), min(n, n_k)
    a = theory.rate_exponent(beta, Lambda)
    rate = theory.lower_rate(n_k, beta, Lambda, C_1)
    T = theory.proof_parameters(n, beta, Lambda, C_1)
    assert T / n_k == pytest.approx(rate * (n / n_k) ** (1 - a), rel=1e-9)


def test_upper_rate_fails_where_n_k_is_a_power_of_n() -> None:
    """beta = 1, Lambda = 2, M = s_0 = 20, n_k = T = sqrt n: r_{n_k} = 3 log 20 for every n.

    The rate itself, with delta' = 1.6, begins to fall at n_k = e^6.4 only.
    """
    found = []
    for n in (1e8, 1e12, 1e16, 1e20):
        T = float(theory.proof_parameters(n, 1, 2))
        n_k = n**0.5
        r = theory.r_n(n_k, T, theory.fraktur_g(T, 20, 1, 20))
        assert r == pytest.approx(3 * math.log(20), rel=1e-12)
        found.append(r / theory.upper_rate(n_k, 1, 2, 1.6))
    assert found[0] < found[1] < found[2] < found[3]  # what C_2 would have to be
    assert found[3] > 50 * found[0]


@property_test
@given(st.floats(1.05, 3), BETAS, DIMENSIONS)
def test_delta_prime_needs_delta_plus_a_half(delta: float, beta: float, Lambda: float) -> None:
    """T chosen by n_k: epsilon^2 / (n_k^-a log^(2 delta') n_k) is G_1 / l + a/2 for delta' =
    delta + 1/2, l = log n_k, G_1 that of T = 1, hence bounded; for delta' = delta + 0.1 it is that
    times l^0.8, which grows without end."""
    a = theory.rate_exponent(beta, Lambda)
    G_1, bounded, growing = 3 * math.log(20), [], []
    for log in (30.0, 60.0, 120.0, 240.0):
        n_k = math.exp(log)
        T = float(theory.proof_parameters(n_k, beta, Lambda))
        part = theory.epsilon_n_squared(n_k, T, theory.fraktur_g(T, 20, 1, 20), delta)
        bounded.append(part / theory.upper_rate(n_k, beta, Lambda, delta + 0.5))
        growing.append(part / theory.upper_rate(n_k, beta, Lambda, delta + 0.1))
        assert bounded[-1] == pytest.approx(G_1 / log + a / 2, rel=1e-6)
        assert growing[-1] == pytest.approx(bounded[-1] * log**0.8, rel=1e-6)
    assert bounded == sorted(bounded, reverse=True)
    assert (G_1 / 1e9 + a / 2) * 1e9**0.8 > 100 * growing[0]  # l = 10^9, by the form just shown


# --- the lower bounds: a coreset that loses nothing -----------------------------------------------


def same_posterior(n: int, seed: int) -> tuple[int, float, float]:
    """Points of a coreset with the posterior of all n, KL between the two, squared error."""
    draws = np.random.default_rng(seed)
    theta = np.array([0.5, -1.0, 0.3])
    x = draws.normal(size=(n, 3))
    y = x @ theta + 0.5 * draws.normal(size=n)
    weight = theory.matching_subset(theory.linear_statistics(x, y))
    prior = Normal(torch.zeros(3).double(), torch.eye(3).double())
    full, part = (
        linear_posterior(torch.tensor(x), torch.tensor(y), torch.tensor(w), prior, 0.5)
        for w in (np.ones(n), weight)
    )
    error = (part.mean - torch.tensor(theta)).square().sum() + part.covariance.trace()
    return int((weight > 0).sum()), float(kl(part, full)), float(error)


@pytest.mark.parametrize("n", [50, 500, 5000])
def test_a_coreset_of_nine_points_has_the_posterior_of_all(n: int) -> None:
    """d = 3: at most d (d + 3) / 2 = 9 points, whatever n; int ||f_theta - f||^2 dq is near
    2 d noise^2 / n, d noise^2 / n from the mean (in expectation) and as much from the spread."""
    found = [same_posterior(n, seed) for seed in range(20)]
    assert max(points for points, _, _ in found) <= 9
    assert max(divergence for _, divergence, _ in found) < 1e-9
    mean = float(np.mean([error for _, _, error in found]))
    # The part from the mean is chi^2 of 3 over 20 sets: a relative error of sqrt(2 / 60) of it.
    assert mean == pytest.approx(2 * 3 * 0.25 / n, rel=4 * 0.5 * (2 / 60) ** 0.5 + 0.1)


@pytest.mark.parametrize("n", [400, 6400])
def test_the_lower_rate_in_n_k_fails_for_a_whole_class(n: int) -> None:
    """beta = Lambda = 1: means of D = n^(1/3) cells have the best rate n^(-2/3) for Lipschitz f on
    [0, 1], and depend on two sums a cell: a coreset of at most 2 D points has the same means."""
    draws = np.random.default_rng(0)
    cells = round(n ** (1 / 3))
    x = draws.random(n)
    y = np.abs(x - 0.4) + 0.1 * draws.normal(size=n)
    inside = np.eye(cells)[np.minimum((x * cells).astype(int), cells - 1)]
    weight = theory.matching_subset(np.concatenate([inside, inside * y[:, None]], axis=1))
    assert (weight > 0).sum() <= 2 * cells
    full = inside.T @ y / inside.sum(0)
    part = inside.T @ (weight * y) / (inside.T @ weight)
    np.testing.assert_allclose(part, full, atol=1e-9)


@property_test
@given(SIZES, SIZES, BETAS, DIMENSIONS, st.floats(1e-3, 1e3))
def test_theorem_3_is_arithmetic(
    n: float, n_k: float, beta: float, Lambda: float, C_3: float
) -> None:
    """0 < C_3 (n_k^-a - n^-a) <= C_3 n_k^-a for n_k < n."""
    n, n_k = max(n, n_k), min(n, n_k)
    gap = theory.lower_bound_gap(n, n_k, beta, Lambda, C_3)
    part, full = (theory.lower_rate(size, beta, Lambda, C_3) for size in (n_k, n))
    assert gap == pytest.approx(part - full, abs=slack(part) * 100)
    assert 0 <= gap <= part
    assert gap > 0 or n / n_k == 1


# --- the table ------------------------------------------------------------------------------------


@property_test
@given(
    st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, 100), st.integers(1, 10),
    st.integers(1, 200), st.floats(1.01, 5), st.floats(0.1, 5), st.floats(0.01, 10),
)  # fmt: skip
def test_the_table_says_what_the_numbers_say(
    n: int, n_k: int, s_0: int, L: int, M: int, delta: float, beta: float, sigma: float
) -> None:
    n, n_k = max(n, n_k), min(n, n_k)
    setting = theory.TheorySetting(
        n=n, n_k=n_k, s_0=s_0, L=L, M=M, delta=delta, beta=beta, sigma=sigma, Lambda=1, Omega=1.5
    )
    named = {each.name: each for each in theory.judge(setting)}
    T, G = setting.parameter_count, setting.fraktur_g
    assert len(named) == 13
    assert named["Lemma 2"].holds == (n > n_k)
    real = G + math.log(n_k) / 2 >= 0
    first, second = (theory.epsilon_n_squared(size, T, G, delta) for size in (n, n_k))
    assert named["Lemma 3"].holds == (real and first > second)
    im = theory.im(theory.drifts(n, n_k, T, G, delta, setting.xi), setting.zeta)
    assert named["Theorem 1: as printed"].holds == (im >= 0)
    assert named["Theorems 3, 4: bounds"].holds == (n > n_k)
    for each in named.values():
        assert each.because.endswith(".") and "nan" not in each.because
