"""Theorems 1 to 4: drifts and Im(w, n_k), upper and lower rate, C_F, the gap of the lower bounds.

Theorem 1 comes in two forms. As printed, its last step multiplies by n and n_k,

    Im = C (epsilon_n^2 - epsilon_{n_k}^2) + zeta C' (n r_n - n_k r_{n_k}) + C'' (n xi - n_k xi).

The line before it, with Eqs. 16 and 17, has a factor 1/n that this loses: an error is bounded by

    (1/n) [ (1/zeta) C'' (n r_n + n xi) + C' n r_n ] + C epsilon_n^2
        = C epsilon_n^2 + (C' + C''/zeta) r_n + (C''/zeta) xi,

the form from which Theorem 2's own proof starts (Eq. 18). `drifts` and `im` are the printed ones;
`drifts_per_point` and `im_per_point` keep the 1/n. xi is the mean of xi^i over clients; it is an
infimum over the same networks for n and n_k, hence one number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from corefed.base.errors import UserError
from corefed_studies.theory.quantities import (
    UNCHECKED,
    Numbers,
    above,
    at_least,
    epsilon_n_squared,
    finite,
    r_n,
    rate_exponent,
)


class Constants(NamedTuple):
    """The constants of the proofs. None is known, so each is 1: shapes can be read, levels not."""

    C: float = 1.0  # of epsilon_n^2, Eqs. 13 and 14
    C_prime: float = 1.0  # C' of the KL, Eq. 17
    C_second: float = 1.0  # C'' of the likelihood ratio, Eq. 16
    C_0: float = 1.0  # of the approximation error
    C_1: float = 1.0  # of T = C_1 n^(Lambda / (2 beta + Lambda))
    C_2: float = 1.0  # of the upper rate
    C_3: float = 1.0  # of the lower rate


ONES = Constants()


class Drifts(NamedTuple):
    """What Theorem 1 adds up: full data minus coreset."""

    estimation_1: Numbers  # "estimation error type I drift", Lemma 3
    estimation_2: Numbers  # "estimation error type II drift", Lemma 2
    approximation: Numbers  # "approximation error drift"


@UNCHECKED
def drifts(n: Numbers, n_k: Numbers, T: Numbers, G: Numbers, delta: float, xi: Numbers) -> Drifts:
    """The three drifts of Theorem 1 as printed."""
    ordered(n, n_k)
    at_least(0, xi=xi)
    return Drifts(
        epsilon_n_squared(n, T, G, delta) - epsilon_n_squared(n_k, T, G, delta),
        # n r_n - n_k r_{n_k} with one T: all but the logarithms cancels.
        finite("n r_n", np.asarray(T, float) / 2 * np.log(np.asarray(n) / n_k)),
        finite("n xi", (np.asarray(n, float) - n_k) * xi),
    )


@UNCHECKED
def drifts_per_point(
    n: Numbers, n_k: Numbers, T: Numbers, G: Numbers, delta: float, xi: Numbers
) -> Drifts:
    """The three drifts with the 1/n kept: the last one is 0, since xi does not depend on n."""
    ordered(n, n_k)
    at_least(0, xi=xi)
    return Drifts(
        epsilon_n_squared(n, T, G, delta) - epsilon_n_squared(n_k, T, G, delta),
        r_n(n, T, G) - r_n(n_k, T, G),
        0.0 * np.asarray(n_k * xi),
    )


@UNCHECKED
def im(drifts: Drifts, zeta: float, constants: Constants = ONES) -> Numbers:
    """Im(w, n_k) of Theorem 1 as printed, from the drifts as printed."""
    above(0, zeta=zeta)
    total: Numbers = (
        constants.C * drifts.estimation_1
        + zeta * constants.C_prime * drifts.estimation_2
        + constants.C_second * drifts.approximation
    )
    return finite("Im", total)


@UNCHECKED
def im_per_point(drifts: Drifts, zeta: float, constants: Constants = ONES) -> Numbers:
    """Im(w, n_k) with the 1/n kept, from `drifts_per_point`: the difference of `error_bound`s."""
    above(0, zeta=zeta)
    estimation = constants.C_prime + constants.C_second / zeta
    total: Numbers = (
        constants.C * drifts.estimation_1
        + estimation * drifts.estimation_2
        + constants.C_second / zeta * drifts.approximation
    )
    return finite("Im", total)


@UNCHECKED
def error_bound(
    n: Numbers,
    T: Numbers,
    G: Numbers,
    delta: float,
    xi: Numbers,
    zeta: float,
    constants: Constants = ONES,
) -> Numbers:
    """Bound of the error, int d^2 dq <= C epsilon_n^2 + (C' + C''/zeta) r_n + (C''/zeta) xi.

    Eq. 18 (there of n_k), whose C' stands for our C' + C''/zeta. Above 1 it says nothing, since
    d^2 <= 1.
    """
    above(0, zeta=zeta)
    at_least(0, xi=xi)
    estimation = constants.C_prime + constants.C_second / zeta
    total: Numbers = (
        constants.C * epsilon_n_squared(n, T, G, delta)
        + estimation * r_n(n, T, G)
        + constants.C_second / zeta * xi
    )
    return finite("the bound", total)


@UNCHECKED
def upper_rate(
    n_k: Numbers, beta: float, Lambda: float, delta_prime: float, C_2: float = 1.0
) -> Numbers:
    """C_2 n_k^(-2 beta / (2 beta + Lambda)) log^(2 delta') n_k, the upper bound of Theorem 2."""
    above(1, delta_prime=delta_prime)
    logs = np.power(np.log(n_k), 2 * delta_prime)
    return finite("the upper rate", lower_rate(n_k, beta, Lambda, C_2) * logs)


@UNCHECKED
def lower_rate(n_k: Numbers, beta: float, Lambda: float, C_3: float = 1.0) -> Numbers:
    """C_3 n_k^(-2 beta / (2 beta + Lambda)), the lower bound of Theorem 2."""
    at_least(1, n_k=n_k)
    above(0, constant=C_3)
    power = np.power(np.asarray(n_k, float), -rate_exponent(beta, Lambda))[()]
    return finite("the rate", C_3 * power)


def c_f(F: float, sigma: float) -> float:
    """C_F = (1 - exp(-4 F^2 / (8 sigma^2))) / (4 F^2) of Theorem 2.

    d^2 >= C_F (f_theta - f)^2 wherever both lie in [-F, F], for (1 - e^(-u / 8 sigma^2)) / u falls
    in u and u <= (2F)^2.
    """
    above(0, F=F, sigma=sigma)
    ratio = F / sigma
    if ratio < 1e-150:  # its square is no normal float; the limit is exact there
        return _representable("C_F", -math.log(8) - 2 * math.log(sigma))
    log = math.log(-math.expm1(-(ratio**2) / 2)) if ratio < 50 else 0.0  # e^-1250 is nothing
    return _representable("C_F", log - math.log(4) - 2 * math.log(F))


@UNCHECKED
def lower_bound_gap(
    n: Numbers, n_k: Numbers, beta: float, Lambda: float, C_3: float = 1.0
) -> Numbers:
    """C_3 (n_k^-a - n^-a), a = 2 beta / (2 beta + Lambda): Theorem 3, and for d^2 Theorem 4.

    Of the two lower bounds on C_F times the mean over clients, as Theorem 2 has them.
    """
    ordered(n, n_k)
    # By expm1, for n_k next to n.
    shrink = -np.expm1(-rate_exponent(beta, Lambda) * np.log(np.asarray(n, float) / n_k))
    return finite("the gap", lower_rate(n_k, beta, Lambda, C_3) * shrink)


def ordered(n: Numbers, n_k: Numbers) -> None:
    """A coreset has from 1 to n points (Assumption 2 has fewer than n)."""
    at_least(1, n=n, n_k=n_k)
    if not np.all(np.asarray(n_k) <= n):
        raise UserError(f"n_k is {n_k}; a coreset has at most the n = {n} points of its client.")


def _representable(name: str, log: float) -> float:
    if not -700 < log < 700:
        raise UserError(f"{name} leaves the range of a float; choose less extreme numbers.")
    return math.exp(log)
