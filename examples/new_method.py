"""A method of your own, outside the package: FedAvgM (Hsu et al., 2019).

    python examples/new_method.py

Clients make steps of SGD from what the server sent, and the server moves on with momentum: it adds
half of its last move to the average of theirs. CONTRIBUTING.md says how the same file becomes a
method of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corefed import resolve, train
from corefed.base.rng import Streams
from corefed.base.settings import Positive, Probability
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.methods.registry import Entry, register
from corefed.models.network import Model


@dataclass(frozen=True)
class Config:
    """Settings of FedAvgM."""

    learning_rate: Positive = 0.1
    """Step size of the clients' SGD."""
    server_momentum: Probability = 0.5
    """How much of the last round's move the server repeats (beta)."""


def build(config: Config, model: Model) -> Method:
    def init_server(streams: Streams) -> Tree:
        theta = model.init(streams.generators("init")[0], 0.1)
        return {"theta": theta, "velocity": torch.zeros_like(theta)}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        return {"theta": broadcast["theta"].clone()}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        return {"theta": broadcast["theta"].clone()}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta = working["theta"].requires_grad_()  # [C, P]
        nll = -model.log_likelihood(theta.unsqueeze(1), batch.x, batch.y).squeeze(1)  # [C, b]
        loss = (batch.scale * nll).sum(-1)  # [C]
        (slope,) = torch.autograd.grad(loss.sum(), theta)  # clients do not interact
        return {"theta": theta.detach() - config.learning_rate * slope}, {"loss": loss.detach()}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        return {"theta": working["theta"]}, {"theta": working["theta"]}  # message, private

    def aggregate(server: Tree, update: Update) -> Tree:
        n = update.examples.to(server["theta"])
        moved = server["theta"] - (n / n.sum()) @ update.message["theta"]
        velocity = config.server_momentum * server["velocity"] + moved
        return {"theta": server["theta"] - velocity, "velocity": velocity}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {"global": {"theta": broadcast["theta"]}, "localized": {"theta": private["theta"]}}

    def predict(tree: Tree, x: Tensor, noise: Tensor) -> Tensor:
        theta = tree["theta"].unsqueeze(1)  # the weights themselves are the one draw
        return model.likelihood.predictive(theta, model.forward(theta, x))

    return Method(
        name="fedavgm",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=predict,
        noise=(0,),  # a step consumes no draws
        traits=Traits(sent=("theta",), mean="examples"),  # the velocity stays at the server
    )


register("fedavgm", Entry(__name__, "fedavg with momentum at the server"))

if __name__ == "__main__":
    flags = {"method": "fedavgm", "data": "digits", "clients": 5, "rounds": 10}
    trained = train(resolve(flags=flags))
    accuracy = trained.summary["metrics"]["global_accuracy"]["mean"]
    print(f"FedAvgM on digits, 5 clients, 10 rounds: global accuracy {accuracy:.1%}")
