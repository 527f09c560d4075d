"""One pool of points before it is split: its fields, its checks, parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import streaming
from corefed.data.cells import shorten
from corefed.data.columns import Layout


class Dataset(NamedTuple):
    """One pool of points before it is split between clients."""

    name: str
    x: Tensor  # [N, ...] float32, uint8 for the levels 0..255 of what runs from 0 to 1, or float64
    y: Tensor  # [N] int64 class indices, or [N, d] float32 regression targets
    classes: int  # 0 for regression
    groups: Tensor | None = None  # [N] int64 natural client of each point
    held_out: Tensor | None = None  # [N] bool: the official test points
    labels: tuple[str, ...] = ()  # names of the classes; empty: their numbers
    keep_split: bool = False  # held-out points never become training points
    notes: tuple[str, ...] = ()  # for readers of the results, such as points left out
    group_names: tuple[str, ...] = ()  # of the natural clients; empty: no names
    layout: Layout | None = None  # of a table, whose missing numbers are NaN in x
    embedding: str = ""  # of images: the frozen network that made the features, or none
    standardise: bool = False  # learn regression targets in standard deviations
    digest: str = ""  # of images: a hash of all files

    def values(self, rows: Tensor) -> Tensor:
        """x of some points in float32, so that a large pool of bytes is never converted whole."""
        x = self.x[rows]
        return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x


def check(dataset: Dataset) -> None:
    """Refuse empty data, NaN, and labels out of range."""
    name, x, y, classes = dataset.name, dataset.x, dataset.y, dataset.classes
    if len(x) == 0:
        raise UserError(f"Data set {name!r} is empty: it needs at least one point.")
    if len(x) != len(y):
        raise UserError(f"Data set {name!r} has {len(x)} points but {len(y)} labels or targets.")
    if x.is_floating_point() and dataset.layout is None:
        _check_finite(name, "features", x)
    if classes == 0:
        _check_finite(name, "regression targets", y)
        return
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"Data set {name!r} has {int(wrong.sum())} labels outside 0..{classes - 1}; the first "
            f"is {int(y[row])} in row {row}. Renumber the labels from 0, or remove those rows."
        )


def _check_finite(name: str, what: str, values: Tensor) -> None:
    parts = (~torch.isfinite(some).reshape(len(some), -1) for some in streaming.blocks(values))
    found = [(int(bad.sum()), bad.any(-1)) for bad in parts]
    count = sum(number for number, _ in found)
    if count:
        rows = torch.cat([mine for _, mine in found]).nonzero()
        raise UserError(
            f"Data set {name!r} has {count} NaN or infinite {what} in {len(rows)} rows, "
            f"the first in row {int(rows[0])}. Impute or remove those rows."
        )


def select(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """The points of some classes, by name or number, renumbered in the given order."""
    if dataset.classes == 0:
        raise UserError(f"{dataset.name} is a regression; it has no classes to choose from.")
    names = dataset.labels or tuple(map(str, range(dataset.classes)))
    known = {name.casefold(): number for number, name in enumerate(names)}
    known |= {str(number): number for number in range(dataset.classes)}
    known |= {name: number for number, name in enumerate(names)}
    chosen = [known.get(name, known.get(name.casefold(), -1)) for name in classes]
    if -1 in chosen:
        wrong = classes[chosen.index(-1)]
        raise UserError(f"{dataset.name} has no class {wrong!r}; it has {', '.join(names)}.")
    if len(set(chosen)) < max(2, len(chosen)):
        raise UserError(f"classes is {', '.join(classes)}; it must be two or more different ones.")
    places = torch.full((dataset.classes,), -1)
    places[chosen] = torch.arange(len(chosen))
    dataset = _rows(dataset, places[dataset.y] >= 0)
    return dataset._replace(
        y=places[dataset.y],
        classes=len(chosen),
        labels=tuple(names[number] for number in chosen),
    )


def without_small(dataset: Dataset, smallest: int) -> Dataset:
    """Leave out natural clients with fewer points, and name them in a note."""
    assert dataset.groups is not None
    counts = dataset.groups.bincount(minlength=len(dataset.group_names))
    kept = counts >= smallest
    if bool(kept.all()):
        return dataset
    if not bool(kept.any()):
        raise UserError(
            f"No client of {dataset.name} has {smallest} points; the largest has "
            f"{int(counts.max())}. Use a column with fewer values, or a smaller smallest_client."
        )
    names = dataset.group_names
    small = [name for name, keep in zip(names, kept.tolist(), strict=True) if not keep]
    places = kept.cumsum(0) - 1
    dataset = _rows(dataset, kept[dataset.groups])
    assert dataset.groups is not None
    note = (
        f"{len(small)} of {len(names)} clients have fewer than {smallest} points and are left out: "
        f"{shorten(small, 10)}."
    )
    return dataset._replace(
        groups=places[dataset.groups],
        group_names=tuple(name for name, keep in zip(names, kept.tolist(), strict=True) if keep),
        notes=(*dataset.notes, note),
    )


def _rows(dataset: Dataset, kept: Tensor) -> Dataset:
    return dataset._replace(
        x=dataset.x[kept],
        y=dataset.y[kept],
        groups=None if dataset.groups is None else dataset.groups[kept],
        held_out=None if dataset.held_out is None else dataset.held_out[kept],
    )
