"""How far the training points of a run reach, and which new points lie outside.

    reach.safetensors    written with data.json, before training; G seeds, d features

A point is outside if one of its numbers is far beyond what any training point had, if a category is
none that training had, or if its features together are unlike those of the client's training
points. Then the network extrapolates, and its posterior need not be wide there.

**By column.** A number may exceed the smallest and largest training value by `margin` spreads (its
standard deviation). The margin is fitted: the score of a training point is the largest excess of
its numbers over the range of all other training points, and the margin is the score that at most
SHARE of the points exceed.

**Jointly.** With z the features around the client's mean in units of spread, and Sigma the
covariance of z within clients on half of the points,

    distance^2 = sum_j (b_j . z)^2 / lambda_j + |z - B B^T z|^2 / rest

for the largest eigenvalues lambda of Sigma, shrunk towards their mean, and the mean of the others,
`rest`: a Mahalanobis distance that needs d r numbers, not d^2. The limit is the distance that at
most SHARE of the other half exceed, a conformal quantile. A client with fewer than OWN points has
the mean of all clients, and so has the shared model.

No training point is stored, but ranges and means are, as in data.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import digests, files, tensor_file
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.data import columns
from corefed.data.cells import shorten
from corefed.data.preparation import Preparation, Scale

FILE = "reach.safetensors"
ROUNDED_UP = 1 + 1e-6
"""A limit is kept as a float32, which may be below the distance that it is to allow."""


class Reach(NamedTuple):
    """Of one seed. The last centre is that of all clients; large runs have no other."""

    low: Tensor  # [d] smallest and largest training values, as the network sees them
    high: Tensor
    spread: Tensor  # [d]
    margin: Tensor  # []
    centre: Tensor  # [N + 1, d] or [1, d]
    limit: Tensor  # [N + 1] or [1]; infinite where there are too few points
    basis: Tensor  # [d, r]
    scale: Tensor  # [r]
    rest: Tensor  # []
    target: Tensor  # [targets] variance of the training targets; [0] of classes

    def place(self, i: int | None) -> int:
        """The row of a client's centre; None is the shared model."""
        return i if i is not None and i < len(self.centre) - 1 else len(self.centre) - 1


# --- judge ----------------------------------------------------------------------------------------


class Outside(NamedTuple):
    """Of n points."""

    far: Tensor  # [n] bool
    why: tuple[str, ...]  # [n] empty for points inside


def judge(reach: Reach, preparation: Preparation, client: str, i: int | None, x: Tensor) -> Outside:
    """Which of the prepared points [n, *shape] are outside, and why.

    `client` and `i` say whose points and model they are; None is the shared model.
    """
    flat = x.flatten(1).cpu()
    slack = reach.margin * reach.spread
    beyond = ((flat < reach.low - slack) | (flat > reach.high + slack)) & numbers(preparation)
    place = reach.place(i)
    z = (flat - reach.centre[place]) / reach.spread
    ratio = distance(z, reach.basis, reach.scale, reach.rest) / reach.limit[place]
    unknown = _unknown(preparation, flat)
    apart = ~(ratio <= 1)  # NaN too
    far = beyond.any(1) | unknown.any(1) | apart
    own = preparation.clients.get(client, Scale(preparation.mean, preparation.std))
    why = [""] * len(flat)
    for row in far.nonzero().flatten().tolist():
        said = _columns(reach, preparation, own, flat[row], beyond[row])
        said += _categories(preparation, unknown[row])
        if not said:
            said = [f"features together unlike training ({float(ratio[row]):.1f} of the limit)"]
        why[row] = shorten(said, 3)
    return Outside(far, tuple(why))


def _unknown(preparation: Preparation, flat: Tensor) -> Tensor:
    """[n, columns] bool: the category is none that training had; all its features are 0."""
    if preparation.kind != "table":
        return torch.zeros(len(flat), 0, dtype=torch.bool)
    parts = columns.parts(flat, preparation.columns).values()
    never = torch.zeros(len(flat), dtype=torch.bool)
    found = [(each == 0).all(1) if column.categories else never for column, each in parts]
    return torch.stack(found, 1)


def _columns(
    reach: Reach, preparation: Preparation, own: Scale, point: Tensor, beyond: Tensor
) -> list[str]:
    """`age 900 (training: 29 to 77)` for every number that is beyond."""
    names = columns.features(preparation.columns)
    said = []
    for j in beyond.nonzero().flatten().tolist():
        mean, std = (each[j] if len(each) > 1 else each[0] for each in (own.mean, own.std))
        value, low, high = (float(each[j]) * std + mean for each in (point, reach.low, reach.high))
        name = names[j] if names else f"feature {j}"
        said.append(f"{name} {value:.5g} (training: {low:.5g} to {high:.5g})")
    return said


def _categories(preparation: Preparation, unknown: Tensor) -> list[str]:
    places = unknown.nonzero().flatten().tolist()
    return [f"{preparation.columns[j].name} is no category of training" for j in places]


def extend(known: Reach, points: Tensor) -> Reach:
    """The reach of all clients, with the prepared points [n, ...] of a newcomer."""
    flat = points.flatten(1).cpu()
    far = distance((flat - known.centre[-1]) / known.spread, known.basis, known.scale, known.rest)
    return known._replace(
        low=torch.minimum(known.low, flat.amin(0)),
        high=torch.maximum(known.high, flat.amax(0)),
        centre=known.centre[-1:],
        limit=known.limit[-1:].clamp_min(float(far.max()) * ROUNDED_UP),
    )


def numbers(preparation: Preparation) -> Tensor:
    """[d] bool: features that have a range; categories and pixels have none."""
    if preparation.kind == "table":
        return torch.tensor(columns.numbers(preparation.columns))
    rows = preparation.kind == "array" and len(preparation.shape) == 1
    return torch.full((math.prod(preparation.shape),), rows)


def distance(z: Tensor, basis: Tensor, scale: Tensor, rest: Tensor) -> Tensor:
    z, basis = z.double(), basis.double()
    along = z @ basis
    inside = (along / scale.double()).square().sum(1)
    left = (z.square().sum(1) - along.square().sum(1)).clamp_min(0)
    return (inside + left / rest.double().square()).sqrt()


# --- files ----------------------------------------------------------------------------------------


def keep(folder: Path, known: Sequence[Reach]) -> None:
    """Write the file; nothing where nothing is known."""
    if known:
        files.replace_all(folder, [(FILE, tensor_file.stream(_stacked(known), {}))])


def read(folder: Path, seeds: int) -> list[Reach]:
    """One per seed; none in the folder of an older version."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # takes time to import

    try:
        tensor_file.check(folder / FILE)
        found = load_file(folder / FILE)
        return [Reach(*(found[name][g] for name in Reach._fields)) for g in range(seeds)]
    except FileNotFoundError:
        return []
    except (OSError, SafetensorError, digests.DamagedError, KeyError, IndexError) as error:
        raise UserError(f"{folder / FILE} is truncated or damaged ({error}).") from error


def _stacked(known: Sequence[Reach]) -> Tree:
    """Seeds side by side. One with fewer points has fewer directions, and is padded with zeros."""
    width = max(each.basis.shape[1] for each in known)
    same = [_padded(each, width - each.basis.shape[1]) for each in known]
    return {
        name: torch.stack([getattr(each, name) for each in same]).contiguous()
        for name in Reach._fields
    }


def _padded(each: Reach, more: int) -> Reach:
    pad = torch.nn.functional.pad
    return each._replace(
        basis=pad(each.basis, (0, more)), scale=pad(each.scale, (0, more), value=1)
    )
