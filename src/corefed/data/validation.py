"""Describe data before training, and warn about what may go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from corefed.data import streaming
from corefed.data.cells import shorten

if TYPE_CHECKING:
    from rich.table import Table

    from corefed.data.dataset import Dataset
    from corefed.data.profile import Profile

SMALL = 50
"""Warn about clients with fewer points: a fifth of them, ten, is too few to test on."""

RARE = 10
"""Warn about classes with fewer points: they can hardly be learnt or tested."""

UNEVEN = 20
"""Class-size ratio above which we warn."""

LISTED = 5
"""Names in a sentence."""


def find_warnings(dataset: Dataset) -> list[str]:
    """Warnings about these data, one sentence each."""
    found = [*_column_warnings(dataset), *_class_warnings(dataset)]
    if dataset.group_names:
        found += _client_warnings(dataset)
    return found


def _column_warnings(dataset: Dataset) -> Iterator[str]:
    if dataset.layout is None:
        width = dataset.x.shape[1:].numel()
        if not width or dataset.embedding or not dataset.x.is_floating_point():
            return
        first = dataset.x[:1].flatten(1)
        same = [(some.flatten(1) == first).all(0) for some in streaming.blocks(dataset.x)]
        constant = int(torch.stack(same).all(0).sum())
        if constant:
            yield f"{constant} of {width} features never change."
        return
    features = [one for one in dataset.layout.profiles if one.role in ("number", "category")]
    constant_ones = [one.name for one in features if one.constant]
    if constant_ones:
        yield f"Columns that never change teach nothing: {shorten(constant_ones, LISTED)}."
    for one in features:
        if one.role == "number" and one.whole and one.different:
            yield (
                f"{one.name!r} has another whole number in every row, as an identifier has; "
                f"--set ignore={one.name} leaves it out."
            )
    empty = [f"{one.name} ({_percent(one)})" for one in features if one.missing > one.present]
    if empty:
        yield f"Columns that most rows lack: {shorten(empty, LISTED)}."


def _class_warnings(dataset: Dataset) -> Iterator[str]:
    if not dataset.classes:
        return
    sizes: list[int] = dataset.y.bincount(minlength=dataset.classes).tolist()
    counts = dict(zip(dataset.labels, sizes, strict=True))
    rare = [f"{label} ({count})" for label, count in counts.items() if count < RARE]
    if rare:
        yield f"Classes with fewer than {RARE} points: {shorten(rare, LISTED)}."
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] > UNEVEN * max(1, counts[least]) and not rare:
        yield (
            f"Class {most!r} has {counts[most]} points and {least!r} {counts[least]}: accuracy "
            "alone says little about the rarer one."
        )


def _client_warnings(dataset: Dataset) -> Iterator[str]:
    assert dataset.groups is not None
    names, sizes = dataset.group_names, dataset.groups.bincount().tolist()
    if len(names) == 1:
        yield f"There is one client only, {names[0]!r}: nothing is federated."
    small = [f"{name} ({n})" for name, n in zip(names, sizes, strict=True) if n < SMALL]
    if small:
        yield f"Clients with fewer than {SMALL} points: {shorten(small, LISTED)}."
    if not dataset.classes or len(names) == 1:
        return
    pairs = set(zip(dataset.groups.tolist(), dataset.y.tolist(), strict=True))
    owners = Counter(label for _, label in pairs)
    only = {label: group for group, label in pairs if owners[label] == 1}
    alone = [f"{dataset.labels[label]} ({names[only[label]]})" for label in sorted(only)]
    if alone:
        yield f"Classes that one client alone has: {shorten(alone, LISTED)}."
    classes = Counter(group for group, _ in pairs)
    single = [name for group, name in enumerate(names) if classes[group] == 1]
    if single:
        yield f"Clients whose points all have one class: {shorten(single, LISTED)}."


def column_table(dataset: Dataset) -> Table | None:
    """What each column of a table is; None for other data."""
    from rich.table import Table  # rich takes time to import

    if dataset.layout is None:
        return None
    title = f"{dataset.name}: {len(dataset.y)} rows, {dataset.x.shape[1]} features"
    table = Table("column", "kind", "missing", "values", title=title)
    for one in dataset.layout.profiles:
        missing = f"{one.missing} ({_percent(one)})" if one.missing else ""
        table.add_row(one.name, _kind(one, dataset), missing, _values(one, dataset))
    for name in dataset.layout.ignored:
        table.add_row(name, "ignored", "", "")
    return table


def _kind(one: Profile, dataset: Dataset) -> str:
    if one.role == "target":
        return "target: classes" if dataset.classes else "target: a number"
    return one.role


def _values(one: Profile, dataset: Dataset) -> str:
    if one.role == "number" or (one.role == "target" and not dataset.classes):
        return f"{one.low:.6g} to {one.high:.6g}"
    counted = [f"{name} ({count})" for name, count in one.values.most_common(LISTED)]
    return shorten(counted, LISTED) + (", ..." if len(one.values) > LISTED else "")


def _percent(one: Profile) -> str:
    share = 100 * one.missing / one.rows
    return f"{share:.0f} %" if share >= 1 else "below 1 %"
