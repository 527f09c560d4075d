"""Real rows for `corefed bench pays`: published sets of 500, and larger ones that are on the disk.

    phishing, ds1, biketrips   the coreset literature's, 500 rows: the quality of a posterior alone
    housing                    California's census blocks, dearer than the median or not
    mnist, fashion-mnist       one class against the rest, 15 principal components of all images

Logistic but for biketrips (Poisson). Columns of the larger sets are standardised, and one is
constant.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corefed.base.errors import UserError
from corefed.data import idx
from corefed_studies.data import coreset_sets
from corefed_studies.data.positions import find

Array = NDArray[Any]

COMPONENTS = 15
CLASS = {"mnist": 3, "fashion-mnist": 6}
"""The class that is told from the rest: threes, and shirts, the hardest of the garments."""
PRICE, PLACE = "median_house_value", "ocean_proximity"


class Rows(NamedTuple):
    family: str  # logistic or poisson
    x: Array  # [n, d] float32
    y: Array  # [n] float32


def published(name: str, data_dir: Path | None) -> Rows:
    found = coreset_sets.load(name, data_dir)
    x, y = (t.numpy().astype(np.float32) for t in (found.x, found.y))
    return Rows(found.family, x, y)


def housing(name: str, data_dir: Path | None) -> Rows:
    """Eight numbers and the place in five indicators, less one; rows without a number are left
    out."""
    path = find("housing/california_housing.csv", data_dir)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row.values())]
    if not rows or not {PRICE, PLACE} <= rows[0].keys():
        raise UserError(f"{path} needs a header with {PRICE} and {PLACE}, and whole rows.")
    numbers = [column for column in rows[0] if column not in (PRICE, PLACE)]
    places = sorted({row[PLACE] for row in rows})[1:]
    x = np.array([[float(row[column]) for column in numbers] for row in rows])
    near = np.array([[row[PLACE] == place for place in places] for row in rows])
    price = np.array([float(row[PRICE]) for row in rows])
    columns = np.concatenate([_standard(np.log(x[:, 2:])), _standard(x[:, :2]), near], 1)
    return _logistic(columns, price > np.median(price))


def images(name: str, data_dir: Path | None) -> Rows:
    pixels, labels, _ = idx.load(name, data_dir, download=False)
    x = pixels.numpy() - pixels.numpy().mean(0)
    _, vectors = np.linalg.eigh(x.T @ x)  # ascending
    return _logistic(_standard(x @ vectors[:, -COMPONENTS:]), labels.numpy() == CLASS[name])


SETS: dict[str, Callable[[str, Path | None], Rows]] = {
    "phishing": published,
    "ds1": published,
    "biketrips": published,
    "housing": housing,
    "mnist": images,
    "fashion-mnist": images,
}


def load(name: str, data_dir: Path | None = None) -> Rows:
    if name not in SETS:
        raise UserError(f"There is no set {name!r}; there are {', '.join(SETS)}.")
    return SETS[name](name, data_dir)


def _standard(x: Array) -> Array:
    return np.asarray((x - x.mean(0)) / x.std(0))


def _logistic(x: Array, y: Array) -> Rows:
    constant = np.ones((len(x), 1))
    return Rows("logistic", np.hstack([x, constant]).astype(np.float32), y.astype(np.float32))
