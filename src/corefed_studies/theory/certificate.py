"""A bound on the error without unknown constants: ours, from the paper's own steps.

For one theta and a power 0 < s < 1, with points that are independent and d of Definition 1,

    E exp(s l_n(P_theta, P)) = (E_X e^(-c u))^n <= (1 - d^2)^(c n) <= e^(-c n d^2),

c = 4 s (1 - s), u = (f_theta - f)^2 / (8 sigma^2), by Jensen's inequality (s = 1/2 needs none). So
int exp(s l_n + c n d^2) dz has an expectation of at most 1 for every z that does not depend on the
data. Markov's inequality and the paper's Lemma A.1 then give, with probability at least 1 - alpha,
for ALL q at once,

    int d^2 dq <= [ s int l_n(P, P_theta) dq + KL(q || z) + log(1/alpha) ] / (c n).

q may come from a coreset, from any zeta, from any training: what counts is how it explains all n
points. s is the paper's 1/zeta; at zeta = 1 the step says nothing, at zeta = 2 it costs least.
"""

from __future__ import annotations

import math

from torch import Tensor

from corefed.base.errors import UserError
from corefed_studies.theory.quantities import Numbers, above, at_least, finite


def log_likelihood_ratio(outputs: Tensor, truth: Tensor, y: Tensor, noise: float) -> Tensor:
    """l_n(P, P_theta) = log P(D) - log P_theta(D) of each draw, on all points.

    Args:
        outputs: f_theta(x), [..., draws, points].
        truth: f(x), [..., points].
        y: Observed targets, [..., points].
        noise: sigma_epsilon, of both.
    """
    above(0, noise=noise)
    off = outputs - truth.unsqueeze(-2)
    error = (y - truth).unsqueeze(-2)
    # (y - f_theta)^2 - (y - f)^2, expanded, for a ratio near 0 is a difference of large sums.
    return (off * (off - 2 * error)).sum(-1) / (2 * noise**2)


def ratio_without_truth(outputs: Tensor, y: Tensor, noise: float, alpha: float) -> Tensor:
    """A bound of l_n(P, P_theta) of each draw that needs the noise but not f.

    With probability at least 1 - alpha, for all theta at once: sum_j (y_j - f(x_j))^2 / sigma^2 is
    chi^2 of n, hence at least its alpha-quantile. It costs about sqrt(n log(1/alpha)).
    Probabilities add up: alpha / 2 here and in the certificate hold alpha together.
    """
    from scipy.stats import chi2

    above(0, noise=noise)
    _probability(alpha)
    residual = ((y.unsqueeze(-2) - outputs) / noise).square().sum(-1)
    return (residual - float(chi2.ppf(alpha, outputs.shape[-1]))) / 2


def error_certificate(
    ratio: Numbers, kl: Numbers, n: Numbers, alpha: float = 0.05, power: float = 0.5
) -> Numbers:
    """The bound of int d^2 dq that holds with probability 1 - alpha.

    Args:
        ratio: int l_n(P, P_theta) dq, a mean over draws of `log_likelihood_ratio`, on all n points.
        kl: KL(q || z), z independent of these n points: a prior, or one fitted to other clients.
        n: Points of the client, all of them.
        alpha: Probability of a miss.
        power: s above. 1/2 is best where the KL is the larger part.
    """
    at_least(1, n=n)
    at_least(0, kl=kl)
    _probability(alpha)
    if not 0 < power < 1:
        raise UserError(f"power is {power}; it must lie between 0 and 1.")
    miss = -math.log(alpha)
    return finite("the bound", (power * ratio + kl + miss) / (4 * power * (1 - power) * n))


def _probability(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise UserError(f"alpha is {alpha}; a probability of a miss lies between 0 and 1.")
