"""What all clients' data have in common, computed from each client's description of its own.

The mean and standard deviation of all training values, or of those of one column, follow from
count, mean and sum of squared deviations (M2) at each client: with delta = mean_b - mean_a and
n = n_a + n_b,

    mean = mean_a + delta n_b / n        M2 = M2_a + M2_b + delta^2 n_a n_b / n

(Chan, Golub & LeVeque 1983), which loses no digits where sums of squares would.

Descriptions come from machines that the server does not control. `check_description` looks at
types, lengths and numbers before anything is computed from them. Names are compared and kept, never
interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.class_names import LONGEST, MOST, are_numbers, sort_names, unite
from corefed.data.columns import Column
from corefed.data.profile import MOST_CATEGORIES
from corefed.federation.protocol import Agreement

MOST_VALUES = 2**53
"""Largest number of values per client; above it float64 does not count exactly."""
MOST_COLUMNS = 10_000
LARGEST = torch.finfo(torch.float32).max
"""Of a value: networks compute in float32."""
SCALES = ("unit", "standard")
"""Of arrays. Scales of single features would reveal more about the data."""
TABLE_SCALES = (*SCALES, "features", "client")
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


# --- what clients say -----------------------------------------------------------------------------


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
    if description["count"] != description["train"] * math.prod(shape):
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
    if description["targets"] > 1 or len(target) != 2 * description["targets"]:
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


# --- what they have in common ---------------------------------------------------------------------


def agree(
    descriptions: Mapping[str, Description] | Sequence[Description],
    classes: Sequence[str],
    scale: str,
) -> Agreement:
    """The agreement of clients, by name or in order, that described their data.

    `classes` are the experiment's. Where it names none, the classes of all clients are taken.
    """
    if not isinstance(descriptions, Mapping):
        descriptions = {f"client {number}": each for number, each in enumerate(descriptions)}
    if not descriptions:
        raise UserError("No client has described its data.")
    for name, each in descriptions.items():
        problem = check_description(each)
        if problem:
            raise UserError(f"The description of {name}'s data {problem}.")
    _check_same(descriptions, "as data", _form)
    first = next(iter(descriptions.values()))
    scales = TABLE_SCALES if "columns" in first else SCALES
    if scale not in scales:
        raise UserError(
            f"There is no scale {scale!r} for {_form(first)} in a federation; use "
            f"{' or '.join(scales)}."
        )
    if "columns" in first:
        return _agree_on_tables(descriptions, classes, scale)
    _check_same(descriptions, "points of shape", lambda each: list(each["shape"]))
    _check_same(descriptions, "as target", _target)
    parts = [
        Moments(each["count"], float(each["mean"]), float(each["m2"]))
        for each in descriptions.values()
    ]
    mean, std = _mean_and_std(combine(parts)) if scale == "standard" else (0.0, 1.0)
    agreed = _classes(descriptions, classes, unite)
    return Agreement(tuple(first["shape"]), agreed, first["targets"], (mean,), (std,))


def _agree_on_tables(
    descriptions: Mapping[str, Description], classes: Sequence[str], scale: str
) -> Agreement:
    """The same as a simulation finds that reads all clients' rows in one table."""
    sites = {
        name: {column["name"]: column for column in each["columns"]}
        for name, each in descriptions.items()
    }
    _check_columns(sites)
    hint = "set task to classification or regression for all"
    _check_same(descriptions, "as target", _target, hint)
    rows = sum(each["train"] for each in descriptions.values())
    columns: list[Column] = []
    scales: list[Moments] = []  # one per feature; no values where it is not scaled
    values: list[Moments] = []  # of the features with their gaps filled
    for name in sorted(next(iter(sites.values()))):
        own = {site: each[name] for site, each in sites.items()}
        column, found = _column(name, own, descriptions)
        columns.append(column)
        scales += [found] + [Moments()] * (column.width - 1)
        if column.categories:  # exactly one of its features is 1 in each row
            share = 1 / column.width
            values.append(Moments(rows * column.width, share, rows * (1 - share)))
        else:
            values.append(Moments(rows, found.mean, found.m2))
            share = 1 - found.n / rows
            values += [Moments(rows, share, rows * share * (1 - share))] * column.lacking
    means, stds = tuple(each.mean for each in scales), tuple(each.std for each in scales)
    agreement = Agreement(
        (len(scales),),
        _classes(descriptions, classes, sort_names),
        next(iter(descriptions.values()))["targets"],
        columns=tuple(columns),
    )
    targets = combine(
        Moments(each["train"], *each["target"]) for each in descriptions.values() if each["target"]
    )
    if targets.n:
        agreement = replace(agreement, target_mean=(targets.mean,), target_std=(targets.std,))
    if scale in ("features", "client"):
        return replace(agreement, mean=means, std=stds, own_scale=scale == "client")
    mean, std = _mean_and_std(combine(values)) if scale == "standard" else (0.0, 1.0)
    return replace(agreement, mean=(mean,), std=(std,), fill=means)


