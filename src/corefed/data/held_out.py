"""Draw the points of a client that it does not train on: test points, validation points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.data.dataset import Dataset
from corefed.data.partition import Split

FEW = 20
"""Validation points below which a client's own metrics are mostly chance: the standard error of an
accuracy of 90 % is 7 points."""


def draw(
    dataset: Dataset, fraction: float, seed: int, client: int = 0, purpose: str = "test split"
) -> Tensor:
    """[n] bool: the held-out points, evenly spaced along the shuffled points sorted by class.

    Each class contributes its share within one point, and the shares do not all round the same way.
    Every class keeps a training point.
    """
    n = len(dataset.y)
    generator = rng.generator(seed, 0, client, purpose)
    order = torch.randperm(n, generator=generator)
    label = dataset.y[order] if dataset.classes else torch.zeros(n, dtype=torch.int64)
    label, by_class = label.sort(stable=True)
    order = order[by_class]
    start = torch.rand(1, generator=generator, dtype=torch.float64)
    steps = (start + fraction * torch.arange(n + 1, dtype=torch.float64)).floor()
    chosen = steps.diff() > 0
    first = torch.cat([torch.tensor([True]), label.diff() > 0])  # of its class
    trained = torch.zeros(int(label[-1]) + 1, dtype=torch.bool)
    trained[label[~chosen]] = True
    chosen &= ~first | trained[label]
    test = torch.zeros(n, dtype=torch.bool)
    test[order[chosen]] = True
    return test


def with_validation(
    dataset: Dataset, splits: Sequence[Split], share: float, seed: int
) -> list[Split]:
    """Take a share of each client's training points for validation; every class keeps one."""
    if share == 0:
        return list(splits)
    found = [hold_back(dataset, one, share, seed, client) for client, one in enumerate(splits)]
    if not any(len(one.validation) for one in found):
        largest = max(len(one.train) for one in splits)
        raise UserError(
            f"validation is {share:g}, which leaves no client a validation point: the largest has "
            f"{largest} training points. Use a larger share, or 0 for none."
        )
    return found


def hold_back(dataset: Dataset, split: Split, share: float, seed: int, client: int) -> Split:
    """The split of one client, with validation points taken from its training points."""
    mine = dataset._replace(y=dataset.y[split.train])  # labels are all that a draw looks at
    chosen = draw(mine, share, seed, client, "validation split")
    return split._replace(train=split.train[~chosen], validation=split.train[chosen])


def validation_notes(splits: Sequence[Split], dataset: Dataset, names: Sequence[str]) -> list[str]:
    """Sentences where validation points say little."""
    counts = [len(one.validation) for one in splits]
    if not any(counts):
        return []
    found = []
    few = [client for client, count in enumerate(counts) if count < FEW]
    if few:
        least = min(few, key=counts.__getitem__)
        found.append(
            f"{len(few)} of {len(splits)} clients have fewer than {FEW} validation points "
            f"({names[least]} has {counts[least]}): alone they say little about a client. "
            "Settings are compared by the validation points of all clients together."
        )
    if dataset.classes:
        classes = torch.cat([dataset.y[one.validation] for one in splits]).unique()
        if len(classes) == 1:
            label = (dataset.labels or tuple(map(str, range(dataset.classes))))[int(classes)]
            found.append(
                f"All validation points are of class {label!r}: they cannot tell settings apart."
            )
    return found
