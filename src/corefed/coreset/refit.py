"""Weights for a chosen support: non-negative least squares, shrunk towards the plain weight n/k.

    minimise ||y - Phi w||^2 + lambda ||w - n/k||^2   over   w >= 0 on the support

With few draws, or draws from the wrong region, some weights are hardly determined. Shrinkage leaves
those at n/k, the weight in a uniform subset, instead of at 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.coreset.nnls import nnls
from corefed.coreset.problem import Problem
from corefed.coreset.support import from_weights


def refit(problem: Problem, support: Tensor, plain: Tensor, shrink: float) -> Tensor:
    """[C, n] weights on `support` [C, n] bool; `plain` [C] is n/k.

    lambda = shrink times the mean squared norm of the support's columns, so that the scale of the
    potentials does not matter.
    """
    if not bool(support.any()):
        return torch.zeros_like(support, dtype=problem.y.dtype)
    chosen = from_weights(problem, support.to(problem.y.dtype))
    x = _shrunk(chosen.gram, chosen.target, chosen.real, plain, shrink)
    return chosen._replace(x=x).weights(problem)


def choose_shrink(problem: Problem, support: Tensor, plain: Tensor) -> float:
    """The shrinkage of GRID with the smallest error in five-fold cross-validation over the draws.

    Errors are added over clients. The support was selected on all draws, which favours too little
    shrinkage; the weights are fitted on four fifths of them, which favours too much.
    """
    if not bool(support.any()):
        return 0.0
    chosen = from_weights(problem, support.to(problem.y.dtype))
    y = problem.y.double()
    scale = y.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
    fold = torch.arange(y.shape[-1], device=y.device) % FOLDS
    errors = []
    for shrink in GRID:
        error = torch.zeros_like(scale)
        for number in range(FOLDS):
            mine, other = fold != number, fold == number
            columns = chosen.columns[..., mine]
            gram = torch.bmm(columns, columns.mT)
            target = torch.bmm(columns, y[:, mine].unsqueeze(-1)).squeeze(-1)
            x = _shrunk(gram, target, chosen.real, plain, shrink)
            left = y[:, other] - torch.bmm(x.unsqueeze(1), chosen.columns[..., other]).squeeze(1)
            error += left.square().sum(-1)
        errors.append(float((error / scale).sum()))
    return GRID[min(range(len(GRID)), key=errors.__getitem__)]


FOLDS = 5
GRID = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def _shrunk(gram: Tensor, target: Tensor, real: Tensor, plain: Tensor, shrink: float) -> Tensor:
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = shrink * diagonal.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    target = target + ridge * plain.to(target.dtype).unsqueeze(-1)
    return nnls(gram + torch.diag_embed(ridge.expand_as(diagonal)), target, real)
