"""From a point as its owner has it to what a network sees, and from its output back.

Everything here was fixed on training points, and is all that a later point needs: it is kept in
data.json of a run's folder, so that predictions need no training data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Preparation:
    """How the points of one federation (seed) are made ready."""

    shape: tuple[int, ...]
    """Of a point as the network sees it."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of the network's outputs; empty for a regression."""
    targets: tuple[str, ...] = ()
    """Names of what a regression predicts."""
    mean: tuple[float, ...] = (0.0,)
    """Features are (x - mean) / std: one of each for all of them, or one a feature."""
    std: tuple[float, ...] = (1.0,)
    embedding: str = "none"
    """The frozen network that images went through."""

    def scaled(self, x: Tensor) -> Tensor:
        """Features [..., *shape] as the network sees them, in float32."""
        mean, std = (torch.tensor(each) for each in (self.mean, self.std))
        return (x.to(torch.float32) - mean) / std

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preparation:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**given)