def _column(
    name: str, own: Mapping[str, Description], descriptions: Mapping[str, Description]
) -> tuple[Column, Moments]:
    """One column over all sites, and the moments of its numbers."""
    kinds = {site: each["kind"] for site, each in own.items() if each["kind"] != "empty"}
    of_kind = {kind: site for site, kind in reversed(kinds.items())}
    if len(of_kind) > 1:
        raise UserError(
            f"Column {name!r} has numbers at {of_kind['number']} but text at "
            f"{of_kind['category']}; mend the cells, take them for categories everywhere by "
            f"categorical={name}, or leave the column out by ignore={name}."
        )
    present = sum(descriptions[site]["train"] - each["missing"] for site, each in own.items())
    if not present:
        raise UserError(
            f"Column {name!r} has no value in any client's training rows; leave it out by "
            f"ignore={name}."
        )
    categories = sorted({each for column in own.values() for each in column["categories"]})
    if len(categories) > MOST_CATEGORIES:
        raise UserError(
            f"Column {name!r} has {len(categories)} different categories over all clients, more "
            f"than {MOST_CATEGORIES}; join rare ones, or leave it out by ignore={name}."
        )
    found = combine(
        Moments(descriptions[site]["train"] - each["missing"], each["mean"], each["m2"])
        for site, each in own.items()
        if each["kind"] == "number"
    )
    return Column(name, tuple(categories), any(each["missing"] for each in own.values())), found


def _check_columns(sites: Mapping[str, Mapping[str, Any]]) -> None:
    """Features are made of columns by name, so all tables must have the same names."""
    (first, one), *others = sites.items()
    for name, each in others:
        for here, there, own, other in ((first, name, one, each), (name, first, each, one)):
            alone = next((column for column in own if column not in other), None)
            if alone is not None:
                raise UserError(
                    f"The table of {there} has no column {alone!r}, which that of {here} has; add "
                    f"it (its cells may be empty), or leave it out everywhere by ignore={alone}."
                )


def _form(description: Description) -> str:
    return "a table" if "columns" in description else "arrays"


def _target(description: Description) -> str:
    if description["classes"]:
        return "classes"
    width = description["targets"]
    return f"{width} numbers" if width > 1 else "a number"


def _check_same(
    descriptions: Mapping[str, Description],
    what: str,
    of: Callable[[Description], object],
    hint: str = "all clients must prepare their data alike",
) -> None:
    (first, one), *others = descriptions.items()
    for name, each in others:
        if of(each) != of(one):
            raise UserError(f"{first} has {what} {of(one)} but {name} has {of(each)}; {hint}.")


def _classes(
    descriptions: Mapping[str, Description],
    classes: Sequence[str],
    join: Callable[[Iterable[str]], tuple[str, ...]],
) -> tuple[str, ...]:
    named = {label: name for name, each in descriptions.items() for label in each["classes"]}
    if not named:
        if classes:
            raise UserError("The experiment names classes, but the clients have regressions.")
        return ()
    if not classes:
        return join(named)
    foreign = [label for label in named if label not in classes]
    if foreign:
        raise UserError(
            f"{named[foreign[0]]} has class {foreign[0]!r}, which is none of the experiment's: "
            f"{', '.join(classes)}."
        )
    return tuple(classes)


def _mean_and_std(whole: Moments) -> tuple[float, float]:
    """Mean and standard deviation in float32, the precision that features have."""
    mean, std = torch.tensor([whole.mean, whole.std]).tolist()
    return mean, std or 1.0
