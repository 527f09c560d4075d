"""PyMC: a weighted likelihood in place of an observed variable.

    pm.Bernoulli("y", logit_p=x @ beta, observed=y)                         # all data
    weighted("y", pm.Bernoulli.dist(logit_p=x @ beta), y, coreset)          # x, y = points(coreset)

The coreset itself is built from a log-likelihood in PyTorch, or in JAX (`bridge.FromJax`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from corefed.base.errors import UserError, install
from corefed.coreset.coreset import Coreset

try:
    import pymc as pm
except ImportError as error:
    raise UserError(f"This needs PyMC: {install('pymc')}.") from error


def weighted(name: str, variable: Any, observed: Any, coreset: Coreset) -> Any:
    """Inside a model: sum_j w_j log p(observed_j) as a potential of that name."""
    if len(observed) != len(coreset):
        raise UserError(
            f"{name} has {len(observed)} observations, and the coreset has {len(coreset)} points: "
            "observe points(coreset)."
        )
    log_p = pm.logp(variable, observed)
    weight = coreset.weights.double().numpy().reshape(-1, *(1,) * (log_p.ndim - 1))
    return pm.Potential(name, (weight * log_p).sum())


def points(coreset: Coreset) -> tuple[Any, Any]:
    """(x, y) of the coreset's points as numpy arrays."""
    if coreset.points is None:
        raise UserError(
            "This coreset was loaded without its points; attach(log_likelihood, data) first."
        )
    x, y = (_arrays(part) for part in coreset.points)
    return x, y


def _arrays(part: Any) -> Any:
    if isinstance(part, Tensor):
        return np.asarray(part.detach().cpu())
    if isinstance(part, Mapping):
        return {name: _arrays(value) for name, value in part.items()}
    return tuple(_arrays(value) for value in part)
