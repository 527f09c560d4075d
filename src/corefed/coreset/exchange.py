"""Forward selection in blocks, then exchanges: the default.

Points join by how much they lower f when all weights are refitted (`support.joined_best`), k/20 at
a time. Forward selection never takes a choice back, and its early points were chosen while most of
y was unexplained. So exchanges follow: m points join, all weights are refitted, the points that are
cheapest to lose go, and the rest are refitted. The result is kept if it lowers f. When neither the
m best candidates nor the next m help, m is halved; it ends when single points do not help. f falls
at every step that is kept, so it is never above that of forward selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset import support
from corefed.coreset.omp import BLOCKS
from corefed.coreset.problem import Problem, Solution, norm2

ITERATIONS = 200
STEPS = 10 * BLOCKS
"""Bound on the steps of forward selection, which needs BLOCKS if no weight becomes 0."""
WORTH = 1e-3
"""The part of f by which a step must lower it."""
MUCH = 1e-6
"""The part of ||y||^2 above which f is not rounding."""
TRIES = 2
"""Sets of candidates tried at one m."""


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    k, most = problem.k, iterations or ITERATIONS
    chosen, started = forward(problem)
    f = norm2(chosen.residual(problem))
    # Where no further point helped, f is rounding, and exchanges would fit rounding.
    swaps = (-(-k // 4)).masked_fill(chosen.size < k, 0)
    tried = torch.zeros_like(k)
    iteration = 0
    while iteration < most and bool((swaps > 0).any()):
        iteration += 1
        room = (k - chosen.size + swaps).masked_fill(swaps <= 0, 0)
        grown = support.refitted(support.joined_best(problem, chosen, room, tried * swaps))
        rank = support.removal_costs(grown).argsort(-1).argsort(-1)
        surplus = (grown.size - k).clamp_min(0).unsqueeze(-1)
        pruned = support.refitted(support.kept(grown, (grown.x > 0) & (rank >= surplus)))
        f_new = norm2(pruned.residual(problem))
        worth = (f_new < (1 - WORTH) * f) & (swaps > 0)
        chosen = _where(worth, pruned, chosen)
        f = torch.where(worth, f_new, f)
        tried = torch.where(worth, 0, tried + 1)
        spent = tried >= TRIES
        swaps, tried = torch.where(spent, swaps // 2, swaps), tried.masked_fill(spent, 0)
    w = chosen.weights(problem)
    return Solution(w, problem.objective(w), started + iteration, swaps <= 0)


def forward(problem: Problem) -> tuple[support.Support, int]:
    """k points in blocks of k/20, fewer where no further point helps, and the number of steps.

    Near a posterior's mode y has no slope, and a few points whose slopes do not cancel get no
    weight: of P parameters, P + 1 points must join together. So where a block does not help and
    much of y is left, the next block is twice as large.
    """
    k = problem.k
    block, none = -(-k // BLOCKS), torch.zeros_like(k)
    much = MUCH * norm2(problem.y.double())
    chosen, done = support.empty(problem), k <= 0
    step = 0
    while step < STEPS and not bool(done.all()):
        step += 1
        room = torch.minimum(block, k - chosen.size).masked_fill(done, 0)
        before = norm2(chosen.residual(problem))
        grown = support.refitted(support.joined_best(problem, chosen, room, none))
        f = norm2(grown.residual(problem))
        # None joined, or as many left as joined, which never ends near an exact fit.
        stuck = (f >= before) | ((f >= (1 - WORTH) * before) & (grown.size <= chosen.size))
        more = stuck & (f > much) & (room < k - chosen.size)
        block = torch.where(more, 2 * block, block)
        chosen = support.kept(grown, grown.x > 0)
        done = done | (stuck & ~more) | (chosen.size >= k)
    return chosen, step


def _where(take: torch.Tensor, new: support.Support, old: support.Support) -> support.Support:
    """The new support or the old one, per client."""
    if bool(take.all()):
        return new
    if not bool(take.any()):
        return old
    width = max(new.at.shape[1], old.at.shape[1])
    parts = []
    for a, b in zip(_padded(new, width), _padded(old, width), strict=True):
        parts.append(torch.where(take.view(-1, *(1,) * (a.dim() - 1)), a, b))
    return support.Support(*parts)


def _padded(chosen: support.Support, width: int) -> support.Support:
    more = width - chosen.at.shape[1]
    pad = torch.nn.functional.pad
    return support.Support(
        pad(chosen.at, (0, more)),
        pad(chosen.real, (0, more)),
        pad(chosen.columns, (0, 0, 0, more)),
        pad(chosen.gram, (0, more, 0, more)),
        pad(chosen.target, (0, more)),
        pad(chosen.x, (0, more)),
    )
