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

from corefed.data.values import Texts

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES = 1 << 23
"""Of the file per block: about 30,000 rows of 30 numbers."""

LONGEST = 131072
"""Characters of a cell that the csv module reads."""

Quoting = Literal["none", "quotes", "doubtful"]

_LONE_RETURN = re.compile(rb"\r(?!\n)")


class StoppedError(Exception):
    """pyarrow cannot read on; the csv module can, or says why not."""


def look(path: Path, sign: str) -> Quoting:
    """Whether the file has quotes; `doubtful` where pyarrow may read it otherwise than csv does."""
    if find_spec("pyarrow") is None:
        return "doubtful"
    boundary = re.escape(sign).encode() + rb"\r\n"
    inside = re.compile(rb'[^%b]"[^%b]' % (boundary, boundary))
    found: Quoting = "none"
    with path.open("rb") as file:
        left = b""
        while piece := file.read(BYTES):
            piece = left + piece
            if b"\0" in piece or (b"\r" in piece and _LONE_RETURN.search(piece[:-1])):
                return "doubtful"
            if b'"' in piece:
                found = "quotes"
                # A quote inside a cell that is not doubled: one reader may end the cell there.
                if inside.search(piece.replace(b'""', b"")):
                    return "doubtful"
            left = piece[piece.rfind(b"\n") + 1 :]
            if len(left) > BYTES:
                return "doubtful"
    return "doubtful" if left.endswith(b"\r") else found


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
    except (arrow.ArrowException, OSError) as error:
        raise StoppedError from error


def _too_long(columns: Any) -> bool:
    from pyarrow import compute

    lengths = (compute.max(compute.binary_length(each.array)).as_py() for each in columns)
    return any(length is not None and length > LONGEST for length in lengths)
