"""Iterative hard thresholding (Blumensath and Davies, 2009) with the exact step of A-IHT and no
momentum: w <- project(w - mu grad f(w)), mu the line search on the active set.

The baseline that shows what A-IHT's acceleration and de-biasing are worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset.aiht import ITERATIONS, PATIENCE, TOLERANCE, line_search, project
from corefed.coreset.problem import Problem, Solution, largest, norm2


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    points, y, k, mask = problem
    most = problem.most
    w = torch.zeros_like(mask, dtype=y.dtype)
    phi_w = torch.zeros_like(y)
    best, best_f = w, norm2(y)
    scale = best_f.clamp_min(torch.finfo(y.dtype).tiny)
    previous, calm, settled = best_f, torch.zeros_like(k), torch.zeros_like(k, dtype=torch.bool)
    iteration = 0
    for iteration in range(1, (iterations or ITERATIONS) + 1):
        gradient = -2 * points.correlate(y - phi_w)
        support = w > 0
        outside = gradient.abs().masked_fill(support | ~mask, -1.0)
        restricted = gradient * ((support | largest(outside, k, most)) & mask)
        step = line_search(restricted, lambda v: problem.combine(v, 2 * most))
        w, _ = project(w - step.unsqueeze(-1) * gradient, k, most, mask)
        phi_w = problem.combine(w, most)
        f = norm2(y - phi_w)
        better = (f < best_f) & ~settled
        best = torch.where(better.unsqueeze(-1), w, best)
        best_f = torch.where(better, f, best_f)
        calm = torch.where((previous - f).abs() <= TOLERANCE * scale, calm + 1, 0)
        previous = f
        if iteration % PATIENCE == 0:
            settled |= calm >= PATIENCE
            if bool(settled.all()):
                break
    return Solution(best, best_f, iteration, settled)
