"""pFedMe (T Dinh, Tran, Nguyen, NeurIPS 2020): personal models near a global one.

Client i's objective is the Moreau envelope of its loss f_i, with penalty lambda:

    F_i(w) = min_theta f_i(theta) + (lambda / 2) ||theta - w||^2,
    grad F_i(w) = lambda (w - theta_i(w)),    theta_i(w) the minimiser: the personal model.

In each round w_i starts at the broadcast w. Each of the R local steps draws a minibatch, makes K
gradient steps towards theta_i(w_i) on it, and one step w_i <- w_i - eta lambda (w_i - theta_i). The
client uploads w_i; the server averages: w <- (1 - beta) w + (beta / S) sum_i w_i.

Algorithm 1 leaves open where the K steps start. Here it is always the last theta_i, over steps and
over rounds: the minimiser moves little from one step to the next, so few steps suffice. (The
authors' program starts at the broadcast in each round. After a few of the R steps that is the same:
the start fades by a factor of about |1 - personal_rate (lambda + curvature)| per inner step.)

Defaults are the authors' for a network on MNIST, except learning_rate (0.01 there) and
personal_rate. Their 0.05 is stable for curvatures up to 10; with ten inner steps, or with a
convolutional network, training diverged. 0.02 is stable up to 70, with the same accuracies on
MNIST.

theta_i and w_i are two tensors throughout: `personal` is theta_i, `localized` w_i, `global` w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import PER_RUN, LearningRate, Positive, PositiveInt, Start, Times
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods.fedavg import gradient
from corefed.models.network import Model


@dataclass(frozen=True)
class Config:
    """Settings of pFedMe; the paper's symbol in brackets."""

    penalty: Annotated[Positive, PER_RUN, Times(1 / 8, 3)] = 30.0
    """Weight of ||theta - w||^2 / 2 (lambda): more means less personal."""
    inner_steps: PositiveInt = 5
    """Gradient steps towards the personal model on each minibatch (K)."""
    personal_rate: LearningRate = 0.02
    """Step size of the personal model; stable while penalty plus curvature is below 2 / it."""
    optimizer: optim.Rule = "sgd"
    """Update rule of the personal model, which goes on from round to round; momentum (of 0.9) needs
    about a tenth of sgd's personal_rate, adam 0.005. The localized model's step is always plain."""
    learning_rate: LearningRate = 0.06
    """Step size of the localized model w_i on the Moreau envelope (eta)."""
    beta: Positive = 2.0
    """Server mixing (beta): w <- (1 - beta) w + beta mean of uploads; above 1 it goes beyond."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


def check(config: Config) -> None:
    """Refuse a product of 2 or more: every inner step would move theta away from w."""
    optim.refuse_large_steps(config.optimizer, "personal_rate", config.personal_rate)
    if config.optimizer == "sgd" and config.personal_rate * config.penalty >= 2:
        raise UserError(
            f"personal_rate is {config.personal_rate:g} and penalty {config.penalty:g}; their "
            f"product must be below 2, so take personal_rate below {2 / config.penalty:g}."
        )


def build(config: Config, model: Model) -> Method:
    rule = _rule(config, model)

    def init_server(streams: Streams) -> Tree:
        return {"w": model.init(streams.generators("init")[0], config.initial_std)}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        theta = broadcast["w"].clone()
        return {"theta": theta, "w": theta.clone(), **rule.init(theta)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        kept = {name: value.clone() for name, value in private.items() if name != "w"}
        return {**kept, "w": broadcast["w"].clone()}  # w_{i,0} = w^t

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta, w = working["theta"], working["w"]
        loss = approach(config, model, theta, w, batch, working)
        optim.towards(w, theta, config.learning_rate * config.penalty)  # w - eta lambda (w - theta)
        return working, {"loss": loss}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "personal": {"w": private["theta"]},
            "global": {"w": broadcast["w"]},
            "localized": {"w": private["w"]},
        }

    return Method(
        name="pfedme",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=lambda broadcast, working: ({"w": working["w"]}, working),
        aggregate=lambda server, update: aggregate(config, server, update),
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["w"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(passes=config.inner_steps, mean="equal"),
    )


def approach(
    config: Config, model: Model, theta: Tensor, w: Tensor, batch: Batch, state: Tree | None = None
) -> Tensor:
    """K gradient steps of theta, in place, on f(theta; batch) + (lambda / 2) ||theta - w||^2.

    Returns the loss before the first step, [C]: on points that theta was not fitted to yet.
    """
    rule, losses = _rule(config, model), []
    state = rule.init(theta) if state is None else state
    for _ in range(config.inner_steps):
        loss, slope = gradient(model, theta, batch)
        losses.append(loss)
        if config.optimizer == "sgd":  # both parts of the gradient at once
            optim.towards(theta, w, config.personal_rate * config.penalty)
            optim.descend(theta, slope, config.personal_rate)
        else:
            rule.update(theta, slope + optim.scaled(config.penalty, theta - w), state)
    return losses[0]


def _rule(config: Config, model: Model) -> optim.Optimizer:
    return optim.of_weights(config.optimizer, config.personal_rate, model.scale())


def aggregate(config: Config, server: Tree, update: Update) -> Tree:
    """w^{t+1} = (1 - beta) w^t + (beta / S) sum_i w_i; clients of any size count alike."""
    return {"w": torch.lerp(server["w"], update.message["w"].mean(0), config.beta)}
