"""A set of chosen points that grows and shrinks, with what a refit of its weights needs.

Columns, Gram matrix and products with y of the chosen points are kept in float64 and extended when
points join, so a refit needs no product with all of Phi. Clients have different numbers of points:
slots beyond a client's own are False in `real` and have weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.coreset.nnls import RIDGE, nnls, square
from corefed.coreset.problem import Problem, divide


class Support(NamedTuple):
    at: Tensor  # [C, m] which points
    real: Tensor  # [C, m] bool
    columns: Tensor  # [C, m, S] g_j, zero where not real
    gram: Tensor  # [C, m, m]
    target: Tensor  # [C, m] <g_j, y>
    x: Tensor  # [C, m] weights

    @property
    def size(self) -> Tensor:
        """[C] points of positive weight."""
        return (self.x > 0).sum(-1)

    def residual(self, problem: Problem) -> Tensor:
        """y - Phi w, [C, S] in float64."""
        return problem.y.double() - torch.bmm(self.x.unsqueeze(1), self.columns).squeeze(1)

    def weights(self, problem: Problem) -> Tensor:
        """w [C, n] in the potentials' precision."""
        w = torch.zeros_like(problem.mask, dtype=self.x.dtype)
        return w.scatter_add_(1, self.at, self.x * self.real).to(problem.y.dtype)


def empty(problem: Problem) -> Support:
    clients, _, rows = problem.points.shape
    none = torch.zeros(clients, 0, dtype=torch.float64, device=problem.y.device)
    columns, gram = none.unsqueeze(-1).expand(-1, -1, rows), none.unsqueeze(1).expand(-1, 0, -1)
    return Support(none.long(), none.bool(), columns, gram, none, none)


def from_weights(problem: Problem, w: Tensor) -> Support:
    """The points where w [C, n] is positive, with those weights."""
    most = int((w > 0).sum(-1).max())
    if most == 0:
        return empty(problem)
    top = w.topk(most, dim=-1)
    chosen = joined(empty(problem), problem, top.indices, top.values > 0)
    return chosen._replace(x=top.values.double() * chosen.real)


def joined(support: Support, problem: Problem, index: Tensor, real: Tensor) -> Support:
    """The support with further points [C, m], of weight 0."""
    return _with(support, problem, index, real, problem.points.gather(index).double())


def _with(
    support: Support, problem: Problem, index: Tensor, real: Tensor, columns: Tensor
) -> Support:
    columns = columns * real.unsqueeze(-1)
    cross = torch.bmm(columns, support.columns.mT)  # [C, new, old]
    corner = torch.bmm(columns, columns.mT)
    gram = torch.cat([torch.cat([support.gram, cross.mT], 2), torch.cat([cross, corner], 2)], 1)
    target = torch.bmm(columns, problem.y.double().unsqueeze(-1)).squeeze(-1)
    return Support(
        torch.cat([support.at, index], 1),
        torch.cat([support.real, real], 1),
        torch.cat([support.columns, columns], 1),
        gram,
        torch.cat([support.target, target], 1),
        torch.cat([support.x, torch.zeros_like(target)], 1),
    )


def refitted(support: Support) -> Support:
    """The same points with the weights of non-negative least squares."""
    if not support.at.shape[1]:
        return support
    return support._replace(x=nnls(support.gram, support.target, support.real, support.x))


def kept(support: Support, keep: Tensor) -> Support:
    """Only the points in `keep` [C, m], moved to the front; slots that no client needs go."""
    keep = keep & support.real
    width = int(keep.sum(-1).max()) if keep.shape[1] else 0
    order = keep.to(torch.int8).topk(width, dim=-1)
    slot, real = order.indices, order.values > 0
    columns = _rows(support.columns, slot) * real.unsqueeze(-1)
    gram = square(support.gram, slot) * (real.unsqueeze(-1) & real.unsqueeze(1))
    return Support(
        support.at.gather(1, slot),
        real,
        columns,
        gram,
        support.target.gather(1, slot) * real,
        support.x.gather(1, slot) * real,
    )


def _rows(columns: Tensor, slot: Tensor) -> Tensor:
    """[C, m, S] of columns [C, n, S]."""
    if len(columns) == 1:  # as in `nnls.square`
        return columns[0].index_select(0, slot[0]).unsqueeze(0)
    return columns.take_along_dim(slot.unsqueeze(-1), 1)


def removal_costs(support: Support) -> Tensor:
    """[C, m] how much f grows when a point goes and the others are refitted: x_j^2 / (G^-1)_jj.

    Exact while no other weight becomes 0; infinite where there is no weight to remove.
    """
    free = support.x > 0
    system, unit = _system(support, free, RIDGE)
    inverse = torch.linalg.inv_ex(system).inverse.diagonal(dim1=-2, dim2=-1)
    cost: Tensor = (support.x * unit).square() / inverse.clamp_min(1.0)  # at least 1 in units
    return cost.masked_fill(~free, torch.inf)


