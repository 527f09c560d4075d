"""scikit-learn's digits, from its own file.

Importing scikit-learn takes seconds, the file a tenth of one, and this is the first set that a new
user trains on.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from corefed.base.errors import UserError
from corefed.data.dataset import Dataset

PLACE = Path("datasets") / "data" / "digits.csv.gz"
"""Inside the package; its rows are 64 grey levels from 0 to 16, and the label."""


def load() -> Dataset:
    pixels, labels = read()
    x = torch.from_numpy(pixels).to(torch.float32) / 16
    return Dataset("digits", x, torch.from_numpy(labels).to(torch.int64), classes=10)


def read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels, as `sklearn.datasets.load_digits` returns them."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn."
        )
    path = Path(package.origin).parent / PLACE
    if not path.exists():  # a version that keeps it elsewhere
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return pixels, labels
    with gzip.open(path, "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)
