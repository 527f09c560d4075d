"""Frank-Wolfe (Campbell and Broderick, JMLR 2019): f over the polytope of the vertices
(sigma / sigma_j) e_j, sigma_j = ||g_j||, sigma = sum_j sigma_j, with exact steps.

There are k steps, and each adds at most one point. The first goes to the vertex nearest to y in
direction. sum_j w_j sigma_j = sigma throughout, so w cannot shrink and the fit is poor at small k:
f can stay above ||y||^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset.problem import Problem, Solution, divide


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    points, y, k, mask = problem
    sigma_j = points.squares().sqrt() * mask
    sigma = sigma_j.sum(-1, keepdim=True)
    inverse = divide(torch.ones_like(sigma), sigma_j)
    usable = inverse > 0
    w = torch.zeros_like(sigma_j)
    phi_w = torch.zeros_like(y)
    ended = (k <= 0) | ~usable.any(-1)
    iteration = 0
    for iteration in range(1, min(iterations or problem.most, problem.most) + 1):
        slope = points.correlate(y - phi_w) * inverse
        best = slope.masked_fill(~usable, -torch.inf).argmax(-1, keepdim=True)
        weight = sigma * inverse.gather(-1, best)
        direction = weight * points.gather(best).squeeze(1) - phi_w
        rise = (direction * (y - phi_w)).sum(-1, keepdim=True)
        gamma = divide(rise, direction.square().sum(-1, keepdim=True)).clamp(0.0, 1.0)
        if iteration == 1:
            gamma = torch.ones_like(gamma)
        ended = ended | (iteration > k) | (gamma.squeeze(-1) <= 0)
        if bool(ended.all()):
            break
        keep = ended.unsqueeze(-1)
        phi_w = torch.where(keep, phi_w, phi_w + gamma * direction)
        w = torch.where(keep, w, ((1 - gamma) * w).scatter_add(-1, best, gamma * weight))
    return Solution(w, problem.objective(w), iteration, torch.ones_like(ended))
