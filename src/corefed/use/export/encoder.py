"""A table's encoder as tensor operations, so that an exported program takes a row's own columns.

A program has no text. So a category goes in as its place in the column's list of categories
(`preparation.json`, and the card), from 0. -1 or any other number is a category that training did
not have, and NaN is a missing value. A number goes in as it is. The features are those of
`data/columns.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.data.columns import Column
from corefed.data.preparation import Preparation


def input_shape(preparation: Preparation) -> tuple[int, ...]:
    """Of a point as it goes into the program: of a table, one number per column."""
    if preparation.kind == "table":
        return (len(preparation.columns),)
    return preparation.shape


def encode(columns: Sequence[Column], x: Tensor) -> Tensor:
    """[n, columns] -> [n, features]."""
    found: list[Tensor] = []
    for place, column in enumerate(columns):
        value = x[:, place]
        if column.categories:
            found += [(value == code).to(x.dtype) for code in range(len(column.categories))]
        else:
            found.append(value)
        if column.lacking:
            found.append(value.isnan().to(x.dtype))
    return torch.stack(found, 1)


def made_up(columns: Sequence[Column], features: Tensor) -> Tensor:
    """[n, features] of any numbers -> [n, columns] that a table could have; category 0, 1, ..."""
    found, start = [], 0
    rows = torch.arange(len(features))
    for column in columns:
        codes = (rows % max(1, len(column.categories))).to(features.dtype)
        found.append(codes if column.categories else features[:, start])
        start += column.width
    return torch.stack(found, 1)
