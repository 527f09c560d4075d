"""The state in a run's checkpoint, put together from its files, and clients to put it into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from corefed.base.types import Tree
from corefed.settings.config import resolve, to_dict
from corefed.training import checkpoint, record, segments


class Stacked:
    """Private state of some clients."""

    def __init__(self, private: Tree) -> None:
        self.private = private

    def take(self, rows: Sequence[int]) -> Tree:
        return {k: v[list(rows)] for k, v in self.private.items()}

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        for k, v in self.private.items():
            v[list(rows)] = tree[k]


def loaded(folder: Path, part: str = "") -> checkpoint.Loaded:
    values = to_dict(resolve(folder / record.EXPERIMENT))
    found = checkpoint.load(folder, values, part)
    assert found is not None, f"{folder} has no checkpoint"
    return found


def state_of(folder: Path) -> dict[str, Tensor]:
    """server.G.NAME, and private.NAME with the newest version of each row that was ever written."""
    found = loaded(folder)
    tensors = segments.pack_server(found.servers)
    newest: dict[int, dict[str, Tensor]] = {}
    for rows, tree in found.pieces():
        newest |= {row: {k: v[i] for k, v in tree.items()} for i, row in enumerate(rows)}
    order = sorted(newest)
    names = newest[order[0]] if order else {}
    return tensors | {f"private.{k}": torch.stack([newest[row][k] for row in order]) for k in names}


def bits_of(folder: Path) -> dict[str, bytes]:
    """The same as bytes, to be compared."""
    return {
        name: value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in state_of(folder).items()
    }
