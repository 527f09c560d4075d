"""Read new points for a trained network: to predict them, or to train a newcomer.

    trained on arrays     an .npz with X and perhaps y; an .npy
    trained on a table    a .csv, .tsv or .parquet with the same columns, in any order
    trained on images     a folder of images, or with one folder per class

An .npz without X may have X_test, which is predicted, and X_train, which is trained on. Points are
scaled by what was fixed on training points (`preparation.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns, raw, raw_table, scaling
from corefed.data.preparation import Preparation
from corefed.data.raw import Raw


class Inputs(NamedTuple):
    """n points of one client."""

    x: Tensor  # [n, *shape] float32, ready for the network
    y: Tensor | None  # [n] class indices, or [n, d] targets in their own unit; None: none
    ids: tuple[str, ...]  # [n] the value of an identifying column, or the row number
    notes: tuple[str, ...]  # for readers of the predictions
    preparation: Preparation  # as given, or with the scale of a new client


def read(
    path: Path,
    preparation: Preparation,
    client: str,
    *,
    target_wanted: bool = False,
    memory_mb: int = 4096,
) -> Inputs:
    """All points of the file, for a client; unknown classes in y are refused.

    With `target_wanted`, for training, a file without a target is refused.
    """
    found = read_raw(path, preparation, target_wanted=target_wanted, memory_mb=memory_mb)
    return prepare(found, preparation, client)


def read_raw(
    path: Path, preparation: Preparation, *, target_wanted: bool = False, memory_mb: int = 4096
) -> Raw:
    """All points of the file, before scaling."""
    if not path.exists():
        raise UserError(f"There is no {path}; give a file of points to read.")
    if preparation.kind == "table":
        return raw_table.read(path, preparation, target_wanted, memory_mb)
    if preparation.kind == "images":
        return raw.read_images(path, preparation, target_wanted)
    return raw.read_array(path, preparation, target_wanted, memory_mb)


def prepare(found: Raw, preparation: Preparation, client: str) -> Inputs:
    """The points, scaled for a client.

    Where clients have their own scales, the scale of a new client is that of these points.
    """
    numbers = torch.ones(math.prod(preparation.shape), dtype=torch.bool)
    if preparation.kind == "table":
        numbers = torch.tensor(columns.numbers(preparation.columns))
    preparation = scaling.add_client(preparation, client, found.x, numbers)
    x = preparation.scale(found.x, client)
    return Inputs(x, found.y, tuple(found.ids), tuple(found.notes), preparation)
