"""Names of classes and their order.

Where every name is a number, class 7 is output 7 for all clients, also where no client has class 3.
Other names are in alphabetical order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.cells import shorten

MOST = 10_000
"""Classes at most; a column with more values is an identifier or a measurement."""

LONGEST = 200
"""Characters of a name at most; a longer one is free text."""

FEW = 20
"""Different whole numbers at most that are taken for classes where their type does not say so."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def are_numbers(names: Iterable[str]) -> bool:
    return all(_NUMBER.fullmatch(name) for name in names)


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """The different names in order: 2 before 10."""
    different = set(names)
    return tuple(sorted(different, key=int if are_numbers(different) else None))


def are_few(different: int, count: int) -> bool:
    """Whether so many different whole numbers among `count` are classes: few, and recurring."""
    return 0 < different <= FEW and 2 * different <= count


def are_classes(values: npt.NDArray[Any]) -> bool:
    """The rule for floating-point numbers [n], the same as for the numbers in a table."""
    if not len(values) or not np.isfinite(values).all() or (values != np.floor(values)).any():
        return False
    return are_few(len(np.unique(values)), len(values))


def refuse_one_hot(values: npt.NDArray[Any], where: str) -> None:
    """Refuse targets [n, d] of which each point has a single 1 among zeros: they mean classes."""
    if values.shape[1] < 2 or not np.isin(values, (0, 1)).all() or (values.sum(1) != 1).any():
        return
    raise UserError(
        f"{where} has one 1 and zeros in every row, which are classes; give their numbers by "
        "y.argmax(1), or say task=regression to learn them as numbers."
    )


def said(where: str, labels: Sequence[str]) -> str:
    """The note about floating-point numbers that are classes."""
    return (
        f"{where} has {len(labels)} different whole numbers as floating-point numbers; they are "
        f"taken for classes: {shorten(labels, 10)}. task=regression learns them as numbers."
    )


def unite(names: Iterable[str]) -> tuple[str, ...]:
    """The classes of a federation, from those of all clients."""
    different = sort_names(names)
    if not are_numbers(different):
        return different
    if int(different[-1]) >= MOST:
        raise UserError(
            f"There is a class {different[-1]}, and class numbers end at {MOST - 1}; is it an "
            "identifier?"
        )
    return tuple(map(str, range(int(different[-1]) + 1)))


def name_of(value: object) -> str:
    """The name of a class in an array: whole numbers and booleans as 0, 1, ..."""
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return str(value)


def index_numbers(values: npt.NDArray[Any], where: str) -> tuple[Tensor, tuple[str, ...]]:
    """[n] class numbers as indices, and the names of the classes that occur."""
    low, high = float(values.min()), float(values.max())
    if low < 0 or high >= MOST:
        wrong = low if low < 0 else high
        raise UserError(
            f"{where} has class number {wrong:.9g}; class numbers are 0 to {MOST - 1}. Is it an "
            "identifier? For a regression give y as floating-point numbers in an .npz."
        )
    kinds, places = np.unique(values, return_inverse=True)
    return torch.from_numpy(places.reshape(-1)).long(), tuple(str(int(kind)) for kind in kinds)


def index_names(values: Sequence[str], where: str) -> tuple[Tensor, tuple[str, ...]]:
    """[n] class names as indices, and the sorted names that occur."""
    names = sort_names(values)
    if len(names) > MOST:
        raise UserError(
            f"{where} has {len(names)} different names of classes, more than {MOST}. Is it an "
            "identifier?"
        )
    longest = max(names, key=len)
    if len(longest) > LONGEST or not all(name.strip() for name in names):
        what = "an empty name" if len(longest) <= LONGEST else f"one of {len(longest)} characters"
        raise UserError(f"{where} has {what} among its classes; name each by 1 to {LONGEST}.")
    places = {name: place for place, name in enumerate(names)}
    return torch.tensor([places[value] for value in values]), names
