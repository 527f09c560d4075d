"""DataFrames as tables: columns by name, categories one-hot, gaps filled as in a file.

A frame is anything with `columns` and columns that are arrays, such as those of pandas and polars;
neither is imported. Columns of a categorical type are categories, also if they are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns, profile
from corefed.data.cells import BLOCK, shorten
from corefed.data.columns import Column
from corefed.data.profile import Role
from corefed.data.sources import Block, Source
from corefed.data.values import Numbers

CATEGORICAL = ("category", "categorical", "enum")
"""Types of pandas and polars."""

FrameCells = Sequence[str] | Numbers


class Frame(NamedTuple):
    """The columns of a DataFrame as cells."""

    cells: dict[str, FrameCells]
    unfit: dict[str, str]  # columns that are neither numbers nor text, and what they are
    categorical: frozenset[str]
    rows: int

    def of(self, rows: Sequence[int]) -> Frame:
        """Some of the rows."""
        cells: dict[str, FrameCells] = {
            name: each[list(rows)] if isinstance(each, np.ndarray) else [each[row] for row in rows]
            for name, each in self.cells.items()
        }
        return self._replace(cells=cells, rows=len(rows))


def is_frame(x: Any) -> bool:
    if isinstance(x, Frame):
        return True
    return hasattr(x, "columns") and hasattr(x, "dtypes") and hasattr(x, "__getitem__")


def read(x: Any, without: Sequence[str] = ()) -> Frame:
    """All columns but those `without`."""
    if isinstance(x, Frame):
        return x
    cells: dict[str, FrameCells] = {}
    unfit: dict[str, str] = {}
    categorical = set()
    for column in x.columns:
        name = str(column)
        if name in without:
            continue
        if name in cells:
            raise UserError(f"X has two columns {name!r}; rename or leave out one.")
        series = x[column]
        if str(series.dtype).lower().startswith(CATEGORICAL):
            categorical.add(name)
        values = np.asarray(series)
        if values.dtype.kind in "mM":
            unfit[name] = "dates"
        cells[name] = _cells(values, _missing(series, values), name in categorical)
    return Frame(cells, unfit, frozenset(categorical), len(x))


def _missing(series: Any, values: Any) -> Any:
    """[n] bool."""
    for test in ("isna", "is_null"):
        if hasattr(series, test):
            return np.asarray(getattr(series, test)(), dtype=bool)
    return np.array([each is None for each in values])


def _cells(values: Any, missing: Any, categorical: bool) -> FrameCells:
    if values.dtype.kind in "iuf" and not categorical:
        return np.where(missing, np.nan, values.astype(np.float64))
    if values.dtype.kind == "O" and not categorical:  # such as pandas' Int64 with gaps
        there = [each for each, gap in zip(values, missing, strict=True) if not gap]
        if all(isinstance(each, int | float) and not isinstance(each, bool) for each in there):
            pairs = zip(values, missing, strict=True)
            return np.array([np.nan if gap else float(each) for each, gap in pairs])
    return ["" if gap else _text(each) for each, gap in zip(values, missing, strict=True)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | np.bool_) else str(value)


def layout(frames: Sequence[Frame], where: Sequence[str]) -> tuple[Column, ...]:
    """The columns of all frames together, in the order of the first one."""
    names = list(frames[0].cells)
    for place, each in enumerate(frames):
        check_names(list(each.cells), names, where[place])
        extra = [name for name in each.cells if name not in frames[0].cells]
        if extra:
            raise UserError(
                f"{where[place]} also has {_columns(extra)}, which {where[0]} has not; give all "
                "clients the same columns."
            )
    unfit = {name: what for each in frames for name, what in each.unfit.items()}
    categorical = frozenset[str]().union(*(each.categorical for each in frames))

    def blocks(wanted: Sequence[str]) -> Iterator[Block]:
        for each in frames:
            yield from _blocks(each, wanted)

    source = Source(Path("X"), tuple(names), blocks, unfit)
    roles: dict[str, Role] = dict.fromkeys(names, "number")
    found = profile.scan(source, roles)
    return tuple(profile.make_column(source, found[name], name in categorical) for name in names)


def encode(wanted: Sequence[Column], frame: Frame, where: str) -> Tensor:
    """[n, width] features before scaling, NaN where a number is missing; columns go by name."""
    check_names(list(frame.cells), [column.name for column in wanted], where)
    parts = [
        columns.encode(wanted, block, lambda row: f"Row {row} of {where}")[0]
        for block in _blocks(frame, [column.name for column in wanted])
    ]
    if not parts:
        raise UserError(f"{where} has no points.")
    return torch.from_numpy(np.concatenate(parts))


def check_names(there: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Refuse a frame that lacks columns; their order does not matter."""
    lacking = [name for name in wanted if name not in there]
    if lacking:
        raise UserError(f"{where} has no {_columns(lacking)}, which training had.")


def _columns(names: Sequence[str]) -> str:
    return f"{'column' if len(names) == 1 else 'columns'} {shorten(names, 5)}"


def _blocks(frame: Frame, wanted: Sequence[str]) -> Iterator[Block]:
    for first in range(0, frame.rows, BLOCK):
        last = min(frame.rows, first + BLOCK)
        cells = {name: frame.cells[name][first:last] for name in wanted}
        yield Block(range(first, last), cells)
