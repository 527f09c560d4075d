"""k points at random: with weights n/k, what every coreset must beat, or with fitted weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.coreset.problem import Problem, Solution
from corefed.coreset.refit import refit


def solve(
    problem: Problem,
    *,
    iterations: int = 0,
    generators: Sequence[torch.Generator] = (),
    fit_weights: bool = False,
) -> Solution:
    """Weights n/k, or with `fit_weights` those that fit best, without shrinkage."""
    chosen = subset(problem, generators)
    plain = problem.mask.sum(-1) / problem.k.clamp_min(1)
    if fit_weights:
        w = refit(problem, chosen, plain, 0.0)
    else:
        w = chosen * plain.to(problem.y.dtype).unsqueeze(-1)
    return Solution(w, problem.objective(w), 1, torch.ones_like(problem.k, dtype=torch.bool))


def uniform_error(y2: Tensor, squares: Tensor, n: Tensor, k: Tensor) -> Tensor:
    """E||y - Phi w||^2 / ||y||^2 of k columns of n without replacement, each with weight n/k:

    (n/k)(n - k)/(n - 1) sum_j ||g_j - y/n||^2 / ||y||^2, from ||y||^2 and the sum of ||g_j||^2.
    """
    y2 = y2.clamp_min(torch.finfo(y2.dtype).tiny)
    spread = squares - y2 / n
    return (n / k) * (n - k).clamp_min(0) / (n - 1).clamp_min(1) * spread / y2


def subset(problem: Problem, generators: Sequence[torch.Generator]) -> Tensor:
    """[C, n] bool: k_i real points of each client, every set equally likely.

    Drawn on the CPU, so that a GPU takes the same points; without generators, from seed 0.
    """
    n = problem.mask.shape[-1]
    if not generators:
        generators = [torch.Generator().manual_seed(0) for _ in problem.k]
    score = torch.stack([torch.rand(n, generator=g, dtype=torch.float64) for g in generators])
    score = score.to(problem.mask.device).masked_fill(~problem.mask, -1.0)
    index = score.topk(problem.most, dim=-1).indices
    wanted = torch.arange(problem.most, device=score.device) < problem.k.unsqueeze(-1)
    return torch.zeros_like(problem.mask).scatter(-1, index, wanted)
