"""What a client reads on its own machine, and the little that it says about it.

    npz:PATH, PATH.npz               arrays X and y (`npz.py`); a folder with data.npz in it, too
    table:PATH, PATH.csv             a table with a header (`table.py`)
    image-folder:PATH, a folder      images in a folder a class (`corefed.data.images`)

Points never leave. `describe` is what the server is told before the first round: how many points,
what one looks like, which classes there are, and three numbers about the scale of their values.
From all clients' descriptions follows the `Agreement`, to which each client fits its points.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data import classes as naming
from corefed.data import datasets, held_out, npz
from corefed.data.dataset import Dataset, check
from corefed.federation import digest
from corefed.federation.protocol import Agreement
from corefed.federation.reading import table
from corefed.federation.reading.agreement import agree, moments, named

if TYPE_CHECKING:
    from corefed.settings.config import Embedding

__all__ = ["LocalData", "agree", "describe", "fingerprint", "fit", "read"]

INSIDE = "data.npz"
"""What a folder holds that is not a folder of images."""

KINDS = "an .npz file, a .csv table, or a folder of images"


class LocalData(NamedTuple):
    """A client's points, as its own files have them."""

    x_train: Tensor  # [n, ...] float32
    y_train: Tensor  # [n] int64 indices into labels, or [n, d] float32 targets
    x_test: Tensor  # [m, ...]
    y_test: Tensor
    labels: tuple[str, ...]  # names of the classes that this client has; empty for a regression
    notes: tuple[str, ...] = ()  # for the client's operator
    columns: tuple[str, ...] = ()  # of a table: names of the features in their order
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
    target: str = "",
    classes: Sequence[str] = (),
    embedding: Embedding = "auto",
    bad_images: str = "refuse",
    memory_mb: int = 4096,
) -> LocalData:
    """The points of a file or folder, those of some classes where these are named.

    Test points are those that the data set apart, or else a part of each class, drawn by `seed`:
    the same ones whenever it is called, since private state refers to the rows of training points.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction is {test_fraction}; it must be at least 0 and below 1.")
    dataset = _load(spec, target, embedding, bad_images, memory_mb)
    check(dataset)
    dataset = _renamed(dataset, classes)
    test = dataset.held_out
    if test is None:
        test = held_out.drawn(dataset, test_fraction, seed)
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
        dataset.columns,
        dataset.embedding,
        dataset.x.dtype == torch.uint8,
    )


def _load(spec: str, target: str, embedding: Embedding, bad_images: str, memory_mb: int) -> Dataset:
    kind, path = _kind(spec)
    if kind == "npz":
        return npz.read(path, memory_mb)
    if kind == "table":
        return table.read(path, target, memory_mb)
    return datasets.load(
        f"image-folder:{path.absolute()}",
        embedding=embedding,
        bad_images=bad_images,
        memory_mb=memory_mb,
        partial=True,
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
    kind = kind or {".npz": "npz", ".csv": "table"}.get(path.suffix.lower(), "")
    if not kind or (kind != "image-folder" and not path.is_file()):
        raise UserError(f"{path} is none of what a client can read: {KINDS}.")
    return kind, path


def _renamed(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Classes in their order; only those that are named, in that spelling, where some are."""
    if not dataset.classes:
        if classes:
            raise UserError(f"{dataset.name} is a regression; it has no classes to choose from.")
        return dataset
    spelt = {name.casefold(): name for name in classes} | {name: name for name in classes}
    found = {own: spelt.get(own, spelt.get(own.casefold(), "")) for own in dataset.labels}
    known = found if classes else {own: own for own in dataset.labels}
    labels = naming.ordered(name for name in known.values() if name)
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


# --- what is said about the points, and what all clients agree on ---------------------------------


def fingerprint(data: LocalData) -> str:
    """Of the training points in their order, by which a client notices that they have changed."""
    return digest.of({"x": data.x_train, "y": data.y_train}, *data.labels)


def describe(data: LocalData) -> dict[str, Any]:
    """All that a client tells of its data before the first round; see `agreement.py`."""
    scale = moments(data.x_train)
    return {
        "train": len(data.y_train),
        "test": len(data.y_test),
        "shape": list(data.shape),
        "classes": list(data.labels),
        "targets": 0 if data.labels else data.y_train.shape[1],
        "columns": named(data.columns),
        "count": scale.n,
        "mean": scale.mean,
        "m2": scale.m2,
    }


def fit(data: LocalData, agreement: Agreement) -> tuple[ClientData, ClientData]:
    """Training and test points of one client, [1, n, ...], in the terms of the agreement."""
    if data.shape != agreement.shape:
        raise UserError(
            f"A point has shape {list(data.shape)} here, but {list(agreement.shape)} in this run; "
            "prepare the data as the other clients do."
        )
    if not 0 < agreement.std < float("inf"):
        raise UserError(f"The standard deviation of this run's values is {agreement.std}.")
    own = named(data.columns)
    if own and agreement.columns and own != agreement.columns:
        raise UserError(
            "The columns of this client's table have other names than those of this run; give "
            "them the names that the other clients use."
        )
    if bool(data.labels) != bool(agreement.classes):
        here, there = ("classes", "numbers") if data.labels else ("numbers", "classes")
        raise UserError(f"The target is {here} here, but {there} in this run.")
    if data.labels:
        foreign = [name for name in data.labels if name not in agreement.classes]
        if foreign:
            raise UserError(
                f"Class {foreign[0]!r} of this client is none of this run's: "
                f"{', '.join(agreement.classes)}. Name all classes in the experiment, or start a "
                "new run."
            )
    elif data.y_train.shape[1] != agreement.targets:
        raise UserError(
            f"A point has {data.y_train.shape[1]} targets here, but {agreement.targets} in this "
            "run."
        )
    return _fitted(data, data.x_train, data.y_train, agreement), _fitted(
        data, data.x_test, data.y_test, agreement
    )


def _fitted(data: LocalData, x: Tensor, y: Tensor, agreement: Agreement) -> ClientData:
    """The same operations in the same order as in a simulation, so that every bit is the same."""
    scaled = x.clone().sub_(agreement.mean).div_(agreement.std)
    if data.labels:
        y = torch.tensor([agreement.classes.index(name) for name in data.labels])[y]
    return ClientData(scaled.unsqueeze(0), y.unsqueeze(0), torch.ones(1, len(x)))
