"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg without client drift, by control variates.

Client i keeps c_i, an estimate of its own gradient, and the server c, that of everybody's. From the
broadcast x a client makes K local steps y <- y - eta (g_i(y) - c_i + c). By the paper's option II,

    c_i^+ = c_i - c + (x - y_i) / (K eta),    c^+ = c + (|S| / N) mean_i (c_i^+ - c_i).

Put the first into the second: c^+ = (1 - rho) c + rho (x - mean_i y_i) / (K eta), rho = |S| / N. So
the server rebuilds c from the y_i, and an upload is as large as FedAvg's, whoever takes part. x and
c are sent down. All means are by numbers of points, as the objective is sum_i (n_i / n) f_i, and so
is rho: points of the cohort by those of all clients so far. An upload says whether it is a client's
first, so that they can be counted. In that round a client has no c_i, and makes plain steps.

Then c is the mean of the c_i at any time. That is what pins x to the optimum: with c_i = g_i(x) and
c = 0 nothing moves, and sum_i n_i g_i(x) = n c.

Here c is kept as C = K eta c, how far a round moves: y <- y - eta g_i(y) + (C_i - C) / K in a step,

    C_i^+ = C_i - C + x - y_i,    C^+ = (1 - rho) C + rho (x - mean_i y_i),

and the server need know neither K nor eta. (Where eta follows a schedule, C and C_i are both those
of earlier rounds.)

Steps are plain SGD: K eta is the length of the path of no other rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods import fedavg
from corefed.methods.fedavg import gradient
from corefed.models.network import Model


@dataclass(frozen=True)
class Config:
    """Settings of SCAFFOLD."""

    learning_rate: LearningRate = Usual(0.07)
    """Step size of the clients' SGD."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


def build(config: Config, model: Model) -> Method:
    def init_server(streams: Streams) -> Tree:
        theta = model.init(streams.generators("init")[0], config.initial_std)
        none = theta.new_zeros(())
        return {"theta": theta, "c": torch.zeros_like(theta), "first": none, "points": none.clone()}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        theta = broadcast["theta"].clone()
        return {
            "theta": theta,
            "c": torch.zeros_like(theta),
            "joined": torch.zeros_like(theta[:, 0]),
        }

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        turn = (private["c"] - broadcast["c"]) * private["joined"].unsqueeze(-1)  # C_i - C
        return {"theta": broadcast["theta"].clone(), "turn": turn, "first": 1 - private["joined"]}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        y = working["theta"]
        loss, slope = gradient(model, y, batch)
        optim.descend(y, slope, config.learning_rate)
        y.addcdiv_(working["turn"], optim.column(working["planned"], y))  # K local steps
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        y = working["theta"]
        c = working["turn"] + broadcast["theta"] - y
        message = {"theta": y, "first": working["first"]}
        return message, {"theta": y, "c": c, "joined": torch.ones_like(y[:, 0])}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "global": {"theta": broadcast["theta"]},
            "localized": {"theta": private["theta"]},
        }

    return Method(
        name="scaffold",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["theta"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(sent=("theta", "c", "first"), mean="examples", planned=True),
    )


def aggregate(server: Tree, update: Update) -> Tree:
    """x^+ = mean_i y_i and C^+ = (1 - rho) C + rho (x - x^+), with rho = n_S / n."""
    n = update.examples.to(server["theta"])
    mean = fedavg.average(update)
    points = server["points"] + n @ update.message["first"].clamp(0, 1)  # of all clients so far
    rho = (n.sum() / points).clamp_max(1)
    moved = server["theta"] - mean
    return {**server, "theta": mean, "c": torch.lerp(server["c"], moved, rho), "points": points}
