"""RandomSubset: PFedBayes on k = fraction n points drawn uniformly, each with weight n / k.

The baseline every coreset has to beat: chosen once, or redrawn after a number of local steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corefed.methods import pfedbayes
from corefed.models import Model
from corefed.rng import Streams
from corefed.types import Batch, ClientData, Method, Tree, Work


@dataclass(frozen=True)
class Config(pfedbayes.Config):
    """Settings of RandomSubset, beside those of PFedBayes."""

    fraction: float = 0.1
    """Part of each client's points it trains on: k = ceil(fraction n)."""
    redraw_every: int = 0
    """Local steps after which a new subset is drawn; 0 keeps the first for the whole run."""


def build(config: Config, model: Model) -> Method:
    base = pfedbayes.build(config, model)

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        age = torch.full((data.weight.shape[0],), -1.0, device=data.weight.device)
        chosen = {"weight": torch.zeros_like(data.weight), "age": age}
        return {**base.init_client(broadcast, data), **chosen}

    def select(working: Tree, data: ClientData, streams: Streams, work: Work) -> Tree:
        age = working["age"]
        due = age < 0 if config.redraw_every == 0 else (age < 0) | (age >= config.redraw_every)
        rows = due.nonzero().squeeze(-1)
        if len(rows) > 0:
            part = ClientData(*(field[rows] for field in data))
            drawn = uniform(part, config.fraction, streams.subset(rows.tolist()))
            working["weight"] = working["weight"].index_copy(0, rows, drawn)
            working["age"] = age.masked_fill(due, 0.0)
        return working

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        working["age"] = working["age"] + 1
        return base.step(working, batch, noise)

    return base._replace(
        name="random-subset",
        init_client=init_client,
        select=select,
        weights=lambda working, data: working["weight"],
        step=step,
        select_every=config.redraw_every,
    )


def subset_size(size: Tensor, fraction: float) -> Tensor:
    """k_i = ceil(fraction n_i), at least 1: [C] int64."""
    return torch.ceil(size.double() * fraction - 1e-9).long().clamp_min(1)


def uniform(data: ClientData, fraction: float, streams: Streams) -> Tensor:
    """Weight n/k on k points chosen uniformly without replacement: [C, n]."""
    k = subset_size(data.size, fraction)
    order = torch.full(data.weight.shape, 2.0)  # above every uniform: padding comes last
    generators = streams.generators("subset", host=True)
    for row, real, g in zip(order, data.weight.cpu() > 0, generators, strict=True):
        row[real] = torch.rand(int(real.sum()), generator=g)  # as many, whatever the padding
    rank = order.to(data.weight.device).argsort(-1).argsort(-1)
    chosen = rank < k.unsqueeze(-1)
    return chosen * (data.size / k).unsqueeze(-1).to(data.weight.dtype)
