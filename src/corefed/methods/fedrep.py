"""FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021): a shared body, a head per client.

A network is a body phi, shared, and a head h_i, its last layer, which never leaves client i. In the
R local steps of a round, from the broadcast phi and the client's last head,

    first    h_i <- h_i - alpha grad_h f_i(phi, h_i),        `head_part` of the steps,
    then     phi_i <- phi_i - alpha grad_phi f_i(phi_i, h_i)    in the others, h_i held fixed.

The client uploads phi_i; the server averages, each client in proportion to its number of points.
Where R = 1 the one step moves both.

`personal` is the current broadcast body with the client's head, `localized` the client's own body
with it. `global` is the broadcast body with the head that all clients began with: a start for
newcomers and no model to use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import LearningRate, Probability, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Traits, Tree
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods.fedavg import gradient
from corefed.methods.fedbabu import aggregate
from corefed.models.body_and_head import body_and_head
from corefed.models.network import Model

BODY, HEAD = "body.", "head."
"""Prefixes of the states of the two optimisers."""


@dataclass(frozen=True)
class Config:
    """Settings of FedRep."""

    learning_rate: LearningRate = Usual(0.07)
    """Step size of body and head (alpha)."""
    head_part: Probability = 0.5
    """Part of a round's local steps that train the head; those that follow train the body."""
    optimizer: optim.Rule = "sgd"
    """Update rule of both: the body's restarts in each round, the head's goes on. momentum needs
    about a tenth of sgd's learning_rate, adam 0.005."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


def check(config: Config) -> None:
    optim.refuse_large_steps(config.optimizer, "learning_rate", config.learning_rate)


def build(config: Config, model: Model) -> Method:
    split = body_and_head(model, "fedrep")
    scale = model.scale()
    of_body, of_head = (
        optim.of_weights(config.optimizer, config.learning_rate, each)
        for each in ((None, None) if scale is None else (split.body(scale), split.head(scale)))
    )

    def init_server(streams: Streams) -> Tree:
        theta = model.init(streams.generators("init")[0], config.initial_std)
        return {"body": split.body(theta), "head": split.head(theta)}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        body, head = broadcast["body"].clone(), broadcast["head"].clone()
        return {
            "body": body, "head": head, "start": head.clone(),
            **optim.prefixed(HEAD, of_head.init(head)),
        }  # fmt: skip

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        own = {k: v.clone() for k, v in private.items() if k == "head" or k.startswith(HEAD)}
        body = broadcast["body"].clone()
        taken = torch.zeros_like(body[:, 0])  # local steps so far
        return {**own, "body": body, "taken": taken, **optim.prefixed(BODY, of_body.init(body))}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        loss, slope = gradient(model, split.join(working["body"], working["head"]), batch)
        taken, planned = working["taken"], working["planned"]
        first = (config.head_part * planned).floor().clamp_min(1)  # steps of the head
        head_moves = taken < first
        body_moves = taken >= torch.minimum(first, planned - 1)
        _where(head_moves, of_head, "head", split.head(slope), working)
        _where(body_moves, of_body, "body", split.body(slope), working)
        taken.add_(1)
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        kept = {k: v for k, v in working.items() if k in ("body", "head") or k.startswith(HEAD)}
        return {"body": working["body"]}, kept

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "personal": {"theta": split.join(broadcast["body"], private["head"])},
            "global": {"theta": split.join(broadcast["body"], private["start"])},
            "localized": {"theta": split.join(private["body"], private["head"])},
        }

    return Method(
        name="fedrep",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["theta"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(sent=("body",), mean="examples", planned=True),
    )


def _where(moves: Tensor, rule: optim.Optimizer, name: str, slope: Tensor, working: Tree) -> None:
    """One step of working[name] for the clients that move it [C]; others keep value and state."""
    own = {"": working[name], **optim.under(f"{name}.", working)}
    before = {key: value.clone() for key, value in own.items()}
    rule.update(working[name], slope, own)
    for key, value in own.items():
        chosen = moves.view(-1, *[1] * (value.dim() - 1))
        value.copy_(torch.where(chosen, value, before[key]))
