"""The passes that clients have for a round with a deadline: selection and steps share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.base.passes import FORWARD
from corefed.base.types import ClientData, Method, Tree, Work

ROUNDING = 1e-9
"""Of a quotient that would be a whole number."""


class Allowance:
    """What is left for each of C clients."""

    def __init__(self, method: Method, state: Tree, data: ClientData, work: Work) -> None:
        """`state` is that of their subsets at the start of the round."""
        assert work.passes is not None
        self.subset, self.batch = method.subset, work.batch
        self.left = work.passes.double().clone()  # infinite: no deadline
        self.each, self.points = passes_per_point(method), data.size
        self.looked = self._looked(state)

    def has_room(self, sizes: Sequence[int]) -> Tensor:
        """[C] whether a selection, should one be due, and a step after it would fit."""
        look = 0.0 if self.subset is None else self.subset.look
        return FORWARD * look * self.points + self._step(sizes) <= self.left

    def fitting(self, state: Tree, sizes: Sequence[int]) -> Tensor:
        """[C] steps that fit, after paying for what was selected since."""
        looked = self._looked(state)
        self.left -= FORWARD * (looked - self.looked)
        self.looked = looked
        fits = (self.left / self._step(sizes) + ROUNDING).floor()
        return fits.clamp(0, torch.iinfo(torch.int32).max).long()

    def spend(self, steps: int | Tensor, sizes: Sequence[int]) -> None:
        self.left -= steps * self._step(sizes)

    def _step(self, sizes: Sequence[int]) -> Tensor:
        points = torch.tensor(sizes, device=self.left.device).clamp(1, self.batch)
        return self.each * points.double()

    def _looked(self, state: Tree) -> Tensor:
        cost = None if self.subset is None else self.subset.cost
        return torch.zeros_like(self.left) if cost is None else cost(state).double().clone()


def passes_per_point(method: Method) -> int:
    """Passes that a point of a minibatch takes in a step, at all draws of the weights."""
    return method.traits.passes * math.prod(method.noise[:-1])
