"""RandomSubset: a method on k = fraction n points drawn uniformly, each with weight n / k.

The baseline that every coreset has to beat: PFedBayes or FedAvg on a subset that is drawn once, or
redrawn after a number of local steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, NotNegativeInt, Part, Unit, Usual
from corefed.base.types import ClientData, Method
from corefed.methods import fedavg, pfedbayes
from corefed.methods.subset import on_subset
from corefed.models.network import Model
from corefed.selectors.subset import uniform


@dataclass(frozen=True)
class Config(pfedbayes.Config):
    """Settings of RandomSubset, beside those of PFedBayes."""

    base: Literal["pfedbayes", "fedavg"] = "pfedbayes"
    """The method that trains on the subset; fedavg takes learning_rate and initial_std alone."""
    learning_rate: LearningRate = Usual(0.07)
    """Step size of the clients' SGD (base fedavg)."""
    fraction: Part = 0.1
    """Part of each client's points it trains on: k = ceil(fraction n)."""
    redraw_every: Annotated[NotNegativeInt, Unit("local steps")] = 0
    """Age at which the subset is redrawn; 0 keeps the first for the whole run."""


PRESETS = pfedbayes.PRESETS


def idle(config: Config) -> set[str]:
    """Settings that the chosen base does not use."""
    own = {field.name for field in dataclasses.fields(pfedbayes.Config)} - {"initial_std"}
    return own if config.base == "fedavg" else {"learning_rate"}


def check(config: Config) -> None:
    """Refuse a setting that the chosen base does not use."""
    if config.base == "pfedbayes":
        pfedbayes.check(config)
    for name in sorted(idle(config)):
        if getattr(config, name) != getattr(Config, name):
            raise UserError(
                f"{name} is {getattr(config, name)}, but base {config.base} does not use it; "
                "leave it out or choose the other base."
            )


def build(config: Config, model: Model) -> Method:
    base = pfedbayes.build(config, model)
    if config.base == "fedavg":
        own = fedavg.Steps(learning_rate=config.learning_rate, initial_std=config.initial_std)
        base = fedavg.plain(own, model)

    def choose(data: ClientData, streams: Streams, points: Tensor | None) -> Tensor:
        return uniform(data, config.fraction, streams, points)

    return on_subset(base, "random-subset", choose, config.redraw_every, free=True)
