"""Greedy iterative geodesic ascent (Campbell and Broderick, ICML 2018).

Directions only: with ell = y / ||y|| and ell_j = g_j / ||g_j||, each step moves ell(w) along the
geodesic of the sphere towards the ell_j that points best at ell, by the exact line search

    gamma = (z0 - z1 z2) / ((z0 - z1 z2) + (z1 - z0 z2)),
    z0 = <ell, ell_j>,  z1 = <ell, ell(w)>,  z2 = <ell_j, ell(w)>

and the length is set at the end. There are k steps, and each adds at most one point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset.problem import Problem, Solution, divide


def solve(
    problem: Problem, *, iterations: int = 0, generators: Sequence[torch.Generator] = ()
) -> Solution:
    points, y, k, mask = problem
    size = y.norm(dim=-1)
    ell = divide(y, size.unsqueeze(-1))
    inverse = divide(torch.ones_like(size).unsqueeze(-1), points.squares().sqrt())  # 1 / ||g_j||
    usable = mask & (inverse > 0)
    toward = points.correlate(ell) * inverse  # z0 of every point
    w = torch.zeros_like(toward)  # in units of ell_j
    at = torch.zeros_like(ell)  # ell(w)
    cosine = torch.zeros_like(toward)  # z2 of every point
    ended = (k <= 0) | (size <= 0)
    iteration = 0
    for iteration in range(1, min(iterations or problem.most, problem.most) + 1):
        z1 = (ell * at).sum(-1, keepdim=True)
        # <d, d_j> of the tangents at ell(w) towards ell and ell_j, up to d's length. A point in the
        # direction of ell(w) has no tangent: 0/0, which rounding would decide.
        sine2 = 1 - cosine.square()
        elsewhere = usable & (sine2 > 100 * torch.finfo(y.dtype).eps)
        alignment = (toward - z1 * cosine) * sine2.clamp_min(1e-12).rsqrt()
        best = alignment.masked_fill(~elsewhere, -torch.inf).argmax(-1, keepdim=True)
        z0, z2 = toward.gather(-1, best), cosine.gather(-1, best)
        towards, away = z0 - z1 * z2, z1 - z0 * z2
        gamma = divide(towards, towards + away.clamp_min(0.0))
        if iteration == 1:  # ell(w) is 0: the first point itself
            gamma = torch.ones_like(gamma)
        ended = ended | (iteration > k) | (towards.squeeze(-1) <= torch.finfo(y.dtype).eps)
        if bool(ended.all()):
            break
        column = points.gather(best).squeeze(1) * inverse.gather(-1, best)
        moved = (1 - gamma) * at + gamma * column
        length = moved.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
        stepped = ((1 - gamma) * w).scatter_add(-1, best, gamma) / length
        keep = ended.unsqueeze(-1)
        at = torch.where(keep, at, moved / length)
        w = torch.where(keep, w, stepped)
        cosine = torch.where(keep, cosine, points.correlate(at) * inverse).clamp(-1.0, 1.0)
    scale = size * (ell * at).sum(-1).clamp_min(0.0)  # the best multiple of ell(w)
    w = w * inverse * scale.unsqueeze(-1)
    return Solution(w, problem.objective(w), iteration, torch.ones_like(ended))
