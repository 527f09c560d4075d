"""A method of your own, outside the package: FedProx (Li et al., MLSys 2020).

    python examples/new_method.py

Clients make steps of SGD on f + (mu / 2) ||w - w_t||^2, where w_t is what the server sent. The
server averages what they send, each client in proportion to its number of points. CONTRIBUTING.md
says how the same file becomes a method of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corefed import resolve, train
from corefed.base.rng import Streams
from corefed.base.settings import Positive
from corefed.base.types import Batch, ClientData, Method, Tree, Update
from corefed.methods.registry import Entry, register
from corefed.models.network import Model


@dataclass(frozen=True)
class Config:
    """Settings of FedProx."""

    learning_rate: Positive = 0.1
    """Step size of the clients' SGD."""
    proximal: Positive = 0.1
    """How strongly a client is pulled towards the broadcast (mu)."""


def build(config: Config, model: Model) -> Method:
    def init_server(streams: Streams) -> Tree:
        return {"theta": model.init(streams.generators("init")[0], 0.1)}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        return {"theta": broadcast["theta"].clone()}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        return {"theta": broadcast["theta"].clone(), "anchor": broadcast["theta"]}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta = working["theta"].requires_grad_()  # [C, P]
        nll = -model.log_likelihood(theta.unsqueeze(1), batch.x, batch.y).squeeze(1)  # [C, b]
        loss = (batch.scale * nll).sum(-1)  # [C]
        (slope,) = torch.autograd.grad(loss.sum(), theta)  # clients do not interact
        theta = theta.detach()
        slope = slope + config.proximal * (theta - working["anchor"])
        return {**working, "theta": theta - config.learning_rate * slope}, {"loss": loss.detach()}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        return {"theta": working["theta"]}, {"theta": working["theta"]}  # message, private

    def aggregate(server: Tree, update: Update) -> Tree:
        n = update.examples.to(server["theta"])
        return {"theta": (n / n.sum()) @ update.message["theta"]}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {"global": {"theta": broadcast["theta"]}, "localized": {"theta": private["theta"]}}

    def predict(tree: Tree, x: Tensor, noise: Tensor) -> Tensor:
        theta = tree["theta"].unsqueeze(1)  # the weights themselves are the one draw
        return model.likelihood.predictive(theta, model.forward(theta, x))

    return Method(
        name="fedprox",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=predict,
        noise=(0,),  # a step consumes no draws
    )


register("fedprox", Entry(__name__, "fedavg with clients that stay near the broadcast"))

if __name__ == "__main__":
    flags = {"method": "fedprox", "data": "digits", "clients": 5, "rounds": 10, "proximal": 0.01}
    trained = train(resolve(flags=flags))
    accuracy = trained.summary["metrics"]["global_accuracy"]["mean"]
    print(f"FedProx on digits, 5 clients, 10 rounds: global accuracy {accuracy:.1%}")
