"""Small regression sets of the Bayesian-coreset literature, one `.npz` each: X, y, Xt, yt.

The six published files have a constant column, the last one. A file without one gets one there, so
that the intercept is a coefficient like the others. Labels -1 / 1 become 0 / 1. Features keep their
units. Only the 500 training points are used: a coreset is judged by their posterior.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base import arrays
from corefed.base.errors import UserError
from corefed_studies.data.positions import find

SETS = {
    "phishing": "logistic",
    "ds1": "logistic",
    "synth_lr": "logistic",
    "airportdelays": "poisson",
    "biketrips": "poisson",
    "synth_poiss": "poisson",
}
"""The likelihood of each set."""


class CoresetSet(NamedTuple):
    name: str
    family: str  # logistic or poisson
    x: Tensor  # [n, d] float64, with a constant column
    y: Tensor  # [n] float64: 0 / 1, or counts


def load(name: str, data_dir: Path | None = None) -> CoresetSet:
    if name not in SETS:
        raise UserError(f"There is no set {name!r}; there are {', '.join(SETS)}.")
    path = find(f"coresets/{name}.npz", data_dir)
    stored = arrays.load(path, ["X", "y"], arrays.MEMORY_MB)
    for key, array in stored.items():
        if array.dtype.kind not in "fiub":
            raise UserError(f"{key} in {path} is {array.dtype}, not numbers.")
    x, y = (torch.from_numpy(stored[key].astype(np.float64)) for key in ("X", "y"))
    y = y.flatten()
    if x.ndim != 2 or len(x) != len(y) or len(y) == 0:
        raise UserError(f"{path} has X of shape {tuple(x.shape)} and {len(y)} of y.")
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise UserError(f"{path} has NaN or infinite numbers.")
    family = SETS[name]
    if family == "logistic":
        y = torch.where(y == -1, 0.0, y)
    allowed = (y == 0) | (y == 1) if family == "logistic" else (y >= 0) & (y == y.round())
    if not allowed.all():
        what = "-1 / 1 or 0 / 1" if family == "logistic" else "counts"
        raise UserError(
            f"{path} must have {what} for y; row {int((~allowed).nonzero()[0])} is not."
        )
    if not (x == x[:1]).all(0).any():
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return CoresetSet(name, family, x, y)
