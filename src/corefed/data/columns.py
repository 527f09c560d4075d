"""A table's columns as features: numbers as they are, categories one-hot.

    a number                    x                   NaN where it is missing
    ... that some rows lack     x, [x is missing]
    a category                  [c = a], [c = b], ...
    ... that some rows lack     [c = a], [c = b], ..., [c is missing]

The layout comes from the whole file, so that every split has a network of the same size. In a
federation the sites agree on it. Means and scales come from training points alone
(`preparation.py`). A category that is not in the layout is all zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import values
from corefed.data.sources import Block
from corefed.data.values import Cells, Numbers

if TYPE_CHECKING:
    from corefed.data.profile import Profile

LARGEST = float(np.finfo(np.float32).max)
"""Networks compute in float32."""


@dataclass(frozen=True)
class Column:
    """A column that becomes features."""

    name: str
    categories: tuple[str, ...] = ()
    """Names in the order of the features; empty for a number."""
    lacking: bool = False
    """Some rows have no value; the last feature marks them."""

    @property
    def width(self) -> int:
        """Number of features."""
        return (len(self.categories) or 1) + self.lacking

    @property
    def features(self) -> tuple[str, ...]:
        """Their names."""
        own = tuple(f"{self.name}={each}" for each in self.categories) or (self.name,)
        return (*own, f"{self.name} missing") if self.lacking else own


def from_dicts(values: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Columns from their JSON."""
    return tuple(
        Column(each["name"], tuple(each["categories"]), each["lacking"]) for each in values
    )


class Layout(NamedTuple):
    """The columns of a table and their roles."""

    columns: tuple[Column, ...]  # in the order of the features
    target: str
    client: str  # empty: no column names the client of a row
    ignored: tuple[str, ...]
    profiles: tuple[Profile, ...]  # of all columns that are read, in file order


def width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns)


def features(columns: Sequence[Column]) -> tuple[str, ...]:
    """Names of all features."""
    return tuple(name for column in columns for name in column.features)


def numbers(columns: Sequence[Column]) -> tuple[bool, ...]:
    """Per feature, whether it is a number, which is scaled."""
    found: list[bool] = []
    for column in columns:
        found += [not column.categories] + [False] * (column.width - 1)
    return tuple(found)


def parts(x: Tensor, columns: Sequence[Column]) -> dict[str, tuple[Column, Tensor]]:
    """Column name -> the column and its features [n, width]."""
    pieces = x.split([column.width for column in columns], 1)
    return {each.name: (each, piece) for each, piece in zip(columns, pieces, strict=True)}


def change_layout(x: Tensor, own: Sequence[Column], wanted: Sequence[Column]) -> Tensor:
    """The features [n, width] in another layout of the same columns.

    Categories that the other layout lacks become all zeros.
    """
    known = parts(x, own)
    never = x.new_zeros(len(x))
    found: list[Tensor] = []
    for column in wanted:
        mine, piece = known[column.name]
        if column.categories:
            features = dict(zip(mine.categories, piece.unbind(1), strict=False))
            found += [features.get(name, never) for name in column.categories]
        else:
            found.append(piece[:, 0])
        if column.lacking:
            found.append(piece[:, -1] if mine.lacking else never)
    return torch.stack(found, 1)


def encode(
    columns: Sequence[Column], block: Block, where: Callable[[int], str]
) -> tuple[Numbers, Counter[tuple[str, str]]]:
    """[n, width] features of a block, and the counts of unknown categories."""
    x = np.zeros((len(block.places), width(columns)))
    unknown: Counter[tuple[str, str]] = Counter()
    start = 0
    for column in columns:
        cells = block.cells[column.name]
        part = x[:, start : start + column.width]
        if column.categories:
            foreign = _one_hot(column, cells, part)
            unknown.update({(column.name, each): count for each, count in foreign.items()})
        else:
            part[:, 0] = _numbers(column.name, block, where)
            if column.lacking:
                part[:, 1] = np.isnan(part[:, 0])
        start += column.width
    return x, unknown


def _numbers(name: str, block: Block, where: Callable[[int], str]) -> Numbers:
    cells = block.cells[name]
    found, texts = values.numbers(cells)
    bad = np.abs(found) > LARGEST
    bad[texts] = True
    if bad.any():
        at = int(bad.argmax())
        what = "text" if at in texts else "infinite" if np.isinf(found[at]) else "too large"
        raise UserError(
            f"{where(block.places[at])} has {values.cell(cells, at)[:40]!r} in column {name!r}, "
            f"which is {what} where training had numbers; mend that cell."
        )
    return found


def _one_hot(column: Column, cells: Cells, part: Numbers) -> Counter[str]:
    """Set the feature of each row's category; returns the counts of unknown categories."""
    known = {name: place for place, name in enumerate(column.categories)}
    names, codes = values.coded(cells)
    lacking = column.width - 1 if column.lacking else -1
    places = np.array([known.get(name, -1 if name else lacking) for name in names])[codes]
    rows = np.flatnonzero(places >= 0)
    part[rows, places[rows]] = 1
    times = np.bincount(codes, minlength=len(names)).tolist()
    unknown: Counter[str] = Counter()
    for name, count in zip(names, times, strict=True):
        if name and name not in known:
            unknown[name] += count
    return unknown