def _system(support: Support, free: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The Gram matrix of the free points in units of their norms, I for the others; the units."""
    unit = torch.where(free, support.gram.diagonal(dim1=-2, dim2=-1), 1.0).sqrt()
    system = torch.where(free.unsqueeze(-1) & free.unsqueeze(-2), support.gram, 0.0)
    system = system / unit.unsqueeze(-1) / unit.unsqueeze(-2)
    system.diagonal(dim1=-2, dim2=-1).add_(torch.where(free, ridge, 1.0))
    return system, unit


def candidates(problem: Problem, support: Support, room: Tensor) -> tuple[Tensor, Tensor]:
    """The points that would lower f most on their own, at most room_i [C] of them: index and real.

    Adding g_j with weight x lowers f by 2 x <r, g_j> - x^2 ||g_j||^2. The best x is
    <r, g_j> / ||g_j||^2, which is unbounded for points with tiny potentials. So x is at most CAP
    uniform weights.
    """
    squares = problem.points.squares()
    r = support.residual(problem).to(problem.y.dtype)
    slope = problem.points.correlate(r)
    size = problem.mask.sum(-1, keepdim=True)
    cap = CAP * size / problem.k.clamp_min(1).unsqueeze(-1)
    x = (slope / squares.clamp_min(torch.finfo(squares.dtype).tiny)).clamp_min(0.0).minimum(cap)
    gain = x * (2 * slope - x * squares)
    taken = torch.zeros_like(gain).scatter_add_(1, support.at, support.real.to(gain.dtype))
    gain = gain.masked_fill((taken > 0) | faint(problem) | ~problem.mask, -1.0)
    top = gain.topk(min(int(room.max()), gain.shape[-1]), dim=-1)
    place = torch.arange(top.values.shape[-1], device=gain.device)
    # Smaller gains are rounding: of the products with r, and of r itself where f is near 0.
    noise = r.shape[-1] * torch.finfo(r.dtype).eps ** 2 * r.square().sum(-1, keepdim=True)
    enough = noise.maximum(1e-20 * problem.y.square().sum(-1, keepdim=True))
    return top.indices, (top.values > enough) & (place < room.unsqueeze(-1))


def faint(problem: Problem) -> Tensor:
    """[C, n] points whose potentials are below FAINT times the root mean square."""
    squares = problem.points.squares()
    size = problem.mask.sum(-1, keepdim=True).clamp_min(1)
    return squares < FAINT**2 * (squares * problem.mask).sum(-1, keepdim=True) / size


def joined_best(problem: Problem, support: Support, room: Tensor, skip: Tensor) -> Support:
    """The support with at most room_i [C] further points, one after the other: each time the point
    that lowers f most when all weights are refitted. The first skip_i points are left out.

    After a refit only v_j counts, the part of g_j outside the span of the others: f falls by
    <r, v_j>^2 / ||v_j||^2 (orthogonal least squares; weights are capped as in `candidates`, and the
    bound at 0 of the others is ignored). This is computed for a shortlist. Its points are often
    similar, so each that joins has its direction removed from r and from the others.
    """
    index, real = candidates(problem, support, SHORTLIST * (room + skip) + 64)
    columns = problem.points.gather(index).double() * real.unsqueeze(-1)
    basis = _basis(support)
    v = columns - torch.bmm(torch.bmm(columns, basis.mT), basis)
    slope = torch.bmm(v, support.residual(problem).unsqueeze(-1)).squeeze(-1)
    gram = torch.bmm(v, v.mT)
    outside = gram.diagonal(dim1=-2, dim2=-1).clone()
    floor = (SAFE * columns.square().sum(-1)).clamp_min(torch.finfo(columns.dtype).tiny)
    cap = CAP * problem.mask.sum(-1, keepdim=True) / problem.k.clamp_min(1).unsqueeze(-1)
    last = room + skip
    rows = v.new_zeros(len(v), int(last.max()), v.shape[1])  # <v_j, q> of the directions q so far
    picks, joins = [], []
    for place in range(rows.shape[1]):
        x = (slope / outside.maximum(floor)).clamp_min(0.0).minimum(cap.to(slope.dtype))
        gain = (x * (2 * slope - x * outside)).masked_fill(~real | (outside <= floor), 0.0)
        best = gain.max(-1, keepdim=True)
        join = (best.values > 0) & (place < last.unsqueeze(-1))
        if not bool(join.any()):
            break
        picks.append(best.indices)
        join = join & (place >= skip.unsqueeze(-1))
        joins.append(join)
        real = real.scatter(-1, best.indices, False)
        # A step of pivoted Cholesky: q is v of the best, less what earlier directions took.
        pivot = best.indices.unsqueeze(1)
        known = torch.bmm(rows[:, :place].take_along_dim(pivot, 2).mT, rows[:, :place]).squeeze(1)
        length = outside.gather(-1, best.indices).sqrt()
        along = (gram.take_along_dim(pivot, 1).squeeze(1) - known) * divide(join, length)
        rows[:, place] = along
        slope = slope - along * divide(slope.gather(-1, best.indices), length)
        outside = outside - along.square()
    if not picks:
        return support
    at, wanted = torch.cat(picks, 1), torch.cat(joins, 1)
    chosen = _rows(columns, at)
    return _with(support, problem, index.gather(1, at), wanted, chosen)


def _basis(support: Support) -> Tensor:
    """Orthonormal rows that span the points of positive weight: [C, m, S]."""
    free = support.x > 0
    system, unit = _system(support, free, SAFE)
    lower = torch.linalg.cholesky_ex(system).L
    scaled = support.columns * (free / unit).unsqueeze(-1)
    basis: Tensor = torch.linalg.solve_triangular(lower, scaled, upper=False)
    return basis


SHORTLIST = 4
"""Candidates considered per point that joins."""
SAFE = 1e-10
"""Part of a column's square that rounding can leave outside the span of the others."""
FAINT = 0.01
"""Points with potentials below this part of the root mean square do not join. They would need
weights in the hundreds to matter, and get weights in the millions to fit rounding errors."""
CAP = 10.0
"""Largest weight of a candidate when its gain is computed, in units of n/k."""
