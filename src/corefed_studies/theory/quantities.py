"""What the statements are made of: T, G, r_n, epsilon_n, sigma_n^2, xi, and the rate's exponent.

Sizes may be numbers or numpy arrays; a result has their shape. r_n and epsilon_n depend on s_0, L
and M only through the constant that the proof of Lemma 2 calls fraktur G,

    G = (L+1) log M + log(s_0 / sqrt T),    n r_n = T (G + log(n) / 2),

so that they are functions of (n, T, G).
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from corefed.base.errors import UserError

Numbers: TypeAlias = float | NDArray[np.float64]

UNCHECKED = np.errstate(over="ignore", invalid="ignore")
"""For functions that end with `finite`, whose sentence says more than numpy's warning."""


def network_parameters(s_0: int, L: int, M: int, outputs: int = 1) -> int:
    """T of a fully connected network of L hidden layers of width M (Assumption 1), with biases."""
    whole_from_one(s_0=s_0, L=L, M=M, outputs=outputs)
    return M * (s_0 + 1) + (L - 1) * M * (M + 1) + outputs * (M + 1)


def width_for(parameters: float, s_0: int, L: int, outputs: int = 1) -> int:
    """The width M whose network has the number of parameters nearest to the wanted one."""
    whole_from_one(s_0=s_0, L=L, outputs=outputs)
    at_least(1, parameters=parameters)
    # (L-1) M^2 + (s_0 + L + outputs) M + outputs = T; the root in the form that cannot cancel.
    rest, slope = max(parameters - outputs, 0), s_0 + L + outputs
    root = 2 * rest / (slope + math.sqrt(slope**2 + 4 * (L - 1) * rest))
    below = max(1, math.floor(root))
    return min(
        (below, below + 1), key=lambda M: abs(network_parameters(s_0, L, M, outputs) - parameters)
    )


def fraktur_g(T: Numbers, s_0: float, L: float, M: float) -> Numbers:
    """G = (L+1) log M + log(s_0 / sqrt T), the constant in the proof of Lemma 2."""
    at_least(1, T=T, s_0=s_0, L=L, M=M)
    G: Numbers = (L + 1) * np.log(M) + np.log(s_0) - np.log(T) / 2
    return G


@UNCHECKED
def r_n(n: Numbers, T: Numbers, G: Numbers) -> Numbers:
    """Variational error r_n = (T/n) (G + log(n) / 2), Definition 2; of n_k, Definition 3.

    As printed: ((L+1) T/n) log M + (T/n) log(s_0 sqrt(n/T)). Negative where G < -log(n) / 2.
    """
    at_least(1, n=n, T=T)
    return finite("r_n", np.asarray(T, float) / n * (G + np.log(n) / 2))


@UNCHECKED
def epsilon_n_squared(n: Numbers, T: Numbers, G: Numbers, delta: float) -> Numbers:
    """epsilon_n^2 = r_n log^(2 delta) n, Definition 2; of n_k, Definition 3."""
    above(1, delta=delta)
    return finite("epsilon_n^2", r_n(n, T, G) * np.power(np.log(n), 2 * delta))


def epsilon_n(n: Numbers, T: Numbers, G: Numbers, delta: float) -> Numbers:
    """epsilon_n = sqrt(r_n) log^delta n, Definition 2, where it is a real number."""
    squared = epsilon_n_squared(n, T, G, delta)
    if np.any(np.asarray(squared) < 0):
        raise UserError("epsilon_n is no real number here, since G + log(n)/2 is negative.")
    root: Numbers = np.sqrt(squared)
    return root


