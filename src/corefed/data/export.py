"""Write a split to disk, one file per client, for a real federation on simulated clients.

client-I.npz has X_train, y_train, X_test and y_test of client I, before scaling. Rows of a table
are features, with missing numbers filled in.
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


def write(dataset: Dataset, splits: Sequence[Split], folder: Path) -> None:
    """Write all clients' files, or none, into a new or empty folder."""
    files.refuse_existing(folder, "name a new folder for the clients' data")
    files.write_folder(folder, _contents(dataset, splits))


def _contents(dataset: Dataset, splits: Sequence[Split]) -> Iterator[tuple[str, bytes]]:
    """One at a time, because together they may be large."""
    filled = scaling.fit(dataset, splits, "unit", ()) if dataset.layout is not None else None

    def features(rows: Tensor) -> Tensor:
        x = dataset.values(rows)
        return x if filled is None else filled.scale(x)

    for client, one in enumerate(splits):
        content = io.BytesIO()
        np.savez(
            content,
            X_train=features(one.train).numpy(),
            y_train=dataset.y[one.train].numpy(),
            X_test=features(one.test).numpy(),
            y_test=dataset.y[one.test].numpy(),
        )
        yield f"client-{client}.npz", content.getvalue()
