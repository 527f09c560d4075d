"""What all clients' data have in common, from what each of them says of its own.

The scale of all training values, mean and standard deviation, follows from count, mean and sum of
squared deviations (M2) of each client's: with delta = mean_b - mean_a and n = n_a + n_b,

    mean = mean_a + delta n_b / n        M2 = M2_a + M2_b + delta^2 n_a n_b / n

(Chan, Golub & LeVeque 1983), which loses no digits where sums of squares would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import classes as naming
from corefed.federation import digest
from corefed.federation.protocol import Agreement

MOST_VALUES = 2**53
"""Of a client: numbers above this are not counted exactly, and nobody has them."""

SCALES = ("unit", "standard")
"""What follows from three numbers a client; scales of single features would tell more of them."""

BLOCK = 1 << 22
"""Values that are widened to float64 at once."""


class Moments(NamedTuple):
    """Of some values."""

    n: int
    mean: float
    m2: float  # sum of squared deviations from the mean


def moments(values: Tensor) -> Moments:
    """Of all values of a tensor, in float64."""
    return combine(_of_block(block) for block in values.flatten().split(BLOCK))


def _of_block(block: Tensor) -> Moments:
    """Seen from the first value, so that equal values have a deviation of exactly 0."""
    shift = block[:1].double()
    var, mean = torch.var_mean(block.double() - shift, correction=0)
    return Moments(len(block), float(shift + mean), float(var) * len(block))


def combine(parts: Iterable[Moments]) -> Moments:
    return reduce(_chan, parts)


def _chan(a: Moments, b: Moments) -> Moments:
    n = a.n + b.n
    delta = b.mean - a.mean
    return Moments(n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * b.n / n))


def agree(
    descriptions: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    scale: str,
) -> Agreement:
    """The agreement of clients by name (or in order) that described their data.

    `classes` are the experiment's; where it names none, those of all clients together.
    """
    if scale not in SCALES:
        raise UserError(f"There is no scale {scale!r} in a federation; use {' or '.join(SCALES)}.")
    if not isinstance(descriptions, Mapping):
        descriptions = {f"client {number}": each for number, each in enumerate(descriptions)}
    if not descriptions:
        raise UserError("No client has described its data.")
    for name, each in descriptions.items():
        problem = check(each)
        if problem:
            raise UserError(f"The description of {name}'s data {problem}.")
    _check_same(descriptions, "points of shape", lambda each: list(each["shape"]))
    _check_same(descriptions, "as target", _target)
    tables = {name: each for name, each in descriptions.items() if each["columns"]}
    _check_columns(tables)
    first = next(iter(descriptions.values()))
    mean, std = _scale(descriptions.values()) if scale == "standard" else (0.0, 1.0)
    return Agreement(
        tuple(first["shape"]),
        _classes(descriptions, classes),
        first["targets"],
        mean,
        std,
        next((each["columns"] for each in tables.values()), ""),
    )


def named(columns: Sequence[str]) -> str:
    """A digest of columns' names, by which sites can compare them without telling them."""
    return digest.of({}, *columns) if columns else ""


def _check_columns(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Columns are taken by the order of their names, so these must be the same everywhere."""
    for name, each in tables.items():
        first, one = next(iter(tables.items()))
        if each["columns"] != one["columns"]:
            raise UserError(
                f"The tables of {first} and {name} have columns of other names; give them the same "
                "ones."
            )


def check(description: Mapping[str, Any]) -> str:
    """What is wrong with what a client sent, completing "the description ..."; empty: nothing."""
    missing = [key for key in _KINDS if key not in description]
    if missing:
        return f"lacks {missing[0]!r}"
    for key, kind in _KINDS.items():
        value = description[key]
        if isinstance(value, bool) or not isinstance(value, kind):
            return f"has {type(value).__name__} as {key!r}"
    shape, names = description["shape"], description["classes"]
    if any(type(length) is not int or length < 1 for length in shape) or not 0 < len(shape) <= 8:
        return "has no sensible shape of a point"
    if description["train"] * math.prod(shape) > MOST_VALUES:
        return f"has more than {MOST_VALUES} values"
    if any(type(name) is not str or not 0 < len(name) <= naming.LONGEST for name in names):
        return f"has names of classes that are not 1 to {naming.LONGEST} characters"
    if len(names) > naming.MOST or len(set(names)) < len(names):
        return f"has more than {naming.MOST} classes, or one of them twice"
    if not re.fullmatch(r"([0-9a-f]{32})?", description["columns"]):
        return "has no digest of its columns"
    if description["train"] < 1 or description["test"] < 0:
        return "has no training points, or a negative number of test points"
    if description["targets"] < 0 or (description["targets"] > 0) == bool(names):
        return "has neither classes nor targets, or both"
    if description["count"] != description["train"] * math.prod(shape):
        return "has another number of values than its points have"
    largest = torch.finfo(torch.float32).max
    bound = 4 * largest**2 * description["count"]
    if not (abs(description["mean"]) <= largest and 0 <= description["m2"] <= bound):
        return "has a scale that numbers in float32 cannot have"
    return ""


_KINDS: dict[str, Any] = {
    "train": int,
    "test": int,
    "shape": list | tuple,
    "classes": list | tuple,
    "targets": int,
    "columns": str,
    "count": int,
    "mean": int | float,
    "m2": int | float,
}


def _target(description: Mapping[str, Any]) -> str:
    if description["classes"]:
        return "classes"
    width = description["targets"]
    return f"{width} numbers" if width > 1 else "a number"


def _check_same(descriptions: Mapping[str, Mapping[str, Any]], what: str, of: Any) -> None:
    (first, one), *others = descriptions.items()
    for name, each in others:
        if of(each) != of(one):
            raise UserError(
                f"{first} has {what} {of(one)} but {name} has {of(each)}; all clients must prepare "
                "their data alike."
            )


def _classes(
    descriptions: Mapping[str, Mapping[str, Any]], classes: Sequence[str]
) -> tuple[str, ...]:
    named = {label: name for name, each in descriptions.items() for label in each["classes"]}
    if not named:
        if classes:
            raise UserError("The experiment names classes, but the clients have regressions.")
        return ()
    if not classes:
        return naming.united(named)
    foreign = [label for label in named if label not in classes]
    if foreign:
        raise UserError(
            f"{named[foreign[0]]} has class {foreign[0]!r}, which is none of the experiment's: "
            f"{', '.join(classes)}."
        )
    return tuple(classes)


def _scale(descriptions: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean and standard deviation in float32, the precision that features have."""
    whole = combine(
        Moments(each["count"], float(each["mean"]), float(each["m2"])) for each in descriptions
    )
    mean, std = torch.tensor([whole.mean, math.sqrt(whole.m2 / whole.n)]).tolist()
    if not math.isfinite(mean) or not math.isfinite(std):
        raise UserError("The clients' values are too large to be scaled; divide them before.")
    return mean, std or 1.0  # constant features: centre only
