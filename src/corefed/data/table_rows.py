"""The rows of a table, block by block: features, targets and clients, without Python's own text.

Names of classes and clients are numbered as they are read, so that ten million rows of them take
four bytes each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns, values
from corefed.data.columns import Column
from corefed.data.file_rows import Scratch
from corefed.data.sources import Source
from corefed.data.streaming import of_rows
from corefed.data.values import Numbers


class Names:
    """The names in a column, as numbers in the order in which they are first seen."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.parts: list[npt.NDArray[np.int32]] = []

    def add(self, names: list[str], places: values.Places) -> None:
        """A block's different names, and the place of each row's name among them."""
        used = np.unique(places)
        codes = np.zeros(len(names), np.int32)
        for at in used.tolist():
            codes[at] = self.known.setdefault(names[at], len(self.known))
        self.parts.append(codes[places])

    def numbered(self, order: Tensor) -> Tensor:
        """[n] the number of each row's name, where the k-th name seen has number order[k].

        Part by part, and the parts are gone afterwards: of many rows, each copy counts.
        """
        found = torch.empty(sum(map(len, self.parts)), dtype=torch.int64)
        done = 0
        for part in self.parts:
            found[done : (done := done + len(part))] = order[torch.from_numpy(part)]
        self.parts.clear()
        return found


class Rows(NamedTuple):
    x: Tensor  # [n, width] float64
    targets: Names  # of classes
    numbers: list[Numbers]  # the targets of a regression, in parts
    clients: Names
    left_out: dict[str, int]  # rows without a target or a client


def read(
    source: Source,
    special: tuple[str, str],
    layout: tuple[Column, ...],
    rows: int,
    task: str,
    *,
    streamed: bool = False,
) -> Rows:
    """All rows whose target and client, the columns of `special`, are known.

    `streamed` features are unpacked to a file: a client's rows are all over a table, which would
    be read whole for every client.
    """
    target = special[0]
    width = columns.width(layout)
    scratch = Scratch((width,), torch.float64) if streamed else None
    x = np.empty((0 if streamed else rows, width))
    targets, clients, measured = Names(), Names(), list[Numbers]()
    left_out = {"target": 0, "client": 0}
    seen = filled = 0
    named_columns = [name for name in special if name]
    for block in source.blocks([*(column.name for column in layout), *named_columns]):
        features, _ = columns.encode(layout, block, source.at)
        cells = block.cells[target]
        there: list[npt.NDArray[np.bool_]] = []
        named: dict[str, tuple[list[str], values.Places]] = {}
        for name in named_columns:
            if name == target and task == "regression":
                there.append(~np.isnan(values.numbers(cells)[0]))
                continue
            named[name] = values.coded(block.cells[name])
            there.append(np.array([each != "" for each in named[name][0]])[named[name][1]])
        kept = np.logical_and.reduce(there)
        lacking = int((~there[0]).sum())
        left_out["target"] += lacking
        left_out["client"] += int((~kept).sum()) - lacking
        count = int(kept.sum())
        seen += len(kept)
        if seen > rows:
            break
        if scratch is not None:
            scratch.append(features[kept])
        else:
            x[filled : filled + count] = features[kept]
        filled += count
        for name, into in zip(special, (targets, clients), strict=True):
            if name in named:
                into.add(named[name][0], named[name][1][kept])
        if task == "regression":
            measured.append(values.numbers(cells)[0][kept])
    if seen != rows:
        raise UserError(f"{source.path} changed while it was read; try again.")
    if not filled:
        raise UserError(
            f"Every row of {source.path} lacks its target or its client; there is nothing to learn."
        )
    held = torch.from_numpy(x[:filled])
    if scratch is not None:
        held = of_rows(scratch.rows(), filled)
    return Rows(held, targets, measured, clients, left_out)
