"""Draw the test points of a client."""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base import rng
from corefed.data.dataset import Dataset


def draw(dataset: Dataset, fraction: float, seed: int) -> Tensor:
    """[n] bool: the test points, evenly spaced along the shuffled points sorted by class.

    Each class contributes its share within one point, and the shares do not all round the same way.
    Every class keeps a training point.
    """
    n = len(dataset.y)
    generator = rng.generator(seed, 0, 0, "test split")
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
