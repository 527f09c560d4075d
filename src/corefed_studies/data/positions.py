"""House prices and where the houses stand: California's, or a file that the user names.

A file is one of
* an array [n, 3] of latitude, longitude, price: `.npy`, or `.npz` with that one array;
* a CSV with a header that names those three, in any order and among other columns;
* a CSV of prices and postcodes, with a second CSV that says where each postcode lies: the Land
  Registry's price-paid file as it is published (no header, 16 columns) or one with a header.

Rows without a positive price or a known position are dropped and counted. Everything else that is
not as expected is an error: a price-paid file with a shifted column must not become a picture.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base import arrays
from corefed.base.errors import UserError
from corefed.data.fetch import DATA_VARIABLE, cache, roots

LATITUDE = ("latitude", "lat")
LONGITUDE = ("longitude", "long", "lng", "lon")
PRICE = ("price", "price_paid", "median_house_value")
POSTCODE = ("postcode", "pcds", "pcd")

PRICE_PAID_COLUMNS = 16
PRICE_PAID_PRICE, PRICE_PAID_POSTCODE = 1, 3  # counted from 0

MISSING = ("", "na", "nan", "null", "none")


class Positions(NamedTuple):
    name: str
    where: Tensor  # [n, 2] float64, longitude and latitude in degrees
    log_price: Tensor  # [n] float64, log10
    dropped: int  # rows without a positive price or a known position


Sale = tuple[float, float, float]  # longitude, latitude, price; NaN where missing


def load(
    path: Path | None = None, postcodes: Path | None = None, data_dir: Path | None = None
) -> Positions:
    """The user's file, or California's census blocks of 1990 when there is none."""
    if postcodes is not None and (path is None or path.suffix in (".npy", ".npz")):
        raise UserError(
            "--postcodes goes with a CSV of prices and postcodes, named by --data; leave it out, "
            "or name that CSV."
        )
    if path is None:
        found = find("housing/california_housing.csv", data_dir)
        return _check("California housing", found, list(_csv_rows(found, None)))
    if path.suffix in (".npy", ".npz"):
        return _check(path.stem, path, _array_rows(path))
    return _check(path.stem, path, list(_csv_rows(path, postcodes)))


def find(relative: str, data_dir: Path | None) -> Path:
    """A file under data_dir, $COREFED_DATA or the user's cache, in this order."""
    places = list(roots(data_dir))
    with suppress(ImportError):
        places.append(cache())
    for root in places:
        if (root / relative).exists():
            return root / relative
    raise UserError(
        f"{relative} is not at hand; put it under --data-dir, ${DATA_VARIABLE}"
        + (f" or {places[-1]}." if places else ".")
    )


def _check(name: str, path: Path, rows: Sequence[Sale] | np.ndarray) -> Positions:
    """Drop what is missing, refuse what is wrong."""
    table = torch.as_tensor(np.asarray(rows, dtype=np.float64)).reshape(-1, 3)
    where, price = table[:, :2], table[:, 2]
    kept = torch.isfinite(table).all(-1) & (price > 0)
    # 99.999999 is how the postcode directory writes a latitude it does not know.
    kept &= (where[:, 0].abs() <= 180) & (where[:, 1].abs() <= 90)
    if not kept.any():
        raise UserError(
            f"None of the {len(table)} rows of {path} has a positive price and a known position; "
            "check its columns."
        )
    return Positions(name, where[kept], price[kept].log10(), int((~kept).sum()))


# --- arrays ---------------------------------------------------------------------------------------


def _array_rows(path: Path) -> np.ndarray:
    """[n, 3] in the order of `Sale`. Sizes are read before the numbers are."""
    found = arrays.headers(path)
    if len(found) != 1:
        raise UserError(f"{path} holds {len(found)} arrays; save just one [n, 3].")
    ((name, header),) = found.items()
    if header.dtype.kind not in "fiu":
        raise UserError(f"{path} holds an array of {header.dtype}, not of numbers.")
    if len(header.shape) != 2 or header.shape[1] != 3:
        raise UserError(
            f"{path} holds an array of shape {header.shape}; it must be [n, 3]: latitude, "
            "longitude, price."
        )
    table = arrays.load(path, [name], arrays.MEMORY_MB, remedy="use fewer rows")[name]
    return table[:, [1, 0, 2]].astype(np.float64)  # a file says latitude first


