"""The points of one client: which of them it trains on, and which are held out for testing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.data.partitioners import Indices, Pool

TEST_STRIDE = 5  # one point in five is a test point
MINIMUM_TRAIN, MINIMUM_TEST = 2, 1


class Split(NamedTuple):
    """One client's points, as ascending row numbers of the data set."""

    train: Tensor  # int64
    test: Tensor  # int64
    validation: Tensor = torch.empty(0, dtype=torch.int64)  # taken from the training points


def train_and_test(
    points: Indices,
    pool: Pool,
    cap: int | None,
    rng: np.random.Generator,
    test: float,
    fold: int | None,
) -> Split:
    """Hold out every fifth of the shuffled points sorted by label, which stratifies them.

    The offset is random, so that points of rare labels can be test points too. Another share is as
    evenly spaced. Test points that the data mark are used instead where there are any.
    """
    if pool.held_out is not None:
        is_test = pool.held_out[points]
    else:
        points = rng.permutation(points)
        points = points[np.argsort(pool.labels[points], kind="stable")]
        is_test = np.zeros(len(points), dtype=bool)
        if fold is not None:
            stride = round(1 / test)
            is_test[fold::stride] = True
        elif test == 1 / TEST_STRIDE:
            is_test[rng.integers(min(TEST_STRIDE, len(points))) :: TEST_STRIDE] = True
        else:
            places = np.floor(rng.random() + test * np.arange(len(points) + 1))
            is_test = np.diff(places) > 0
            is_test[-MINIMUM_TRAIN:] &= (~is_test).sum() >= MINIMUM_TRAIN
    train = points[~is_test]
    if cap is not None:
        own = pool.labels[train]
        train = np.concatenate([train[own == label][:cap] for label in np.unique(own)])
    return as_split(train, points[is_test])


def as_split(train: Indices, test: Indices) -> Split:
    return Split(torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(test)))
