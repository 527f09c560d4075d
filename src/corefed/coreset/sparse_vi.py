"""Sparse variational inference (Campbell and Beronov, NeurIPS 2019): the coreset whose own
posterior pi_w is nearest to the full one.

The gradient of KL(pi_w || pi) in w is -Cov_w[f, f^T (1 - w)], with f the log-likelihoods and the
covariance under pi_w itself. So every step needs fresh draws from the coreset's current posterior:
`resample(w, step)` gives the potentials under such draws. Points join by how much they would lower
the residual f^T (1 - w) on them. Weights move by damped natural-gradient steps: Cov_w[f] on the
support is both curvature and metric, and the full step is the non-negative least-squares fit on the
current draws. (The paper's plain gradient steps need a step size for every problem.) Points join in
blocks of k/20, since each step costs a posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.coreset import support
from corefed.coreset.omp import BLOCKS
from corefed.coreset.problem import Problem, Solution
from corefed.coreset.refit import refit

Resample = Callable[[Tensor, int], Problem]

MASS = 2.0
"""Bound on the sum of weights, in units of n. Without one the first blocks diverge; 1 is too small
for good coresets. Of 1, 1.2, 2 and 4, 2 was the most stable on three regressions."""
STEPS = 5
"""Weight steps after each block, each on fresh draws, of lengths 1, 1/2, 1/3, ..."""


def solve(
    problem: Problem,
    *,
    iterations: int = 0,
    generators: Sequence[torch.Generator] = (),
    resample: Resample | None = None,
) -> Solution:
    if resample is None:
        raise UserError(
            "sparse-vi draws from the coreset's own posterior at every step: pass "
            "resample=, a function that gives such draws, or choose another solver."
        )
    k = problem.k
    plain = torch.zeros_like(problem.y[:, 0])
    size = problem.mask.sum(-1, keepdim=True).to(problem.y.dtype)
    w = torch.zeros_like(problem.mask, dtype=problem.y.dtype)
    step = 0
    blocks = iterations or BLOCKS
    for block in range(1, blocks + 1):
        wanted = -(-(block * k) // blocks)
        now = resample(w, step)
        taken = w > 0
        chosen = support.from_weights(now, w)
        index, real = support.candidates(now, chosen, wanted - taken.sum(-1))
        active = taken.scatter(-1, index, real | taken.gather(-1, index))
        for i in range(STEPS):
            if i > 0:
                now = resample(w, step)
            # Potentials that were large can be negligible under later draws.
            fitted = refit(now, active & ~support.faint(now), plain, 0.0)
            # Draws of a poor posterior can lead to any weight, so the sum of weights is bounded.
            mass = fitted.sum(-1, keepdim=True).clamp_min(torch.finfo(fitted.dtype).tiny)
            fitted = fitted * (MASS * size / mass).clamp_max(1.0)
            w = w + (fitted - w) / (i + 1)
            step += 1
    return Solution(w, problem.objective(w), step, torch.ones_like(k, dtype=torch.bool))
