"""Block matching pursuit, then exchanges: the default.

Pursuit never takes a choice back, and its early points were chosen while most of y was still
unexplained. So after it, m points join, all weights are fitted anew, the points whose loss would
cost least go, and the rest are fitted again; what lowers f is kept. When no exchange of m helps, m
is halved; when the best single candidate does not, it has ended. f falls at every step that is
kept, so it is never above that of the pursuit it started from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset import support
from corefed.coreset.omp import BLOCKS, pursue
from corefed.coreset.problem import Problem, Solution, norm2

ITERATIONS = 60
WORTH = 1e-3
"""An exchange must lower f by this part of it, or m is halved."""


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    k = problem.k
    chosen, started, _ = pursue(problem, -(-k // BLOCKS), 0)
    f = norm2(chosen.residual(problem))
    swaps = -(-k // 4)
    iteration, most = 0, iterations or ITERATIONS
    while iteration < most and bool((swaps > 0).any()):
        iteration += 1
        index, real = support.candidates(problem, chosen, (k - chosen.size) + swaps)
        grown = support.refitted(support.joined(chosen, problem, index, real))
        costs = support.removal_costs(grown)
        rank = costs.argsort(-1).argsort(-1)
        surplus = (grown.size - k).clamp_min(0).unsqueeze(-1)
        pruned = support.kept(grown, (grown.x > 0) & (rank >= surplus))
        pruned = support.refitted(pruned)
        f_new = norm2(pruned.residual(problem))
        worth = f_new < (1 - WORTH) * f
        chosen = _where(worth, pruned, chosen)
        f = torch.where(worth, f_new, f)
        swaps = torch.where(worth, swaps, swaps // 2)
    w = chosen.weights(problem)
    return Solution(w, problem.objective(w), started + iteration, swaps <= 0)


def _where(take: torch.Tensor, new: support.Support, old: support.Support) -> support.Support:
    """Client by client the new support or the old one."""
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
