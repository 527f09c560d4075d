"""What a client reads on its own machine, and how it describes that to the server.

    npz:PATH, PATH.npz               arrays X and y; a folder with data.npz in it, too
    table:PATH, PATH.csv, .parquet   a table with a header, read as in a simulation
    image-folder:PATH, a folder      images in one folder per class

Points never leave. `describe` gives what the server is told before the first round; docs/privacy.md
lists it. All clients' descriptions together give the `Agreement`, to which each client fits its
points.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data import columns, datasets, held_out, npz, scaling, sources, table
from corefed.data.class_names import sort_names
from corefed.data.columns import Column, Layout
from corefed.data.dataset import Dataset, check
from corefed.data.preparation import Preparation
from corefed.data.table import Settings
from corefed.federation import digest
from corefed.federation.protocol import ENVELOPE, Agreement
from corefed.federation.reading.description import Moments, check_description, moments

if TYPE_CHECKING:
    from corefed.settings.run import Embedding

INSIDE = "data.npz"
"""What a folder holds that is not a folder of images."""
ENDINGS = {".npz": "npz", **dict.fromkeys((".csv", ".tsv", *sources.PARQUET), "table")}
KINDS = "an .npz file, a table (.csv, .tsv, .parquet), or a folder of images"


class LocalData(NamedTuple):
    """A client's points, as its own files have them."""

    x_train: Tensor  # [n, ...] float32; of a table [n, width] float64, NaN where there is a gap
    y_train: Tensor  # [n] int64 indices into labels, or [n, d] float32 targets
    x_test: Tensor  # [m, ...]
    y_test: Tensor
    labels: tuple[str, ...]  # names of the classes that this client has; empty for a regression
    notes: tuple[str, ...] = ()  # for the client's operator
    layout: Layout | None = None  # of a table
    embedding: str = ""  # of images: the network that they went through, or none
    levels: bool = False  # points were bytes 0..255 of what runs from 0 to 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a point."""
        return tuple(self.x_train.shape[1:])


# --- reading --------------------------------------------------------------------------------------


def read(
    spec: str,
    *,
    test_fraction: float,
    seed: int,
    reading: Settings | None = None,
    classes: Sequence[str] = (),
    embedding: Embedding = "auto",
    bad_images: str = "refuse",
    memory_mb: int = 4096,
    labels_only: bool = False,
) -> LocalData:
    """The points of a file or folder; only those of `classes`, where some are named.

    `reading` is for tables; `labels_only` leaves their features unread.

    Test points are those that the data set apart, or else a part of each class, drawn by `seed`.
    They are the same in every call, since private state refers to the rows of training points.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction is {test_fraction}; it must be at least 0 and below 1.")
    kind, path = _kind(spec)
    if kind == "npz":
        dataset = npz.read(path, memory_mb)
    elif kind == "table":
        own = (reading or Settings())._replace(partial=True)
        dataset = table.read(path, own, memory_mb, labels_only=labels_only)
    else:
        dataset = datasets.load(
            f"image-folder:{path.absolute()}",
            embedding=embedding,
            bad_images=bad_images,
            memory_mb=memory_mb,
            partial=True,
        )
    check(dataset)
    dataset = _select_classes(dataset, classes)
    test = dataset.held_out
    if test is None:
        test = held_out.draw(dataset, test_fraction, seed)
    if bool(test.all()):
        raise UserError(f"{dataset.name} has no points to train on.")
    (train_rows,), (test_rows,) = (~test).nonzero(as_tuple=True), test.nonzero(as_tuple=True)
    return LocalData(
        dataset.values(train_rows),
        dataset.y[train_rows],
        dataset.values(test_rows),
        dataset.y[test_rows],
        dataset.labels,
        dataset.notes,
        dataset.layout,
        dataset.embedding,
        dataset.x.dtype == torch.uint8,
    )


def _kind(spec: str) -> tuple[str, Path]:
    """npz, table or image-folder, and what to read."""
    kind, colon, written = spec.partition(":")
    if not colon or kind not in ("npz", "table", "image-folder"):
        kind, written = "", spec
    path = Path(os.path.expanduser(written))
    if not written or not path.exists():
        raise UserError(f"There is no {written or 'path in ' + repr(spec)}; give {KINDS}.")
    if not kind and path.is_dir():
        kind = "image-folder"
        if (path / INSIDE).exists():
            kind, path = "npz", path / INSIDE
    kind = kind or ENDINGS.get(path.suffix.lower(), "")
    if not kind or (kind != "image-folder" and not path.is_file()):
        raise UserError(f"{path} is none of what a client can read: {KINDS}.")
    return kind, path


def _select_classes(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Classes in their order; only those that are named, in that spelling, if any are."""
    if not dataset.classes:
        if classes:
            raise UserError(f"{dataset.name} is a regression; it has no classes to choose from.")
        return dataset
    spelt = {name.casefold(): name for name in classes} | {name: name for name in classes}
    found = {own: spelt.get(own, spelt.get(own.casefold(), "")) for own in dataset.labels}
    known = found if classes else {own: own for own in dataset.labels}
    labels = sort_names(name for name in known.values() if name)
    if not labels:
        raise UserError(
            f"{dataset.name} has none of the classes {', '.join(classes)}; it has "
            f"{', '.join(dataset.labels)}."
        )
    places = {name: place for place, name in enumerate(labels)}
    y = torch.tensor([places.get(name, -1) for name in known.values()])[dataset.y]
    dataset = dataset._replace(y=y, classes=len(labels), labels=labels)
    kept = y >= 0
    if bool(kept.all()):
        return dataset
    others = ", ".join(own for own, name in known.items() if not name)
    note = f"{int((~kept).sum())} points of other classes are left out: {others}."
    return dataset._replace(
        x=dataset.x[kept],
        y=y[kept],
        held_out=None if dataset.held_out is None else dataset.held_out[kept],
        notes=(*dataset.notes, note),
    )


