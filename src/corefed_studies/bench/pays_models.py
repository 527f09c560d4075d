"""The models of `corefed bench pays`: three likelihoods, on synthetic rows and real ones.

Synthetic rows of any number; `pays_sets.py` has the real ones. 500 rows are far too few for a
coreset to save time, and are here for the posterior's quality.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpy.typing import NDArray

from corefed_studies.bench import pays_sets

FEATURES, GROUPS = 10, 20
REAL = tuple(pays_sets.SETS)

Array = NDArray[Any]


class Case(NamedTuple):
    name: str
    model: Callable[[Any, Any], None]
    x: Any
    y: Array

    @property
    def n(self) -> int:
        return len(self.y)


def synthetic(name: str, n: int) -> Case:
    """n rows of one of the three likelihoods, with a truth of its own."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(n, FEATURES)).astype(np.float32)
    beta = draw.normal(size=FEATURES).astype(np.float32)
    if name == "logistic":
        y = (draw.random(n) < _sigmoid(x @ beta)).astype(np.float32)
        return Case(name, logistic, x, y)
    if name == "poisson":
        y = draw.poisson(np.exp(0.3 * (x @ beta))).astype(np.float32)
        return Case(name, poisson, x, y)
    group = draw.integers(GROUPS, size=n).astype(np.int32)
    level = draw.normal(scale=0.7, size=GROUPS).astype(np.float32)
    y = (draw.random(n) < _sigmoid(x @ beta + level[group])).astype(np.float32)
    return Case(name, hierarchical, {"x": x, "group": group}, y)


SYNTHETIC = ("logistic", "poisson", "hierarchical")


def real(name: str, data_dir: Path | None = None) -> Case:
    """A real set, with the likelihood it is used with."""
    found = pays_sets.load(name, data_dir)
    model = logistic if found.family == "logistic" else softplus_poisson
    return Case(name, model, found.x, found.y)


def logistic(x: Any, y: Any) -> None:
    beta = _coefficients(x.shape[-1])
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def poisson(x: Any, y: Any) -> None:
    beta = _coefficients(x.shape[-1])
    numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)


def softplus_poisson(x: Any, y: Any) -> None:
    beta = _coefficients(x.shape[-1])
    numpyro.sample("y", dist.Poisson(jnp.logaddexp(x @ beta, 0.0)), obs=y)


def hierarchical(x: Any, y: Any) -> None:
    """Logistic, with a level per group around a common mean."""
    beta = _coefficients(x["x"].shape[-1])
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(mean, spread).expand([GROUPS]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x["x"] @ beta + level[x["group"]]), obs=y)


def _coefficients(d: int) -> Any:
    return numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))


def _sigmoid(eta: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-eta)))
