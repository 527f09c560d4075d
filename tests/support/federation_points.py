"""Files for the clients of a federation with the very points that a simulation would deal them."""

from __future__ import annotations

from pathlib import Path

from corefed.data import datasets, export, partition
from corefed.settings.run import Run


def deal(run: Run, folder: Path) -> None:
    """client-0.npz and so on."""
    (seed,) = run.seeds
    dataset = datasets.load(run.data, seed=seed, clients=run.clients)
    spec = run.partition or partition.default_for(run.data)
    splits = partition.split(spec, dataset, run.clients, seed)
    export.write(dataset, partition.thin(splits, run.keep, seed), folder)
