"""What a client tells about its data, checked: counts, names, and moments of values.

The mean and standard deviation of all training values, or of those of one column, follow from
count, mean and sum of squared deviations (M2) at each client: with delta = mean_b - mean_a and
n = n_a + n_b,

    mean = mean_a + delta n_b / n        M2 = M2_a + M2_b + delta^2 n_a n_b / n

(Chan, Golub & LeVeque 1983), which loses no digits where sums of squares would.

A client with noise tells no moments (`outline.py`): it has a count of 0, columns without values and
no target.

Descriptions come from machines that the server does not control. `check_description` looks at
types, lengths and numbers before anything is computed from them. Names are compared and kept, never
interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.data.class_names import LONGEST, MOST, are_numbers
from corefed.data.profile import MOST_CATEGORIES

MOST_VALUES = 2**53
"""Largest number of values per client; above it float64 does not count exactly."""
MOST_COLUMNS = 10_000
LARGEST = torch.finfo(torch.float32).max
"""Of a value: networks compute in float32."""
BLOCK = 1 << 22
"""Values that are widened to float64 at once."""

Description = Mapping[str, Any]


class Moments(NamedTuple):
    """Of some values."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """1 where the values do not vary: they are centred only."""
        return (math.sqrt(self.m2 / self.n) if self.n else 0.0) or 1.0


def moments(values: Tensor) -> Moments:
    """Of all values of a tensor, in float64."""
    return combine(_block_moments(block) for block in values.flatten().split(BLOCK) if len(block))


def _block_moments(block: Tensor) -> Moments:
    """Relative to the first value, so that equal values have a deviation of exactly 0."""
    shift = block[:1].double()
    var, mean = torch.var_mean(block.double() - shift, correction=0)
    return Moments(len(block), float(shift + mean), float(var) * len(block))


def combine(parts: Iterable[Moments]) -> Moments:
    return reduce(_chan, (each for each in parts if each.n), Moments())


def _chan(a: Moments, b: Moments) -> Moments:
    if not a.n:
        return b
    n = a.n + b.n
    delta = b.mean - a.mean
    return Moments(n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * b.n / n))


def check_description(description: Description) -> str:
    """What is wrong with a client's description, as the end of "the description ...", or ""."""
    kinds = _KINDS | (_TABLE if "columns" in description else _ARRAYS)
    problem = _check_kinds(description, kinds)
    if problem:
        return problem
    names, train = description["classes"], description["train"]
    if any(type(name) is not str or not 0 < len(name) <= LONGEST for name in names):
        return f"has names of classes that are not 1 to {LONGEST} characters"
    if len(names) > MOST or len(set(names)) < len(names):
        return f"has more than {MOST} classes, or one of them twice"
    if not 1 <= train <= MOST_VALUES or description["test"] < 0:
        return "has no training points, or a negative or absurd number of points"
    if description["targets"] < 0 or (description["targets"] > 0) == bool(names):
        return "has neither classes nor targets, or both"
    return _check_table(description) if "columns" in description else _check_arrays(description)


NUMBER = int | float
_KINDS: dict[str, Any] = {"train": int, "test": int, "classes": list | tuple, "targets": int}
_ARRAYS: dict[str, Any] = {"shape": list | tuple, "count": int, "mean": NUMBER, "m2": NUMBER}
_TABLE: dict[str, Any] = {"columns": list | tuple, "target": list | tuple}
_COLUMN: dict[str, Any] = {
    "name": str,
    "kind": str,
    "categories": list | tuple,
    "missing": int,
    "mean": NUMBER,
    "m2": NUMBER,
}


def _check_kinds(values: Description, kinds: Mapping[str, Any]) -> str:
    for key, kind in kinds.items():
        if key not in values:
            return f"lacks {key!r}"
        if isinstance(values[key], bool) or not isinstance(values[key], kind):
            return f"has {type(values[key]).__name__} as {key!r}"
    if len(values) > len(kinds):
        return "has more fields than are asked for"
    return ""


def _check_arrays(description: Description) -> str:
    shape, names = description["shape"], description["classes"]
    if any(type(length) is not int or length < 1 for length in shape) or not 0 < len(shape) <= 8:
        return "has no sensible shape of a point"
    if description["train"] * math.prod(shape) > MOST_VALUES:
        return f"has more than {MOST_VALUES} values"
    if are_numbers(names) and any(int(name) >= MOST for name in names):
        return f"has class numbers above {MOST - 1}; is it an identifier?"
    if description["count"] not in (0, description["train"] * math.prod(shape)):
        return "has another number of values than its points have"
    if not _plausible(description["count"], description["mean"], description["m2"]):
        return "has a scale that numbers in float32 cannot have"
    return ""


def _check_table(description: Description) -> str:
    columns, train, target = description["columns"], description["train"], description["target"]
    if not 0 < len(columns) <= MOST_COLUMNS:
        return f"has {len(columns)} columns, not 1 to {MOST_COLUMNS}"
    if not all(isinstance(each, dict) for each in columns):
        return "has columns that are no tables of values"
    problem = next(filter(None, (_check_column(each, train) for each in columns)), "")
    if problem:
        return problem
    if len({each["name"] for each in columns}) < len(columns):
        return "has a column twice"
    if description["targets"] > 1 or len(target) not in (0, 2 * description["targets"]):
        return "has another number of targets than a table has"
    numbers = all(type(each) in (int, float) for each in target)
    if target and not (numbers and _plausible(train, *target)):
        return "has a target whose scale numbers in float32 cannot have"
    return ""


def _check_column(column: Description, train: int) -> str:
    problem = _check_kinds(column, _COLUMN)
    if problem:
        return f"has a column that {problem}"
    name, kind, categories = column["name"], column["kind"], column["categories"]
    if not 0 < len(name) <= LONGEST:
        return f"has names of columns that are not 1 to {LONGEST} characters"
    where, present = f"has a column {name!r} with", train - column["missing"]
    if not 0 <= present <= train or (present and kind == "empty"):
        return f"{where} another number of gaps than it can have"
    if kind not in ("number", "category", "empty"):
        return f"{where} no kind that is known"
    if len(categories) > (MOST_CATEGORIES if kind == "category" else 0):
        return f"{where} more categories than are allowed"
    if any(type(each) is not str or not 0 < len(each) <= LONGEST for each in categories):
        return f"{where} names of categories that are not 1 to {LONGEST} characters"
    if len(set(categories)) < len(categories) or len(categories) > present:
        return f"{where} a category twice, or more categories than rows"
    if kind == "category" and present and not categories:
        return f"{where} values but no categories"
    if not _plausible(present if kind == "number" else 0, column["mean"], column["m2"]):
        return f"{where} a scale that numbers in float32 cannot have"
    return ""


def _plausible(n: int, mean: float, m2: float) -> bool:
    """Whether n values, none above LARGEST, can have these moments."""
    if not n:
        return mean == 0 and m2 == 0
    most = LARGEST**2 * (1 + 1e-6)
    return abs(mean) <= LARGEST and 0 <= m2 <= most * n and mean * mean + m2 / n <= most
