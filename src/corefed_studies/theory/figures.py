"""The numbers of `corefed theory`: quantities at n and n_k, both together, curves over k."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corefed_studies.theory import quantities, theorems
from corefed_studies.theory.setting import TheorySetting
from corefed_studies.theory.statements import judge
from corefed_studies.theory.turning import falls_below, turning_point

SCHEMA = 1
POINTS = 200  # of a curve


class Quantity(NamedTuple):
    """One row: a value of each size, or one of both together."""

    symbol: str
    what: str
    values: tuple[float, ...]  # at n and at n_k, or a single one
    place: str  # in the paper
    bound: bool = False  # of something that is at most 1
    log: bool = False  # the values are natural logarithms


class Curves(NamedTuple):
    """Against coreset sizes k, [POINTS] each."""

    k: NDArray[np.float64]
    epsilon: NDArray[np.float64]  # C epsilon_k^2
    bound: NDArray[np.float64]  # Eq. 18
    upper: NDArray[np.float64]  # Theorem 2
    lower: NDArray[np.float64]
    im: NDArray[np.float64]  # Theorem 1 as printed
    im_per_point: NDArray[np.float64]  # with the 1/n kept


def at_sizes(setting: TheorySetting) -> list[Quantity]:
    """What depends on the number of points, at n and at n_k."""
    T, G, delta, xi, zeta, constants = setting.bound_arguments
    beta, Lambda = setting.beta, setting.Lambda

    def both(function: Any) -> tuple[float, float]:
        return float(function(setting.n)), float(function(setting.n_k))

    return [
        Quantity(
            "r_n",
            "variational error",
            both(lambda n: quantities.r_n(n, T, G)),
            "Definitions 2, 3",
        ),
        Quantity(
            "n r_n",
            "the same, summed over points",
            both(lambda n: T * (G + math.log(n) / 2)),
            "Lemma 2",
        ),
        Quantity(
            "epsilon_n^2",
            "r_n log^(2 delta) n",
            both(lambda n: quantities.epsilon_n_squared(n, T, G, delta)),
            "Definitions 2, 3",
            bound=True,
        ),
        Quantity(
            "sigma_n^2",
            "T A / (8 n)",
            both(lambda n: quantities.log_sigma_n_squared(n, T, setting.log_a)),
            "Assumption 3",
            log=True,
        ),
        Quantity("xi_n", "approximation error, at most", (xi, xi), "proof of Theorem 2"),
        Quantity(
            "bound",
            "C epsilon_n^2 + (C' + C''/zeta) r_n + C''/zeta xi_n",
            both(lambda n: theorems.error_bound(n, T, G, delta, xi, zeta, constants)),
            "Theorem 1, Eq. 18",
            bound=True,
        ),
        Quantity(
            "upper rate",
            "C_2 n^-a log^(2 delta') n",
            both(
                lambda n: theorems.upper_rate(n, beta, Lambda, setting.delta_prime, constants.C_2)
            ),
            "Theorem 2",
            bound=True,
        ),
        Quantity(
            "lower rate",
            "C_3 n^-a",
            both(lambda n: theorems.lower_rate(n, beta, Lambda, constants.C_3)),
            "Theorem 2",
        ),
    ]


def together(setting: TheorySetting) -> list[Quantity]:
    """What belongs to the network, or to n and n_k together."""
    T, G, delta, xi, zeta, constants = setting.bound_arguments
    sizes = (setting.n, setting.n_k)
    printed = theorems.drifts(*sizes, T, G, delta, xi)
    kept = theorems.drifts_per_point(*sizes, T, G, delta, xi)
    gap = theorems.lower_bound_gap(*sizes, setting.beta, setting.Lambda, constants.C_3)

    def row(symbol: str, what: str, value: Any, place: str, **rest: bool) -> Quantity:
        return Quantity(symbol, what, (float(value),), place, **rest)

    exponent = quantities.rate_exponent(setting.beta, setting.Lambda)
    return [
        row("T", "parameters", T, "Section 2"),
        row("G", "(L+1) log M + log(s_0 / sqrt T)", G, "proof of Lemma 2"),
        row("A", "of the prior's width", setting.log_a, "Assumption 3", log=True),
        row("a", "2 beta / (2 beta + Lambda)", exponent, "Theorem 2"),
        row("C_F", "d^2 over squared error, at least", _c_f(setting), "Theorem 2"),
        row("n*", "epsilon_n^2 rises up to it, then falls", turning_point(G, delta), "Lemma 3"),
        row("n_1", "epsilon_n^2 <= 1 from here on", falls_below(1, T, G, delta), "ours"),
        row(
            "drift I",
            "epsilon_n^2 - epsilon_{n_k}^2",
            printed.estimation_1,
            "Theorem 1, Lemma 3",
        ),
        row("drift II", "n r_n - n_k r_{n_k}", printed.estimation_2, "Theorem 1, Lemma 2"),
        row("drift III", "n xi_n - n_k xi_{n_k}", printed.approximation, "Theorem 1"),
        row(
            "Im",
            "C I + zeta C' II + C'' III",
            theorems.im(printed, zeta, constants),
            "Theorem 1, as printed",
        ),
        row("drift II, 1/n kept", "r_n - r_{n_k}", kept.estimation_2, "Theorem 1"),
        row(
            "Im, 1/n kept",
            "C I + (C' + C''/zeta) (r_n - r_{n_k})",
            theorems.im_per_point(kept, zeta, constants),
            "Theorem 1",
        ),
        row("gap", "C_3 (n_k^-a - n^-a)", gap, "Theorems 3, 4"),
        row(
            "gap of sums",
            "the same, N / C_F times: squared errors of all clients",
            setting.N / _c_f(setting) * float(gap),
            "Theorem 3",
        ),
    ]


def curves(setting: TheorySetting) -> Curves:
    """Everything that is drawn, over sizes from 2 to n."""
    T, G, delta, xi, zeta, constants = setting.bound_arguments
    beta, Lambda = setting.beta, setting.Lambda
    k = np.minimum(np.geomspace(2, setting.n, POINTS), setting.n)  # the last may be rounded up
    printed = theorems.drifts(setting.n, k, T, G, delta, xi)
    kept = theorems.drifts_per_point(setting.n, k, T, G, delta, xi)
    every = (
        k,
        constants.C * quantities.epsilon_n_squared(k, T, G, delta),
        theorems.error_bound(k, T, G, delta, xi, zeta, constants),
        theorems.upper_rate(k, beta, Lambda, setting.delta_prime, constants.C_2),
        theorems.lower_rate(k, beta, Lambda, constants.C_3),
        theorems.im(printed, zeta, constants),
        theorems.im_per_point(kept, zeta, constants),
    )
    return Curves(*(np.asarray(each, float) for each in every))


def as_json(setting: TheorySetting) -> dict[str, Any]:
    """Everything, for other programs. Of a quantity that a float cannot hold, its logarithm."""
    return {
        "schema": SCHEMA,
        "setting": {
            **asdict(setting),
            "parameters": setting.parameter_count,
            "constants": setting.constants._asdict(),
        },
        "at_sizes": [_plain(each, ("n", "n_k")) for each in at_sizes(setting)],
        "together": [_plain(each, ("value",)) for each in together(setting)],
        "statements": [each._asdict() for each in judge(setting)],
        "curves": {name: each.tolist() for name, each in curves(setting)._asdict().items()},
    }


def _plain(quantity: Quantity, names: tuple[str, ...]) -> dict[str, Any]:
    prefix = "log_" if quantity.log else ""
    found: dict[str, Any] = {"symbol": quantity.symbol, "what": quantity.what}
    found |= {prefix + name: value for name, value in zip(names, quantity.values, strict=True)}
    if quantity.bound:
        found["says_nothing"] = [value > 1 for value in quantity.values]
    return {**found, "place": quantity.place}


def _c_f(setting: TheorySetting) -> float:
    return theorems.c_f(setting.F, setting.sigma)
