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
`certificate` work on a posterior's draws. `docs/theory.md` says what survives, and why.
"""

from __future__ import annotations

from importlib import import_module

_EXPORTS = {
    "epsilon_n": "quantities",
    "epsilon_n_squared": "quantities",
    "fraktur_g": "quantities",
    "log_a": "quantities",
    "log_sigma_n_squared": "quantities",
    "network_parameters": "quantities",
    "proof_parameters": "quantities",
    "r_n": "quantities",
    "rate_exponent": "quantities",
    "sigma_n_squared": "quantities",
    "width_for": "quantities",
    "xi_bound": "quantities",
    "falls_below": "turning",
    "partner": "turning",
    "turning_point": "turning",
    "Constants": "theorems",
    "Drifts": "theorems",
    "c_f": "theorems",
    "drifts": "theorems",
    "drifts_per_point": "theorems",
    "error_bound": "theorems",
    "im": "theorems",
    "im_per_point": "theorems",
    "lower_bound_gap": "theorems",
    "lower_rate": "theorems",
    "upper_rate": "theorems",
    "Estimate": "hellinger",
    "hellinger_gaussian": "hellinger",
    "of_model": "hellinger",
    "posterior_hellinger": "hellinger",
    "error_certificate": "certificate",
    "log_likelihood_ratio": "certificate",
    "ratio_without_truth": "certificate",
    "Setting": "setting",
    "Statement": "statements",
    "judge": "statements",
    "linear_statistics": "examples",
    "matching_subset": "examples",
}
"""Fetched when they are first used, so that quantities and theorems need no torch."""


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'corefed_studies.theory' has no attribute {name!r}")
    return getattr(import_module(f"corefed_studies.theory.{_EXPORTS[name]}"), name)
