"""Orthogonal matching pursuit with a non-negative refit, a point or a block at a time.

Each step adds the points that would lower f most, refits all weights by non-negative least squares,
and drops points whose weight becomes 0; others take their places. One point per step is the
active-set method of Lawson and Hanson (1974), stopped at k points. Blocks of k/20 points need about
twenty products with Phi^T instead of k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset import support
from corefed.coreset.problem import Problem, Solution, norm2

BLOCKS = 20


def solve(
    problem: Problem,
    *,
    iterations: int = 0,
    generators: Sequence[torch.Generator] = (),
    in_blocks: bool = False,
) -> Solution:
    """Add points until k_i have a weight, or none would help."""
    block = -(-problem.k // BLOCKS) if in_blocks else torch.ones_like(problem.k)
    chosen = support.empty(problem)
    done = problem.k <= 0
    iteration, most = 0, iterations or 3 * problem.most
    while iteration < most and not bool(done.all()):
        iteration += 1
        room = torch.minimum(block, problem.k - chosen.size).masked_fill(done, 0)
        index, real = support.candidates(problem, chosen, room)
        done = done | ~real.any(-1)
        if bool(done.all()):
            break
        before = norm2(chosen.residual(problem))
        grown = support.refitted(support.joined(chosen, problem, index, real))
        stuck = norm2(grown.residual(problem)) >= before  # rounding is all that is left
        chosen = support.kept(grown, grown.x > 0)
        done = done | stuck | (chosen.size >= problem.k)
    w = chosen.weights(problem)
    return Solution(w, problem.objective(w), iteration, done)
