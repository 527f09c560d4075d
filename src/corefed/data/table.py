"""A table: one row per point, a column to predict, perhaps a column of clients.

The file holds a whole federation, or one site's part of it (`partial`). It is read twice: once to
find out what the columns are (`profile.py`), once to fill an array of features (`columns.py`) of
known size. Features are in the order of the file's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from corefed.base.errors import UserError, did_you_mean
from corefed.data import class_names, columns, profile, sources, table_rows
from corefed.data.cells import shorten
from corefed.data.columns import Column, Layout
from corefed.data.dataset import Dataset
from corefed.data.profile import Profile, Role
from corefed.data.sources import Source
from corefed.data.table_rows import Rows

MANY_CLIENTS = 1000
FEWEST_ROWS = 3
"""A column with more values than MANY_CLIENTS and fewer rows per value is taken for an identifier:
a client needs two points to train on and one to test."""


class Settings(NamedTuple):
    """How to read a table: settings of a run."""

    target: str = ""
    client_column: str = ""
    categorical: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    missing: str = "impute"
    task: str = "auto"
    smallest_client: int = 1
    streamed: bool = False  # features stay in a file; also of .npz and images
    partial: bool = False  # one site's part; it may lack classes, values, and columns to ignore


def read(path: Path, settings: Settings, memory_mb: int, *, labels_only: bool = False) -> Dataset:
    """All rows whose target (and client) is known; `labels_only` leaves features unread."""
    source = sources.find(path, memory_mb, streamed=settings.streamed)
    settings, index = _without_index(source, settings)
    roles = _roles(source, settings)
    if labels_only:
        roles = {settings.target: "target"}
    profiles = profile.scan(source, roles)
    target = profiles[settings.target]
    task = _task(source, target, settings)
    layout = tuple(
        profile.make_column(source, profiles[name], name in settings.categorical, settings.partial)
        for name in source.columns
        if roles.get(name) in ("number", "category")
    )
    if settings.missing == "refuse":
        _refuse_missing(source, profiles)
    if not settings.streamed:
        _check_memory(path, target.rows, layout, memory_mb)
    if settings.client_column:
        _check_clients(source, profiles[settings.client_column])
    rows = table_rows.read(
        source, (settings.target, settings.client_column), layout, target.rows, task,
        streamed=settings.streamed,
    )  # fmt: skip
    labels: tuple[str, ...] = ()
    if task == "regression":
        y = torch.from_numpy(np.concatenate(rows.numbers)).to(torch.float32).unsqueeze(1)
    else:
        where = f"Column {target.name!r} of {source.path}"
        order, labels = class_names.index_names(list(rows.targets.known), where)
        y = rows.targets.numbered(order)
    names = class_names.sort_names(rows.clients.known) if settings.client_column else ()
    places = {name: place for place, name in enumerate(names)}
    order = torch.tensor([places[name] for name in rows.clients.known])
    groups = rows.clients.numbered(order) if names else None
    kinds: dict[str, Role] = {
        column.name: "category" if column.categories else "number" for column in layout
    }
    return Dataset(
        str(path),
        rows.x,
        y,
        len(labels),
        groups,
        labels=labels,
        notes=(*source.notes, *index, *_notes(source, settings, profiles, rows, labels)),
        group_names=names,
        layout=Layout(
            layout,
            settings.target,
            settings.client_column,
            settings.ignore,
            tuple(
                profiles[name]._replace(role=kinds.get(name, profiles[name].role))
                for name in source.columns
                if name in profiles
            ),
        ),
        standardise=not labels,
    )


# --- what each column is --------------------------------------------------------------------------


def _without_index(source: Source, settings: Settings) -> tuple[Settings, list[str]]:
    """Leave out row numbers that a program wrote without a name, and say so."""
    taken = {settings.target, settings.client_column, *settings.categorical, *settings.ignore}
    found = tuple(name for name in source.unnamed if name not in taken)
    notes = [
        f"{source.path} has a column without a name ({name!r}), as pandas writes row numbers; it "
        "is left out."
        for name in found
    ]
    return settings._replace(ignore=(*settings.ignore, *found)), notes


def _roles(source: Source, settings: Settings) -> dict[str, Role]:
    """The role of every column, in file order."""
    if not settings.target:
        how = "as target in client.toml" if settings.partial else "by --target"
        raise UserError(
            f"Name the column of {source.path} to predict {how}; it has {shorten(source.columns)}."
        )
    for purpose, names in (
        ("to predict", [settings.target]),
        ("to make clients of", [settings.client_column] if settings.client_column else []),
        ("to take for categories", settings.categorical),
        ("to ignore", () if settings.partial else settings.ignore),
    ):
        for name in names:
            if name not in source.columns:
                raise UserError(_no_column(source, name, purpose))
    special: dict[str, Role] = {settings.target: "target"}
    if settings.client_column == settings.target:
        raise UserError(f"Column {settings.target!r} cannot be both target and client.")
    if settings.client_column:
        special[settings.client_column] = "client"
    for key, names in (("ignore", settings.ignore), ("categorical", settings.categorical)):
        taken = next((name for name in names if name in special), None)
        if taken is not None:
            raise UserError(f"{key} names column {taken!r}, which is the {special[taken]}.")
    special |= dict.fromkeys(settings.ignore, "ignored")
    roles: dict[str, Role] = {name: special.get(name, "number") for name in source.columns}
    if "number" not in roles.values():
        raise UserError(f"{source.path} has no columns left to learn from.")
    return roles


def _no_column(source: Source, name: str, purpose: str) -> str:
    hint = did_you_mean(name, source.columns, otherwise=f"it has {shorten(source.columns)}")
    return f"{source.path} has no column {name!r} {purpose}{hint}"


def _task(source: Source, target: Profile, settings: Settings) -> str:
    """classification or regression; a target that can be neither is refused."""
    where = f"Column {target.name!r} of {source.path}"
    if not target.present:
        words = target.taken_for_missing
        raise UserError(f"{where} is empty; there is nothing to predict{words}.")
    if target.too_large and not target.texts:
        raise UserError(profile.describe_large(source, target))
    line, cell = target.first_text
    different = len(target.values) if target.whole else 0
    # At one site, any repeated value is enough: other sites have more rows.
    enough = 2 * different if settings.partial and not target.different else target.present
    classed = bool(target.texts) or class_names.are_few(different, enough)
    auto = "classification" if classed else "regression"
    task = auto if settings.task == "auto" else settings.task
    if target.texts:
        profile.refuse_written(where, target)
    if task == "regression" and target.texts:
        raise UserError(
            f"{source.at(line)} has {cell[:40]!r} in column {target.name!r}; a regression needs "
            "numbers."
        )
    if target.texts and 2 * target.texts < target.present and len(target.values) > class_names.FEW:
        raise UserError(
            f"{source.at(line)} has {cell[:40]!r} in column {target.name!r}, "
            f"{target.among_numbers}; correct it, or leave it empty."
        )
    if len(target.values) == 1 and not settings.partial:
        raise UserError(
            f"{where} has one value only, {next(iter(target.values))!r}; there is nothing to learn"
            f"{target.taken_for_missing}."
        )
    if task == "classification" and (not target.values or (not target.texts and not target.whole)):
        what = "numbers that are not whole" if target.values else "more than 10000 different values"
        raise UserError(f"{where} has {what}, which are no classes; use --set task=regression.")
    if task == "classification" and target.different:
        raise UserError(f"{where} has another class in every row; is it an identifier?")
    return task


def _check_clients(source: Source, client: Profile) -> None:
    where = f"Column {client.name!r} of {source.path}"
    if not client.present:
        raise UserError(f"{where} is empty; there are no clients{client.taken_for_missing}.")
    if not client.values:
        raise UserError(
            f"{where} has more than {profile.MOST_CLIENTS} different values, and each would be a "
            "client; is it an identifier? Name a column such as site or device."
        )
    count = len(client.values)
    if count > MANY_CLIENTS and client.present < FEWEST_ROWS * count:
        raise UserError(
            f"{where} has {count} different values, and each would be a client, with "
            f"{client.present / count:.1f} rows on average; is it an identifier? Name a column "
            "such as site or device."
        )


def _check_memory(path: Path, rows: int, layout: tuple[Column, ...], memory_mb: int) -> None:
    """Features in float64, twice: rows are copied when they are split between clients."""
    needed = 16 * rows * columns.width(layout) / 2**20
    if needed > memory_mb:
        raise UserError(
            f"{rows} rows of {columns.width(layout)} features of {path} need {needed:.0f} MB, more "
            f"than the {memory_mb} MB allowed; use fewer rows or columns, raise memory_mb, or "
            "leave them in the file by --set resident=coreset."
        )


def _refuse_missing(source: Source, profiles: dict[str, Profile]) -> None:
    lacking = [f"{one.missing} in column {one.name!r}" for one in profiles.values() if one.missing]
    if lacking:
        more = f" and {len(lacking) - 3} more columns" if len(lacking) > 3 else ""
        raise UserError(
            f"{source.path} has missing values: {', '.join(lacking[:3])}{more}; fill them in, or "
            "use --set missing=impute."
        )


# --- what is said ---------------------------------------------------------------------------------


def _notes(
    source: Source,
    settings: Settings,
    profiles: dict[str, Profile],
    rows: Rows,
    labels: tuple[str, ...],
) -> Iterator[str]:
    target = settings.target
    if labels:
        yield f"{target!r} has {len(labels)} classes: {shorten(labels, 10)}."
    else:
        low, high = profiles[target].low, profiles[target].high
        yield f"{target!r} is a number from {low:.6g} to {high:.6g}: a regression."
    whose = {"target": target, "client": settings.client_column}
    for what, count in rows.left_out.items():
        if count:
            words, many = profiles[whose[what]].taken_for_missing, profiles[target].rows
            yield f"{count} of {many} rows have no {what}; they are left out{words}."
    special = (target, settings.client_column)
    lacking = [one for one in profiles.values() if one.missing and one.name not in special]
    if lacking:
        which = shorten([f"{one.missing} in {one.name!r}" for one in lacking], 5)
        yield (
            f"Missing values: {which}. Numbers are filled with the training mean beside a feature "
            "that says so; for categories they are a category of their own."
        )
