"""Whether a finished model may replace the one in use at a client: `models/current`.

Both models predict the client's own test points, as its files have them now. For each point the
difference of their negative log-likelihoods is taken. The new model is worse where the mean of
these differences is above 0 by a one-sided paired t-test at 5 %. Then `current` stays where it was.

With few points only a large loss is significant, and a model that is wrong on a few chosen points
passes. The gate stops a model that is spoilt as a whole.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import files
from corefed.base.errors import UserError
from corefed.federation.protocol import CURRENT
from corefed.federation.reading import fitting
from corefed.federation.reading.local_data import LocalData
from corefed.models import own
from corefed.settings import config
from corefed.training import fitted, record, scoring
from corefed.training.fitted import Fitted

LEVEL = 0.05
"""Probability with which a model that is no worse is turned away."""


class Verdict(NamedTuple):
    """Of the gate."""

    passes: bool
    note: str  # for the client's operator; empty for the first model


def judge(folder: Path, new: Fitted, data: LocalData, client: str, listed: str = "") -> Verdict:
    """Compare a model with the one in use, `folder`/current.

    `listed` is the network of the client's own that its client.toml names; no other code is run.
    """
    link = folder / CURRENT
    if not link.exists():
        return Verdict(True, "")
    try:
        old = _losses(_load(link, listed), data, client)
    except UserError as error:
        return Verdict(False, f"The model in use cannot be compared with the new one: {error}")
    found = _losses(new, data, client)
    means = f"negative log-likelihood {found.mean():.3f}, that in use {old.mean():.3f}"
    if is_worse(found, old):
        return Verdict(
            False, f"The new model is significantly worse on this client's points: {means}"
        )
    return Verdict(True, f"The new model is not significantly worse than the one in use: {means}")


def is_worse(new: Tensor, old: Tensor) -> bool:
    """Whether losses of the same points are larger by a one-sided paired t-test."""
    from scipy.special import stdtr  # Student's t; scipy takes a tenth of a second

    difference = (new - old).double()
    if not bool(difference.isfinite().all()):
        return not bool(new.isfinite().all())
    n = len(difference)
    if n < 2:
        return False  # nothing is known about the spread
    mean, error = float(difference.mean()), float(difference.std()) / math.sqrt(n)
    return mean > 0 if error == 0 else bool(stdtr(n - 1, -mean / error) < LEVEL)


def use(folder: Path, name: str) -> None:
    """Let `folder`/current be the model `name`, in one step."""
    fresh = folder / f".{CURRENT}{files.TEMPORARY}"
    with suppress(FileNotFoundError):
        fresh.unlink()
    os.symlink(name, fresh)
    os.replace(fresh, folder / CURRENT)
    files.flush(folder)


def in_use(folder: Path, name: str) -> bool:
    link = folder / CURRENT
    return link.is_symlink() and os.readlink(link) == name


def _load(folder: Path, listed: str) -> Fitted:
    model = config.resolve(folder / record.EXPERIMENT).run.model
    if own.is_own(model) and model != listed:
        raise UserError(f"client.toml does not name its network, model = {model!r}.")
    return fitted.load(folder, own.find(model) if own.is_own(model) else None)


def _losses(model: Fitted, data: LocalData, client: str) -> Tensor:
    """The negative log-likelihood of each test point."""
    (preparation, *_) = model.preparations
    x, y = fitting.fit_points(data, preparation, client, data.x_test, data.y_test)
    if not len(x):
        return torch.zeros(0, dtype=torch.float64)
    found = model.predict(client, x)
    if preparation.labels:
        return scoring.score_classes(found.mean, y)["nll"]
    return scoring.score_targets(torch.cat([found.mean, found.total], -1), y)["nll"]
