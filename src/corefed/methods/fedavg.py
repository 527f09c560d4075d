"""FedAvg (McMahan et al., AISTATS 2017): one model for all clients.

A client starts at the broadcast w, makes R gradient steps on its own data and uploads what it has;
the server averages, each client in proportion to its number of points: w <- sum_i (n_i / n) w_i.

With `server_momentum` it is FedAvgM (server_momentum.py).

There is no personal model. `localized` is a client's model after its local steps, before averaging.

A learning rate of 0.55 that falls along a cosine (`schedule`) makes better shared models of MLPs,
but leaves the last local steps without effect, and diverged with a convolutional network
(docs/defaults.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import elbo, optim
from corefed.bayes.predict import predictive_at
from corefed.methods.server_momentum import ServerMomentum, at_rest, moved
from corefed.models.network import Model


@dataclass(frozen=True)
class Steps:
    """Settings of the clients' steps, for every method that makes FedAvg's."""

    learning_rate: LearningRate = Usual(0.07)
    """Step size of the clients."""
    optimizer: optim.Rule = "sgd"
    """Update rule of the clients; momentum (of 0.9) and adam restart in each round. Each needs a
    learning_rate of its own: about a tenth of sgd's for momentum, 0.005 for adam."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


@dataclass(frozen=True)
class Config(Steps):
    """Settings of FedAvg."""

    server_momentum: ServerMomentum = 0.0
    """Part of the shared model's last move that the server adds to the next; 0.8 wants about a
    third of the learning_rate."""


def check(config: Steps) -> None:
    optim.refuse_large_steps(config.optimizer, "learning_rate", config.learning_rate)


def build(config: Config, model: Model) -> Method:
    """FedAvg, with the server's momentum where it has one."""
    base, beta = plain(config, model), config.server_momentum

    def init_server(streams: Streams) -> Tree:
        server = base.init_server(streams)
        return server | at_rest(beta, server["theta"])

    def aggregate(server: Tree, update: Update) -> Tree:
        theta, state = moved(beta, server, server["theta"], average(update))
        return {"theta": theta, **state}

    traits = base.traits._replace(sent=("theta",))
    return base._replace(init_server=init_server, aggregate=aggregate, traits=traits)


def plain(config: Steps, model: Model) -> Method:
    """FedAvg as of 2017, which other methods change."""
    rule = optim.of_weights(config.optimizer, config.learning_rate, model.scale())

    def init_server(streams: Streams) -> Tree:
        return {"theta": model.init(streams.generators("init")[0], config.initial_std)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        theta = broadcast["theta"].clone()
        return {"theta": theta, **rule.init(theta)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        loss, slope = gradient(model, working["theta"], batch)
        rule.update(working["theta"], slope, working)
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        kept = {"theta": working["theta"]}  # the weights start anew, and with them the optimiser
        return kept, dict(kept)

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "global": {"theta": broadcast["theta"]},
            "localized": {"theta": private["theta"]},
        }

    return Method(
        name="fedavg",
        init_server=init_server,
        init_client=lambda broadcast, data: {"theta": broadcast["theta"].clone()},
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["theta"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(mean="examples"),
    )


def gradient(model: Model, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss per point, (1/n) sum_j w_j nll_j, and its gradient in theta: [C], [C, P]."""
    theta = theta.detach().requires_grad_()
    with torch.enable_grad():
        loss = elbo.weighted_nll(model, theta.unsqueeze(1), batch)
        (slope,) = torch.autograd.grad(loss.sum(), theta)  # clients do not interact
    return loss.detach(), slope


def aggregate(server: Tree, update: Update) -> Tree:
    """w <- sum_i (n_i / n) w_i over the cohort."""
    return {"theta": average(update)}


def average(update: Update, part: str = "theta") -> Tensor:
    """sum_i (n_i / n) w_i over the cohort: [P]."""
    uploads = update.message[part]  # [S, P]
    n = update.examples.to(uploads)  # integers would be divided in float32
    return (n / n.sum()) @ uploads
