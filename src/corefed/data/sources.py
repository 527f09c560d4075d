"""Read tables block by block: CSV (separated by commas, semicolons or tabs) and Parquet.

A block has, for each column, either the text of the cells or numbers, NaN where one is missing.
CSV files are read by pyarrow where it is installed (`arrow_csv.py`), to the same result.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corefed.base.errors import UserError, install
from corefed.data import arrow_csv
from corefed.data.cells import (
    BLOCK,
    check_content,
    check_names,
    check_size,
    named,
    open_text,
    read_header,
    read_rows,
    unnamed_columns,
)
from corefed.data.values import Cells, Numbers, Texts

SEPARATORS = (",", ";", "\t")
"""In order of preference."""

KEPT = 1 << 28
"""Bytes of a CSV file up to which its cells stay in memory between two passes."""

ROWS = 1 << 15
"""Of a Parquet file per block."""

STREAMED_ROWS = 1 << 14
"""The same where points shall not be in memory. With fewer rows than `profile.MOST_VALUES`, numbers
would be counted as if they were categories."""

BUFFER = 1 << 16
"""Bytes of a column that are read ahead where points shall not be in memory; otherwise a column of
a row group is read whole."""

CSV, PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")


class Block(NamedTuple):
    places: range  # [n] number of each row in the file, from 1
    cells: Mapping[str, Cells]  # column -> [n]


class Source(NamedTuple):
    """A table that can be read more than once."""

    path: Path
    columns: tuple[str, ...]  # in file order
    blocks: Callable[[Sequence[str]], Iterator[Block]]  # of some columns
    unfit: dict[str, str]  # columns that cannot be features, and why
    notes: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()  # columns of row numbers that a program added
    line: Callable[[int], int] | None = None  # of a row; None: the file has no lines

    def at(self, place: int) -> str:
        """Where a row is, for messages."""
        where = f"Row {place}" if self.line is None else f"Line {self.line(place)}"
        return f"{where} of {self.path}"


def find(path: Path, memory_mb: int, *, streamed: bool = False) -> Source:
    """Read the header of a table; its size is checked first, unless it shall not be in memory."""
    if not path.is_file():
        raise UserError(f"{path} is no file; a table is a .csv, .tsv or .parquet file.")
    if not streamed:
        check_size(path, memory_mb)
    if path.suffix.lower() in PARQUET:
        return _parquet(path, streamed=streamed)
    if path.suffix.lower() in CSV:
        return _csv(path, keep=not streamed)
    raise UserError(f"{path} is no table by its ending; use {' '.join((*CSV, *PARQUET))}.")


# --- CSV ------------------------------------------------------------------------------------------


def _csv(path: Path, *, keep: bool = True) -> Source:
    check_content(path)
    with open_text(path) as file:
        first = file.readline()
    sign = max(SEPARATORS, key=lambda sign: _number_of_cells(first, sign))
    with open_text(path) as file:
        header = read_header(path, next(csv.reader(file, strict=True, delimiter=sign), []))
    quoting = arrow_csv.look(path, sign)
    fast = quoting != "doubtful"
    keep = keep and fast and path.stat().st_size <= KEPT
    kept: list[Block] = []  # a table is read twice

    def rows() -> Iterator[tuple[int, list[str]]]:
        with open_text(path) as file:
            reader = csv.reader(file, strict=True, delimiter=sign)
            next(reader)
            yield from read_rows(path, reader, header)

    def blocks(names: Sequence[str]) -> Iterator[Block]:
        if kept and set(names) <= kept[0].cells.keys():
            yield from kept
            return
        done = 0
        fresh: list[Block] = []
        try:
            for count, cells in arrow_csv.read(path, sign, quoting, header, names) if fast else ():
                block = Block(range(done + 1, done + 1 + count), cells)
                fresh += [block] if keep else []
                yield block
                done += count
        except arrow_csv.StoppedError:
            pass
        else:
            if fast:
                kept[:] = fresh
                return
        places = [header.index(name) for name in names]
        numbered = islice(rows(), done, None)
        while some := list(islice(numbered, BLOCK)):
            columns = list(zip(*(row for _, row in some), strict=True))
            own = {name: columns[at] for name, at in zip(names, places, strict=True)}
            yield Block(range(done + 1, done + 1 + len(some)), own)
            done += len(some)

    def line(row: int) -> int:
        return next(islice(rows(), row - 1, None))[0]

    name = {";": "semicolons", "\t": "tabs"}.get(sign)
    notes = (f"{path} is separated by {name}.",) if name else ()
    return Source(path, tuple(header), blocks, {}, notes, unnamed_columns(header), line)


def _number_of_cells(line: str, sign: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=sign), []))
    except csv.Error:  # a cell is too long: the sign does not separate this line
        return 1


# --- Parquet --------------------------------------------------------------------------------------


def _parquet(path: Path, *, streamed: bool = False) -> Source:
    try:
        import pyarrow as arrow  # an extra
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"Reading {path} needs pyarrow: {install('tables')}; or save it as CSV."
        ) from error

    with _readable(path, arrow):
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        header = named([name.strip() for name in schema.names])
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
        # By default all row groups are fetched ahead, and stay in memory together.
        options = {"pre_buffer": False, "buffer_size": BUFFER if streamed else 0}
        with _readable(path, arrow), parquet.ParquetFile(path, **options) as file:
            wanted = [stored[name] for name in names]
            step = STREAMED_ROWS if streamed else ROWS
            for batch in file.iter_batches(step, columns=wanted, use_threads=False):
                cells = {
                    name: _cells(batch.column(stored[name]), kinds[name], arrow) for name in names
                }
                yield Block(range(first, first + len(batch)), cells)
                first += len(batch)

    unfit = {name: kind for name, kind in kinds.items() if kind not in ("numbers", "text")}
    return Source(path, tuple(header), blocks, unfit, unnamed=unnamed_columns(header))


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


def _cells(column: Any, kind: str, arrow: Any) -> Cells:
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "numbers" and arrow.types.is_decimal(column.type):
        values = [np.nan if each is None else float(each) for each in column.to_pylist()]
        return np.array(values, dtype=np.float64)
    if kind == "numbers":
        found: Numbers = column.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        return found
    if not arrow.types.is_large_string(column.type):
        column = column.cast(arrow.string())  # true and false of booleans
    return Texts(column.fill_null(""))


@contextmanager
def _readable(path: Path, arrow: Any) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # pyarrow's own is one of both kinds
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read as Parquet: {error.strerror or error}.") from error
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a whole Parquet file: {error}.") from error
