"""Solve small positive definite systems by products of matrices alone.

Newton's iteration for the inverse, X <- X (2 I - A X), squares the error I - A X in every step
(Schulz 1933). It needs no library of factorisations, no look at a number and no branch, so that a
GPU can record it. With eigenvalues from a to b it starts at X = 2 / (a + b) I, whose error is
(b - a) / (b + a) = 1 - 2 / (b / a + 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ERROR = 1e-16
"""Of I - A X after the last step, in exact arithmetic."""


def steps_for(condition: float) -> int:
    """Steps after which a matrix with b / a up to `condition` is inverted to `ERROR`."""
    shrinks_by = -math.log1p(-2 / (condition + 1)) if condition > 1 else math.inf
    return 1 + max(0, math.ceil(math.log2(max(1.0, -math.log(ERROR) / shrinks_by))))


def solve(system: Tensor, right: Tensor, least: Tensor, steps: int) -> Tensor:
    """A^-1 B for A [C, S, S], symmetric, with eigenvalues of at least `least` [C, 1, 1] > 0.

    The largest is below the trace and below the largest sum of a row.
    """
    trace = system.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = torch.minimum(trace, system.abs().sum(-1).amax(-1)).view(-1, 1, 1)
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    inverse = one * (2 / (least + largest))
    for _ in range(steps):
        error = torch.baddbmm(one, system, inverse, alpha=-1)
        inverse = torch.baddbmm(inverse, inverse, error)  # X (2 I - A X) = X + X (I - A X)
    return torch.bmm(inverse, right)