# --- the description, and points in the terms of the agreement ------------------------------------


def fingerprint(data: LocalData) -> str:
    """Of the training points in their order, so that a client notices when they change."""
    names = columns.features(data.layout.columns) if data.layout else ()
    return digest.hash_tree({"x": data.x_train, "y": data.y_train}, *data.labels, *names)


def describe(data: LocalData) -> dict[str, Any]:
    """All that a client tells about its data before the first round; docs/privacy.md lists it."""
    found: dict[str, Any] = {
        "train": len(data.y_train),
        "test": len(data.y_test),
        "classes": list(data.labels),
        "targets": 0 if data.labels else data.y_train.shape[1],
    }
    if data.layout is None:
        scale = moments(data.x_train)
        found |= {"shape": list(data.shape), "count": scale.n, "mean": scale.mean, "m2": scale.m2}
    else:
        parts = columns.parts(data.x_train, data.layout.columns).values()
        empty = {one.name for one in data.layout.profiles if not one.present}
        found["columns"] = [_describe_column(*each, empty) for each in parts]
        found["target"] = [] if data.labels else list(moments(data.y_train)[1:])
    problem = check_description(found)
    if not problem and len(json.dumps(found)) > ENVELOPE // 2:
        problem = "is too long to be sent; leave out columns, or join categories"
    if problem:
        raise UserError(f"The description of this client's data {problem}.")
    return found


def _describe_column(column: Column, x: Tensor, empty: set[str]) -> dict[str, Any]:
    """Which categories a column has in the training rows, or the moments of its numbers."""
    numbers = moments(x[:, 0][~x[:, 0].isnan()]) if not column.categories else Moments()
    seen = (x != 0).any(0).tolist()
    gaps = x[:, -1].sum() if column.lacking else 0
    return {
        "name": column.name,
        "kind": "category" if column.categories else "empty" if column.name in empty else "number",
        "categories": [each for each, there in zip(column.categories, seen, strict=False) if there],
        "missing": int(gaps),
        "mean": numbers.mean,
        "m2": numbers.m2,
    }


