"""Greedy choice of k diverse points out of n by their features.

What a set A of points is worth, and what point j adds to it, with similarities S = (s_ij) of
`similarity.py`, distances d_ij = 1 - s_ij and L = S + lambda I:

    logdet      f(A) = log det L_A                  log r_j,  r_j = L_jj - L_jA L_AA^-1 L_Aj
    dispsum     f(A) = sum of d_ij over its pairs   sum_{i in A} d_ij
    dispmin     f(A) = min of d_ij over its pairs   min(f(A), min_{i in A} d_ij) - f(A)

Only the first is submodular, but the name is used for all three.

The picks are those of submodlib 0.0.3 (Kaushal et al. 2022; "NaiveGreedy" on `data`), up to ties.
Of points within a rounding error (`TIE`) of the best the last one wins, as in submodlib. So all
three begin with the last point (logdet with cosines: the last that is not 0), since every first
point adds the same. submodlib begins logdet with a point whose cosine with itself float32 rounds
up, which is not imitated. For the second pick of dispmin a distance above 1 (a cosine below 0)
counts as 1, as in submodlib. Unlike there, k may be n.

Cost. dispsum and dispmin need one row of distances per pick, O(n p k) in all, and keep a running
sum or minimum. logdet is a pivoted Cholesky: O(n p k), or O(n k^2) if p > k. Both work in blocks,
because a product of matrices takes a tenth of the time of products with its columns. All of it is
in float64 on the features' device, and no n x n matrix is needed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.selectors.similarity import ComparedPoints, Metric, prepare

Objective = Literal["logdet", "dispsum", "dispmin"]

TIE = 1e-11
"""Scores this close to the best tie, relative to it or to 1: float64 leaves about 1e-13."""
BLOCK = 64
"""Rows of distances made at once, and picks of logdet between two updates of all points."""


class Picks(NamedTuple):
    chosen: Tensor  # [k] indices in the order of picking
    gain: Tensor  # [k] what each added to f, so that they sum to f; float64


def greedy(
    x: Tensor,
    k: int,
    objective: Objective,
    *,
    metric: Metric = "cosine",
    regulariser: float = 1.0,
    selection_mb: int = 2048,
) -> Picks:
    """Pick k of the points x [n, ...], one after the other.

    `regulariser` is lambda, of logdet alone. `selection_mb` bounds the memory for features, rows
    and factors, and is checked before any is taken.
    """
    for word, known in ((objective, get_args(Objective)), (metric, get_args(Metric))):
        if word not in known:
            raise UserError(f"There is no {word!r} to choose points by, only {', '.join(known)}.")
    n, p = len(x), x[:1].numel()
    if not 1 <= k <= n:
        raise UserError(f"k is {k}; it must be from 1 to the number of points, {n}.")
    if regulariser < 1e-6:  # rounding is about 1e-13 of L, and would decide between near points
        raise UserError(f"regulariser is {regulariser}; it must be at least 1e-06.")
    low_rank = metric == "cosine" and p < k
    factor = 0 if objective != "logdet" else p * p if low_rank else n * k
    _check_memory(8 * (3 * n * p + 3 * n * BLOCK + factor), n, k, selection_mb)
    points = prepare(x.flatten(1), metric)
    if objective == "logdet":
        residual = LowRank(points) if low_rank else Factored(points, k)
        return _log_determinant(residual, points.own + regulariser, k)
    rows = Rows(points, (selection_mb << 20) // (8 * n) - 3 * p)
    return (_disparity_sum if objective == "dispsum" else _disparity_min)(rows, n, k)


def _check_memory(needed: int, n: int, k: int, selection_mb: int) -> None:
    if needed > selection_mb << 20:
        raise UserError(
            f"Choosing {k} of {n} points takes {needed / 2**20:.0f} MB; raise selection_mb, which "
            f"is {selection_mb}, or choose fewer."
        )


def _last_best(score: Tensor) -> tuple[float, int]:
    """The highest score and its point; of points that tie, the last."""
    best = float(score.max())
    i = int((score >= best - _tie(best)).nonzero()[-1])
    return float(score[i]), i


def _tie(score: float) -> float:
    return TIE * max(1.0, abs(score))


# Disparities


class Rows:
    """Rows of distances, computed together with those that may be needed next, and kept."""

    def __init__(self, points: ComparedPoints, room: int) -> None:
        self.points, self.room = points, max(BLOCK, room)
        self.made = torch.zeros(len(points.rows), dtype=torch.bool, device=points.rows.device)
        self.kept: dict[int, Tensor] = {}

    def __call__(self, i: int, score: Tensor, more: int) -> Tensor:
        """Distances of point i; if there are none yet, also of the `more` of highest score."""
        if i not in self.kept:
            if len(self.kept) + BLOCK > self.room:
                self.kept.clear()
                self.made.fill_(False)
            wanted = score.masked_fill(self.made, -torch.inf)
            wanted[i] = torch.inf
            index = wanted.topk(min(BLOCK, 1 + more)).indices
            self.made[index] = True
            self.kept.update(zip(index.tolist(), 1 - self.points.similarity(index), strict=True))
        return self.kept[i]


def _disparity_sum(distances: Rows, n: int, k: int) -> Picks:
    index: list[int] = []
    gain: list[float] = []
    total = distances.points.rows.new_zeros(n)  # sum_{i in A} d_ij; -inf once picked
    for left in reversed(range(k)):
        best, i = _last_best(total)
        index.append(i)
        gain.append(best)
        total[i] = -torch.inf
        if left > 0:
            total += distances(i, total, left - 1)
    return Picks(torch.tensor(index, device=total.device), total.new_tensor(gain))


def _disparity_min(distances: Rows, n: int, k: int) -> Picks:
    index: list[int] = []
    gain: list[float] = []
    f = 0.0
    nearest = distances.points.rows.new_full((n,), torch.inf)  # min_{i in A} d_ij; -inf once picked
    for left in reversed(range(k)):
        second = len(index) == 1  # before there is a pair, f = 0 is no bound
        score = nearest.clamp_max(1.0 if second else f)
        _, i = _last_best(score)
        smallest = float(nearest[i]) if second else min(f, float(nearest[i]))
        index.append(i)
        gain.append(smallest - f)
        f = smallest
        nearest[i] = -torch.inf
        if left > 0:
            nearest = torch.minimum(nearest, distances(i, score, left - 1))
    return Picks(torch.tensor(index, device=nearest.device), nearest.new_tensor(gain))


# Log-determinant. R = S - S_.A L_AA^-1 S_A. is what A leaves of S, and r = diag(R) + lambda.


class LowRank:
    """R = U H U^T for cosines, with U [n, p] the unit rows: p numbers per point, whatever k."""

    def __init__(self, points: ComparedPoints) -> None:
        self.U = points.rows
        self.H = torch.eye(self.U.shape[1], dtype=self.U.dtype, device=self.U.device)

    def among(self, a: Tensor) -> Tensor:
        """R between points a: [a, a]."""
        U = self.U[a]
        return U @ self.H @ U.T

    def take(self, picks: Tensor, cholesky: Tensor) -> Tensor:
        """Add picks to A, given the factor of their R + lambda I: rows C, since R loses C^T C."""
        V: Tensor = torch.linalg.solve_triangular(cholesky, self.U[picks] @ self.H, upper=False)
        self.H.addmm_(V.T, V, alpha=-1)
        return V @ self.U.T


class Factored:
    """R = S - C^T C for any similarities, with C [k, n] the rows of the Cholesky factor so far."""

    def __init__(self, points: ComparedPoints, k: int) -> None:
        self.points, self.size = points, 0
        self.C = points.rows.new_empty(k, len(points.rows))

    def among(self, a: Tensor) -> Tensor:
        C = self.C[: self.size, a]
        return self.points.similarity(a, a) - C.T @ C

    def take(self, picks: Tensor, cholesky: Tensor) -> Tensor:
        C = self.C[: self.size]
        R = self.points.similarity(picks).addmm_(C[:, picks].T, C, alpha=-1)
        rows = self.C[self.size : self.size + len(picks)]
        rows[:] = torch.linalg.solve_triangular(cholesky, R, upper=False)
        self.size += len(picks)
        return rows


def _log_determinant(residual: LowRank | Factored, r: Tensor, k: int) -> Picks:
    """Pivoted Cholesky in blocks: r only falls, so that an old value bounds the present one.

    A block is a pivoted Cholesky of the points with the highest r, and goes on for as long as its
    best is above the r that all other points had when the block began.
    """
    index: list[Tensor] = []
    pivots: list[float] = []
    width = BLOCK
    while len(pivots) < k:
        left = len(r) - len(pivots)
        top = r.topk(min(width, left))
        _, first = _last_best(r)  # more points may tie than there is room for
        active = torch.cat([top.indices, top.indices.new_tensor([first])]).unique()
        others = float(top.values[-1]) if width < left else -torch.inf
        most = min(BLOCK, k - len(pivots))
        # On the host: thousands of small steps, each of which needs the one before.
        R, high = residual.among(active).cpu(), r[active].cpu()
        chosen, values, cholesky = _pivots(R, high, most, others)
        picks = active[chosen.to(r.device)]
        r -= residual.take(picks, cholesky.to(r.device)).square().sum(0)
        index.append(picks)
        pivots += values
        r[torch.cat(index)] = -torch.inf
        width = min(max(8 * len(picks), BLOCK // 2), 8 * BLOCK)
    return Picks(torch.cat(index), r.new_tensor(pivots).log())


def _pivots(R: Tensor, r: Tensor, most: int, others: float) -> tuple[Tensor, list[float], Tensor]:
    """Picks among points with residuals R, their pivots, and the picks' Cholesky factor [b, b]."""
    C = R.new_zeros(most, len(r))
    chosen: list[int] = []
    pivots: list[float] = []
    for t in range(most):
        best, i = _last_best(r)
        if t > 0 and best <= others + _tie(others):
            break
        C[t] = (R[i] - C[:t, i] @ C[:t]) / best**0.5
        C[t, i] = best**0.5
        r = r - C[t].square()
        chosen.append(i)
        pivots.append(best)
        r[chosen] = -torch.inf
    index = torch.tensor(chosen)
    return index, pivots, C[: len(chosen), index].T
