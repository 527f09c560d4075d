"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020): a start that one step makes personal.

The server seeks the w that does best after one gradient step of size alpha on each client's data,
min_w (1/N) sum_i f_i(w - alpha grad f_i(w)). A client makes R steps of size beta on its own term,
each with independent minibatches D, D', D'' of its training data:

    g = grad f(w - alpha grad f(w; D); D'),    w <- w - beta (I - alpha Hessian f(w; D'')) g.

Variant `fo` (first-order) leaves the Hessian out; variant `hf` (Hessian-free) takes its product
with g from two gradients, at w + r g and w - r g; variant `exact` differentiates twice. The server
averages what clients upload. The default is fo: half the gradients, and equally accurate on MNIST.
hf and exact need alpha times the curvature to stay near 1 or below. Above, as with an untrained
convolutional network, I - alpha Hessian makes g longer in each step: `clip` bounds its length.

The paper leaves open how far apart the two gradients are. Here r = delta alpha with delta = 1, the
length of the step itself. The correction is then half the difference of two gradients. It does not
depend on the scale of g, loses no digits in float32, and is no larger than the gradients. That
matters for ReLU networks, whose gradient jumps where a unit switches: a closer pair straddles fewer
jumps but divides them by a smaller r, and the mean square error is larger.

The defaults of alpha and beta must not diverge on any of the problems that they were chosen on. On
images alone far larger ones are much better (alpha 0.2, beta 0.4: docs/defaults.md).

The personal model is the current broadcast after `adapt_steps` gradient steps of size alpha on all
of the client's training data. Test data are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import (
    PER_RUN,
    LearningRate,
    NotNegative,
    Positive,
    PositiveInt,
    Start,
    Times,
)
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import elbo, optim
from corefed.bayes.batches import parts
from corefed.bayes.predict import predictive_at
from corefed.methods.fedavg import gradient
from corefed.models.network import Model

PASSES = {"fo": 2, "hf": 4, "exact": 4}
"""Gradients per step; the second derivative costs about two."""


