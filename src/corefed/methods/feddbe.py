"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg without domain bias in the features (DBE).

A network is a body f, which makes features z of K numbers, and a linear head g. Two additions:

* **PRBM**, the personalised representation bias memory: client i has a vector b_i of K numbers that
  never leaves it. It predicts g(f(x) + b_i), so that f and g need not know what is its own.
* **MR**, mean regularisation: with z_bar the mean feature of a minibatch and z_g a consensus of all
  clients, f's features are kept around the same centre everywhere. A client descends

      sum_j scale_j nll_j(g(f(x_j) + b_i)) + (kappa / 2 K) ||z_bar - z_g||^2

in the weights theta and in b_i, from the broadcast theta and its last b_i. It uploads theta; the
server averages, each client in proportion to its number of points.

z_g is the mean of clients' mean features while they train alone, by their numbers of points. The
authors have a round before training for it. Here it is the first round, of those who take part in
it, which has no MR; then z_g stays. A client follows z_bar over its steps by a running mean that
begins at the initial weights. Those weights alone would not do: their features are small, and MR
would hold the body there.

`personal` is the broadcast with b_i, folded into the bias of the head: g(z + b) = W z + (c + W b).
`global` is the broadcast without, `localized` the client's weights after its local steps, with b_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import PER_RUN, LearningRate, NotNegative, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import optim
from corefed.bayes.predict import predictive_at
from corefed.methods import fedavg
from corefed.models.network import Head, Model

FOLLOW = 0.1
"""Part of a minibatch in the running mean of the first round."""
OWN = "bias."
"""Prefix of the state of the bias memory's optimiser."""


@dataclass(frozen=True)
class Config(fedavg.Steps):
    """Settings of FedDBE; the paper's symbol in brackets."""

    regularisation: Annotated[NotNegative, PER_RUN, Times(1 / 16, 16)] = 1.0
    """Weight of the mean regularisation (kappa); 0 leaves the bias memory alone."""
    learning_rate: LearningRate = Usual(0.07)
    """Step size of the weights and of the bias memory."""
    optimizer: optim.Rule = "sgd"
    """Update rule of both: that of the weights restarts in each round, that of the memory goes on.
    momentum needs about a tenth of sgd's learning_rate, adam 0.005."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


check = fedavg.check


def build(config: Config, model: Model) -> Method:
    head = _head(model)
    of_weights = optim.of_weights(config.optimizer, config.learning_rate, model.scale())
    of_bias = optim.of_weights(config.optimizer, config.learning_rate, None)

    def init_server(streams: Streams) -> Tree:
        theta = model.init(streams.generators("init")[0], config.initial_std)
        return {"theta": theta, "mean": theta.new_zeros(head.width), "known": theta.new_zeros(())}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        bias = torch.zeros_like(broadcast["mean"])
        theta = broadcast["theta"].clone()
        return {"theta": theta, "bias": bias, **optim.prefixed(OWN, of_bias.init(bias))}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        own = {name: value.clone() for name, value in private.items() if name != "theta"}
        theta, known = broadcast["theta"].clone(), broadcast["known"]
        mean = broadcast["mean"]
        if bool((known == 0).any()):  # the first round: where the running mean begins
            found = mean_features(model, theta, data)
            mean = torch.where(known.unsqueeze(-1) > 0, mean, found)
        return {**own, "theta": theta, "mean": mean, "known": known, **of_weights.init(theta)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        theta, bias = working["theta"], working["bias"]
        kappa = working["known"] * config.regularisation  # [C]
        loss, by_theta, by_bias, centre = gradients(
            model, theta, bias, working["mean"], kappa, batch
        )
        followed = torch.lerp(working["mean"], centre, FOLLOW)
        working["mean"] = torch.where(working["known"].unsqueeze(-1) > 0, working["mean"], followed)
        of_weights.update(theta, by_theta, working)
        of_bias.update(bias, by_bias, optim.under(OWN, working))
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        kept = {k: v for k, v in working.items() if k in ("theta", "bias") or k.startswith(OWN)}
        return {"theta": working["theta"], "mean": working["mean"]}, kept

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        bias = private["bias"]
        return {
            "personal": {"theta": folded(head, broadcast["theta"], bias)},
            "global": {"theta": broadcast["theta"]},
            "localized": {"theta": folded(head, private["theta"], bias)},
        }

    return Method(
        name="feddbe",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["theta"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(mean="examples"),
    )


def _head(model: Model) -> Head:
    if model.head is None:
        raise UserError(
            "feddbe needs a network whose last layer is linear, and this model has none; use "
            "model=mlp or cnn, or the method ditto."
        )
    return model.head


def gradients(
    model: Model, theta: Tensor, bias: Tensor, mean: Tensor, kappa: Tensor, batch: Batch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss per point without MR, the gradients with it, and z_bar.

    They are [C], by theta [C, P], by b [C, K], and [C, K]. kappa is one number per client.
    """
    head = _head(model)
    theta, bias = theta.detach().requires_grad_(), bias.detach().requires_grad_()
    with torch.enable_grad():
        z = head.features(theta.unsqueeze(1), batch.x).squeeze(1)  # [C, b, K]
        weight = theta[:, head.weight].unflatten(-1, (-1, head.width))  # [C, out, K]
        output = torch.baddbmm(theta[:, head.bias].unsqueeze(1), z + bias.unsqueeze(1), weight.mT)
        log_p = model.likelihood.log_prob(
            theta.unsqueeze(1), output.unsqueeze(1), batch.y.unsqueeze(1)
        ).squeeze(1)
        loss = -(log_p * batch.scale).sum(-1)
        share = batch.scale / batch.scale.sum(-1, keepdim=True).clamp_min(1e-12)
        centre = (share.unsqueeze(-1) * z).sum(1)  # z_bar, [C, K]
        apart = 0.5 * (centre - mean).square().mean(-1)
        whole = loss + kappa.to(loss) * apart
        by_theta, by_bias = torch.autograd.grad(whole.sum(), (theta, bias))
    return loss.detach(), by_theta, by_bias, centre.detach()


def mean_features(model: Model, theta: Tensor, data: ClientData, points: int = 512) -> Tensor:
    """(1/n) sum_j z_j over a client's points, `points` at a time: [C, K]."""
    head = _head(model)
    share = (data.weight > 0).to(theta) / data.size.clamp_min(1).unsqueeze(-1).to(theta)
    parts = zip(data.x.split(points, 1), share.split(points, 1), strict=True)
    with torch.no_grad():
        sums = [
            (part.unsqueeze(-1) * head.features(theta.unsqueeze(1), x).squeeze(1)).sum(1)
            for x, part in parts
        ]
    return torch.stack(sums).sum(0)


def folded(head: Head, theta: Tensor, bias: Tensor) -> Tensor:
    """theta with W b added to the bias of the head: the same function, as plain weights."""
    weight = theta[:, head.weight].unflatten(-1, (-1, head.width))
    found = theta.clone()
    found[:, head.bias] += (weight @ bias.unsqueeze(-1)).squeeze(-1)
    return found


def aggregate(server: Tree, update: Update) -> Tree:
    """theta by numbers of points; the consensus of the first round, which then stays."""
    n = update.examples.to(server["theta"])
    found = (n / n.sum()) @ update.message["mean"]
    mean = torch.where(server["known"] > 0, server["mean"], found)
    return {
        "theta": fedavg.average(update),
        "mean": mean,
        "known": torch.ones_like(server["known"]),
    }
