"""The theory of the paper's second half as small functions, and where its statements hold.

    s_0, L, M   inputs, hidden layers and their width (Assumption 1)    T   parameters
    n, n_k      points of a client and of its coreset    N   clients    Omega   bound of a weight
    beta        smoothness of the true f (Hoelder)    Lambda   intrinsic dimension of the inputs
    zeta        weight of the KL    delta > 1   power of the logarithm in epsilon_n
    F           bound of |f| and |f_theta|          sigma   noise of y = f(x) + N(0, sigma^2)
    C, C', C''  constants of Theorem 1    C_0 .. C_3   of Theorem 2; nobody knows any of them

Equations are cited by the number they have when the count of the main text (1 to 9) goes on
through the appendix: 10 to 12 are Lemma 1, 13 and 14 the events of high probability, 15 takes
n_k d^2 apart, 16 and 17 bound the likelihood ratio and the KL, 18 starts Theorem 2's proof.
Definitions and lemmas count through in the same way: Definition 1 is the Hellinger distance,
Definition 2 holds r_n, xi_n and epsilon_n, Definition 3 the same for n_k.

`quantities` and `theorems` take numbers or numpy arrays and know nothing of torch; `hellinger` and
`certificate` work on a posterior's draws. `docs/theory-study.md` says what survives, and why.
"""

from __future__ import annotations

from importlib import import_module

from corefed_studies.theory.examples import linear_statistics, matching_subset
from corefed_studies.theory.quantities import (
    epsilon_n,
    epsilon_n_squared,
    fraktur_g,
    log_a,
    log_sigma_n_squared,
    network_parameters,
    proof_parameters,
    r_n,
    rate_exponent,
    sigma_n_squared,
    width_for,
    xi_bound,
)
from corefed_studies.theory.setting import TheorySetting
from corefed_studies.theory.statements import Statement, judge
from corefed_studies.theory.theorems import (
    Constants,
    Drifts,
    c_f,
    drifts,
    drifts_per_point,
    error_bound,
    im,
    im_per_point,
    lower_bound_gap,
    lower_rate,
    upper_rate,
)
from corefed_studies.theory.turning import falls_below, partner, turning_point

__all__ = [
    "Constants",
    "Drifts",
    "Statement",
    "TheorySetting",
    "c_f",
    "drifts",
    "drifts_per_point",
    "epsilon_n",
    "epsilon_n_squared",
    "error_bound",
    "falls_below",
    "fraktur_g",
    "im",
    "im_per_point",
    "judge",
    "linear_statistics",
    "log_a",
    "log_sigma_n_squared",
    "lower_bound_gap",
    "lower_rate",
    "matching_subset",
    "network_parameters",
    "partner",
    "proof_parameters",
    "r_n",
    "rate_exponent",
    "sigma_n_squared",
    "turning_point",
    "upper_rate",
    "width_for",
    "xi_bound",
]

_WITH_TORCH = {
    "Estimate": "hellinger",
    "hellinger_gaussian": "hellinger",
    "of_model": "hellinger",
    "posterior_hellinger": "hellinger",
    "error_certificate": "certificate",
    "log_likelihood_ratio": "certificate",
    "ratio_without_truth": "certificate",
}
"""Imported when first used: `corefed theory` needs no torch, which takes a second."""


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'corefed_studies.theory' has no attribute {name!r}")
    return getattr(import_module(f"corefed_studies.theory.{_WITH_TORCH[name]}"), name)
