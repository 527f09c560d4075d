"""Algorithm 2: accelerated iterative hard thresholding (A-IHT; Zhang et al., AISTATS 2021).

    minimise f(w) = ||y - Phi w||^2   subject to   w >= 0,  ||w||_0 <= k

The line numbers in the code are those of Algorithm 2. Constants: with the gradient
-2 Phi^T (y - Phi z) of f, the exact step of line 6 is ||g||^2 / (2 ||Phi g||^2), and the exact
momentum of line 8 has no 2 in its denominator (the paper's 2 halves it). Safeguards: 0/0 is 0; an
index is never picked twice in line 4; the best iterate seen is returned, never a worse one than the
start.

Cost of an iteration: one product with Phi^T. All products with Phi are on the support of w (k
columns) or of the step (at most 3k).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from corefed.coreset.problem import Problem, Solution, divide, largest, norm2

ITERATIONS = 300
TOLERANCE = 1e-5
PATIENCE = 10
"""Converged when f changed by less than TOLERANCE times ||y||^2 on PATIENCE iterations in a row; a
single small change is often only a pause."""


def solve(
    problem: Problem,
    *,
    iterations: int = 0,
    generators: Sequence[torch.Generator] = (),
    tolerance: float = TOLERANCE,
    start: Tensor | None = None,
    debias: bool = False,
    momentum: bool = True,
) -> Solution:
    """A-IHT. With `debias` A-IHT II: one exact step on the new support after each projection.
    Without `momentum` (tau = 0) plain IHT (Blumensath and Davies, 2009) with exact steps.

    With a `tolerance` below 0 all iterations are made.
    """
    points, y, k, mask = problem
    most = problem.most
    w = torch.zeros_like(mask, dtype=y.dtype)  # line 1
    if start is not None:
        w, _ = project(start, k, most, mask)
    phi_w = problem.combine(w, most)
    z, phi_z = w, phi_w
    best, best_f = w, norm2(y - phi_w)
    scale = norm2(y).clamp_min(torch.finfo(y.dtype).tiny)
    previous, calm, settled = best_f, torch.zeros_like(k), torch.zeros_like(k, dtype=torch.bool)
    iteration = 0
    for iteration in range(1, (iterations or ITERATIONS) + 1):  # line 2
        gradient = -2 * points.correlate(y - phi_z)
        support = z > 0  # line 3: z may have negative entries after momentum; they are not kept
        outside = gradient.abs().masked_fill(support | ~mask, -1.0)
        active = (support | largest(outside, k, most)) & mask  # line 4
        restricted = gradient * active  # line 5
        step = line_search(restricted, lambda v: problem.combine(v, 3 * most))  # line 6
        w_next, index = project(z - step.unsqueeze(-1) * gradient, k, most, mask)  # line 7
        columns, kept = points.gather(index), w_next.gather(-1, index)
        phi_next = _mix(columns, kept)
        if debias:  # A-IHT II: one exact step on the new support, kept feasible
            slope = -2 * torch.bmm(columns, (y - phi_next).unsqueeze(-1)).squeeze(-1) * (kept > 0)
            length = line_search(slope, partial(_mix, columns)).unsqueeze(-1)
            kept = (kept - length * slope).clamp_min_(0.0)
            w_next = w_next.scatter(-1, index, kept)
            phi_next = _mix(columns, kept)
        change = phi_next - phi_w
        tau = divide((y - phi_next).mul(change).sum(-1), norm2(change)).unsqueeze(-1)  # line 8
        tau = tau if momentum else torch.zeros_like(tau)
        z = w_next + tau * (w_next - w)  # line 9
        phi_z = phi_next + tau * change
        w, phi_w = w_next, phi_next  # line 10
        f = norm2(y - phi_w)
        better = (f < best_f) & ~settled  # a converged client stays as it would be alone
        best = torch.where(better.unsqueeze(-1), w, best)
        best_f = torch.where(better, f, best_f)
        calm = torch.where((previous - f).abs() <= tolerance * scale, calm + 1, 0)
        previous = f
        if iteration % PATIENCE == 0:  # line 11
            settled |= calm >= PATIENCE
            if bool(settled.all()):
                break
    return Solution(best, best_f, iteration, settled)


def project(z: Tensor, k: Tensor, most: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Line 7: the k largest entries, clamped at 0, and their indices [C, most].

    Not the largest in magnitude: negative ones would be clamped to 0. This projection is exact.
    """
    top = z.masked_fill(~mask, -torch.inf).topk(most, dim=-1)
    wanted = torch.arange(most, device=z.device) < k.unsqueeze(-1)
    kept = top.values.clamp_min(0.0) * wanted
    return torch.zeros_like(z).scatter(-1, top.indices, kept), top.indices


def line_search(gradient: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """argmin_mu f(z - mu g) = ||g||^2 / (2 ||Phi g||^2) for g the gradient on its own support: [C].

    In units of the largest entry, since squares of float32 gradients can over- and underflow.
    """
    unit = divide(gradient, gradient.abs().amax(-1, keepdim=True))
    return divide(norm2(unit), 2 * norm2(apply(unit)))


def _mix(columns: Tensor, v: Tensor) -> Tensor:
    """sum_j v_j g_j: [C, m, S], [C, m] -> [C, S]."""
    return torch.bmm(v.unsqueeze(1), columns).squeeze(1)
