"""Iterative hard thresholding (Blumensath and Davies, 2009) with the exact step of A-IHT and no
momentum: w <- project(w - mu grad f(w)), mu the line search on the active set.

The baseline that shows what acceleration and de-biasing are worth: Algorithm 2 with tau = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.coreset import aiht
from corefed.coreset.problem import Problem, Solution


def solve(
    problem: Problem,
    *,
    iterations: int = 0,
    generators: Sequence[torch.Generator] = (),
    tolerance: float = aiht.TOLERANCE,
) -> Solution:
    return aiht.solve(problem, iterations=iterations, tolerance=tolerance, momentum=False)
