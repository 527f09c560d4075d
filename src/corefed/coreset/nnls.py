"""Non-negative least squares from a Gram matrix, exact and batched.

    minimise x^T G x / 2 - b^T x   over   x >= 0

`_pivot`, block principal pivoting (Kim and Park, SIAM J. Sci. Comput. 2011), is tried first: solve
G x = b on the free entries, then bind all that are negative and free all whose slope is negative.
It ends after a few solves or starts to cycle. Clients for which it cycles go through `_descend`:
projected Newton steps (Bertsekas, SIAM J. Control Optim. 1982), then Lawson and Hanson's single
ones. That is slower, but the objective falls with every step.

The k-by-k systems are small compared with the potentials, so they are solved in float64 always: G
squares their condition number.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-11
"""Added to a diagonal of ones. Equal points make G singular; with a ridge they share a weight."""
SLACK = 1e-9
"""Slopes this small relative to the largest |b| are rounding."""
PIVOTS = 25
BULK = 30
"""Projected steps before single ones."""
LENGTHS = 12
"""Step lengths 1, 1/2, 1/4, ... that a projected step tries."""


def nnls(gram: Tensor, target: Tensor, real: Tensor, start: Tensor | None = None) -> Tensor:
    """x [C, m] for gram [C, m, m], target [C, m], both float64; entries outside `real` are 0.

    Never worse than `start` (0 unless given), up to RIDGE ||x||^2 in units of the columns.
    """
    # In units of each column's norm: potentials differ by many orders of magnitude.
    unit = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    real = real & (unit > 0)
    inverse = torch.where(real, unit.reciprocal(), 0.0)
    gram = gram * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    target = target * inverse
    slack = SLACK * target.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(unit.dtype).tiny)
    x = torch.zeros_like(target) if start is None else start.clamp_min(0.0) * unit * real
    pivoted, ended = _pivot(gram, target, real, slack)
    if not bool(ended.all()):
        pivoted = torch.where(ended, pivoted, _descend(gram, target, real, slack, x))
    return pivoted * inverse


def _pivot(gram: Tensor, target: Tensor, real: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """x and whether it is optimal [C, 1], starting with all entries free."""
    free, x = real, torch.zeros_like(target)
    ended = torch.zeros_like(real[:, :1])
    fewest = torch.full_like(target[:, :1], torch.inf)
    chances = torch.full_like(fewest, 3.0)  # rounds without fewer violations before giving up
    for _ in range(PIVOTS):
        x = torch.where(ended, x, _solve_free(gram, target, free))
        slope = _times(gram, x) - target
        wrong = (free & (x < 0)) | (~free & real & (slope < -slack))
        count = wrong.sum(-1, keepdim=True)
        ended = count == 0
        chances = torch.where(count < fewest, 3.0, chances - 1)
        fewest = torch.minimum(fewest, count)
        if not bool((~ended & (chances >= 0)).any()):
            break
        free = free ^ wrong
    return x, ended


def _descend(gram: Tensor, target: Tensor, real: Tensor, slack: Tensor, x: Tensor) -> Tensor:
    """Projected Newton steps while they help, then Lawson and Hanson's to the end."""
    halves = 0.5 ** torch.arange(LENGTHS, dtype=x.dtype, device=x.device)
    single = torch.zeros_like(real[:, :1])  # clients that go on with one entry at a time
    for step in range(BULK + 3 * real.shape[-1]):
        slope = _times(gram, x) - target
        inside, joins = real & (x > 0), real & (x <= 0) & (slope < -slack)
        settled = ~(inside & (slope.abs() > slack)).any(-1, keepdim=True)
        if not bool((joins | ~settled).any()):
            break
        # One at a time: positive entries alone until their slopes vanish, then one more joins.
        steepest = slope.masked_fill(~joins, torch.inf).argmin(-1, keepdim=True)
        one = joins & torch.zeros_like(joins).scatter(-1, steepest, True) & settled
        free = inside | torch.where(single, one, joins)
        newton = _solve_free(gram, slope, free)
        # The lengths tried: halves, cut off at 0, and the one at which the first entry meets 0.
        wall = torch.where((newton > 0) & inside, x / newton.clamp_min(1e-300), 1.0)
        wall = wall.amin(-1).clamp_max(1.0)
        lengths = torch.cat([halves.unsqueeze(-1).expand(-1, len(x)), wall.unsqueeze(0)])
        trial = (x - lengths.unsqueeze(-1) * newton).clamp_min(0.0)  # [lengths, C, m]
        trial = torch.where(trial <= 1e-15 * x.amax(-1, keepdim=True), 0.0, trial)
        best = _change(gram, slope, trial - x).min(0)
        improved = (best.values < 0).unsqueeze(-1)
        if not bool((improved | ~single).any()):
            break
        chosen = trial.take_along_dim(best.indices.view(1, -1, 1), 0).squeeze(0)
        x = torch.where(improved, chosen, x)
        single = single | ~improved | (step >= BULK)
    return x


def _change(gram: Tensor, slope: Tensor, move: Tensor) -> Tensor:
    """f(x + move) - f(x) for move [lengths, C, m]: [lengths, C]. Not as a difference of two values,
    which cancels where the fit is good."""
    curved = torch.bmm(move.movedim(0, 1), gram).movedim(1, 0)
    return (move * (slope + 0.5 * curved)).sum(-1)


def square(gram: Tensor, at: Tensor) -> Tensor:
    """[C, m, m] of gram [C, n, n]: the rows and columns `at` [C, m]."""
    if len(gram) == 1:  # index_select copies rows at once, several times as fast
        return gram[0].index_select(0, at[0]).index_select(1, at[0]).unsqueeze(0)
    return gram.take_along_dim(at.unsqueeze(-1), 1).take_along_dim(at.unsqueeze(1), 2)


def _times(gram: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(gram, x.unsqueeze(-1)).squeeze(-1)


def _solve_free(gram: Tensor, b: Tensor, free: Tensor) -> Tensor:
    """G x = b on the free entries, 0 elsewhere; entries that no client has free are left out."""
    width = int(free.sum(-1).max())
    order = free.to(torch.int8).topk(width, dim=-1)
    at, own = order.indices, order.values > 0
    system = torch.where(own.unsqueeze(-1) & own.unsqueeze(-2), square(gram, at), 0.0)
    system.diagonal(dim1=-2, dim2=-1).add_(torch.where(own, RIDGE, 1.0))
    factor, failed = torch.linalg.cholesky_ex(system)
    more = 1e3 * RIDGE
    while bool(failed.any()):  # numerically indefinite: more ridge for those clients alone
        system.diagonal(dim1=-2, dim2=-1).add_(torch.where(failed > 0, more, 0.0).unsqueeze(-1))
        factor, failed = torch.linalg.cholesky_ex(system)
        more *= 1e3
    wanted = torch.where(own, b.gather(-1, at), 0.0).unsqueeze(-1)
    found = torch.cholesky_solve(wanted, factor).squeeze(-1)
    return torch.zeros_like(b).scatter(-1, at, found)
