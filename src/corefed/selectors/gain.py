"""How many points a step takes, when they are drawn by importance.

A point of a minibatch is drawn with probability p_j = pi_j / k and counts 1 / p_j. With s_j the
norm of its gradient, the second moment of the estimate is sum_j s_j^2 / p_j over b, and that of
uniform draws is n sum_j s_j^2 over b. So

    gain = (sum_j s_j^2 / p_j) / (n sum_j s_j^2)

of the points have the noise of b uniform ones. The variance is the second moment less the square of
the mean, which both have in common: where the gain is below 1, the variance falls by more, so that
this is the careful choice. The batch is a quarter, a half, three quarters or all of b, rounded up:
compiled steps then have four programs at most (`training/compiled.py`).

Fewer points save time only where a point costs more than a weight. A step also draws, moves and
regularises every weight, whatever its batch is. Medians of the CPU time of a step of PFedBayes, one
thread, 25 and 100 points: 3.0 and 2.9 ms with 2 FLOPs per point and weight (784-100-10), 4.0 and
8.5 ms with 15 (CNN 4-8-32), 9.2 and 24 ms with 21 (CNN 16-32-64).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from corefed.models.network import Forward, Model

PARTS = 4
"""Batches are multiples of b / PARTS."""
MULTIPLE = 8
"""Points that a minibatch is padded to a multiple of where steps are compiled."""
WORTH = 10
"""FLOPs of a point's forward pass per weight from which on fewer points are taken: between the
networks above whose steps do not get shorter by that, and those whose do."""


def share(score: Tensor, pi: Tensor, mask: Tensor) -> Tensor:
    """[C] part of a batch that is needed, from scores and chances [C, n]: 1/4, 1/2, 3/4 or 1."""
    squares = torch.where(mask, score, 0.0).double().square()
    top = squares.amax(-1, keepdim=True).clamp_min(torch.finfo(squares.dtype).tiny)
    squares = squares / top  # sums stay finite
    k, n = pi.sum(-1), mask.sum(-1).clamp_min(1)
    drawn = k * torch.where(mask, squares / pi.clamp_min(torch.finfo(pi.dtype).tiny), 0.0).sum(-1)
    uniform = n * squares.sum(-1)
    gain = torch.where(uniform > 0, drawn / uniform, 1.0)
    return (PARTS * gain - 1e-9).ceil().clamp(1, PARTS) / PARTS


def points(part: Tensor, batch: int) -> list[int]:
    """[C] points of a step that takes this part of a batch."""
    wanted = (part.double() * batch / MULTIPLE - 1e-9).ceil().clamp_min(1) * MULTIPLE
    found: list[int] = wanted.clamp_max(batch).long().tolist()
    return found


def pays(model: Model, shape: tuple[int, ...]) -> bool:
    """Whether a point of this shape costs more than a weight."""
    return flops(model.forward, model.size, shape) >= WORTH * model.size


@lru_cache(maxsize=16)  # a method is built again in every round, of the same network
def flops(forward: Forward, size: int, shape: tuple[int, ...]) -> int:
    """Floating-point operations of one point's forward pass: products of matrices, convolutions."""
    from torch.utils.flop_counter import FlopCounterMode  # it takes a tenth of a second

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(torch.zeros(1, 1, size), torch.zeros(1, 1, *shape))
    return int(counter.get_total_flops())
