"""Named data sets: find or fetch the official files, read them strictly, check them once.

A set is one pool of points. The official test points are marked in `held_out`, not set apart,
because the split protocols of this line of work pool both files before dealing points to clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.config import LOCAL
from corefed.data import (
    cifar,
    embedding,
    fetch,
    hoelder,
    idx,
    images,
    medmnist,
    networks,
    npz,
    synthetic,
    table,
)
from corefed.data.cells import shown
from corefed.data.columns import Layout
from corefed.data.pictures import ImageSet
from corefed.data.table import Settings
from corefed.errors import UserError

if TYPE_CHECKING:
    from corefed.config import Embedding


class Dataset(NamedTuple):
    """One pool of points, before any client exists."""

    name: str
    x: Tensor  # [N, ...] float32, uint8 for the levels 0..255 of what runs from 0 to 1, or float64
    y: Tensor  # [N] int64 class indices, or [N, d] float32 regression targets
    classes: int  # 0 for regression
    groups: Tensor | None = None  # [N] int64 natural client of each point
    held_out: Tensor | None = None  # [N] bool, the official test points
    labels: tuple[str, ...] = ()  # names of the classes; empty: their numbers
    keep_split: bool = False  # no partition may deal a held-out point for training
    notes: tuple[str, ...] = ()  # what whoever reads results should know, such as points left out
    columns: tuple[str, ...] = ()  # names of the features in their order; empty: they have none
    group_names: tuple[str, ...] = ()  # of the natural clients; empty: they have none
    layout: Layout | None = None  # of a table, whose missing numbers are NaN in x
    embedding: str = ""  # of images: the frozen network they went through, or none
    standardise: bool = False  # regression targets are learnt in standard deviations

    def values(self, rows: Tensor) -> Tensor:
        """x of some points in float32; a large pool of bytes is never converted as a whole."""
        x = self.x[rows]
        return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x


_DESCRIPTIONS = {
    "digits": "1797 handwritten digits of 8x8 pixels, 10 classes; built in, from scikit-learn",
    "mnist": "70000 handwritten digits of 28x28 pixels, 10 classes",
    "fashion-mnist": "70000 articles of clothing of 28x28 pixels, 10 classes",
    "cifar10": "60000 photographs of 32x32 pixels in colour, 10 classes",
    "image-folder:PATH": "your images, in PATH/CLASS/ or PATH/{train,test}/CLASS/",
    "medmnist:PATH": "a MedMNIST file (.npz), such as octmnist.npz",
    "table:PATH": "your table (.csv, .parquet): --target COLUMN, --client COLUMN",
    "npz:PATH": "your arrays (.npz): X and y, and client where it says whose points they are",
    "synthetic-linear": "linear regression, coefficients differ by client; exact posterior known",
    "synthetic-regression": "smooth non-linear regression, one function a client",
    "synthetic-hoelder": "functions of smoothness beta on curved data of some dimension; write "
    "synthetic-hoelder:beta=1,dimension=2,points=1000 for others",
}


def names() -> dict[str, str]:
    """Every name `load` knows, with one line about it."""
    return dict(_DESCRIPTIONS)


IMAGES = ("image-folder:", "medmnist:")
"""Beginnings of names that take a path; what lies there is embedded, or becomes raw pixels."""


def has_images(name: str, embedding: Embedding = "auto") -> bool:
    """Whether the points of a set are [channels, height, width], and not rows of features."""
    return name == cifar.NAME or (name.startswith(IMAGES) and embedding == "none")


def embedding_for(name: str, embedding: Embedding) -> Embedding:
    """What `auto` means for a set of images on this machine; of no meaning to other sets."""
    return networks.choose(embedding) if name.startswith(IMAGES) else embedding


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    download: bool = True,
    seed: int = 0,
    clients: int = 10,
    classes: Sequence[str] = (),
    embedding: Embedding = "auto",
    bad_images: str = "refuse",
    memory_mb: int = 4096,
    labels_only: bool = False,
    partial: bool = False,
    reading: Settings | None = None,
) -> Dataset:
    """The named set, checked; of some of its classes, if they are given by name or number.

    `seed` and `clients` matter to synthetic sets only, `reading` to tables and .npz. What follows
    `classes` otherwise matters to sets of images: `labels_only` leaves them unread and x empty;
    `partial` is for a client's own folder, which may lack classes that others have.
    """
    reading = reading or Settings()
    _check_reading(name, reading)
    if name == LOCAL:
        raise UserError(
            "Local data are what each client of a federation reads on its own machine: use "
            "`corefed federation`, or name a data set."
        )
    if name.startswith(IMAGES):
        found = _find_images(name, data_dir, memory_mb, partial)
        dataset = _embed(name, found, None if labels_only else embedding, bad_images)
    elif name.startswith("table:"):
        dataset = table.read(_path(name, data_dir), reading, memory_mb)
    elif name.startswith("npz:"):
        path = _path(name, data_dir)
        dataset = npz.read(path, memory_mb, reading.client_column, reading.task)
        if len(dataset.y.unique(dim=0)) == 1:
            raise UserError(f"y in {path} has one value only; there is nothing to learn.")
        dataset = dataset._replace(standardise=dataset.classes == 0)
    elif name.partition(":")[0] == hoelder.NAME:
        rough = hoelder.draw(hoelder.parse(name), clients, seed)
        dataset = Dataset(name, rough.x, rough.y, 0, rough.groups, rough.held_out, keep_split=True)
    elif name not in _DESCRIPTIONS or name.endswith(":PATH"):
        raise UserError(_unknown(name))
    elif name == "digits":
        dataset = _load_digits()
    elif name in idx.IDX_SOURCES:
        x, y, held_out = idx.load(name, data_dir, download)
        dataset = Dataset(name, x, y, classes=10, held_out=held_out)
    elif name == cifar.NAME:
        x, y, held_out = cifar.load(data_dir, download)
        dataset = Dataset(name, x, y, len(cifar.LABELS), held_out=held_out, labels=cifar.LABELS)
    elif name == "synthetic-linear":
        linear = synthetic.linear_gaussian(clients, seed=seed)
        dataset = Dataset(name, linear.x, linear.y, 0, linear.groups)
    else:
        smooth = synthetic.smooth_regression(clients, seed=seed)
        dataset = Dataset(name, smooth.x, smooth.y, 0, smooth.groups)
    check(dataset)
    dataset = select(dataset, classes) if classes else dataset
    return without_small(dataset, reading.smallest_client) if dataset.group_names else dataset


def _check_reading(name: str, reading: Settings) -> None:
    """Settings of tables for something else are a mistake."""
    if name.startswith("table:") or name in ("table", "npz"):  # the latter are refused next
        return
    given = {key: getattr(reading, key) for key in ("target", "categorical", "ignore")}
    if not name.startswith("npz:"):
        given["client_column"] = reading.client_column
    wrong = next((key for key, value in given.items() if value), None)
    if wrong is not None:
        raise UserError(f"{wrong} is a setting of table:PATH; {name} has no columns.")


def without_small(dataset: Dataset, smallest: int) -> Dataset:
    """Without the natural clients that have fewer points, who are named in a note."""
    assert dataset.groups is not None
    counts = dataset.groups.bincount(minlength=len(dataset.group_names))
    kept = counts >= smallest
    if bool(kept.all()):
        return dataset
    if not bool(kept.any()):
        raise UserError(
            f"No client of {dataset.name} has {smallest} points; the largest has "
            f"{int(counts.max())}. Use a column with fewer values, or a smaller smallest_client."
        )
    names = dataset.group_names
    small = [name for name, keep in zip(names, kept.tolist(), strict=True) if not keep]
    places = kept.cumsum(0) - 1
    dataset = _rows(dataset, kept[dataset.groups])
    assert dataset.groups is not None
    note = (
        f"{len(small)} of {len(names)} clients have fewer than {smallest} points and are left out: "
        f"{shown(small, 10)}."
    )
    return dataset._replace(
        groups=places[dataset.groups],
        group_names=tuple(name for name in names if name not in small),
        notes=(*dataset.notes, note),
    )


def _rows(dataset: Dataset, kept: Tensor) -> Dataset:
    """Some of its points."""
    return dataset._replace(
        x=dataset.x[kept],
        y=dataset.y[kept],
        groups=None if dataset.groups is None else dataset.groups[kept],
        held_out=None if dataset.held_out is None else dataset.held_out[kept],
    )


def look(name: str, data_dir: Path | None) -> npz.Look | None:
    """What an .npz file is like, before it is read; None for other data."""
    return npz.look(_path(name, data_dir)) if name.startswith("npz:") else None


def select(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """The points of some classes, by name or number, which are renumbered in the order given."""
    if dataset.classes == 0:
        raise UserError(f"{dataset.name} is a regression; it has no classes to choose from.")
    names = dataset.labels or tuple(map(str, range(dataset.classes)))
    known = {name.casefold(): number for number, name in enumerate(names)}
    known |= {str(number): number for number in range(dataset.classes)}
    known |= {name: number for number, name in enumerate(names)}
    chosen = [known.get(name, known.get(name.casefold(), -1)) for name in classes]
    if -1 in chosen:
        wrong = classes[chosen.index(-1)]
        raise UserError(f"{dataset.name} has no class {wrong!r}; it has {', '.join(names)}.")
    if len(set(chosen)) < max(2, len(chosen)):
        raise UserError(f"classes is {', '.join(classes)}; it must be two or more different ones.")
    places = torch.full((dataset.classes,), -1)
    places[chosen] = torch.arange(len(chosen))
    dataset = _rows(dataset, places[dataset.y] >= 0)
    return dataset._replace(
        y=places[dataset.y],
        classes=len(chosen),
        labels=tuple(names[number] for number in chosen),
    )


def _unknown(name: str) -> str:
    kind = name.partition(":")[0]
    bare = {known.partition(":")[0]: known for known in _DESCRIPTIONS}
    if kind in bare:
        return f"Data set {name!r} is not written like that; write {bare[kind]}."
    nearest = get_close_matches(kind, bare, n=1)
    hint = f" Did you mean {bare[nearest[0]]!r}?" if nearest else ""
    return f"There is no data set {name!r}.{hint} Known: {', '.join(_DESCRIPTIONS)}."


def _find_images(name: str, data_dir: Path | None, memory_mb: int, partial: bool) -> ImageSet:
    path = _path(name, data_dir)
    if name.startswith("image-folder:"):
        return images.find(path, partial=partial)
    return medmnist.find(path, memory_mb)


def _path(name: str, data_dir: Path | None) -> Path:
    kind, _, written = name.partition(":")
    if not written or written == "PATH":
        raise UserError(f"Data set {name!r} names no path; write {kind}:PATH with yours.")
    return fetch.named(written, data_dir)


def _embed(name: str, found: ImageSet, embedder: Embedding | None, bad_images: str) -> Dataset:
    if embedder is None:
        x, y, notes = torch.zeros(len(found.y), 0), torch.from_numpy(found.y), found.notes
        held_out = None if found.held_out is None else torch.from_numpy(found.held_out)
    else:
        x, y, held_out, notes = embedding.embed(found, embedder, bad_images)
    return Dataset(
        name,
        x,
        y,
        len(found.labels),
        held_out=held_out,
        labels=found.labels,
        keep_split=held_out is not None,
        notes=notes,
        embedding=embedder or "",
    )


def check(dataset: Dataset) -> None:
    """Refuse data that would poison training silently: emptiness, NaN, labels out of range."""
    name, x, y, classes = dataset.name, dataset.x, dataset.y, dataset.classes
    if len(x) == 0:
        raise UserError(f"Data set {name!r} is empty: it needs at least one point.")
    if len(x) != len(y):
        raise UserError(f"Data set {name!r} has {len(x)} points but {len(y)} labels or targets.")
    if x.is_floating_point() and dataset.layout is None:
        _check_finite(name, "features", x)
    if classes == 0:
        _check_finite(name, "regression targets", y)
        return
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"Data set {name!r} has {int(wrong.sum())} labels outside 0..{classes - 1}; the first "
            f"is {int(y[row])} in row {row}. Renumber the labels from 0, or remove those rows."
        )


def _check_finite(name: str, what: str, values: Tensor) -> None:
    bad = ~torch.isfinite(values)
    if bad.any():
        rows = bad.reshape(len(values), -1).any(-1).nonzero()
        raise UserError(
            f"Data set {name!r} has {int(bad.sum())} NaN or infinite {what} in {len(rows)} rows, "
            f"the first in row {int(rows[0])}. Impute or remove those rows."
        )


def _load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).to(torch.float32) / 16  # grey levels are 0..16
    return Dataset("digits", x, torch.from_numpy(labels).to(torch.int64), classes=10)
