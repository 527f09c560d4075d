"""The cells of a column as numbers, as names and as counts.

A column is a sequence of text, numbers (NaN where one is missing), or text that pyarrow holds. Of
the last, each different cell is looked at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corefed.data.cells import MISSING, as_name, is_missing, is_number

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class Texts:
    """Text cells in an array of pyarrow, without nulls."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @cached_property
    def number(self) -> Numbers | None:
        """All cells as numbers, NaN where one is missing; None where that takes a closer look.

        What pyarrow reads as a finite number is what Python reads: both round correctly.
        """
        import pyarrow as arrow  # an extra, which made this array

        try:
            found = to_numpy(self.array.cast(arrow.float64()))
        except arrow.ArrowInvalid:
            there = ~self._lacking
            try:
                some = to_numpy(self.array.filter(from_numpy(there)).cast(arrow.float64()))
            except arrow.ArrowInvalid:
                return None
            found = np.full(len(there), np.nan)
            found[there] = some
            return found if np.isfinite(some).all() else None  # nan in words, or inf
        return found if np.isfinite(found).all() else None

    @property
    def _lacking(self) -> npt.NDArray[np.bool_]:
        """Cells that say in a usual word that they are missing."""
        from pyarrow import compute

        written = {word for each in MISSING for word in (each, each.upper(), each.capitalize())}
        found = compute.is_in(self.array, value_set=_words(sorted(written)).cast(self.array.type))
        lacking: npt.NDArray[np.bool_] = to_numpy(found.cast("uint8")).astype(bool)
        return lacking


def to_numpy(array: Any) -> Any:
    """An array of pyarrow without nulls. Its own `to_numpy` imports pandas, where that is
    installed, which takes longer than reading 100,000 rows."""
    return np.from_dlpack(array)


def from_numpy(mask: npt.NDArray[np.bool_]) -> Any:
    import pyarrow as arrow

    bits = arrow.py_buffer(np.packbits(mask, bitorder="little"))
    return arrow.Array.from_buffers(arrow.bool_(), len(mask), [None, bits])


def _words(words: Sequence[str]) -> Any:
    import pyarrow as arrow

    texts = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    buffers = [None, arrow.py_buffer(ends), arrow.py_buffer(b"".join(texts))]
    return arrow.Array.from_buffers(arrow.string(), len(texts), buffers)


Cells = Sequence[str] | Numbers | Texts


def cell(cells: Cells, at: int) -> str:
    """One cell as text."""
    return str(cells.array[at].as_py()) if isinstance(cells, Texts) else str(cells[at])


def numbers(cells: Cells) -> tuple[Numbers, list[int]]:
    """Values, NaN where one is missing, and the places of cells that are text."""
    if isinstance(cells, np.ndarray):
        return cells, []
    if isinstance(cells, Texts):
        found = cells.number
        if found is not None:
            return found, []
        different, places = _different(cells)
        few, wrong = numbers(different)
        is_text = np.zeros(len(different), dtype=bool)
        is_text[wrong] = True
        return few[places], np.flatnonzero(is_text[places]).tolist()
    try:
        if "_" not in "".join(cells):  # Python would read 1_000 as a number
            return np.array([float(each) for each in cells]), []
    except ValueError:
        pass
    values = np.full(len(cells), np.nan)
    texts = []
    for at, each in enumerate(cells):
        if is_number(each):
            values[at] = float(each)
        elif not is_missing(each):
            texts.append(at)
    return values, texts


def coded(cells: Cells) -> tuple[list[str], Places]:
    """Names, empty where a cell is missing, and the place of each cell's name among them.

    Two of the names may be the same: of 2 and 2.0.
    """
    if isinstance(cells, np.ndarray):
        values, places = np.unique(cells, return_inverse=True)
        named = ["" if np.isnan(each) else as_name(repr(each)) for each in values.tolist()]
        return named, places.reshape(-1).astype(np.int64)
    different, places = _different(cells)
    return ["" if is_missing(each) else as_name(each) for each in different], places


def names(cells: Cells) -> list[str]:
    """The name in every cell, empty where it is missing."""
    known, places = coded(cells)
    found: list[str] = np.array(known, dtype=object)[places].tolist() if known else []
    return found


def gaps(cells: Cells) -> set[str]:
    """The words, as they are written, that stand for a missing cell."""
    if isinstance(cells, np.ndarray):
        return set()
    return {each.strip() for each in _different(cells)[0] if is_missing(each)} - {""}


def count(cells: Cells, values: Numbers, most: int) -> Counter[str] | None:
    """How often each name occurs; None where there are more than `most`.

    `values` are the numbers of the cells. Different numbers have different names, so that the
    names of a long column of measurements need not be made.
    """
    if len(values) > most and len(np.unique(values[~np.isnan(values)])) > most:
        return None
    known, places = coded(cells)
    found: Counter[str] = Counter()
    for name, times in zip(known, np.bincount(places, minlength=len(known)), strict=True):
        if name:
            found[name] += int(times)
    return found if len(found) <= most else None


def _different(cells: Sequence[str] | Texts) -> tuple[list[str], Places]:
    """The different cells, and the place of each cell among them."""
    if isinstance(cells, Texts):
        encoded = cells.array.dictionary_encode()
        return encoded.dictionary.to_pylist(), to_numpy(encoded.indices).astype(np.int64)
    known: dict[str, int] = {}
    places = [known.setdefault(each, len(known)) for each in cells]
    return list(known), np.array(places, dtype=np.int64)
