"""Read tables block by block: CSV (separated by commas, semicolons or tabs) and Parquet.

A block has, for each column, either the text of the cells or numbers, NaN where one is missing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.errors import UserError
from corefed.data.cells import (
    BLOCK,
    as_name,
    check_names,
    check_size,
    is_missing,
    is_number,
    open_text,
    read_header,
    read_rows,
)

Numbers = npt.NDArray[np.float64]
Cells = Sequence[str] | Numbers

SEPARATORS = (",", ";", "\t")
"""In order of preference."""

CSV, PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")


class Block(NamedTuple):
    places: Sequence[int]  # [n] line of each row in the file
    cells: Mapping[str, Cells]  # column -> [n]


class Source(NamedTuple):
    """A table that can be read more than once."""

    path: Path
    columns: tuple[str, ...]
    place: str  # line or row
    blocks: Callable[[Sequence[str]], Iterator[Block]]  # of some columns
    unfit: dict[str, str]  # columns that cannot be features, and why
    notes: tuple[str, ...] = ()

    def at(self, place: int) -> str:
        return f"{self.place.capitalize()} {place} of {self.path}"


def find(path: Path, memory_mb: int) -> Source:
    """Read the header of a table; its size is checked first."""
    if not path.is_file():
        raise UserError(f"{path} is no file; a table is a .csv, .tsv or .parquet file.")
    check_size(path, memory_mb)
    if path.suffix.lower() in PARQUET:
        return _parquet(path)
    if path.suffix.lower() in CSV:
        return _csv(path)
    raise UserError(f"{path} is no table by its ending; use {' '.join((*CSV, *PARQUET))}.")


# --- CSV ------------------------------------------------------------------------------------------


def _csv(path: Path) -> Source:
    with open_text(path) as file:
        first = file.readline()
    sign = max(SEPARATORS, key=lambda sign: _number_of_cells(first, sign))
    with open_text(path) as file:
        header = read_header(path, next(csv.reader(file, strict=True, delimiter=sign), []))

    def blocks(names: Sequence[str]) -> Iterator[Block]:
        places = [header.index(name) for name in names]
        with open_text(path) as file:
            rows = csv.reader(file, strict=True, delimiter=sign)
            next(rows)
            numbered = read_rows(path, rows, header)
            while block := list(islice(numbered, BLOCK)):
                columns = list(zip(*(row for _, row in block), strict=True))
                cells = {name: columns[at] for name, at in zip(names, places, strict=True)}
                yield Block([line for line, _ in block], cells)

    name = {";": "semicolons", "\t": "tabs"}.get(sign)
    notes = (f"{path} is separated by {name}.",) if name else ()
    return Source(path, tuple(header), "line", blocks, {}, notes)


def _number_of_cells(line: str, sign: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=sign), []))
    except csv.Error:  # a cell is too long: the sign does not separate this line
        return 1


# --- Parquet --------------------------------------------------------------------------------------


def _parquet(path: Path) -> Source:
    try:
        import pyarrow as arrow  # an extra
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs pyarrow: pip install 'corefed[tables]'; or save it as CSV."
        ) from error

    with _readable(path, arrow):
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        header = [name.strip() for name in schema.names]
    if len(header) < 2:
        raise UserError(f"{path} has {len(header)} columns; it needs features and a target.")
    check_names(path, header)
    stored = dict(zip(header, schema.names, strict=True))
    kinds = {
        name: _kind(arrow.types, field.type) for name, field in zip(header, schema, strict=True)
    }
    if not rows:
        raise UserError(f"{path} has columns but no rows; it needs at least one point.")

    def blocks(names: Sequence[str]) -> Iterator[Block]:
        first = 1
        with _readable(path, arrow), parquet.ParquetFile(path) as file:
            wanted = [stored[name] for name in names]
            for batch in file.iter_batches(BLOCK, columns=wanted):
                cells = {name: _cells(batch.column(stored[name]), kinds[name]) for name in names}
                yield Block(range(first, first + len(batch)), cells)
                first += len(batch)

    unfit = {name: kind for name, kind in kinds.items() if kind not in ("numbers", "text")}
    return Source(path, tuple(header), "row", blocks, unfit)


def _kind(types: Any, kind: Any) -> str:
    if types.is_dictionary(kind):
        return _kind(types, kind.value_type)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "numbers"
    texts = types.is_boolean, types.is_string, types.is_large_string, types.is_null
    if any(test(kind) for test in texts):
        return "text"
    if types.is_temporal(kind):
        return "dates"
    return f"nested or binary values ({kind})"


def _cells(column: Any, kind: str) -> Cells:
    if kind == "numbers":
        values = [np.nan if each is None else float(each) for each in column.to_pylist()]
        return np.array(values, dtype=np.float64)
    return ["" if each is None else _text(each) for each in column.to_pylist()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _readable(path: Path, arrow: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read as Parquet: {error.strerror or error}.") from error
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file: {error}.") from error


# --- cells ----------------------------------------------------------------------------------------


def numbers(cells: Cells) -> tuple[Numbers, list[int]]:
    """Values, NaN where one is missing, and the places of cells that are text."""
    if isinstance(cells, np.ndarray):
        return cells, []
    try:
        if "_" not in "".join(cells):  # Python would read 1_000 as a number
            return np.array([float(cell) for cell in cells]), []
    except ValueError:
        pass
    values = np.full(len(cells), np.nan)
    texts = []
    for at, cell in enumerate(cells):
        if is_number(cell):
            values[at] = float(cell)
        elif not is_missing(cell):
            texts.append(at)
    return values, texts


def names(cells: Cells) -> list[str]:
    """The name in every cell, empty where it is missing."""
    if isinstance(cells, np.ndarray):
        return ["" if np.isnan(each) else as_name(repr(each)) for each in cells.tolist()]
    known: dict[str, str] = {}
    for cell in cells:
        if cell not in known:
            known[cell] = "" if is_missing(cell) else as_name(cell)
    return [known[cell] for cell in cells]