def _preparation(data: LocalData, agreement: Agreement, client: str) -> Preparation:
    """How points of this client are prepared, later ones too; refused where they do not fit."""
    _check_fit(data, agreement)
    layout = data.layout
    targets = tuple(f"y{number}" for number in range(agreement.targets))
    found = Preparation(
        agreement.shape,
        agreement.classes,
        (layout.target,) if layout and targets else targets,
        agreement.mean,
        agreement.std,
        embedding=data.embedding or "none",
        kind="images" if data.embedding else "table" if layout else "array",
        levels=data.levels,
        columns=agreement.columns,
        target=layout.target if layout else "",
        ignored=layout.ignored if layout else (),
        fill=agreement.fill,
        target_mean=agreement.target_mean,
        target_std=agreement.target_std,
    )
    if not agreement.own_scale:
        return found
    numbers = torch.tensor(columns.numbers(agreement.columns))
    own = scaling.fit_features(_arrange(data, data.x_train, agreement.columns), numbers)
    return replace(found, clients={client: own})


def fit(
    data: LocalData, agreement: Agreement, client: str = ""
) -> tuple[ClientData, ClientData, Preparation]:
    """Training and test points of one client, [1, n, ...], in the terms of the agreement.

    Standardised regression targets are so for training only; test targets keep their own unit.
    """
    ready = _preparation(data, agreement, client)
    places = torch.tensor([agreement.classes.index(name) for name in data.labels])

    def fitted(x: Tensor, y: Tensor) -> ClientData:
        scaled = ready.scale(_arrange(data, x, agreement.columns), client)
        y = places[y] if data.labels else y
        return ClientData(scaled.unsqueeze(0), y.unsqueeze(0), torch.ones(1, len(x)))

    learnt = data.y_train if data.labels else ready.standardise(data.y_train)
    return fitted(data.x_train, learnt), fitted(data.x_test, data.y_test), ready


def _arrange(data: LocalData, x: Tensor, wanted: Sequence[Column]) -> Tensor:
    return columns.change_layout(x, data.layout.columns, wanted) if data.layout else x


def _check_fit(data: LocalData, agreement: Agreement) -> None:
    if bool(data.layout) != bool(agreement.columns):
        here, there = ("a table", "arrays") if data.layout else ("arrays", "tables")
        raise UserError(f"The data are {here} here, but {there} in this run.")
    if data.layout:
        _check_columns(data.layout, agreement.columns)
    elif data.shape != agreement.shape:
        raise UserError(
            f"A point has shape {list(data.shape)} here, but {list(agreement.shape)} in this run; "
            "prepare the data as the other clients do."
        )
    wrong = next((std for std in agreement.std if not 0 < std < float("inf")), None)
    if wrong is not None:
        raise UserError(f"The standard deviation of this run's values is {wrong}.")
    if bool(data.labels) != bool(agreement.classes):
        here, there = ("classes", "numbers") if data.labels else ("numbers", "classes")
        raise UserError(f"The target is {here} here, but {there} in this run.")
    foreign = [name for name in data.labels if name not in agreement.classes]
    if foreign:
        raise UserError(
            f"Class {foreign[0]!r} of this client is none of this run's: "
            f"{', '.join(agreement.classes)}. Name all classes in the experiment, or start a "
            "new run."
        )
    if not data.labels and data.y_train.shape[1] != agreement.targets:
        raise UserError(
            f"A point has {data.y_train.shape[1]} targets here, but {agreement.targets} in this "
            "run."
        )


def _check_columns(layout: Layout, wanted: Sequence[Column]) -> None:
    """The table must have this run's columns, each of its kind; an empty column fits any kind."""
    own = {column.name: column for column in layout.columns}
    alone = min(own.keys() ^ {column.name for column in wanted}, default=None)
    if alone is not None:
        here = "has" if alone in own else "lacks"
        raise UserError(
            f"The table of this client {here} the column {alone!r}, unlike those of this run; give "
            "it the columns that the other clients have."
        )
    filled = {one.name for one in layout.profiles if one.present}
    for column in wanted:
        if column.name in filled and bool(column.categories) != bool(own[column.name].categories):
            here, there = ("numbers", "text") if column.categories else ("text", "numbers")
            raise UserError(
                f"Column {column.name!r} has {here} here, but {there} in this run; mend its cells."
            )
