"""From a point as its owner has it to what a network sees, and from its output back.

Everything here was fixed on training points, and is all that a later point needs: it is kept in
data.json of a run's folder, so that predictions need no training data.
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
    """Features are (x - mean) / std: one of each for all of them, or one a feature."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


class TargetUnit(NamedTuple):
    """The own unit of C clients' targets: what a network calls t is mean + std t."""

    mean: Tensor  # [C, d] float64
    std: Tensor

    def at(self, rows: slice | list[int]) -> TargetUnit:
        return TargetUnit(self.mean[rows], self.std[rows])

    def convert(self, prediction: Tensor) -> Tensor:
        """Means and variances [C, n, 2 d]."""
        mean, variance = prediction.double().chunk(2, -1)
        shift, factor = self.mean.unsqueeze(1), self.std.unsqueeze(1)
        return torch.cat([mean * factor + shift, variance * factor.square()], -1)


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
    kind: Literal["array", "table", "images"] = "array"
    """What the points were read from."""
    levels: bool = False
    """Points were bytes 0..255 of what runs from 0 to 1."""
    columns: tuple[Column, ...] = ()
    """Of a table: those that features are made of, in the features' order."""
    target: str = ""
    """Of a table: the column that is predicted."""
    client: str = ""
    """Of a table: the column that says whose row it is."""
    ignored: tuple[str, ...] = ()
    """Of a table: columns that are left out, such as patients' numbers."""
    fill: tuple[float, ...] = ()
    """What stands for a missing number, one a feature: the mean of the training points'. Empty
    where each feature has a scale, whose mean that is."""
    unseen: tuple[int, ...] = ()
    """Features (a category, a missing number) that no training point had: they stay 0."""
    clients: dict[str, Scale] = field(default_factory=dict)
    """Scales of clients that have one of their own, by name; the others have the common one."""
    target_mean: tuple[float, ...] = ()
    """The network's targets are (y - target_mean) / target_std; empty: y itself."""
    target_std: tuple[float, ...] = ()

    def scale(self, x: Tensor, client: str = "") -> Tensor:
        """Points [n, *shape] of a client, as read, as the network sees them: in float32.

        A missing number is NaN in x; it becomes the mean, which is 0 once features are scaled.
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
        """Targets [..., d] in their own unit as the network learns them."""
        if not self.target_mean:
            return y
        mean, std = self.unit
        return ((y.double() - mean) / std).to(torch.float32)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preparation:
        """What `to_dict` gave, also after a way through JSON."""
        given = {name: _tuples(value) for name, value in values.items()}
        given["columns"] = from_dicts(values.get("columns", ()))
        given["clients"] = {
            name: Scale(tuple(each["mean"]), tuple(each["std"]))
            for name, each in values.get("clients", {}).items()
        }
        return cls(**given)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
