"""Independent: every client alone, by SGD on its own data, from the common initial weights.

Nothing is sent in either direction: messages are empty, and clients draw the initial weights from
the run's seed. A client's model is also tested on the other clients' points, which shows what
federation is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, Start, Times
from corefed.base.types import ClientData, Method, Traits, Tree
from corefed.methods import fedavg
from corefed.models.network import Model


@dataclass(frozen=True)
class Config(fedavg.Config):
    """Settings of Independent: those of FedAvg, with defaults of their own."""

    learning_rate: LearningRate = 0.035
    """Step size of the clients' SGD."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.07
    """Standard deviation of the initial weights of an MLP."""


def build(config: Config, model: Model) -> Method:
    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        return {"theta": private["theta"].clone()}

    return fedavg.build(config, model)._replace(
        name="independent",
        begin=begin,
        end=lambda broadcast, working: ({}, working),
        aggregate=lambda server, update: server,
        models=lambda broadcast, private, data: {"personal": {"theta": private["theta"]}},
        traits=Traits(sent=(), mean="equal"),
    )
