"""Independent: every client alone, on its own data, from the common initial weights.

Nothing is sent in either direction: messages are empty, and clients draw the initial weights from
the run's seed. A client's model is also tested on the other clients' points, which shows what
federation is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, Start, Times, Usual
from corefed.base.types import ClientData, Method, Traits, Tree
from corefed.bayes import optim
from corefed.methods import fedavg
from corefed.models.network import Model


@dataclass(frozen=True)
class Config(fedavg.Steps):
    """Settings of Independent: those of FedAvg, with defaults of their own."""

    learning_rate: LearningRate = Usual(0.035)
    """Step size of the clients."""
    optimizer: optim.Rule = "sgd"
    """Update rule of the clients; momentum (of 0.9) and adam go on from round to round. Each needs
    a learning_rate of its own: about a tenth of sgd's for momentum, 0.005 for adam."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.07
    """Standard deviation of the initial weights of an MLP."""


check = fedavg.check


def build(config: Config, model: Model) -> Method:
    rule = optim.of_weights(config.optimizer, config.learning_rate, model.scale())

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        theta = broadcast["theta"].clone()
        return {"theta": theta, **rule.init(theta)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        return {name: value.clone() for name, value in private.items()}

    return fedavg.plain(config, model)._replace(
        name="independent",
        init_client=init_client,
        begin=begin,
        end=lambda broadcast, working: ({}, working),
        aggregate=lambda server, update: server,
        models=lambda broadcast, private, data: {"personal": {"theta": private["theta"]}},
        traits=Traits(sent=(), mean="equal"),
    )
