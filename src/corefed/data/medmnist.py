"""MedMNIST's files: {train,val,test}_{images,labels} in one .npz, read strictly.

Images are uint8 [N, s, s] or [N, s, s, 3], labels whole numbers [N, 1]. Validation images join the
training images.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corefed.base.errors import UserError
from corefed.data.pictures import ImageSet, Pictures, require_pillow, rgb

PARTS = ("train", "val", "test")
LABELS: dict[str, tuple[str, ...]] = {"octmnist": ("cnv", "dme", "drusen", "normal")}
"""Names of the classes, which the files lack: choroidal neovascularization, diabetic macular edema,
drusen, normal. Other sets' classes are numbers."""

Array = npt.NDArray[Any]


def find(path: Path, memory_mb: int) -> ImageSet:
    """The images of a file, in memory, after its sizes are checked."""
    require_pillow()
    arrays = _arrays(path, memory_mb)
    images = [arrays[f"{part}_images"] for part in PARTS]
    y = np.concatenate([arrays[f"{part}_labels"].reshape(-1) for part in PARTS]).astype(np.int64)
    names = [
        f"{part}_images[{row}]" for part in PARTS for row in range(len(arrays[f"{part}_images"]))
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
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in wanted if name not in inside]
            if missing:
                raise UserError(
                    f"{path} has no array {missing[0]}; a MedMNIST file has {', '.join(wanted)}."
                )
            shapes = {}
            for name in wanted:
                with archive.open(inside[name]) as stream:
                    shapes[name] = _shape(stream, name, inside[name].file_size, path)
        _check_shapes(shapes, path)
        needed = sum(math.prod(shape) for shape in shapes.values()) / 2**20
        if needed > memory_mb:
            raise UserError(
                f"{path} needs {needed:.0f} MB of memory, more than the {memory_mb} MB allowed; "
                "raise memory_mb, or use a file of smaller images."
            )
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in wanted}
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise UserError(f"{path} is not a whole .npz file: {error}.") from error


def _shape(stream: Any, name: str, size: int, path: Path) -> tuple[int, ...]:
    """What an array says it is, before any of it is unpacked."""
    version = np.lib.format.read_magic(stream)
    header = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = header(stream)
    kinds = "u" if name.endswith("images") else "ui"
    if dtype.kind not in kinds or (kinds == "u" and dtype.itemsize != 1):
        wanted = "uint8" if kinds == "u" else "whole numbers"
        raise UserError(f"{name} in {path} is {dtype}; it must be {wanted}.")
    if math.prod(shape) * dtype.itemsize > size:
        raise UserError(f"{name} in {path} says it has shape {shape}, more than there is in it.")
    return tuple(shape)


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
                f"{part}_labels in {path} has shape {labels}; only one label an image is known."
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
