"""What is fixed on training points: means, standard deviations, what stands for missing numbers.

    unit       x as it is
    standard   (x - mean) / std of all training values: right for pixels, which are all alike
    features   each feature by its own mean and std over all clients' training points
    client     each feature by its own mean and std over the client's own training points

The first three are sums that a real federation can agree on; the last needs no agreement, and takes
away differences of level between clients (another device, another unit), known or not. Features
that are 0 or 1 by their making (categories, missing numbers) are left as they are. A feature that
does not vary is centred only. A missing number counts nowhere, and becomes the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns
from corefed.data.preparation import Preparation, Scale

if TYPE_CHECKING:
    from corefed.data.dataset import Dataset
    from corefed.data.partition import Split

SCALES = ("unit", "standard", "features", "client")


def fit(dataset: Dataset, splits: Sequence[Split], scale: str, names: Sequence[str]) -> Preparation:
    """How the points of a split are made ready, from its training points alone."""
    if scale not in SCALES:
        raise UserError(f"There is no scale {scale!r}; use {' or '.join(SCALES)}.")
    layout, width = dataset.layout, dataset.x[0].numel()
    targets = 0 if dataset.classes else dataset.y.shape[-1]
    found = Preparation(
        tuple(dataset.x.shape[1:]),
        dataset.labels or tuple(map(str, range(dataset.classes))),
        (layout.target,) * targets if layout else tuple(f"y{d}" for d in range(targets)),
        embedding=dataset.embedding or "none",
        kind="images" if dataset.embedding else "table" if layout else "array",
        levels=dataset.x.dtype == torch.uint8,
    )
    train = torch.cat([one.train for one in splits])
    numbers = torch.ones(width, dtype=torch.bool)
    if layout is not None:
        numbers = torch.tensor(columns.numbers(layout.columns))
        never = ~numbers & (dataset.x[train] == 0).all(0)
        found = replace(
            found,
            columns=layout.columns,
            target=layout.target,
            client=layout.client,
            ignored=layout.ignored,
            unseen=tuple(never.nonzero().flatten().tolist()),
        )
        if scale in ("unit", "standard"):
            found = replace(found, fill=fit_features(dataset.x[train], numbers).mean)
    if scale == "standard":
        common = fit_common(found.scale(dataset.values(train)))
        found = replace(found, mean=common.mean, std=common.std)
    elif scale in ("features", "client"):
        common = fit_features(dataset.values(train), numbers)
        found = replace(found, mean=common.mean, std=common.std)
    if scale == "client":
        own = (fit_features(dataset.values(one.train), numbers) for one in splits)
        found = replace(found, clients=dict(zip(names, own, strict=True)))
    if dataset.standardise and targets:
        unit = fit_features(dataset.y[train], torch.ones(targets, dtype=torch.bool))
        found = replace(found, target_mean=unit.mean, target_std=unit.std)
    return found


def fit_common(x: Tensor) -> Scale:
    """One mean and standard deviation of all values, in the precision they have."""
    std, mean = torch.std_mean(x, correction=0)
    return Scale((mean.item(),), (std.item() or 1.0,))


def fit_features(x: Tensor, numbers: Tensor) -> Scale:
    """Of points [n, ...], one a feature; those that are no numbers stay as they are."""
    mean, std = _moments(x.flatten(1).double())
    mean = torch.where(numbers & ~mean.isnan(), mean, 0.0)
    std = torch.where(numbers & (std > 0), std, 1.0)
    return Scale(tuple(mean.tolist()), tuple(std.tolist()))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """[d] each, over the values that are there; NaN where there are none.

    Seen from one of its values, a feature that does not vary has a deviation of exactly 0.
    """
    there = ~x.isnan()
    first = x.gather(0, there.int().argmax(0, keepdim=True))
    off = x - first
    mean = off.nanmean(0)
    std = (off - mean).square_().nanmean(0).sqrt_()
    return mean + first.squeeze(0), std


def add_client(preparation: Preparation, client: str, x: Tensor, numbers: Tensor) -> Preparation:
    """The same, with the scale of a client that is new where clients have scales of their own."""
    if not preparation.clients or client in preparation.clients:
        return preparation
    own = {**preparation.clients, client: fit_features(x, numbers)}
    return replace(preparation, clients=own)
