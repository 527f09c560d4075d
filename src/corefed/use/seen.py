"""Whether rows to predict are rows that the run was trained on.

A run keeps nothing about single rows. So its table is read again, if it is still there and small,
and has not changed since; then the run's own split says which rows were training rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from corefed.base.errors import UserError
from corefed.data import fingerprint, hints, partition
from corefed.data.raw import Raw
from corefed.training import fitted, setup
from corefed.training.fitted import Fitted

TABLE = "table:"

LARGEST = 1 << 26
"""Bytes of a table that is read again: 64 MiB, which take about three seconds."""


def note(run: Fitted, raw: Raw, g: int) -> list[str]:
    """A sentence about rows of `raw` that seed number g was trained on; empty: none are known.

    New rows may be like training rows by chance, where there are few different values. How often
    that happens is seen from the run's own test rows.
    """
    settings = run.experiment.run
    path = Path(settings.data.removeprefix(TABLE))
    if not settings.data.startswith(TABLE) or not path.is_file() or path.stat().st_size > LARGEST:
        return []
    seed = settings.seeds[g]
    try:
        dataset = setup.pool(settings, settings.partition, seed)
        kept = fitted.read_data(run.folder).get("fingerprint")
        if not kept or fingerprint.difference(kept, fingerprint.of(dataset)):
            return []
        count = partition.client_count(settings.partition, dataset, settings.clients)
        splits = setup.split(settings, settings.partition, dataset, count, seed)
    except UserError:  # what was read in training cannot be read any more: it has changed
        return []
    if raw.y is None:
        known, here = hints.hash_points(dataset.x), hints.hash_points(raw.x)
    else:
        known, here = hints.hash_rows(dataset), hints.hash_points(raw.x, raw.y)
    trained = known[torch.cat([one.train for one in splits]).numpy()]
    tested = known[torch.cat([one.test for one in splits]).numpy()]
    seen = int(np.isin(here, trained).sum())
    by_chance = float(np.isin(tested, trained).mean()) * len(here) if len(tested) else 0.0
    if seen <= by_chance + 3 * by_chance**0.5:
        return []
    return [
        f"{seen} of {len(here)} rows are rows that the run was trained on; models do better on "
        "those than on new ones, so judge them by other rows."
    ]
