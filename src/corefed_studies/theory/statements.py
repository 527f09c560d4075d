"""Which statement of the paper holds for given numbers, and why: one row each.

`holds` is True or False where the numbers decide, or where a statement holds or fails whatever they
are, and None where it holds under a condition that they do not decide. `docs/theory-study.md` has
proofs and counter-examples, `tests/studies/test_theory_statements.py` has both as tests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from corefed_studies.theory import quantities, theorems
from corefed_studies.theory.setting import TheorySetting
from corefed_studies.theory.turning import partner, turning_point


class Statement(NamedTuple):
    """One claim, for one setting."""

    name: str  # as the paper calls it
    claim: str
    holds: bool | None  # None: under a condition that the numbers do not decide
    because: str


def judge(setting: TheorySetting) -> list[Statement]:
    """Every statement in the order of the paper."""
    return [
        Statement(
            "Definition 1",
            "d^2 is the squared Hellinger distance",
            True,
            "It is 1 - int sqrt(p q) of two Gaussians of one noise, between 0 and 1.",
        ),
        Statement("Lemma 1", "d^2 is symmetric", True, "Only the square of f_theta - f enters it."),
        assumption_3(setting),
        lemma_2(setting),
        lemma_3(setting),
        *theorem_1(setting),
        *theorem_2(setting),
        theorem_3(setting),
        Statement(
            "Theorems 3, 4: errors",
            "a coreset's error is larger than that of full data",
            False,
            "Two lower bounds say nothing about two errors, and a coreset with the posterior of "
            "all data has the same error.",
        ),
    ]


def assumption_3(setting: TheorySetting) -> Statement:
    """sigma_n^2 <= Omega^2 and sigma_{n_k}^2 <= Omega^2; the second implies the first."""
    logs = [
        float(quantities.log_sigma_n_squared(size, setting.parameter_count, setting.log_a))
        for size in (setting.n, setting.n_k)
    ]
    bound = 2 * math.log(setting.Omega)
    return Statement(
        "Assumption 3",
        "sigma_n^2, sigma_{n_k}^2 <= Omega^2",
        max(logs) <= bound,
        f"sigma_n^2 is {digits(logs[0])}, sigma_{{n_k}}^2 is n/n_k times that, {digits(logs[1])}; "
        f"Omega^2 is {digits(bound)}.",
    )


def lemma_2(setting: TheorySetting) -> Statement:
    """n r_n - n_k r_{n_k} = (T/2) log(n / n_k), whatever G is."""
    drift = setting.parameter_count / 2 * math.log(setting.n / setting.n_k)
    inside = setting.fraktur_g + math.log(setting.n_k) / 2
    because = f"The difference is (T/2) log(n/n_k) = {drift:.4g}."
    if setting.n == setting.n_k:
        because = "It is an equality, since n_k = n."
    elif inside <= 0:
        because += (
            f" The proof's ratio is not above 1, though: G + log(n_k)/2 = {inside:.3g} is not "
            "positive, so r and epsilon of n_k mean nothing."
        )
    return Statement("Lemma 2", "n r_n > n_k r_{n_k}", setting.n > setting.n_k, because)


def lemma_3(setting: TheorySetting) -> Statement:
    """epsilon_n^2 rises up to n* and falls from there."""
    first, second = (
        float(
            quantities.epsilon_n_squared(
                size, setting.parameter_count, setting.fraktur_g, setting.delta
            )
        )
        for size in (setting.n, setting.n_k)
    )
    star = turning_point(setting.fraktur_g, setting.delta)
    if setting.n == setting.n_k:
        because = "It is an equality, since n_k = n."
    elif setting.n <= star:
        because = f"epsilon_n^2 rises up to n* = {star:.4g}, and n is below it."
    else:
        where = partner(setting.n, setting.fraktur_g, setting.delta)
        because = (
            f"epsilon_n^2 falls from n* = {star:.4g} on: it is {first:.4g} at n and {second:.4g} "
            f"at n_k; the lemma needs n_k < {where:.4g} here."
        )
    real = setting.fraktur_g + math.log(setting.n_k) / 2 >= 0
    if not real:
        because = "epsilon_{n_k} is no real number, since G + log(n_k)/2 is negative."
    return Statement("Lemma 3", "epsilon_n^2 > epsilon_{n_k}^2", real and first > second, because)


def theorem_1(setting: TheorySetting) -> list[Statement]:
    """As printed, with the lost 1/n, and as a statement on errors."""
    arguments = (
        setting.n,
        setting.n_k,
        setting.parameter_count,
        setting.fraktur_g,
        setting.delta,
        setting.xi,
    )
    printed = theorems.drifts(*arguments)
    per_point = theorems.drifts_per_point(*arguments)
    im = float(theorems.im(printed, setting.zeta, setting.constants))
    kept = float(theorems.im_per_point(per_point, setting.zeta, setting.constants))
    parts = ", ".join(f"{float(part):.4g}" for part in printed)
    return [
        Statement(
            "Theorem 1: as printed",
            "Im(w, n_k) >= 0",
            im >= 0,
            f"The drifts are {parts}. With these constants Im = {im:.4g}; where drifts differ in "
            "sign, other constants change that of Im.",
        ),
        Statement(
            "Theorem 1: 1/n kept",
            "Im(w, n_k) >= 0",
            kept >= 0,
            f"Im = {kept:.4g}: "
            + (
                "the bound for n_k points is the larger one, as one expects of fewer points."
                if kept < 0
                else "the bound for n_k points is not the larger one here."
            ),
        ),
        Statement(
            "Theorem 1: errors",
            "Im bounds the difference of the two errors",
            False,
            "A <= U and B <= V bound no A - B by U - V; Im compares two bounds.",
        ),
    ]


def theorem_2(setting: TheorySetting) -> list[Statement]:
    """Upper rate, C_F, lower rate."""
    bound = float(theorems.error_bound(setting.n_k, *setting.bound_arguments))
    rate = float(
        theorems.upper_rate(setting.n_k, setting.beta, setting.Lambda, setting.delta_prime)
    )
    power = 1 - quantities.rate_exponent(setting.beta, setting.Lambda)
    factor = (setting.n / setting.n_k) ** power
    c_f = theorems.c_f(setting.F, setting.sigma)
    needed = f"C_2 >= {bound / rate:.3g}" if rate > 0 else "more than any C_2, as log(1) = 0"
    return [
        Statement(
            "Theorem 2: upper rate",
            "error <= C_2 n_k^-a log^(2 delta') n_k",
            None,
            f"Holds where n/n_k stays bounded and delta' >= delta + 1/2. With T chosen by n, C_2 "
            f"grows by (n/n_k)^{power:.3g} = {factor:.3g} here; these numbers need {needed}.",
        ),
        Statement(
            "Theorem 2: C_F",
            "d^2 >= C_F |f_theta - f|^2",
            None,
            f"Holds where both lie in [-F, F], with C_F = {c_f:.4g}; draws of a Gaussian posterior "
            "leave it, unless outputs are clipped.",
        ),
        Statement(
            "Theorem 2: lower rate",
            "inf over f_theta and f >= C_3 n_k^-a",
            False,
            "f_theta = f has error 0. Meant is the worst f for an estimator of n_k independent "
            "points: true of random subsets, not of coresets, whose weights know all n points.",
        ),
    ]


def theorem_3(setting: TheorySetting) -> Statement:
    """The arithmetic of two lower bounds."""
    gap = float(
        theorems.lower_bound_gap(
            setting.n, setting.n_k, setting.beta, setting.Lambda, setting.constants.C_3
        )
    )
    limit = float(
        theorems.lower_rate(setting.n_k, setting.beta, setting.Lambda, setting.constants.C_3)
    )
    return Statement(
        "Theorems 3, 4: bounds",
        "the lower bound for n_k is above that for n",
        gap > 0,
        f"C_3 (n_k^-a - n^-a) = {gap:.4g}, at most C_3 n_k^-a = {limit:.4g}: arithmetic of two "
        "bounds.",
    )


def digits(log: float) -> str:
    """e^log in digits, also where a float cannot hold it."""
    if -600 < log < 600:
        return f"{math.exp(log):.4g}"
    tens = log / math.log(10)
    return f"{10 ** (tens - math.floor(tens)):.3f}e{math.floor(tens):+d}"
