"""FedProx (Li et al., MLSys 2020): FedAvg whose clients stay near the broadcast.

A client starts at the broadcast w and makes R gradient steps on

    h_i(theta) = f_i(theta) + (mu / 2) ||theta - w||^2,

then the server averages, each client in proportion to its number of points. mu = 0 would be FedAvg.
The paper's clients may stop early, each at an accuracy of its own; here all make R steps.

There is no personal model. `localized` is a client's model after its local steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import PER_RUN, LearningRate, Positive, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Tree
from corefed.bayes import optim
from corefed.methods import fedavg
from corefed.methods.fedavg import gradient
from corefed.models.network import Model


@dataclass(frozen=True)
class Config(fedavg.Steps):
    """Settings of FedProx: those of FedAvg, and how strongly clients are held."""

    proximal: Annotated[Positive, PER_RUN, Times(1 / 32, 8)] = 0.1
    """Weight of ||theta - w||^2 / 2 (mu): more means that clients stay nearer to the broadcast."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""
    learning_rate: LearningRate = Usual(0.07)
    """Step size of the clients."""


check = fedavg.check


def build(config: Config, model: Model) -> Method:
    rule = optim.of_weights(config.optimizer, config.learning_rate, model.scale())
    base = fedavg.plain(config, model)

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        theta = broadcast["theta"].clone()
        return {"theta": theta, "anchor": broadcast["theta"], **rule.init(theta)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta = working["theta"]
        loss, slope = gradient(model, theta, batch)
        slope += optim.scaled(config.proximal, theta - working["anchor"])
        rule.update(theta, slope, working)
        return working, {"loss": loss}

    return base._replace(name="fedprox", begin=begin, step=step)
