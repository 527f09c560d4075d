"""What a client reads on its own machine, and how it describes that to the server.

    npz:PATH, PATH.npz               arrays X and y; a folder with data.npz in it, too
    table:PATH, PATH.csv, .parquet   a table with a header, read as in a simulation
    image-folder:PATH, a folder      images in one folder per class

Points never leave. `describe` gives what the server is told before the first round; docs/privacy.md
lists it. All clients' descriptions together give the `Agreement`, to which each client fits its
points (`fitting.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns, datasets, held_out, npz, sources, table
from corefed.data.class_names import sort_names
from corefed.data.columns import Column, Layout
from corefed.data.dataset import Dataset, check
from corefed.data.partition import Split
from corefed.data.table import Settings
from corefed.federation import digest
from corefed.federation.protocol import ENVELOPE
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
    x_validation: Tensor | None = None  # [l, ...] held back from training
    y_validation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a point."""
        return tuple(self.x_train.shape[1:])


class HeldBack(NamedTuple):
    """Which part of a client's training points is for validation, drawn as in a simulation."""

    share: float = 0.0
    seed: int = 0  # of the run
    client: int = 0  # the client's number in it


# --- reading --------------------------------------------------------------------------------------


def read(
    spec: str,
    *,
    test_fraction: float,
    seed: int,
    reading: Settings | None = None,
    classes: Sequence[str] = (),
    spelling: Sequence[str] = (),
    embedding: Embedding = "auto",
    bad_images: str = "refuse",
    memory_mb: int = 4096,
    labels_only: bool = False,
    validation: HeldBack | None = None,
) -> LocalData:
    """The points of a file or folder; only those of `classes`, where some are named.

    `classes` are the client's to name. `spelling` are all classes of the experiment: it changes the
    spelling of names, and points of a class that it lacks are refused, not left out. `reading` is
    for tables; `labels_only` leaves their features unread. Without `validation` no
    training points are held back.

    Test points are those that the data set apart, or else a part of each class, drawn by `seed`.
    They are the same in every call, since private state refers to the rows of training points.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction is {test_fraction}; it must be at least 0 and below 1.")
    kind, path = kind_of(spec)
    if kind == "npz":
        dataset = npz.read(path, memory_mb, task=(reading or Settings()).task)
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
    if spelling and dataset.classes:
        dataset = _spell(dataset, spelling)
    test = dataset.held_out
    if test is None:
        test = held_out.draw(dataset, test_fraction, seed)
    if bool(test.all()):
        raise UserError(f"{dataset.name} has no points to train on.")
    split = Split(*(part.nonzero(as_tuple=True)[0] for part in (~test, test)))
    if validation is not None and validation.share:
        split = held_out.hold_back(dataset, split, *validation)
    held = len(split.validation) > 0
    return LocalData(
        dataset.values(split.train),
        dataset.y[split.train],
        dataset.values(split.test),
        dataset.y[split.test],
        dataset.labels,
        dataset.notes,
        dataset.layout,
        dataset.embedding,
        dataset.x.dtype == torch.uint8,
        dataset.values(split.validation) if held else None,
        dataset.y[split.validation] if held else None,
    )


def kind_of(spec: str) -> tuple[str, Path]:
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


def _spell(dataset: Dataset, spelling: Sequence[str]) -> Dataset:
    """Classes as the experiment writes them, in their order."""
    lower = {name.casefold() for name in spelling}
    foreign = [own for own in dataset.labels if own not in spelling and own.casefold() not in lower]
    if foreign:
        raise UserError(
            f"{dataset.name} has the class {foreign[0]!r}, which is none of this run's: "
            f"{', '.join(spelling)}. To take part without it, name the classes of this client as "
            "classes in client.toml ([data])."
        )
    return _select_classes(dataset, spelling)


# --- the description ------------------------------------------------------------------------------


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
