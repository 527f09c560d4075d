"""Read new points before scaling: arrays and images; tables are in `raw_table.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base import arrays
from corefed.base.arrays import Array, Header
from corefed.base.errors import UserError
from corefed.data import class_names, embedding, images
from corefed.data.memory import as_floats
from corefed.data.preparation import Preparation


class Raw(NamedTuple):
    x: Tensor  # [n, *shape], NaN where a table has no number
    y: Tensor | None
    ids: list[str]
    notes: list[str]
    clients: tuple[str, ...] = ()  # [n] whose row it is, by a table's client column; empty: unsaid

    def of(self, rows: Sequence[int]) -> Raw:
        """Some of the rows."""
        return self._replace(
            x=self.x[rows],
            y=None if self.y is None else self.y[rows],
            ids=[self.ids[row] for row in rows],
            clients=tuple(self.clients[row] for row in rows) if self.clients else (),
        )


def indices(where: str, names: Sequence[str], preparation: Preparation) -> Tensor:
    """The network's output for each class name."""
    places = {label: place for place, label in enumerate(preparation.labels)}
    for row, name in enumerate(names):
        if name not in places:
            raise UserError(
                f"{where} has class {name!r} in row {row}, which training did not have; it had "
                f"{', '.join(preparation.labels)}."
            )
    return torch.tensor([places[name] for name in names], dtype=torch.int64)


def read_optional(targets: Callable[[], Tensor], wanted: bool) -> tuple[Tensor | None, list[str]]:
    """Targets that cannot be read are an error where they are wanted, else a note."""
    try:
        return targets(), []
    except UserError as error:
        if wanted:
            raise
        return None, [f"The targets are not read. {error}"]


# --- arrays ---------------------------------------------------------------------------------------


def read_array(path: Path, preparation: Preparation, target_wanted: bool, memory_mb: int) -> Raw:
    """Points of an .npz or .npy file."""
    if path.suffix.lower() not in (".npz", ".npy") or not path.is_file():
        raise UserError(f"{path} is no .npz or .npy file; this model was trained on arrays.")
    headers = arrays.headers(path)
    chosen, targets, notes = _arrays(path, headers, target_wanted)
    if target_wanted and not targets:
        raise UserError(f"{path} has no y; learning from points needs their targets too.")
    _check_array(path, chosen, headers[chosen], preparation)
    stored = arrays.load(
        path,
        [chosen, targets] if targets else [chosen],
        memory_mb,
        working=12 * math.prod(headers[chosen].shape),
        remedy="divide it into several files",
    )
    x = _points(path, chosen, stored[chosen], preparation)
    y, more = None, list[str]()
    if targets:
        y, more = read_optional(
            lambda: _targets(path, targets, stored[targets], preparation), target_wanted
        )
    if y is not None and len(y) != len(x):
        raise UserError(f"{path} has {len(x)} points in {chosen} but {len(y)} in {targets}.")
    return Raw(x, y, [str(row) for row in range(len(x))], [*notes, *more])


def _arrays(
    path: Path, headers: dict[str, Header], target_wanted: bool
) -> tuple[str, str, list[str]]:
    """The names of the arrays of points and of targets (empty: none), and notes."""
    known = {name.lower(): name for name in headers}
    ends = ("", "_train") if target_wanted else ("", "_test", "_train")
    end = next((end for end in ends if f"x{end}" in known), None)
    if end is None:
        there = ", ".join(headers) or "nothing"
        wanted = " or ".join(f"X{end}" for end in ends)
        raise UserError(f"{path} must hold an array {wanted} of points; it holds {there}.")
    x, y = known[f"x{end}"], known.get(f"y{end}", "")
    others = [name for name in headers if name not in (x, y)]
    note = f"{x} of {path} is read; {', '.join(others)} not." if others else ""
    return x, y, [note] if note else []


def _check_array(path: Path, name: str, header: Header, preparation: Preparation) -> None:
    shape, dtype = header
    if dtype.kind not in "fiub":
        raise UserError(f"{name} in {path} is {dtype}, not numbers.")
    point = tuple(shape[1:]) or (1,)
    if not shape or point != preparation.shape:
        raise UserError(
            f"{name} in {path} has shape {shape}; training had points of shape "
            f"{preparation.shape}, so it must be (n, {', '.join(map(str, preparation.shape))})."
        )
    if shape[0] == 0:
        raise UserError(f"{name} in {path} has no points.")


def _points(path: Path, name: str, x: Array, preparation: Preparation) -> Tensor:
    raw = as_floats(x.reshape(len(x), *preparation.shape), f"{name} in {path}")
    return raw.div_(255) if preparation.levels and x.dtype == np.uint8 else raw


def _targets(path: Path, name: str, y: Array, preparation: Preparation) -> Tensor:
    where = f"{name} in {path}"
    if preparation.labels:
        if y.dtype.kind not in "fiubU" or y.size != len(y):
            raise UserError(
                f"{where} is {y.dtype} of shape {y.shape}; it must be one class per point."
            )
        return indices(
            where, [class_names.name_of(each) for each in y.reshape(-1).tolist()], preparation
        )
    width = len(preparation.targets)
    if y.dtype.kind not in "fiub" or y.reshape(len(y), -1).shape[1] != width:
        raise UserError(f"{where} is {y.dtype} of shape {y.shape}; it must be {width} numbers.")
    targets = torch.from_numpy(y.astype(np.float32)).view(len(y), width)
    if not bool(targets.isfinite().all()):
        raise UserError(f"{where} has NaN or infinite numbers.")
    return targets


# --- images ---------------------------------------------------------------------------------------


def read_images(path: Path, preparation: Preparation, target_wanted: bool) -> Raw:
    """A folder with one folder per class, or a plain folder of images, without y."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; this model was trained on images.")
    below, plain = images.list_folder(path)
    if plain and below:
        raise UserError(f"{path} has images beside folders; put them into one or the other.")
    if plain and target_wanted:
        raise UserError(f"{path} has no class folders; learning from images needs their classes.")
    y: Tensor | None = None
    notes: list[str] = []
    if plain:
        pictures = images.pictures(path, plain)
    else:
        found = images.find(path, partial=True)
        pictures = found.pictures
        labels = [found.labels[each] for each in found.y.tolist()]
        y, notes = read_optional(lambda: indices(str(path), labels, preparation), target_wanted)
        notes += found.notes
    x = embedding.features(pictures, preparation.embedding, refuse=True).x
    if preparation.levels:
        x = x[:, : preparation.shape[0]]  # grey, where training was
    if tuple(x.shape[1:]) != preparation.shape:
        raise UserError(f"Images in {path} become {tuple(x.shape[1:])}, not {preparation.shape}.")
    x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x
    return Raw(x, y, list(pictures.names), notes)
