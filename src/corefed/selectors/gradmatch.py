"""GradMatch (Killamsetty et al., ICML 2021): weighted points whose gradients add up to all of them.

    minimise || sum_j g_j - sum_{j in A} w_j g_j ||^2 + lambda ||w||^2   over   w >= 0, |A| <= k

by orthogonal matching pursuit on last-layer gradients g_j, at the posterior mean or at `draws`
draws. The pursuit (`coreset/omp.py`) adds k/20 points at a time and refits their weights. At the
end the weights are fitted once more with the regulariser. lambda is `ridge` times the mean
||g_j||^2 of the chosen points, so it means the same throughout training; public code takes 0.5 for
gradients of any size. In two short runs on MNIST (one client, one seed, k = n/10) a ridge of 0.5
left 7 and 24 % of the squared norm of the sum unmatched at the last selection, 0.01 left 2 and 5 %;
accuracies with ridges from 0 to 0.1 did not differ measurably.

All classes are matched together, with one k; public code can also match them one by one. The
pursuit may end with fewer than k points: when the sum is matched, or when no further point would
help. Gradients of more than `WIDEST` numbers are sketched to that length.
"""

from __future__ import annotations

import torch

from corefed.coreset import solvers
from corefed.coreset.problem import problem
from corefed.coreset.refit import refit
from corefed.selectors.frame import Choice, Look
from corefed.selectors.gradients import last_layer

WIDEST = 4096


def select(look: Look, *, draws: int = 0, ridge: float = 0.01) -> Choice:
    g = last_layer(look, draws, "gradmatch").rows(WIDEST, look.streams, "gradmatch/sketch")
    posed = problem(g, look.k, look.mask)
    chosen = solvers.get("omp-block")(posed).w > 0
    w = refit(posed, chosen, torch.zeros_like(look.k), ridge)  # shrunk towards 0, as in the paper
    return Choice(w.to(look.data.weight.dtype), look.memory)
