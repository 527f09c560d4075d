"""FedBABU (Oh, Kim, Yun, ICLR 2022): the body is federated, the head stays as it was drawn.

A network is a body phi and a head h, its last layer. All clients have the same random h, drawn from
the run's seed. In a round a client makes R gradient steps on phi alone and uploads it; the server
averages, each client in proportion to its number of points. Since h never moves, clients pull phi
towards the same features. h is never sent.

The personal model is (phi, h) after `adapt_steps` steps of fine-tuning, of both, on the client's
training data (`fine_tuning.py`), made when it is evaluated, exported or joined. `global` is the
broadcast phi with h, `localized` a client's body after its local steps, with h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import (
    PER_RUN,
    LearningRate,
    Positive,
    PositiveInt,
    Start,
    Times,
    Usual,
)
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods import fedavg
from corefed.methods.fedavg import gradient
from corefed.methods.fine_tuning import fine_tune
from corefed.models.body_and_head import body_and_head
from corefed.models.network import Model


@dataclass(frozen=True)
class Config:
    """Settings of FedBABU."""

    learning_rate: LearningRate = Usual(0.07)
    """Step size of the body's training."""
    optimizer: optim.Rule = "sgd"
    """Update rule of the body's training, restarted in each round; momentum needs about a tenth of
    sgd's learning_rate, adam 0.005. Fine-tuning is always plain."""
    adapt_rate: Annotated[Positive, PER_RUN, Times(1 / 8, 4)] = Usual(0.07)
    """Step size of fine-tuning, body and head."""
    adapt_steps: PositiveInt = 20
    """Steps of fine-tuning to a personal model."""
    adapt_points: PositiveInt = 100
    """Training points in a step of fine-tuning."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, and so of its head for good."""


def check(config: Config) -> None:
    optim.refuse_large_steps(config.optimizer, "learning_rate", config.learning_rate)


def with_steps(config: Config, steps: int | None) -> tuple[Config, int]:
    """Settings of a client that joins later and adapts for `steps` steps; None: as in the run."""
    config = config if steps is None else replace(config, adapt_steps=steps)
    return config, config.adapt_steps


def build(config: Config, model: Model) -> Method:
    split = body_and_head(model, "fedbabu")
    scale = model.scale()
    scale = None if scale is None else split.body(scale)
    rule = optim.of_weights(config.optimizer, config.learning_rate, scale)

    def init_server(streams: Streams) -> Tree:
        theta = model.init(streams.generators("init")[0], config.initial_std)
        return {"body": split.body(theta), "head": split.head(theta)}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        return {"body": broadcast["body"].clone(), "head": broadcast["head"].clone()}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        body = broadcast["body"].clone()
        return {"body": body, "head": private["head"], **rule.init(body)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta = split.join(working["body"], working["head"])
        loss, slope = gradient(model, theta, batch)
        rule.update(working["body"], split.body(slope), working)
        return working, {"loss": loss}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        theta = split.join(broadcast["body"], private["head"])
        tuned = fine_tune(
            model, theta, data, config.adapt_rate, config.adapt_steps, config.adapt_points
        )
        return {
            "personal": {"theta": tuned},
            "global": {"theta": theta},
            "localized": {"theta": split.join(private["body"], private["head"])},
        }

    return Method(
        name="fedbabu",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=lambda broadcast, working: ({"body": working["body"]}, {"body": working["body"]}),
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["theta"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(sent=("body",), mean="examples"),
    )


def aggregate(server: Tree, update: Update) -> Tree:
    """phi <- sum_i (n_i / n) phi_i over the cohort; the head stays."""
    return {**server, "body": fedavg.average(update, "body")}
