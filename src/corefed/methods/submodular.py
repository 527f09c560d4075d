"""FedAvg on a diverse subset of each client's points: the baselines of the paper's Table 2.

In its first round a client picks k = ceil(fraction n) of its n points, greedily, by the features
alone: no labels, no model. Each pick gets weight n/k, and the client trains on them for the rest of
the run. The three methods `submodular-logdet`, `-dispsum` and `-dispmin` differ in what a set of
points is worth (`corefed.selectors.submodular`). Features are x as the model sees it, flattened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import Part, PositiveInt, Unit
from corefed.base.types import ClientData, Method
from corefed.methods import fedavg
from corefed.methods.subset import on_subset
from corefed.models.network import Model
from corefed.selectors.similarity import Metric
from corefed.selectors.submodular import Objective, greedy
from corefed.selectors.subset import subset_size


@dataclass(frozen=True)
class Config(fedavg.Steps):
    """Settings of FedAvg on a diverse subset, beside those of FedAvg."""

    fraction: Part = 0.5
    """Part of each client's points it trains on: k = ceil(fraction n)."""
    metric: Metric = "cosine"
    """Similarity of two points: their cosine, or exp(-distance / number of features)."""
    selection_mb: Annotated[PositiveInt, Unit("MB")] = 2048
    """Memory bound of the selection of one client."""


check = fedavg.check


def build(objective: Objective, config: Config, model: Model, regulariser: float = 1.0) -> Method:
    def choose(data: ClientData, streams: Streams, points: Tensor | None) -> Tensor:
        return diverse(data, objective, config, regulariser, points)

    return on_subset(fedavg.plain(config, model), f"submodular-{objective}", choose)


def diverse(
    data: ClientData,
    objective: Objective,
    config: Config,
    regulariser: float = 1.0,
    points: Tensor | None = None,
) -> Tensor:
    """Weight n/k on the k points each client picks of its own: [C, n]."""
    weight = torch.zeros_like(data.weight)
    sizes = subset_size(data.size, config.fraction, points).tolist()
    for row, x, given, k in zip(weight, data.x, data.weight, sizes, strict=True):
        real = given.nonzero().squeeze(-1)
        picks = greedy(
            x[real],
            k,
            objective,
            metric=config.metric,
            regulariser=regulariser,
            selection_mb=config.selection_mb,
        )
        row[real[picks.chosen]] = len(real) / k
    return weight
