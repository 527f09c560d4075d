"""A coreset that loses nothing: the counter-example to lower bounds in n_k (Theorems 2 to 4).

A posterior that depends on the data only through m sums of statistics, sum_j s(x_j, y_j), is the
same for every weighted subset with the same sums. The sums lie in the cone of the s(x_j, y_j), so
by Caratheodory's theorem such a subset of at most m points exists. Linear-Gaussian regression has
the statistics x x^T and x y, m = d (d + 3) / 2. A coreset of m points then has the posterior of all
n points, whatever n is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from corefed.base.errors import UserError

SAME = 1e-8
"""Sums agree to this, relative to the root sum of squares of a statistic; rounding leaves 1e-12."""


def matching_subset(statistics: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights w >= 0, at most m of them above 0, with the sums of all points.

    Args:
        statistics: [n, m], one row s(x_j, y_j) per point.
    """
    size = np.linalg.norm(statistics, axis=0)
    columns = statistics[:, size > 0] / size[size > 0]
    # Lawson and Hanson's solution is basic: its points are linearly independent, hence at most m.
    weight, residual = nnls(columns.T, columns.sum(0))
    if residual > SAME * len(statistics) ** 0.5:
        raise UserError(f"no subset with the same sums was found: they differ by {residual:.2g}.")
    found: NDArray[np.float64] = weight
    return found


def linear_statistics(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The statistics x x^T (upper triangle) and x y of a linear regression: [n, d (d + 3) / 2]."""
    rows, columns = np.triu_indices(x.shape[1])
    return np.concatenate([x[:, rows] * x[:, columns], x * y[:, None]], axis=1)