# --- CSV ------------------------------------------------------------------------------------------


def _csv_rows(path: Path, postcodes: Path | None) -> Iterator[Sale]:
    lines = _csv_lines(path)
    try:
        first = next(lines)
    except StopIteration:
        raise UserError(f"{path} is empty; it needs rows of prices and positions.") from None
    names = [_plain(cell) for cell in first[1]]
    price, postcode = _column(names, PRICE), _column(names, POSTCODE)
    latitude, longitude = _column(names, LATITUDE), _column(names, LONGITUDE)
    if price is not None and latitude is not None and longitude is not None:
        if postcodes is not None:
            raise UserError(f"{path} has positions of its own; leave --postcodes out.")
        for line, cells in lines:
            _check_width(cells, len(names), path, line)
            wanted = (cells[longitude], cells[latitude], cells[price])
            lon, lat, paid = (_number(cell, path, line) for cell in wanted)
            yield lon, lat, paid
        return
    if price is None or postcode is None:  # not a header, then; is it a sale?
        if len(names) != PRICE_PAID_COLUMNS or not _is_number(first[1][PRICE_PAID_PRICE]):
            raise UserError(
                f"{path} does not start with a header that names a price ({' or '.join(PRICE)}) "
                f"and latitude and longitude, or a postcode, and is not a price-paid file of "
                f"{PRICE_PAID_COLUMNS} columns; it starts with {','.join(first[1])[:80]!r}."
            )
        price, postcode = PRICE_PAID_PRICE, PRICE_PAID_POSTCODE
        lines = _again(first, lines)
    if postcodes is None:
        raise UserError(
            f"{path} says where a house stands by its postcode only; name a CSV of postcodes with "
            "their latitude and longitude by --postcodes."
        )
    known = _postcode_positions(postcodes)
    for line, cells in lines:
        _check_width(cells, len(names), path, line)
        lon, lat = known.get(_joined(cells[postcode]), (math.nan, math.nan))
        yield lon, lat, _number(cells[price], path, line)


def _postcode_positions(path: Path) -> dict[str, tuple[float, float]]:
    """Longitude and latitude of each postcode, its letters in capitals and without spaces."""
    lines = _csv_lines(path)
    _, header = next(lines, (1, []))
    names = [_plain(cell) for cell in header]
    columns = [_column(names, wanted) for wanted in (POSTCODE, LONGITUDE, LATITUDE)]
    if None in columns:
        raise UserError(
            f"{path} needs a header with a postcode ({' or '.join(POSTCODE)}), a latitude and a "
            f"longitude; it starts with {','.join(header)[:80]!r}."
        )
    postcode, longitude, latitude = (column for column in columns if column is not None)
    known = {}
    for line, cells in lines:
        _check_width(cells, len(names), path, line)
        position = _number(cells[longitude], path, line), _number(cells[latitude], path, line)
        known[_joined(cells[postcode])] = position
    return known


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells of a CSV, without its empty lines."""
    with _reading(path, "a CSV in UTF-8"), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        for cells in reader:
            if cells:
                yield reader.line_num, cells


def _again(
    first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, EOFError, csv.Error) as error:
        raise UserError(f"{path} is not {what}: {error}.") from error


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _joined(postcode: str) -> str:
    return "".join(postcode.split()).upper()


def _column(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _check_width(cells: Sequence[str], width: int, path: Path, line: int) -> None:
    if len(cells) != width:
        raise UserError(
            f"Line {line} of {path} has {len(cells)} cells where the first has {width}; mend or "
            "remove it."
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, path: Path, line: int) -> float:
    if cell.strip().lower() in MISSING:
        return math.nan
    if not _is_number(cell):
        raise UserError(
            f"Line {line} of {path} has {cell[:40]!r} where a number belongs; mend or remove it."
        )
    return float(cell)
