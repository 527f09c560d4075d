"""Convert points to a network's inputs, and its outputs back to the target's unit.

Everything here is fixed on training points. It is kept in data.json of a run's folder, so that
predictions need no training data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from corefed.data.columns import Column, from_dicts


@dataclass(frozen=True)
class Scale:
    """Features are (x - mean) / std: one value for all features, or one per feature."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


class TargetUnit(NamedTuple):
    """The unit of C clients' targets: a network's target t is mean + std t in it."""

    mean: Tensor  # [C, d] float64
    std: Tensor

    def at(self, rows: slice | list[int]) -> TargetUnit:
        return TargetUnit(self.mean[rows], self.std[rows])

    def convert(self, prediction: Tensor) -> Tensor:
        """Means and variances [C, n, 2 d] in the targets' unit."""
        mean, variance = prediction.double().chunk(2, -1)
        shift, factor = self.mean.unsqueeze(1), self.std.unsqueeze(1)
        return torch.cat([mean * factor + shift, variance * factor.square()], -1)


@dataclass(frozen=True)
class Preparation:
    """How the points of one federation (seed) are prepared."""

    shape: tuple[int, ...]
    """Of a point, as the network sees it."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the order of the network's outputs; empty for a regression."""
    targets: tuple[str, ...] = ()
    """Names of the targets of a regression."""
    mean: tuple[float, ...] = (0.0,)
    """Features are (x - mean) / std: one value for all features, or one per feature."""
    std: tuple[float, ...] = (1.0,)
    embedding: str = "none"
    """The frozen network that made features of images."""
    kind: Literal["array", "table", "images"] = "array"
    """What the points were read from."""
    levels: bool = False
    """Points were bytes 0..255 that stand for 0 to 1."""
    columns: tuple[Column, ...] = ()
    """Of a table: the columns of the features, in the features' order."""
    target: str = ""
    """Of a table: the column to predict."""
    client: str = ""
    """Of a table: the column that names the client of a row."""
    ignored: tuple[str, ...] = ()
    """Of a table: columns that are left out, such as patient numbers."""
    fill: tuple[float, ...] = ()
    """The training mean, which replaces missing numbers, per feature. Empty where each feature has
    a scale of its own, whose mean replaces them."""
    unseen: tuple[int, ...] = ()
    """Features (a category, a missing number) that no training point had; they stay 0."""
    clients: dict[str, Scale] = field(default_factory=dict)
    """Client -> its own scale; other clients have the common one."""
    target_mean: tuple[float, ...] = ()
    """The network learns (y - target_mean) / target_std; empty: y itself."""
    target_std: tuple[float, ...] = ()

    def scale(self, x: Tensor, client: str = "") -> Tensor:
        """A client's points [n, *shape] as the network sees them, in float32.

        A missing number (NaN) becomes the mean, which is 0 after scaling.
        """
        own = self.clients.get(client, Scale(self.mean, self.std))
        if self.fill:
            x = torch.where(x.isnan(), torch.tensor(self.fill, dtype=x.dtype), x)
        if len(own.mean) == 1:
            x = x.sub(own.mean[0]).div_(own.std[0])
        else:
            mean, std = (torch.tensor(each, dtype=torch.float64) for each in (own.mean, own.std))
            x = x.double().sub(mean.view(self.shape)).div_(std.view(self.shape)).nan_to_num_(0.0)
        if self.unseen:
            x[:, list(self.unseen)] = 0
        return x.to(torch.float32)

    @property
    def unit(self) -> tuple[Tensor, Tensor]:
        """[d] each: a network's target t is mean + std t in the target's own unit."""
        width = len(self.targets)
        mean, std = self.target_mean or (0.0,) * width, self.target_std or (1.0,) * width
        return torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)

    def standardise(self, y: Tensor) -> Tensor:
        """Targets [..., d] as the network learns them."""
        if not self.target_mean:
            return y
        mean, std = self.unit
        return ((y.double() - mean) / std).to(torch.float32)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preparation:
        """The inverse of `to_dict`, also after JSON."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        given["columns"] = from_dicts(values.get("columns", ()))
        given["clients"] = {
            name: Scale(tuple(each["mean"]), tuple(each["std"]))
            for name, each in values.get("clients", {}).items()
        }
        return cls(**given)
