"""MedMNIST files: {train,val,test}_{images,labels} in one .npz, read strictly.

Images are uint8 [N, s, s] or [N, s, s, 3], labels whole numbers [N, 1]. Validation images join the
training images.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corefed.base import arrays
from corefed.base.arrays import Array
from corefed.base.errors import UserError
from corefed.data.pictures import ImageSet, Pictures, require_pillow, rgb

PARTS = ("train", "val", "test")
LABELS: dict[str, tuple[str, ...]] = {"octmnist": ("cnv", "dme", "drusen", "normal")}
"""Names of the classes, which the files lack. Other sets' classes are numbers."""


def find(path: Path, memory_mb: int) -> ImageSet:
    """The images of a file, in memory; its sizes are checked first."""
    require_pillow()
    stored = _arrays(path, memory_mb)
    images = [stored[f"{part}_images"] for part in PARTS]
    y = np.concatenate([stored[f"{part}_labels"].reshape(-1) for part in PARTS]).astype(np.int64)
    names = [
        f"{part}_images[{row}]" for part in PARTS for row in range(len(stored[f"{part}_images"]))
    ]
    held_out = np.array([name.startswith("test") for name in names])
    _check_labels(path, y, held_out)
    labels = tuple(map(str, range(int(y.max()) + 1)))
    for stem, known in LABELS.items():
        if path.name.startswith(stem) and len(known) == len(labels):
            labels = known
    starts = np.cumsum([0, *map(len, images)])

    def read(row: int) -> Any:
        from PIL import Image

        part = int(np.searchsorted(starts, row, side="right")) - 1
        return rgb(Image.fromarray(images[part][row - starts[part]]))

    return ImageSet(Pictures(str(path), names, lambda: _digest(path), read), y, held_out, labels)


def _arrays(path: Path, memory_mb: int) -> dict[str, Array]:
    wanted = [f"{part}_{what}" for part in PARTS for what in ("images", "labels")]
    headers = arrays.headers(path)
    missing = [name for name in wanted if name not in headers]
    if missing:
        raise UserError(
            f"{path} has no array {missing[0]}; a MedMNIST file has {', '.join(wanted)}."
        )
    for name in wanted:
        dtype = headers[name].dtype
        right = dtype == np.uint8 if name.endswith("images") else dtype.kind in "ui"
        if not right:
            meant = "uint8" if name.endswith("images") else "whole numbers"
            raise UserError(f"{name} in {path} is {dtype}; it must be {meant}.")
    _check_shapes({name: header.shape for name, header in headers.items()}, path)
    return arrays.load(
        path, wanted, memory_mb, remedy="raise memory_mb, or use a file of smaller images"
    )


def _check_shapes(shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    for part in PARTS:
        images, labels = shapes[f"{part}_images"], shapes[f"{part}_labels"]
        if len(images) not in (3, 4) or (len(images) == 4 and images[3] != 3) or 0 in images[1:3]:
            raise UserError(
                f"{part}_images in {path} has shape {images}; it must be [N, height, width] or "
                "[N, height, width, 3]."
            )
        if images[0] == 0 and part != "val":
            raise UserError(f"{part}_images in {path} is empty.")
        if labels[1:] not in ((), (1,)):
            raise UserError(
                f"{part}_labels in {path} has shape {labels}; it must be one label per image."
            )
        if labels[0] != images[0]:
            raise UserError(f"{path} has {labels[0]} {part} labels for {images[0]} images.")


def _check_labels(path: Path, y: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> None:
    train, test = set(y[~held_out].tolist()), set(y[held_out].tolist())
    if train != test:
        label = sorted(train ^ test)[0]
        there, missing = ("train", "test") if label in train else ("test", "train")
        raise UserError(f"{path} has label {label} in its {there} part but not in {missing}.")
    if train != set(range(len(train))):
        raise UserError(
            f"{path} has labels {y.min()} to {y.max()} with gaps; number them 0, 1, ..."
        )
    if len(train) == 1:
        raise UserError(f"{path} has one class only; there must be two or more.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
