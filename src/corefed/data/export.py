"""Write a split to disk, one file per client, for a real federation on simulated clients.

client-I.npz has X_train, y_train, X_test and y_test of client I, before scaling. Rows of a table
are features as a run trains on them, scaled and with missing numbers filled in: points are read in
float32, where 1e9 and 1e9 + 1 are one number.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from corefed.base import files
from corefed.data import scaling
from corefed.data.dataset import Dataset
from corefed.data.partition import Split


def write(dataset: Dataset, splits: Sequence[Split], folder: Path, scale: str = "features") -> None:
    """Write all clients' files, or none, into a new or empty folder; `scale` is that of a table."""
    files.refuse_existing(folder, "name a new folder for the clients' data")
    files.write_folder(folder, _contents(dataset, splits, scale))


def _contents(dataset: Dataset, splits: Sequence[Split], scale: str) -> Iterator[tuple[str, bytes]]:
    """One at a time, because together they may be large."""
    names = [f"client {client}" for client in range(len(splits))]
    table = dataset.layout is not None
    preparation = scaling.fit(dataset, splits, scale, names) if table else None

    def features(rows: Tensor, name: str) -> Tensor:
        x = dataset.values(rows)
        return x if preparation is None else preparation.scale(x, name)

    for client, (name, one) in enumerate(zip(names, splits, strict=True)):
        content = io.BytesIO()
        np.savez(
            content,
            X_train=features(one.train, name).numpy(),
            y_train=dataset.y[one.train].numpy(),
            X_test=features(one.test, name).numpy(),
            y_test=dataset.y[one.test].numpy(),
        )
        yield f"client-{client}.npz", content.getvalue()