@dataclass(frozen=True)
class Config:
    """Settings of Per-FedAvg; the paper's symbol in brackets."""

    variant: Literal["fo", "hf", "exact"] = "fo"
    """`fo`: without the Hessian. `hf`: its products with vectors by differences of gradients.
    `exact`: by differentiating twice."""
    alpha: Annotated[Positive, PER_RUN, Times(1 / 8, 8)] = 0.014
    """Step size that makes a model personal (alpha), in training and at evaluation."""
    beta: LearningRate = 0.14
    """Step size of the shared model's training (beta), as FedAvg's."""
    optimizer: optim.Rule = "sgd"
    """Update rule of the shared model's training, restarted in each round; a step that makes a
    model personal is always plain. momentum needs about a tenth of sgd's beta, adam 0.005."""
    delta: Positive = 1.0
    """Distance at which variant hf takes its two gradients, in steps of size alpha."""
    clip: NotNegative = 0.0
    """Longest that a client's meta-gradient may be; longer ones are shortened. 0: any length."""
    adapt_steps: PositiveInt = 1
    """Gradient steps, on all training data of a client, to its personal model."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


def check(config: Config) -> None:
    optim.refuse_large_steps(config.optimizer, "beta", config.beta)


def build(config: Config, model: Model) -> Method:
    rule = optim.of_weights(config.optimizer, config.beta, model.scale())
    batches = 2 if config.variant == "fo" else 3

    def init_server(streams: Streams) -> Tree:
        return {"w": model.init(streams.generators("init")[0], config.initial_std)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        w = broadcast["w"].clone()
        return {"w": w, **rule.init(w)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        loss, slope = meta_gradient(config, model, working["w"], parts(batch, batches))
        rule.update(working["w"], slope, working)
        return working, {"loss": loss}

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "personal": {"w": adapt(config, model, broadcast["w"], data)},
            "global": {"w": broadcast["w"]},
            "localized": {"w": private["w"]},
        }

    return Method(
        name="per-fedavg",
        init_server=init_server,
        init_client=lambda broadcast, data: {"w": broadcast["w"].clone()},
        begin=begin,
        step=step,
        end=lambda broadcast, working: ({"w": working["w"]}, {"w": working["w"]}),
        aggregate=aggregate,
        models=models,
        predict=lambda tree, x, noise: predictive_at(model, tree["w"].unsqueeze(1), x),
        noise=(0,),
        traits=Traits(batches=batches, passes=PASSES[config.variant], mean="equal"),
    )


def with_steps(config: Config, steps: int | None) -> tuple[Config, int]:
    """Settings of a client that joins later and adapts for `steps` steps; None: as in the run."""
    config = config if steps is None else replace(config, adapt_steps=steps)
    return config, config.adapt_steps


def meta_gradient(
    config: Config, model: Model, w: Tensor, batches: list[Batch]
) -> tuple[Tensor, Tensor]:
    """f(w - alpha grad f(w; D); D') and its gradient in w, as the variant has it: [C], [C, P]."""
    _, slope = gradient(model, w, batches[0])
    loss, g = gradient(model, stepped(w, slope, config.alpha), batches[1])
    if config.variant == "hf":
        r = config.delta * config.alpha
        g = stepped(g, hessian_times(model, w, g, batches[2], r), config.alpha)
    elif config.variant == "exact":
        g = stepped(g, second_derivative(model, w, g, batches[2]), config.alpha)
    if config.clip:
        length = g.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
        g = g * (config.clip / length).clamp_max(1)
    return loss, g


def hessian_times(model: Model, w: Tensor, g: Tensor, batch: Batch, r: float | Tensor) -> Tensor:
    """(grad f(w + r g) - grad f(w - r g)) / 2r, which is Hessian f(w) g up to r^2: [C, P]."""
    _, ahead = gradient(model, stepped(w, g, -r), batch)
    _, behind = gradient(model, stepped(w, g, r), batch)
    return (ahead - behind) / (optim.column(2 * r, w) if isinstance(r, Tensor) else 2 * r)


def second_derivative(model: Model, w: Tensor, g: Tensor, batch: Batch) -> Tensor:
    """Hessian f(w) g by differentiating the gradient along g: [C, P]."""
    w = w.detach().requires_grad_()
    with torch.enable_grad():
        loss = elbo.weighted_nll(model, w.unsqueeze(1), batch)
        (slope,) = torch.autograd.grad(loss.sum(), w, create_graph=True)
        (product,) = torch.autograd.grad((slope * g).sum(), w)
    return product


def stepped(w: Tensor, slope: Tensor, rate: float | Tensor) -> Tensor:
    """w - rate slope, in a new tensor."""
    found = w.clone()
    optim.descend(found, slope, rate)
    return found


def adapt(config: Config, model: Model, w: Tensor, data: ClientData) -> Tensor:
    """w after `adapt_steps` full-batch gradient steps of size alpha on `data`: [C, P]."""
    for _ in range(config.adapt_steps):
        w = stepped(w, full_gradient(model, w, data), config.alpha)
    return w


def full_gradient(model: Model, w: Tensor, data: ClientData, points: int = 512) -> Tensor:
    """The gradient of (1/n) sum_j w_j nll_j over all points, `points` at a time."""
    scale = data.weight / data.size.clamp_min(1).unsqueeze(-1)
    total = torch.zeros_like(w)
    for fields in zip(*(f.split(points, 1) for f in (data.x, data.y, scale)), strict=True):
        total += gradient(model, w, Batch(*fields))[1]
    return total


def aggregate(server: Tree, update: Update) -> Tree:
    """w <- (1 / S) sum_i w_i; clients of any size count alike."""
    return {"w": update.message["w"].mean(0)}
