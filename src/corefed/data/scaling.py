"""Fit means, standard deviations and replacements of missing numbers to training points.

    unit       x unchanged
    standard   (x - mean) / std of all training values together: right for pixels
    features   each feature by its own mean and std over all clients' training points
    client     each feature by its own mean and std over the client's own training points

A real federation can agree on the first three by exchanging sums. The last needs no exchange, and
removes differences in level between clients, such as another device or unit. Features that are 0 or
1 (categories, missing numbers) are not scaled. A constant feature is only centred. Missing numbers
do not count, and become the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.streamed import Streamed, values
from corefed.data import columns
from corefed.data.preparation import Preparation, Scale

if TYPE_CHECKING:
    from corefed.data.dataset import Dataset
    from corefed.data.partition import Split

SCALES = ("unit", "standard", "features", "client")

BLOCK = 1 << 23
"""Numbers that are looked at together: 64 MiB of float64."""

ROWS = 1 << 21
"""Numbers of the rows that are summed together."""


def fit(dataset: Dataset, splits: Sequence[Split], scale: str, names: Sequence[str]) -> Preparation:
    """The preparation of a split, from its training points alone."""
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
        never = _never(dataset, train, ~numbers)
        found = replace(
            found,
            columns=layout.columns,
            target=layout.target,
            client=layout.client,
            ignored=layout.ignored,
            unseen=tuple(never.nonzero().flatten().tolist()),
        )
        if scale in ("unit", "standard"):
            found = replace(found, fill=_fit_rows(dataset, train, numbers).mean)
    if scale == "standard":
        common = _fit_common(dataset, train, found)
        found = replace(found, mean=common.mean, std=common.std)
    elif scale in ("features", "client"):
        common = _fit_rows(dataset, train, numbers)
        found = replace(found, mean=common.mean, std=common.std)
    if scale == "client":
        own = (_fit_rows(dataset, one.train, numbers) for one in splits)
        found = replace(found, clients=dict(zip(names, own, strict=True)))
    if dataset.standardise and targets:
        unit = fit_features(dataset.y[train], torch.ones(targets, dtype=torch.bool))
        found = replace(found, target_mean=unit.mean, target_std=unit.std)
    return found


def _never(dataset: Dataset, rows: Tensor, flags: Tensor) -> Tensor:
    """[d] features that are 0 in all of these rows, of those that are flags."""
    never = flags.clone()
    for some in rows.split(max(1, ROWS // len(flags))) if bool(flags.any()) else ():
        never &= (dataset.x[some] == 0).all(0)
    return never


def _fit_rows(dataset: Dataset, rows: Tensor, numbers: Tensor) -> Scale:
    """`fit_features` of some rows. Many are summed block by block, in the order of the data: a pool
    is never copied whole, a file is read from its start to its end, and both sum alike."""
    step = max(1, ROWS // len(numbers))
    if len(rows) <= step:
        return fit_features(dataset.values(rows), numbers)
    parts = rows.sort().values.split(step)

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for some in parts:
            x = values(dataset.values(some)).flatten(1).double()  # a copy, computed with in place
            yield x, ~x.isnan()

    first = torch.full((len(numbers),), math.nan, dtype=torch.float64)
    total, count = torch.zeros_like(first), torch.zeros_like(first)
    for x, there in blocks():
        here = x.gather(0, there.int().argmax(0, keepdim=True)).squeeze(0)
        first = torch.where(first.isnan(), here, first)
        count += there.sum(0)
        total += x.sub_(first).nansum(0)
    mean = total / count
    squares = torch.zeros_like(first)
    for x, _ in blocks():
        squares += x.sub_(first).sub_(mean).square_().nansum(0)
    return _scale(mean + first, (squares / count).sqrt(), numbers)


def _fit_common(dataset: Dataset, rows: Tensor, found: Preparation) -> Scale:
    """`fit_common` of some rows; of many that are streamed, in float64 and block by block."""
    width = dataset.x.shape[1:].numel()
    block = BLOCK // 8
    if not isinstance(dataset.x, Streamed) or len(rows) * width <= block:
        return fit_common(found.scale(dataset.values(rows)))
    count, total, squares = len(rows) * width, 0.0, 0.0
    for some in rows.split(max(1, block // width)):
        total += float(found.scale(dataset.values(some)).double().sum())
    for some in rows.split(max(1, block // width)):
        off = found.scale(dataset.values(some)).double() - total / count
        squares += float(off.square().sum())
    return Scale((total / count,), (math.sqrt(squares / count) or 1.0,))


def fit_common(x: Tensor) -> Scale:
    """One mean and standard deviation of all values, in their precision."""
    std, mean = torch.std_mean(x, correction=0)
    return Scale((mean.item(),), (std.item() or 1.0,))


def fit_features(x: Tensor, numbers: Tensor) -> Scale:
    """Mean and standard deviation per feature of points [n, ...]; only numbers are scaled."""
    return _scale(*_moments(x.flatten(1).double()), numbers)


def _scale(mean: Tensor, std: Tensor, numbers: Tensor) -> Scale:
    mean = torch.where(numbers & ~mean.isnan(), mean, 0.0)
    std = torch.where(numbers & (std > 0), std, 1.0)
    return Scale(tuple(mean.tolist()), tuple(std.tolist()))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """[d] mean and standard deviation without missing values; NaN where all are missing.

    Relative to one of its values, a constant feature has a deviation of exactly 0.
    """
    missing = x.isnan()
    if not bool(missing.any()):
        off = x - x[:1]
        mean = off.mean(0)
        return mean + x[0], off.sub_(mean).square_().mean(0).sqrt_()
    first = x.gather(0, (~missing).int().argmax(0, keepdim=True))
    off = x - first
    mean = off.nanmean(0)
    std = off.sub_(mean).square_().nanmean(0).sqrt_()
    return mean + first.squeeze(0), std


def add_client(preparation: Preparation, client: str, x: Tensor, numbers: Tensor) -> Preparation:
    """Add the scale of a new client, where clients have their own scales."""
    if not preparation.clients or client in preparation.clients:
        return preparation
    own = {**preparation.clients, client: fit_features(x, numbers)}
    return replace(preparation, clients=own)
