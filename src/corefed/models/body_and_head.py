"""A flat parameter vector cut in two: a network's last layer, its head, and its body.

The head is the last linear layer. The body is everything below it and, behind the layers, what the
likelihood learns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.models.network import Model


class Split(NamedTuple):
    """Where a flat vector is cut: the head is `start` to `stop`, the body is the rest."""

    start: int
    stop: int

    def body(self, theta: Tensor) -> Tensor:
        """[..., P - H], a copy."""
        return torch.cat([theta[..., : self.start], theta[..., self.stop :]], -1)

    def head(self, theta: Tensor) -> Tensor:
        """[..., H], a copy."""
        return theta[..., self.start : self.stop].clone()

    def join(self, body: Tensor, head: Tensor) -> Tensor:
        """[..., P] of both parts."""
        return torch.cat([body[..., : self.start], head, body[..., self.start :]], -1)


def body_and_head(model: Model, method: str) -> Split:
    """The split of a model; one without a last linear layer, or with nothing below, is refused."""
    if model.head is None:
        raise UserError(
            f"{method} needs a network whose last layer is linear, and this model has none; use "
            "model=mlp or cnn, or the method ditto."
        )
    split = Split(model.head.weight.start, model.head.bias.stop)
    if split.start == 0:
        raise UserError(
            f"{method} shares the layers below the last one, and this model has no hidden layer; "
            "set hidden to one or more widths, or use the method ditto."
        )
    return split
