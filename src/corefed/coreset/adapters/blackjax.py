"""BlackJAX, or any sampler of a log-density in JAX.

likelihood = FromJax(log_likelihood, theta0)
coreset = corefed.coreset.build(likelihood, data=(x, y), posterior="laplace", theta0=theta0,
                                log_prior=PriorFromJax(log_prior, likelihood))
nuts = blackjax.nuts(logdensity(coreset, log_likelihood, log_prior), ...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corefed.coreset.adapters.bridge import FromJax, PriorFromJax, over, points
from corefed.coreset.coreset import Coreset

__all__ = ["FromJax", "PriorFromJax", "logdensity", "points"]


def logdensity(
    coreset: Coreset,
    log_likelihood: Callable[[Any, Any, Any], Any],
    log_prior: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """theta -> sum_j w_j log p_theta(D_j) + log prior, both functions written in JAX."""
    x, y = (over(part) for part in points(coreset))
    w = over(coreset.weights)

    def density(theta: Any) -> Any:
        total = w @ log_likelihood(theta, x, y)
        return total if log_prior is None else total + log_prior(theta)

    return density
