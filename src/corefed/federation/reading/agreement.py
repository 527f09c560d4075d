"""What all clients' data have in common, computed from each client's description of its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from corefed.base.errors import UserError
from corefed.data.class_names import sort_names, unite
from corefed.data.columns import Column
from corefed.data.profile import MOST_CATEGORIES
from corefed.federation.protocol import Agreement
from corefed.federation.reading.description import (
    Description,
    Moments,
    check_description,
    combine,
)

SCALES = ("unit", "standard")
"""Of arrays. Scales of single features would reveal more about the data."""
TABLE_SCALES = (*SCALES, "features", "client")
FEWEST = 3
"""Clients from which on a median or a majority means something."""


def agree(
    descriptions: Mapping[str, Description] | Sequence[Description],
    classes: Sequence[str],
    scale: str,
    *,
    medians: bool = False,
) -> Agreement:
    """The agreement of clients, by name or in order, that described their data.

    `classes` are the experiment's. Where it names none, the classes of all clients are taken. With
    `medians`, scales are medians over clients, which one client cannot move far; without, they are
    those of all training points together.
    """
    if not isinstance(descriptions, Mapping):
        descriptions = {f"client {number}": each for number, each in enumerate(descriptions)}
    if not descriptions:
        raise UserError("No client has described its data.")
    together = median_moments if medians and len(descriptions) >= FEWEST else combine
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
        return _agree_on_tables(descriptions, classes, scale, together)
    _check_same(descriptions, "points of shape", lambda each: list(each["shape"]))
    _check_same(descriptions, "as target", _target)
    parts = [
        Moments(each["count"], float(each["mean"]), float(each["m2"]))
        for each in descriptions.values()
    ]
    mean, std = _mean_and_std(together(parts)) if scale == "standard" else (0.0, 1.0)
    agreed = _classes(descriptions, classes, unite)
    return Agreement(tuple(first["shape"]), agreed, first["targets"], (mean,), (std,))


def median_moments(parts: Iterable[Moments]) -> Moments:
    """The median of the clients' means, and of their root mean squared deviations from it.

    Each client counts the same, whatever number of values it claims. Deviations are from the
    common mean, so that they include how far clients are apart.
    """
    known = [each for each in parts if each.n]
    if not known:
        return Moments()
    mean = statistics.median(each.mean for each in known)
    squares = [each.m2 / each.n + (each.mean - mean) ** 2 for each in known]
    n = round(statistics.median(each.n for each in known)) * len(known)
    return Moments(n, mean, statistics.median(map(math.sqrt, squares)) ** 2 * n)


def _agree_on_tables(
    descriptions: Mapping[str, Description],
    classes: Sequence[str],
    scale: str,
    together: Callable[[Iterable[Moments]], Moments],
) -> Agreement:
    """With `combine` the same as a simulation finds that reads all clients' rows in one table."""
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
    for name in next(iter(sites.values())):  # in the order of the first client's table
        own = {site: each[name] for site, each in sites.items()}
        column, found, gaps = _column(name, own, descriptions, together)
        columns.append(column)
        scales += [found] + [Moments()] * (column.width - 1)
        if column.categories:  # exactly one of its features is 1 in each row
            share = 1 / column.width
            values.append(Moments(rows * column.width, share, rows * (1 - share)))
        else:
            variance = found.m2 / max(1, found.n) * (1 - gaps)  # a gap is filled with the mean
            values.append(Moments(rows, found.mean, variance * rows))
            values += [Moments(rows, gaps, rows * gaps * (1 - gaps))] * column.lacking
    means, stds = tuple(each.mean for each in scales), tuple(each.std for each in scales)
    agreement = Agreement(
        (len(scales),),
        _classes(descriptions, classes, sort_names),
        next(iter(descriptions.values()))["targets"],
        columns=tuple(columns),
    )
    targets = together(
        Moments(each["train"], *each["target"]) for each in descriptions.values() if each["target"]
    )
    if targets.n:
        agreement = replace(agreement, target_mean=(targets.mean,), target_std=(targets.std,))
    if scale in ("features", "client"):
        return replace(agreement, mean=means, std=stds, own_scale=scale == "client")
    mean, std = _mean_and_std(combine(values)) if scale == "standard" else (0.0, 1.0)
    return replace(agreement, mean=(mean,), std=(std,), fill=means)


def _column(
    name: str,
    own: Mapping[str, Description],
    descriptions: Mapping[str, Description],
    together: Callable[[Iterable[Moments]], Moments],
) -> tuple[Column, Moments, float]:
    """One column over all sites, the moments of its numbers, and the share of its gaps."""
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
    found = together(
        Moments(descriptions[site]["train"] - each["missing"], each["mean"], each["m2"])
        for site, each in own.items()
        if each["kind"] == "number"
    )
    lacking = any(each["missing"] for each in own.values())
    if together is combine:
        gaps = 1 - found.n / sum(each["train"] for each in descriptions.values())
    else:
        gaps = statistics.median(
            each["missing"] / descriptions[site]["train"] for site, each in own.items()
        )
    return Column(name, tuple(categories), lacking), found, gaps


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
