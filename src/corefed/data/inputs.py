"""Read a file of new points as a trained network sees them: to predict, or to join later.

    trained on arrays     an .npz with X and, where it is there, y; an .npy
    trained on a table    a .csv, .tsv or .parquet with the same columns, in any order
    trained on images     a folder with a folder a class, or of images

An .npz without X may have X_test and X_train: the former is predicted, the latter trained on. A
point is made ready by what was fixed on training points alone (`preparation.py`).
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


class Inputs(NamedTuple):
    """n points of one client."""

    x: Tensor  # [n, *shape] float32, ready for the network
    y: Tensor | None  # [n] class indices, or [n, d] targets in their own unit; None: not there
    ids: tuple[str, ...]  # [n] what names a row: the value of an identifying column, or its number
    notes: tuple[str, ...]  # what whoever reads predictions should know
    preparation: Preparation  # as given, or with the scale of a client that is new


def read(
    path: Path,
    preparation: Preparation,
    client: str,
    *,
    target_wanted: bool = False,
    memory_mb: int = 4096,
) -> Inputs:
    """All points of the file, for a client; y is refused where it has a class that is not known.

    `target_wanted`: for training, so that a file without a target is refused. Where scales are the
    clients' own and this client is new, its scale is that of these points.
    """
    if not path.exists():
        raise UserError(f"There is no {path}; give a file of points to read.")
    numbers = torch.ones(math.prod(preparation.shape), dtype=torch.bool)
    if preparation.kind == "table":
        found = raw_table.read(path, preparation, target_wanted, memory_mb)
        numbers = torch.tensor(columns.numbers(preparation.columns))
    elif preparation.kind == "images":
        found = raw.read_images(path, preparation, target_wanted)
    else:
        found = raw.read_array(path, preparation, target_wanted, memory_mb)
    preparation = scaling.add_client(preparation, client, found.x, numbers)
    x = preparation.scale(found.x, client)
    return Inputs(x, found.y, tuple(found.ids), tuple(found.notes), preparation)
