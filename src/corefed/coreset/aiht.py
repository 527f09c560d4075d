"""Algorithm 2: accelerated iterative hard thresholding (A-IHT; Zhang et al., AISTATS 2021).

    minimise f(w) = ||y - Phi w||^2   subject to   w >= 0,  ||w||_0 <= k

for C clients at once, each with its own mask of real points and its own k. The line numbers in the
code are those of Algorithm 2. Constants: with grad f(z) = -2 Phi^T (y - Phi z) the exact step of
line 6 is ||g||^2 / (2 ||Phi g||^2), and the exact momentum of line 8 has no 2 in its denominator
(the paper's 2 halves it). Safeguards: 0/0 is 0; an index is never picked twice in line 4; the best
iterate seen is returned, never a worse one than the start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    w: Tensor  # [C, n], at most k_i positive entries a client
    objective: Tensor  # [C] f(w), recomputable from w
    iterations: int
    converged: Tensor  # [C] bool: the relative change fell below the tolerance


def solve(
    phi: Tensor,
    y: Tensor,
    k: Tensor,
    mask: Tensor,
    *,
    start: Tensor | None = None,
    debias: bool = True,
    tolerance: float = 1e-5,
    max_iterations: int = 300,
    patience: int = 10,
) -> Solution:
    """A-IHT, or with `debias` A-IHT II: phi [C, S, n], y [C, S], k [C] int, mask [C, n] bool.

    Stops when every client's objective changed by less than `tolerance` of ||y||^2 on `patience`
    iterations in a row (on one alone A-IHT often just pauses), or after `max_iterations`.
    """
    mask = mask.bool()
    k = k.clamp_max(mask.sum(-1))
    top = int(k.max())
    w = torch.zeros_like(phi[:, 0]) if start is None else project(start, k, top, mask)  # line 1
    phi_w = _apply(phi, w)
    z, phi_z = w, phi_w
    best, best_f = w, _norm2(y - phi_w)
    scale = _norm2(y).clamp_min(torch.finfo(y.dtype).tiny)
    previous, calm, settled = best_f, torch.zeros_like(k), torch.zeros_like(k, dtype=torch.bool)
    iteration = 0
    for iteration in range(1, max_iterations + 1):  # line 2
        gradient = -2 * _adjoint(phi, y - phi_z)
        support = z > 0  # line 3: z may have negative entries after momentum; they are not kept
        outside = gradient.abs().masked_fill(support | ~mask, -1.0)
        active = (support | _largest(outside, k, top)) & mask  # line 4
        step = _line_search(phi, gradient * active)  # lines 5 and 6
        w_next = project(z - step * gradient, k, top, mask)  # line 7
        phi_next = _apply(phi, w_next)
        if debias:  # A-IHT II: one exact step on the new support, kept feasible
            on_support = -2 * _adjoint(phi, y - phi_next) * (w_next > 0)
            w_next = (w_next - _line_search(phi, on_support) * on_support).clamp_min_(0.0)
            phi_next = _apply(phi, w_next)
        change = phi_next - phi_w
        tau = _divide((y - phi_next).mul(change).sum(-1), _norm2(change)).unsqueeze(-1)  # line 8
        z = w_next + tau * (w_next - w)  # line 9
        phi_z = phi_next + tau * change
        w, phi_w = w_next, phi_next  # line 10
        f = _norm2(y - phi_w)
        better = (f < best_f) & ~settled  # a client that settled is as it would be alone
        best = torch.where(better.unsqueeze(-1), w, best)
        best_f = torch.where(better, f, best_f)
        calm = torch.where((previous - f).abs() <= tolerance * scale, calm + 1, 0)
        previous = f
        if iteration % patience == 0:  # line 11
            settled |= calm >= patience
            if bool(settled.all()):
                break
    return Solution(best, best_f, iteration, settled)


def project(z: Tensor, k: Tensor, top: int, mask: Tensor) -> Tensor:
    """Line 7: keep the k largest entries and clamp at 0. Largest, not largest in size: those below
    0 would be clamped away, so this is the exact projection on the feasible set."""
    return z.clamp_min(0.0) * _largest(z.masked_fill(~mask, -torch.inf), k, top)


def _largest(score: Tensor, k: Tensor, top: int) -> Tensor:
    """Mask of the k_i largest scores of each row."""
    index = score.topk(top, dim=-1).indices
    wanted = torch.arange(top, device=score.device) < k.unsqueeze(-1)
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, wanted)


def _line_search(phi: Tensor, gradient: Tensor) -> Tensor:
    """argmin_mu f(z - mu g) for a g that is the gradient on its own support: [C, 1]."""
    return _divide(_norm2(gradient), 2 * _norm2(_apply(phi, gradient))).unsqueeze(-1)


def _apply(phi: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(phi, w.unsqueeze(-1)).squeeze(-1)


def _adjoint(phi: Tensor, r: Tensor) -> Tensor:
    return torch.bmm(r.unsqueeze(1), phi).squeeze(1)


def _norm2(v: Tensor) -> Tensor:
    return v.square().sum(-1)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b > 0, a / b.clamp_min(torch.finfo(b.dtype).tiny), 0.0)
