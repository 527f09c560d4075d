"""Hints at what may be a mistake in data that can be read all the same, one sentence each.

    a value that stands for a missing one (-999), or far outside all others
    names that differ in case or blanks only
    rows that occur twice, and test rows that are training rows too
    a column that determines the target

They take less than half a second for 200,000 rows of 30 numbers; above `MOST` numbers, rows are not
compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.streamed import Streamed
from corefed.data import columns
from corefed.data.cells import shorten

if TYPE_CHECKING:
    from corefed.data.dataset import Dataset
    from corefed.data.partition import Split

SENTINELS = frozenset(sign * (10**digits - 1) for digits in range(2, 7) for sign in (1, -1))
"""99, 999, ..., 999999 and their negatives: what people write for a missing number."""

FAR = 100
"""Times the range of 98 % of the values, from which on a value is said to be far outside."""

SAMPLE = 10_000
"""Values that this range is estimated from, and rows that rule out most columns."""

MOST = 1 << 26
"""Numbers in all rows above which rows are not compared: 512 MB."""

LISTED = 5
"""Columns that a kind of hint names."""


def find(dataset: Dataset, splits: Sequence[Split] = ()) -> list[str]:
    """Hints about a table or arrays; `splits` say which rows are test rows."""
    if isinstance(dataset.x, Streamed):  # values are not looked at again
        return list(_variants(dataset))
    found = [*_first(_extremes(dataset)), *_variants(dataset)]
    if dataset.x.is_floating_point() and dataset.x.numel() <= MOST:
        found += [*_copies(dataset, splits), *_first(_leaks(dataset))]
    return found


def _first(hints: Iterable[str]) -> Iterator[str]:
    every = list(hints)
    yield from every[:LISTED]
    if len(every) > LISTED:
        yield f"The same holds for {len(every) - LISTED} more columns."


class _Feature(NamedTuple):
    """A column of numbers, or of features that belong to one category."""

    name: str  # for a sentence
    written: str  # for --set ignore; empty: it cannot be left out
    values: Tensor  # [n, width]
    numeric: bool


def _features(dataset: Dataset) -> Iterator[_Feature]:
    if dataset.layout is not None:
        for name, (column, piece) in columns.parts(dataset.x, dataset.layout.columns).items():
            yield _Feature(f"Column {name!r}", name, piece, not column.categories)
    elif dataset.x.dim() == 2 and dataset.x.is_floating_point():
        for at in range(dataset.x.shape[1]):
            yield _Feature(f"Feature {at} of X", "", dataset.x[:, at : at + 1], True)


# --- values far from the others -------------------------------------------------------------------


def _extremes(dataset: Dataset) -> Iterator[str]:
    for each in _features(dataset):
        if each.numeric:
            yield from _far(each.name, each.values[:, 0])
    if not dataset.classes:
        target = dataset.layout.target if dataset.layout else "y"
        yield from _far(f"Target {target!r}", dataset.y[:, 0])


def _far(name: str, values: Tensor) -> Iterator[str]:
    found: npt.NDArray[np.float64] = values.double().numpy()
    found = found[~np.isnan(found)]
    if len(found) < 3:
        return
    for end in (float(found.min()), float(found.max())):
        if end not in SENTINELS:
            continue
        others = found[found != end]
        low, high = (float(others.min()), float(others.max())) if len(others) else (0.0, 0.0)
        if high > low and max(low - end, end - high) > high - low:
            yield (
                f"{name} has {end:.6g} in {_rows(len(found) - len(others))}, far from its other "
                f"values ({low:.6g} to {high:.6g}); if it stands for a missing value, leave those "
                "cells empty."
            )
            found = others
    some = np.sort(found[:: -(-len(found) // SAMPLE)])
    last = len(some) - 1
    low, middle, high = some[-(-last // 100)], some[last // 2], some[last - -(-last // 100)]
    spread = float(high - low) or max(1.0, abs(float(middle)))
    beyond = np.abs(found - middle) > FAR * spread
    if beyond.any():
        extreme = float(found[np.abs(found - middle).argmax()])
        yield (
            f"{name} has {extreme:.6g} in {_rows(int(beyond.sum()))}, where most values are from "
            f"{low:.6g} to {high:.6g}; correct it, or leave the cell empty: one such value sets "
            "the scale of the whole column."
        )


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


# --- names that are written in two ways -----------------------------------------------------------


def _variants(dataset: Dataset) -> Iterator[str]:
    kinds: list[tuple[str, Sequence[str]]] = [
        ("Classes", dataset.labels), ("Clients", dataset.group_names)
    ]  # fmt: skip
    if dataset.layout is not None:
        kinds += [
            (f"Categories of {each.name!r}", each.categories) for each in dataset.layout.columns
        ]
    for what, names in kinds:
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            alike[" ".join(name.split()).casefold()].append(name)
        pairs = [" and ".join(map(repr, each)) for each in alike.values() if len(each) > 1]
        if pairs:
            yield (
                f"{what} that differ in case or blanks only: {shorten(pairs, LISTED)}; if they are "
                "the same, write them alike."
            )


# --- rows that occur twice ------------------------------------------------------------------------


def _copies(dataset: Dataset, splits: Sequence[Split]) -> Iterator[str]:
    rows = hash_rows(dataset)
    _, places, times = np.unique(rows, return_inverse=True, return_counts=True)
    copied = int((times[places.reshape(-1)] > 1).sum())
    if not copied:
        return
    sentence = f"{copied} of {len(rows)} rows have the features and the target of another row"
    if splits:
        train = torch.cat([one.train for one in splits]).numpy()
        test = torch.cat([one.test for one in splits]).numpy()
        both = int(np.isin(rows[test], rows[train]).sum())
        sentence += f", and {both} of {len(test)} test rows those of a training row" if both else ""
    yield f"{sentence}; if they are copies, remove them: tests on copies flatter the model."


def hash_rows(dataset: Dataset) -> npt.NDArray[np.uint64]:
    """[n] one number per row: the same for rows with the same features and target."""
    return hash_points(dataset.x, dataset.y)


def hash_points(*fields: Tensor) -> npt.NDArray[np.uint64]:
    """[n] one number per row of some fields [n, ...]: the same for rows with the same values."""
    every = [one for each in fields for one in each.reshape(len(each), -1).unbind(1)]
    factors = np.random.Generator(np.random.PCG64(0)).integers(1, 1 << 63, len(every), np.uint64)
    found = np.zeros(len(every[0]), np.uint64)
    for values, factor in zip(every, factors, strict=True):
        number = values.double().nan_to_num(nan=1e300).numpy() + 0.0  # -0 is 0
        bits = number.view(np.uint64)
        # Whole numbers in floating point differ in their first bits alone; spread them.
        bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        found += (bits ^ (bits >> np.uint64(29))) * (factor | np.uint64(1))
    return found


# --- columns that determine the target ------------------------------------------------------------


def _leaks(dataset: Dataset) -> Iterator[str]:
    y = dataset.y
    if len(y) < 5 * max(2, dataset.classes):
        return
    determines = _one_to_one if dataset.classes else _on_a_line
    for each in _features(dataset):
        x = each.values.double().nan_to_num(nan=1e300)
        few = torch.arange(0, len(y), -(-len(y) // SAMPLE))
        if determines(x[few], y[few]) and determines(x, y):
            what = "one to one" if dataset.classes else "but for its unit"
            remedy = (
                f"leave it out by --set ignore={each.written}" if each.written else "leave it out"
            )
            yield (
                f"{each.name} determines the target ({what}); if it is only known afterwards, "
                f"{remedy}."
            )


def _one_to_one(x: Tensor, y: Tensor) -> bool:
    """Each class has one value (or category) alone, and each of these one class."""
    there = y.unique()
    values = []
    for label in there.tolist():
        own = x[y == label]
        if not torch.equal(own, own[:1].expand_as(own)):
            return False
        values.append(own[:1])
    return len(there) > 1 and len(torch.cat(values).unique(dim=0)) == len(there)


def _on_a_line(x: Tensor, y: Tensor) -> bool:
    """The target is the feature itself, but for a factor and a constant."""
    if x.shape[1] > 1 or y.shape[1] > 1:
        return False
    a, b = x[:, 0] - x[:, 0].mean(), y[:, 0].double() - y[:, 0].double().mean()
    length = float(a.norm() * b.norm())
    return length > 0 and abs(float(a @ b)) / length > 1 - 1e-10
