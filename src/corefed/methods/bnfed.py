"""BNFed = PFNM (Yurochkin et al., ICML 2019): one model for all, whose neurons are matched.

A client trains its network on its own data, by Adam, and uploads it. The server regards the hidden
neurons of all uploads as noisy copies of global ones. The Beta-Bernoulli process of `pfnm.py` finds
which are copies of the same, and the posterior mean of each global neuron goes into the global
network. Neurons that clients share are averaged, others stand side by side: the global network is
wider than a client's, and its width changes from round to round. Output biases, and a learnt noise,
need no matching and are averaged.

In the next round a client continues from the global neurons that it was matched to, in a network of
its own width. It finds them itself: the network that it uploaded last is in its private state, and
`pfnm.find` compares it with the broadcast. So the server remembers nothing about clients, which may
come and go, and a client that took part in the last round finds what the server matched it to.
A client that joins later starts from the neurons that the most clients share.

State has fixed shapes here, so the server's network is padded to `growth` times the clients' width
in each hidden layer. Unused neurons are all zeros, which changes nothing in what the network
computes; they are sent, and counted as sent. When a layer is full, neurons must be shared.

There is no personal model. `localized` is a client's network after its local steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import Factors, LearningRate, Positive, PositiveInt, Range
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods.fedavg import gradient
from corefed.methods.layers import Array, Index, join, split, take
from corefed.methods.pfnm import Prior, find, match_networks, popular
from corefed.models.network import Model, mlp

WIDTH = Range(lambda v: 1e-4 <= v <= 1e4, "between 0.0001 and 10000")
"""Of sigma and sigma_0: squares of numbers in this range can be added in float64."""


@dataclass(frozen=True)
class Config:
    """Settings of BNFed; the paper's symbol in brackets."""

    learning_rate: LearningRate = 0.01
    """Step size of the clients."""
    optimizer: optim.Rule = "adam"
    """Update rule of the clients, which restarts in each round: adam, as the authors use, or sgd
    and momentum, which need rates of their own (0.07 and 0.007)."""
    sigma: Annotated[float, WIDTH, Factors((0.5, 1, 2))] = 1.0
    """Standard deviation of a client's neuron around the global one: less means more neurons."""
    sigma_0: Annotated[float, WIDTH] = 1.0
    """Standard deviation of global neurons around 0: less means more shrinkage towards 0."""
    gamma: Positive = 1.0
    """Mass of the Beta process (gamma_0): more means more neurons that are not shared."""
    sweeps: PositiveInt = 10
    """Times that each client's neurons are matched at most; it ends when nothing changes."""
    growth: PositiveInt = 5
    """The global network's hidden layers are at most so many times as wide as a client's."""
    initial: Literal["own", "shared"] = "own"
    """Clients' first networks: each draws its own, as in the paper, or all have the server's."""
    initial_std: Positive = 0.1
    """Standard deviation of the initial weights, as those of the Bayesian methods."""


def check(config: Config) -> None:
    optim.refuse_large_steps(config.optimizer, "learning_rate", config.learning_rate)


MOST_BYTES = 1 << 30
"""Of the padded global network, which each client in training receives."""


