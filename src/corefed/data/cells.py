"""Cells of tables, and CSV files row by row."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from corefed.base.errors import UserError

MISSING = frozenset({"", "?", ".", "-", "na", "n/a", "nan", "null", "none"})
"""What people write for a missing value, in lower case."""

BLOCK = 4096
"""Rows turned into numbers at once."""

_COMPUTED = re.compile(r"[=+\-@\t\r]")
"""How text begins that a spreadsheet would compute."""
_MARKED = re.compile(r"'[=+\-@]")
_WHOLE = re.compile(r"-?\d+\.0+")


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python would read 1_000 as a number


def is_missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def as_name(cell: str) -> str:
    """A cell as the name of a class, category or client: text unchanged, and 2.0 as 2."""
    text = cell.strip()
    if _MARKED.match(text):
        return text[1:]
    return text.partition(".")[0] if _WHOLE.fullmatch(text) else text


def marked(text: str) -> str:
    """Text for a CSV file: an apostrophe keeps a spreadsheet from computing it, as `as_name` knows.

    Numbers stay as they are.
    """
    return f"'{text}" if _COMPUTED.match(text) and not is_number(text) else text


def shorten(names: Sequence[str], most: int = 20) -> str:
    """The names in a row; after `most` of them an ellipsis."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def check_size(path: Path, memory_mb: int) -> None:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    if size > memory_mb * 2**20:
        raise UserError(
            f"{path} has {size / 2**20:.0f} MB, more than the {memory_mb} MB of memory allowed; "
            "use fewer rows or columns, or raise memory_mb."
        )


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The text of the file, without the byte order mark that some programs write."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; save it as a CSV file in UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file that can be read: {error}.") from error


_CONTENTS = {
    b"PK\x03\x04": "an Excel file or another archive; save it in Excel as CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "an old Excel file; save it in Excel as CSV (UTF-8)",
    b"\x1f\x8b": "compressed; unpack it",
    b"PAR1": "a Parquet file; give it the ending .parquet",
}
"""What else a file named .csv may be, by its first bytes."""


def check_content(path: Path) -> None:
    """Refuse a file that is no text at all, whatever its ending says."""
    try:
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    for begin, what in _CONTENTS.items():
        if first.startswith(begin):
            raise UserError(f"By its content {path} is {what}.")


INDEX = "Unnamed: 0"
"""How pandas calls the column of row numbers that it wrote without a name."""


def named(header: list[str]) -> list[str]:
    """A first column without a name gets the one that pandas gives it."""
    return [INDEX, *header[1:]] if header[:1] == [""] and INDEX not in header else header


def unnamed_columns(header: Sequence[str]) -> tuple[str, ...]:
    """Columns of row numbers that a program added."""
    return tuple(name for name in header if name == INDEX)


def read_header(path: Path, cells: Sequence[str]) -> list[str]:
    """The names of the columns, checked."""
    header = [cell.strip() for cell in cells]
    if not any(header):
        raise UserError(f"{path} is empty or begins with an empty line; it needs a header.")
    if all(is_number(name) for name in header):
        raise UserError(f"{path} begins with numbers; its first line must name the columns.")
    if len(header) == 1:
        sign = next((sign for sign in (";", "\t", "|") if sign in header[0]), None)
        why = f"; is it separated by {sign!r}? Use commas" if sign else ""
        raise UserError(f"{path} has one column only{why}; it needs features and a target.")
    header = named(header)
    check_names(path, header)
    return header


MOST_COLUMNS = 100_000
"""Of a table. Every column is looked at by itself, and named in what clients tell each other."""


def check_names(path: Path, header: Sequence[str]) -> None:
    if len(header) > MOST_COLUMNS:
        raise UserError(
            f"{path} has {len(header):,} columns, and a table has at most {MOST_COLUMNS:,}; leave "
            "some out, or save the features as an array (.npz)."
        )
    if "" in header:
        raise UserError(
            f"Column {header.index('') + 1} of {path} has no name; name it, or leave it out."
        )
    (name, times), *_ = Counter(header).most_common(1)
    if times > 1:
        raise UserError(f"{path} has {times} columns {name!r}; rename or leave out all but one.")


def read_rows(path: Path, rows: Any, header: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every non-empty row of a csv.reader, after the header."""
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise UserError(
                f"Line {rows.line_num} of {path} has {len(row)} cells, the header {len(header)}."
            )
        yield rows.line_num, row