def log_a(s_0: float, L: float, M: float, Omega: float) -> float:
    """log A of Assumption 3, tau = Omega M:

    A = log^-1(3 s_0 M) (2 tau)^(-2(L+1)) [(s_0+1+1/(tau-1))^2 + 1/((2 tau)^2-1) + 2/(2 tau-1)^2]^-1

    As a logarithm, since (2 tau)^(-2(L+1)) leaves the range of a float at a few hundred layers.
    """
    at_least(1, s_0=s_0, L=L, M=M)
    above(0, Omega=Omega)
    tau = Omega * M
    if not tau > 1:
        raise UserError(
            f"Omega M is {tau:g}; A of Assumption 3 needs it above 1: a larger bound or width."
        )
    last = (s_0 + 1 + 1 / (tau - 1)) ** 2 + 1 / ((2 * tau) ** 2 - 1) + 2 / (2 * tau - 1) ** 2
    log = -math.log(math.log(3 * s_0 * M)) - 2 * (L + 1) * math.log(2 * tau) - math.log(last)
    return float(finite("log A", log))


def log_sigma_n_squared(n: Numbers, T: Numbers, log_a: float) -> Numbers:
    """log of sigma_n^2 = T A / (8 n), Assumption 3."""
    at_least(1, n=n, T=T)
    log: Numbers = np.log(T) - np.log(8) - np.log(n) + log_a
    return log


def sigma_n_squared(n: Numbers, T: Numbers, log_a: float) -> Numbers:
    """sigma_n^2 = T A / (8 n), Assumption 3, where a float can hold it."""
    log = log_sigma_n_squared(n, T, log_a)
    if np.any(np.asarray(log) < math.log(np.finfo(float).tiny)):
        raise UserError("sigma_n^2 is too small for a float; use its logarithm.")
    value: Numbers = np.exp(log)
    return value


def rate_exponent(beta: float, Lambda: float) -> float:
    """2 beta / (2 beta + Lambda) of Theorem 2: the error falls as n_k to minus this power."""
    above(0, beta=beta)
    at_least(1, Lambda=Lambda)
    return 2 * beta / (2 * beta + Lambda)


@UNCHECKED
def proof_parameters(n: Numbers, beta: float, Lambda: float, C_1: float = 1.0) -> Numbers:
    """T = C_1 n^(Lambda / (2 beta + Lambda)), the choice in the proof of Theorem 2."""
    at_least(1, n=n)
    above(0, C_1=C_1)
    power = 1 - rate_exponent(beta, Lambda)
    return finite("T", C_1 * np.power(np.asarray(n, float), power)[()])


@UNCHECKED
def xi_bound(T: Numbers, beta: float, Lambda: float, C_0: float = 1.0) -> Numbers:
    """Bound C_0 T^(-2 beta / Lambda) of the approximation error xi, the proof of Theorem 2.

    It follows from |f_theta - f| <= C_0 T^(-beta / Lambda) with C_0^2, another constant.
    """
    at_least(1, T=T, Lambda=Lambda)
    above(0, beta=beta, C_0=C_0)
    return finite("xi", C_0 * np.power(np.asarray(T, float), -2 * beta / Lambda)[()])


# --- ranges ---------------------------------------------------------------------------------------


def above(bound: float, **values: Numbers) -> None:
    """Refuse what is not above the bound, not a number, or infinite."""
    _refuse({name: value for name, value in values.items() if not np.all(value > bound)}, bound, "")
    _refuse_infinite(values)


def at_least(bound: float, **values: Numbers) -> None:
    """Refuse what is below the bound, not a number, or infinite."""
    found = {name: value for name, value in values.items() if not np.all(value >= bound)}
    _refuse(found, bound, "at least")
    _refuse_infinite(values)


def whole_from_one(**values: int) -> None:
    """Refuse what does not count anything."""
    at_least(1, **values)
    for name, value in values.items():
        if value != int(value):
            raise UserError(f"{name} is {value}; it must be a whole number.")


def finite(name: str, value: Numbers) -> Numbers:
    """Refuse a result that left the range of a float on the way."""
    if not np.all(np.isfinite(value)):
        raise UserError(f"{name} leaves the range of a float; choose less extreme numbers.")
    return value


def _refuse(found: dict[str, Numbers], bound: float, words: str) -> None:
    for name, value in found.items():
        raise UserError(f"{name} is {value}; it must be {words or 'above'} {bound:g}.")


def _refuse_infinite(values: dict[str, Numbers]) -> None:
    for name, value in values.items():
        if not np.all(np.isfinite(value)):
            raise UserError(f"{name} is {value}; it must be finite.")
