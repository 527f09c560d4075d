"""Data sets by name: find or download the files, read them strictly, check them once.

A set is one pool of points. Official test points are only marked (`held_out`), because the split
protocols of the literature pool both files before they split the points between clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from corefed.base.errors import UserError, did_you_mean
from corefed.data import (
    cifar,
    digits,
    embedding,
    fetch,
    hoelder,
    idx,
    images,
    medmnist,
    networks,
    npz,
    sources,
    synthetic,
    table,
)
from corefed.data.dataset import Dataset, check, select, without_small
from corefed.data.pictures import ImageSet
from corefed.data.table import Settings
from corefed.settings.run import LOCAL

if TYPE_CHECKING:
    from corefed.settings.run import Embedding


_DESCRIPTIONS = {
    "digits": "1797 handwritten digits of 8x8 pixels, 10 classes; built in, from scikit-learn",
    "mnist": "70000 handwritten digits of 28x28 pixels, 10 classes",
    "fashion-mnist": "70000 articles of clothing of 28x28 pixels, 10 classes",
    "cifar10": "60000 photographs of 32x32 pixels in colour, 10 classes",
    "image-folder:PATH": "your images, in PATH/CLASS/ or PATH/{train,test}/CLASS/; --client folder "
    "for PATH/SITE/CLASS/",
    "medmnist:PATH": "a MedMNIST file (.npz), such as octmnist.npz",
    "table:PATH": "your table (.csv, .parquet): --target COLUMN, --client COLUMN",
    "npz:PATH": "your arrays (.npz): X and y, and client where it says whose points they are",
    "synthetic-linear": "linear regression, coefficients differ by client; exact posterior known",
    "synthetic-regression": "smooth non-linear regression, one function per client",
    "synthetic-hoelder": "functions of smoothness beta on curved data of some dimension; write "
    "synthetic-hoelder:beta=1,dimension=2,points=1000 for others",
}


def names() -> dict[str, str]:
    """Every name that `load` knows, with a description."""
    return dict(_DESCRIPTIONS)


IMAGES = ("image-folder:", "medmnist:")
"""Prefixes of image data; the images are embedded, or become raw pixels."""


def has_images(name: str, embedding: Embedding = "auto") -> bool:
    """Whether points are [channels, height, width] rather than rows of features."""
    return name == cifar.NAME or (name.startswith(IMAGES) and embedding == "none")


def embedding_for(name: str, embedding: Embedding) -> Embedding:
    """Resolve `auto` for a set of images; other sets ignore it."""
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
    """The named set, checked; only some classes where they are given by name or number.

    `seed` and `clients` are for synthetic sets, `reading` for tables and .npz. `embedding`,
    `bad_images`, `labels_only` and `partial` are for images: `labels_only` leaves them unread and x
    empty; `partial` is for one client's folder, which may lack classes.
    """
    reading = reading or Settings()
    _check_reading(name, reading)
    if name == LOCAL:
        raise UserError(
            "Local data are what each client of a federation reads on its own machine: use "
            "`corefed federation`, or name a data set."
        )
    if name.startswith(IMAGES):
        path = _path(name, data_dir)
        if name.startswith("image-folder:"):
            found = images.find(
                path, partial=partial, clients=reading.client_column, classes=classes
            )
        else:
            found = medmnist.find(path, memory_mb)
        dataset = _embed(
            name, found, None if labels_only else embedding, bad_images, streamed=reading.streamed
        )
    elif name.startswith("table:"):
        dataset = table.read(_path(name, data_dir), reading, memory_mb)
    elif name.startswith("npz:"):
        path = _path(name, data_dir)
        dataset = npz.read(
            path, memory_mb, reading.client_column, reading.task, streamed=reading.streamed
        )
        if len(dataset.y.unique(dim=0)) == 1:
            raise UserError(f"y in {path} has one value only; there is nothing to learn.")
        dataset = dataset._replace(standardise=dataset.classes == 0)
    elif name.partition(":")[0] == hoelder.NAME:
        rough = hoelder.draw(hoelder.parse(name), clients, seed)
        dataset = Dataset(name, rough.x, rough.y, 0, rough.groups, rough.held_out, keep_split=True)
    elif name not in _DESCRIPTIONS or name.endswith(":PATH"):
        raise UserError(_unknown(name))
    elif name == "digits":
        dataset = digits.load()
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
    """Refuse table settings for other data."""
    if name.startswith("table:") or name in ("table", "npz"):  # the latter are refused next
        return
    given = {key: getattr(reading, key) for key in ("target", "categorical", "ignore")}
    if not name.startswith(("npz:", "image-folder:")):
        given["client_column"] = reading.client_column
    wrong = next((key for key, value in given.items() if value), None)
    if wrong is not None:
        raise UserError(f"{wrong} is a setting of table:PATH; {name} has no columns.")


def look(name: str, data_dir: Path | None) -> npz.Outline | None:
    """The outline of an .npz file, from its headers; None for other data."""
    return npz.look(_path(name, data_dir)) if name.startswith("npz:") else None


def _unknown(name: str) -> str:
    ending = Path(name).suffix.lower()
    kinds = {**dict.fromkeys((*sources.CSV, *sources.PARQUET), "table"), ".npz": "npz"}
    if ending in kinds or ending in (".xlsx", ".xls"):
        kind = kinds.get(ending)
        if kind is None:
            return f"{name} is an Excel file; save it in Excel as CSV, and write table:FILE.csv."
        more = " --target COLUMN" if kind == "table" else ""
        return f"There is no data set {name!r}; for that file write --data {kind}:{name}{more}."
    if Path(name).is_dir():
        return f"There is no data set {name!r}; for a folder of images write image-folder:{name}."
    kind = name.partition(":")[0]
    bare = {known.partition(":")[0]: known for known in _DESCRIPTIONS}
    if kind in bare:
        return f"Data set {name!r} is not written like that; write {bare[kind]}."
    hint = did_you_mean(kind, bare, written=bare)
    return f"There is no data set {name!r}.{hint} Known: {', '.join(_DESCRIPTIONS)}."


def _path(name: str, data_dir: Path | None) -> Path:
    kind, _, written = name.partition(":")
    if not written or written == "PATH":
        raise UserError(f"Data set {name!r} names no path; write {kind}:PATH with yours.")
    return fetch.find_path(written, data_dir)


def _embed(
    name: str,
    found: ImageSet,
    embedder: Embedding | None,
    bad_images: str,
    *,
    streamed: bool = False,
) -> Dataset:
    if embedder is None:
        x, y, notes = torch.zeros(len(found.y), 0), torch.from_numpy(found.y), found.notes
        held_out = None if found.held_out is None else torch.from_numpy(found.held_out)
        groups = None if found.groups is None else torch.from_numpy(found.groups)
    else:
        x, y, held_out, notes, groups = embedding.embed(
            found, embedder, bad_images, streamed=streamed
        )
    return Dataset(
        name,
        x,
        y,
        len(found.labels),
        groups,
        held_out=held_out,
        labels=found.labels,
        keep_split=held_out is not None,
        notes=notes,
        group_names=found.group_names,
        embedding=embedder or "",
        digest=found.pictures.digest() if embedder is not None else "",
    )
