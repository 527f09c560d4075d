"""Orthogonal matching pursuit with a non-negative refit, a point or a block at a time.

Each step adds the points that would lower f most, fits all weights anew by non-negative least
squares, and lets go of points whose weight comes out 0: their places are filled again. One point a
step is the active-set method of Lawson and Hanson (1974), stopped at k points. A block of k/20
makes some twenty products with Phi^T in place of k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset import support
from corefed.coreset.problem import Problem, Solution, norm2
from corefed.coreset.support import Support

BLOCKS = 20


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    return _solution(problem, *pursue(problem, torch.ones_like(problem.k), iterations))


def solve_in_blocks(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    return _solution(problem, *pursue(problem, -(-problem.k // BLOCKS), iterations))


def pursue(
    problem: Problem, block: torch.Tensor, iterations: int
) -> tuple[Support, int, torch.Tensor]:
    """Add block_i [C] points a step until k_i have a weight, or none would help."""
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
    return chosen, iteration, done


def _solution(problem: Problem, chosen: Support, iteration: int, done: torch.Tensor) -> Solution:
    w = chosen.weights(problem)
    return Solution(w, problem.objective(w), iteration, done)
