"""The passes that one client has for a round with a deadline: selection and steps share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.base.passes import FORWARD
from corefed.base.types import Method, Tree, Work

ROUNDING = 1e-9
"""Of a quotient that would be a whole number."""


class Allowance:
    """What is left for one client."""

    def __init__(self, method: Method, state: Tree, work: Work) -> None:
        """`state` is that of its subset at the start of the round."""
        self.subset, self.batch, self.left = method.subset, work.batch, work.passes
        self.each = passes_per_point(method)
        self.looked = self._looked(state)

    def has_room(self, points: int, size: int) -> bool:
        """Whether a selection, should one be due, and a step after it would fit."""
        look = 0.0 if self.subset is None else self.subset.look
        return FORWARD * look * points + self._step(size) <= self.left

    def take(self, steps: int, state: Tree, size: int, least: int) -> int:
        """Pay for what was selected since, and for steps: how many fit, or `least`."""
        looked = self._looked(state)
        self.left -= FORWARD * (looked - self.looked)
        self.looked = looked
        taken = min(steps, max(least, math.floor(self.left / self._step(size) + ROUNDING)))
        self.left -= taken * self._step(size)
        return taken

    def _step(self, size: int) -> float:
        return self.each * max(1, min(self.batch, size))

    def _looked(self, state: Tree) -> float:
        cost = None if self.subset is None else self.subset.cost
        return 0.0 if cost is None else float(cost(state)[0])


def passes_per_point(method: Method) -> int:
    """Passes that a point of a minibatch takes in a step, at all draws of the weights."""
    return method.traits.passes * math.prod(method.noise[:-1])


def first(many: Sequence[int]) -> int:
    """Of a client that is alone in its call."""
    (one,) = many
    return one
