"""Momentum of the server (FedAvgM, Hsu et al. 2019): shared weights go on in the way they moved.

Let x be the shared weights and y the clients' mean upload. In place of x <- y,

    m <- beta m + (y - x),        x <- x + m.

Where x stays, m is 0 and y = x: the fixed points are those of beta = 0. Where a round without
momentum takes the part a of the way to the fixed point, the error follows that of a heavy ball,
e_{t+1} = (1 + beta - a) e_t - beta e_{t-1}. It moves as far as 1 / (1 - beta) rounds without would,
so clients can take smaller steps, and drift apart less.

m stays at the server: messages are as large as without it.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from corefed.base.settings import Range
from corefed.base.types import Tree

ServerMomentum = Annotated[float, Range(lambda v: 0 <= v < 1, "at least 0 and below 1")]

VELOCITY = "velocity"
"""Its part of the server's state; there is none where beta is 0."""


def at_rest(beta: float, weights: Tensor) -> Tree:
    """What the server's state has of it before the first round."""
    return {VELOCITY: weights.new_zeros(weights.shape)} if beta else {}


def moved(beta: float, server: Tree, weights: Tensor, mean: Tensor) -> tuple[Tensor, Tree]:
    """The new shared weights, and m; `weights` are those that the clients started from."""
    if not beta:
        return mean, {}
    velocity = beta * server[VELOCITY] + (mean - weights)
    return weights + velocity, {VELOCITY: velocity}
