"""Read the text of a CSV file's columns by pyarrow, ten times as fast as Python's csv module.

Both readers must give the same cells. So pyarrow only reads files on which they cannot differ, and
where it stops, csv goes on and says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from corefed.data.values import Texts

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES = 1 << 23
"""Of the file per block: about 30,000 rows of 30 numbers."""

LONGEST = 131072
"""Characters of a cell that the csv module reads."""

Quoting = Literal["none", "quotes", "doubtful"]

BOM = b"\xef\xbb\xbf"
_LONE_RETURN = re.compile(rb"\r(?!\n)")


class StoppedError(Exception):
    """pyarrow cannot read on; the csv module can, or says why not."""


def look(path: Path, sign: str) -> Quoting:
    """Whether the file has quotes; `doubtful` where pyarrow may read it otherwise than csv does."""
    if find_spec("pyarrow") is None:
        return "doubtful"
    try:
        return _look(path, sign)
    except StoppedError:
        return "doubtful"


def _look(path: Path, sign: str) -> Quoting:
    found: Quoting = "none"
    inside = False  # a cell in quotes
    for piece in _whole_lines(path):
        if b"\0" in piece or (b"\r" in piece and _LONE_RETURN.search(piece)):
            return "doubtful"
        if b'"' in piece:
            quotes = _plain_quotes(piece, sign, inside)
            found, inside = "quotes", inside ^ (quotes % 2 == 1)
    return "doubtful" if inside else found


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The file in pieces that end with a line."""
    with path.open("rb") as file:
        left = file.read(len(BOM)).removeprefix(BOM)
        while piece := file.read(BYTES):
            end = piece.rfind(b"\n") + 1
            yield left + piece[:end]
            left = piece[end:] if end else left + piece
            if len(left) > BYTES:
                raise StoppedError  # a line as long as a block
        yield left


def _plain_quotes(piece: bytes, sign: str, inside: bool) -> int:
    """Number of quotes that begin or end a cell; stops at any other that is not doubled.

    They must begin a cell where it begins and end it where it ends. On others the readers differ.
    """
    boundary = re.escape(sign).encode() + rb"\r\n"
    # An even number of quotes, and text: the cell has ended before it.
    # Most files have no doubled quotes, which `in` finds ten times as fast.
    doubled = b'""' in piece
    if doubled and re.search(rb'(?:^|[%b])(?:"")+[^"%b]' % (boundary, boundary), piece):
        raise StoppedError
    text = np.frombuffer(b"\n" + piece.replace(b'""', b"") + b"\n", np.uint8)
    at = np.flatnonzero(text == ord('"'))
    first, second = (at[1::2], at[0::2]) if inside else (at[0::2], at[1::2])
    edges = np.frombuffer(sign.encode() + b"\r\n", np.uint8)
    if not np.isin(text[first - 1], edges).all() or not np.isin(text[second + 1], edges).all():
        raise StoppedError
    return len(at)


def read(
    path: Path, sign: str, quoting: Quoting, header: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Texts]]]:
    """Blocks of rows: their number, and the cells of some columns."""
    import pyarrow as arrow  # an extra
    from pyarrow import csv

    numbered = [str(at) for at in range(len(header))]
    wanted = {name: numbered[header.index(name)] for name in names}
    try:
        with csv.open_csv(
            path,
            csv.ReadOptions(
                use_threads=False, block_size=BYTES, column_names=numbered, skip_rows_after_names=1
            ),
            csv.ParseOptions(delimiter=sign, newlines_in_values=quoting == "quotes"),
            csv.ConvertOptions(
                column_types=dict.fromkeys(numbered, arrow.string()),
                include_columns=list(wanted.values()),
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        ) as reader:
            for batch in reader:
                cells = {name: Texts(batch.column(at)) for name, at in wanted.items()}
                if _too_long(cells.values()):
                    raise StoppedError
                if len(batch):
                    yield len(batch), cells
    except MemoryError:  # pyarrow's own is one of both kinds
        raise
    except (arrow.ArrowException, OSError) as error:
        raise StoppedError from error


def _too_long(columns: Any) -> bool:
    from pyarrow import compute

    lengths = (compute.max(compute.binary_length(each.array)).as_py() for each in columns)
    return any(length is not None and length > LONGEST for length in lengths)
