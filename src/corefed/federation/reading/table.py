"""A client's points in a table: a CSV file with a header, a row a point, one column to predict.

Features are the other columns, in alphabetical order of their names, so that sites may keep them in
any order. All of them are numbers, and none is missing. The target's column says what is learnt:
text is names of classes, whole numbers (also 2.0) are numbers of classes, other numbers are a
regression. The file is read row by row; its numbers, not its text, are kept.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import cells as text
from corefed.data import classes
from corefed.data.cells import BLOCK, MISSING, is_number
from corefed.data.dataset import Dataset

PER_ROW, PER_NUMBER = 100, 8
"""Bytes of memory: of the text of a target in Python; of a feature, as it is and divided."""

MANY = 100
"""Classes by number above which the target may well be a measurement."""


def read(path: Path, target: str, memory_mb: int) -> Dataset:
    """All rows of the table."""
    text.check_size(path, memory_mb)
    with text.opened(path) as file:
        rows = csv.reader(file, strict=True)
        header = text.header_of(path, next(rows, []))
        place = _place(path, header, target)
        x, cells = _rows(path, rows, header, place, memory_mb)
    y, labels, notes = _target(f"Column {target!r} of {path}", cells)
    names = _without(header, place)
    order = sorted(range(x.shape[1]), key=names.__getitem__)
    points = torch.from_numpy(np.ascontiguousarray(x[:, order]))
    columns = tuple(names[i] for i in order)
    return Dataset(str(path), points, y, len(labels), labels=labels, notes=notes, columns=columns)


def _place(path: Path, header: list[str], target: str) -> int:
    if target in header:
        return header.index(target)
    shown = text.shown(header)
    if not target:
        raise UserError(f"Name the column of {path} to predict as target; it has {shown}.")
    raise UserError(f"{path} has no column {target!r} to predict; it has {shown}.")


def _rows(
    path: Path, rows: Any, header: list[str], place: int, memory_mb: int
) -> tuple[npt.NDArray[np.float32], list[str]]:
    """[n, d] features in the order of the file, and the text of the targets."""
    names = _without(header, place)
    blocks: list[npt.NDArray[np.float32]] = []
    block: list[list[float]] = []
    cells: list[str] = []
    texts: dict[str, str] = {}  # one string for equal ones
    missing = dict.fromkeys(header, 0)
    most = memory_mb * 2**20 // (PER_ROW + PER_NUMBER * len(names))
    for line, row in text.rows_of(path, rows, header):
        if len(cells) == most:
            raise UserError(
                f"{path} has more than {most} rows of {len(header)} columns, which need more than "
                f"the {memory_mb} MB of memory allowed; use fewer, or raise memory_mb."
            )
        cell = row.pop(place).strip()
        missing[header[place]] += cell.lower() in MISSING
        cells.append(texts.setdefault(cell, cell))
        block.append(_numbers(path, line, names, row))
        if len(block) == BLOCK:
            blocks.append(_closed(block, names, missing))
            block = []
    if not cells:
        raise UserError(f"{path} has a header but no rows; a client needs at least one point.")
    if block:
        blocks.append(_closed(block, names, missing))
    lacking = [f"{count} in column {name!r}" for name, count in missing.items() if count]
    if lacking:
        more = f" and {len(lacking) - 3} more columns" if len(lacking) > 3 else ""
        raise UserError(
            f"{path} has missing values: {', '.join(lacking[:3])}{more}; fill them in, or leave "
            "out those rows or columns."
        )
    return np.concatenate(blocks), cells


def _numbers(path: Path, line: int, names: list[str], row: list[str]) -> list[float]:
    """NaN where a value is missing, to be counted."""
    try:
        if "_" not in "".join(row):  # Python would read 1_000 as a number
            return [float(cell) for cell in row]
    except ValueError:
        pass
    for name, cell in zip(names, row, strict=True):
        if cell.strip().lower() not in MISSING and not is_number(cell):
            raise UserError(
                f"Line {line} of {path} has {cell[:40]!r} in column {name!r}, which is no number; "
                "give categories numbers, or leave the column out."
            )
    return [float(cell) if is_number(cell) else float("nan") for cell in row]


def _closed(
    block: list[list[float]], names: list[str], missing: dict[str, int]
) -> npt.NDArray[np.float32]:
    values = np.array(block)
    for column in np.flatnonzero(np.isnan(values).any(0)):
        missing[names[column]] += int(np.isnan(values[:, column]).sum())
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and refused
        return values.astype(np.float32)


def _target(where: str, cells: list[str]) -> tuple[Tensor, tuple[str, ...], tuple[str, ...]]:
    """y, names of the classes, and notes."""
    different = set(cells)
    numbers = {cell for cell in different if is_number(cell)}
    fraction = next((cell for cell in numbers if not float(cell).is_integer()), None)
    if len(numbers) < len(different):
        text = next(cell for cell in cells if cell not in numbers)
        if fraction is not None:
            raise UserError(
                f"{where} has text such as {text[:40]!r} among numbers such as {fraction}; it must "
                "be names of classes or numbers."
            )
        note = f"{where} has numbers and text; all of them are taken for names of classes."
        return *classes.by_name(cells, where), (note,) if numbers else ()
    values = np.array([float(cell) for cell in cells])
    if fraction is not None:
        with np.errstate(over="ignore"):
            return torch.from_numpy(values.astype(np.float32)).unsqueeze(1), (), ()
    y, labels = classes.by_number(values, where)
    if len(labels) <= MANY:
        return y, labels, ()
    note = (
        f"{where} has {len(labels)} different whole numbers, which are taken for classes; for a "
        "regression give y as floating-point numbers in an .npz."
    )
    return y, labels, (note,)


def _without(header: list[str], place: int) -> list[str]:
    return header[:place] + header[place + 1 :]