def build(config: Config, model: Model) -> Method:
    padded = _padded(config, model)
    prior = Prior(config.sigma, config.sigma_0, config.gamma, config.sweeps)
    rule = optim.of_weights(config.optimizer, config.learning_rate, None)
    hidden, limits = model.widths[1:-1], padded.widths[1:-1]
    predictors = {network.size: network for network in (model, padded)}

    def init_server(streams: Streams) -> Tree:
        """The first neurons of each layer are an initial network; `clients` 0: none matched yet."""
        theta = model.init(streams.generators("init")[0], config.initial_std)
        layers = split(_numpy(theta), model.widths)
        parts = [join(layers, padded.widths), _extra(_numpy(theta), model)]
        members = np.concatenate([np.arange(m) < n for m, n in zip(limits, hidden, strict=True)])
        return {
            "theta": _tensor(parts, theta),
            "members": _tensor([members], theta),
            "clients": theta.new_zeros(()),
        }

    def start(broadcast: Tree, private: Tree, row: int) -> Array:
        """The client's part of the global network, [P]."""
        whole = _numpy(broadcast["theta"][row])
        world, members = split(whole, padded.widths), _members(broadcast["members"][row], limits)
        if private["joined"][row] > 0 and broadcast["clients"][row] > 0:
            own = split(_numpy(private["theta"][row]), model.widths)
            assigned = find(own, world, members, int(broadcast["clients"][row]), prior)
        else:
            assigned = popular(members, hidden)
        return np.concatenate([join(take(world, assigned), model.widths), _extra(whole, model)])

    def starts(broadcast: Tree, private: Tree) -> Tree:
        rows = [start(broadcast, private, row) for row in range(len(broadcast["theta"]))]
        used = (broadcast["members"] > 0).to(broadcast["theta"]).split(limits, -1)
        return {
            "theta": _tensor(rows, broadcast["theta"]).view(len(rows), -1),
            "neurons": torch.stack([layer.sum(-1) for layer in used], -1),
        }

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        joined = {"joined": torch.zeros_like(broadcast["clients"])}
        return {**joined, **starts(broadcast, joined)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        working = starts(broadcast, private)
        first = (private["joined"] == 0) & (broadcast["clients"] == 0)
        for row, g in enumerate(streams.generators("init", host=True)):
            if config.initial == "own" and first[row]:  # a client draws its first network
                working["theta"][row] = model.init(g, config.initial_std).to(working["theta"])
        return {**working, **rule.init(working["theta"])}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        loss, slope = gradient(model, working["theta"], batch)
        rule.update(working["theta"], slope, working)
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        joined = torch.ones_like(broadcast["clients"])
        private = {"theta": working["theta"], "neurons": working["neurons"], "joined": joined}
        return {"theta": working["theta"]}, private

    def aggregate(server: Tree, update: Update) -> Tree:
        order = sorted(range(len(update.clients)), key=update.clients.__getitem__)
        uploads = _numpy(update.message["theta"])[order]
        _refuse_divergence(uploads, [update.clients[i] for i in order])
        world = match_networks([split(theta, model.widths) for theta in uploads], prior, limits)
        members = [np.pad(m, (0, n - len(m))) for m, n in zip(world.counts, limits, strict=True)]
        parts = [join(world.network, padded.widths), _extra(uploads, model).mean(0)]
        return {
            "theta": _tensor(parts, server["theta"]),
            "members": _tensor(members, server["members"]),
            "clients": torch.full_like(server["clients"], len(order)),
        }

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "global": {"theta": broadcast["theta"]},
            "localized": {"theta": private["theta"]},
        }

    def predict(tree: Tree, x: Tensor, noise: Tensor) -> Tensor:
        theta = tree["theta"]
        return predictive_at(predictors[theta.shape[-1]], theta.unsqueeze(1), x)

    def report(private: Tree) -> Tree:
        """Widths of the global network that a client received, by hidden layer."""
        widths = private["neurons"].unbind(-1)
        return {f"global_width_{h}": width for h, width in enumerate(widths, 1)}

    return Method(
        name="bnfed",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=predict,
        noise=(0,),
        traits=Traits(aligned=False, report=report),  # clients order neurons in their own way
    )


def _padded(config: Config, model: Model) -> Model:
    """A network with room for the global neurons, if the model's neurons can be matched."""
    if len(model.widths) < 3:
        lack, way = (
            ("has no hidden layer", "set hidden to one or more widths")
            if model.widths
            else ("is convolutional or a module of its own", "use model=mlp")
        )
        raise UserError(
            f"bnfed matches the neurons of hidden ReLU layers, and this model {lack}; {way}, or "
            "use fedavg."
        )
    features, *hidden, outputs = model.widths
    padded = mlp((features, *(config.growth * n for n in hidden), outputs), model.likelihood)
    if 4 * padded.size > MOST_BYTES:
        raise UserError(
            f"growth is {config.growth}, which makes a global network of {padded.size} weights, "
            f"more than {MOST_BYTES // 4}; use a smaller growth or narrower hidden layers."
        )
    return padded


def _refuse_divergence(uploads: Array, clients: Sequence[int]) -> None:
    for theta, client in zip(uploads, clients, strict=True):
        if not np.isfinite(theta).all():
            raise UserError(
                f"Training diverged: client {client} has weights that are not finite numbers; use "
                "a smaller learning_rate."
            )


def _extra(theta: Array, model: Model) -> Array:
    """What the likelihood learns: [..., extra], the end of a flat vector."""
    return theta[..., theta.shape[-1] - model.likelihood.extra :]


def _members(flat: Tensor, limits: Sequence[int]) -> list[Index]:
    return [layer.long().cpu().numpy() for layer in flat.split(list(limits))]


def _numpy(values: Tensor) -> Array:
    return values.detach().double().cpu().numpy()


def _tensor(parts: Sequence[np.ndarray], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float64)).to(like)
