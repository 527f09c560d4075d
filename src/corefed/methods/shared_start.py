"""shared-start: one Bayesian model for all clients, in which every round starts anew.

A client sets q at the shared posterior v, makes R steps on its own data and uploads q; the server
averages. What all clients descend together is the tempered free energy of all points,

    F(v) = sum_i sum_j w_ij E_v[ -log p_theta(D_ij) ]  +  T KL(v || p_0),      T = N zeta,

with a prior p_0 = N(0, prior_std^2) that stays. Client i has its own points and one of N equal
shares of the prior; per point,

    f_i(q) = (1/n_i) [ sum_j w_ij E_q[ -log p_theta(D_ij) ] + zeta KL(q || p_0) ],
    F / n  = sum_i (n_i / n) f_i,

so the server weighs clients by their points, as FedAvg does. zeta = 1/N is Bayes' rule for the data
of all clients together; smaller is a cold posterior. With the last v in the place of p_0 the KL
would only slow the steps down: nothing would stop the widths from going to 0 (docs/method.md).

**Fixed points**, where f_i is quadratic in the mean with Hessian H_i. R = 1: the minimum of F. R
steps of rate eta: that of FedAvg, sum_i (n_i / n) A_i (mu - a_i) = 0, with a_i the minimum of f_i
and A_i = 1 - (1 - eta (H_i + zeta / (n_i prior_std^2)))^R. With control variates: the minimum of F
again, for any R. Widths by `optimizer=ivon` and `fusion=precision`: those of F's minimum, for any
R, because a natural-gradient step is linear in the precision and every client has the same step.

**Control variates** (SCAFFOLD, Karimireddy et al. 2020; `control`): a client adds c - c_i to its
gradients, where c_i is its own mean gradient of the last round and c that of all clients. Nothing
is uploaded for them. If S of N clients take part, SCAFFOLD's server adds S/N of their mean change
of c_i, and that mean is (v - mean upload) / (R eta) - c: the server has all of it. It keeps
R eta c, which a client divides by the R eta of its own last round. A client without one, such as a
newcomer, has no correction.

**The personal model** is what a client has after its shared steps (`personal=steps`). Control
variates take out of these what makes them personal, so they need `personal=own`: a second posterior
that never leaves the client and goes on from round to round. Its objective is that of PFedBayes
(Eq. 1) with a prior around the shared means mu_v, s = personal_std,

    (1/n_i) [ sum_j w_ij E_q[ -log p_theta(D_ij) ] + personal_zeta KL(q || N(mu_v, s^2)) ].

The prior's width is its own: v is a cold posterior of all clients' data, and its width says nothing
about how far a client is from the others. Both halves take the same minibatches, in one pass.

**Momentum** of the server (`server_momentum`) is on the means alone, and leaves the fixed points
where they are (server_momentum.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import (
    ABLATION,
    PER_RUN,
    RATE,
    Finite,
    LearningRate,
    NotNegative,
    Positive,
    PositiveInt,
    Range,
    Start,
    Times,
)
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import elbo, gaussian, ivon, optim
from corefed.bayes.predict import predictive
from corefed.methods.pfedbayes import initial_posterior
from corefed.methods.server_momentum import ServerMomentum, at_rest, moved
from corefed.models.layer_masks import bayesian_entries
from corefed.models.network import Model

TAKING_PART = Range(lambda v: 0 <= v <= 1, "from 0 to 1")


@dataclass(frozen=True)
class Config:
    """Settings of shared-start."""

    learning_rate: Annotated[Positive, RATE, Times(1 / 16, 4)] = 0.05
    """Step size of the means; an MLP on pixels can take 0.2 (docs/tuning.md). With optimizer ivon
    the part of a Newton step, such as 0.005."""
    width_rate: Annotated[Positive, RATE, ABLATION] = 0.01
    """Step size of the widths (rho), by Adam; optimizer ivon has none."""
    zeta: Annotated[Positive, PER_RUN] = 0.001
    """Each client's share of the temperature: 1 / clients is Bayes' rule, less a cold posterior."""
    prior_std: Annotated[Positive, PER_RUN, ABLATION] = 0.05
    """Standard deviation of the prior of every weight, around 0."""
    personal: Literal["steps", "own"] = "steps"
    """steps: the shared model after the client's steps. own: a private posterior around the shared
    means, at more than twice the cost."""
    personal_rate: LearningRate = 0.005
    """Step size of the personal posterior, by Adam."""
    personal_zeta: Annotated[NotNegative, PER_RUN, Times(1 / 50, 5)] = 1.0
    """Weight of the personal posterior's KL: more means less personal."""
    personal_std: Annotated[Positive, PER_RUN, ABLATION] = 0.02
    """Standard deviation of the personal posterior's prior around the shared means."""
    optimizer: Literal["sgd", "ivon"] = "sgd"
    """Of the shared half. sgd: means by SGD, widths by Adam. ivon: both by natural gradients (Shen
    2024)."""
    fusion: Annotated[Literal["average", "precision"], ABLATION] = "average"
    """How the server joins widths: the average of rho by points, or that of precisions."""
    control: Annotated[float, TAKING_PART] = 0.0
    """SCAFFOLD's control variates on the means (with personal own): 0 has none; 1 where all clients
    take part in every round, else the part of them that does."""
    server_momentum: ServerMomentum = 0.8
    """Part of the shared means' last move that the server adds to the next. 0 wants a learning_rate
    three times as large."""
    bayesian: Annotated[str, ABLATION] = "all"
    """Layers that have a posterior: all, last, or names with commas. The others are point
    estimates with the same prior."""
    monte_carlo: Annotated[PositiveInt, ABLATION] = 1
    """Draws of theta per step (K)."""
    initial_std: Annotated[Start, Times(1 / 3, 3)] = 0.1
    """Standard deviation of the initial means."""
    initial_rho: Annotated[Finite, PER_RUN] = -5.0
    """Initial rho of every weight; sigma = softplus(rho)."""
    by_layer: Annotated[bool, ABLATION] = True
    """A layer of more than 100 inputs has smaller initial means and widths and a narrower prior, by
    sqrt(100 / inputs)."""


def idle(config: Config) -> set[str]:
    """Settings that have no effect beside the others."""
    found = {"width_rate"} if config.optimizer == "ivon" else set()
    return found | (
        {"personal_rate", "personal_zeta", "personal_std"} if config.personal == "steps" else set()
    )


def check(config: Config) -> None:
    if config.control and config.personal == "steps":
        raise UserError(
            f"control is {config.control:g} with personal=steps; control variates take out of a "
            "client's steps what makes them personal: use personal=own, or control=0."
        )
    if config.control and config.optimizer != "sgd":
        raise UserError(
            f"control is {config.control:g} with optimizer={config.optimizer}; control variates "
            "correct steps of SGD: use optimizer=sgd, or control=0."
        )


def build(config: Config, model: Model, *, scored: bool = False) -> Method:
    """`scored`: steps also tell the squared norms of their points' last-layer gradients."""
    scale = model.scale() if config.by_layer else None
    mask = bayesian_entries(model, config.bayesian)
    widths, personal = optim.adam(config.width_rate), optim.adam(config.personal_rate, scale)
    own, draws = config.personal == "own", config.monte_carlo

    def scaled(std: float | Tensor, like: Tensor) -> Tensor:
        """A standard deviation of every weight, by layer: [C, P], [C, 1] or [1, 1]."""
        std = torch.as_tensor(std, dtype=like.dtype, device=like.device).reshape(-1, 1)
        return std if scale is None else std * optim.on_device(like.device, scale)

    def init_server(streams: Streams) -> Tree:
        v = initial_posterior(model, config.initial_std, config.initial_rho, scale, streams)
        drift = {"drift": torch.zeros_like(v[0])} if config.control else {}
        return {"v": v, **drift, **at_rest(config.server_momentum, v[0])}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        v = broadcast["v"]
        private = {"q": v.clone()}
        if own:
            private |= optim.prefixed("q.", personal.init(v))
        if config.control:  # c_i, and R eta of the last round; 0: it has none
            private |= {"slope": torch.zeros_like(v[:, 0]), "pace": torch.zeros_like(v[:, 0, 0])}
        return private

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        v = broadcast["v"]
        mu, rho = v[:, 0].clone(), v[:, 1].clone()
        n = data.size.to(v.dtype).clamp_min(1.0)  # a client without points has its prior alone
        optim.on_device(v.device, mask)  # a recorded step must not copy
        state = ivon.init(mu) if config.optimizer == "ivon" else widths.init(rho)
        working = {"mu": mu, "rho": rho, "prior": (config.zeta / n).unsqueeze(-1)}
        working |= optim.prefixed("state.", state)
        if own:
            working |= {k: x.clone() for k, x in private.items() if k == "q" or k[:2] == "q."}
            working |= {"v": v, "pull": (config.personal_zeta / n).unsqueeze(-1)}
        if config.control:
            pace = private["pace"].unsqueeze(-1)
            known = pace > 0
            c = broadcast["drift"] / torch.where(known, pace, 1.0)
            working["correction"] = (c - private["slope"]) * known  # c - c_i
            working["pace"] = torch.zeros_like(private["pace"])
        return working

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        mu, rho, k = working["mu"], working["rho"], working["prior"]
        precision = scaled(config.prior_std, mu).pow(-2)
        real = optim.on_device(mu.device, mask)
        if real is not None:
            noise = noise * real
        sigma = gaussian.sigma(rho)
        info: Tree = {}
        if own:
            info["loss"], by_mu, by_sigma = together(working, batch, noise, real)
        elif scored:
            info["loss"], by_mu, by_sigma, info["squares"] = elbo.scored_gradient(
                model, mu, sigma, batch, noise
            )
        else:
            info["loss"], by_mu, by_sigma = elbo.gradient(model, mu, sigma, batch, noise)
        if config.optimizer == "ivon":
            prior, state = (0.0, precision, k), optim.under("state.", working)
            ivon.update(mu, rho, (by_mu, by_sigma), prior, config.learning_rate, state, real)
            return working, info
        by_mu = by_mu + k * precision * mu
        if config.control:
            by_mu += working["correction"]
            working["pace"] += config.learning_rate
        optim.descend(mu, by_mu, config.learning_rate)
        by_sigma = by_sigma + k * (precision * sigma - sigma.reciprocal())
        by_rho = gaussian.to_rho(by_sigma, rho)
        widths.update(
            rho, by_rho if real is None else by_rho * real, optim.under("state.", working)
        )
        return working, info

    def together(
        working: Tree, batch: Batch, noise: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The shared half's loss and gradients in (mu, sigma), after a step of the personal one."""
        q, v, k = working["q"], working["v"], working["pull"]
        mu = torch.stack([working["mu"], q[:, 0]], 1)
        sigma = gaussian.sigma(torch.stack([working["rho"], q[:, 1]], 1))
        loss, by_mu, by_sigma = elbo.gradients(model, mu, sigma, batch, noise)
        prior = scaled(config.personal_std, q[:, 0]).expand_as(q[:, 0])
        kl_mu, kl_sigma = gaussian.kl_grads(q, v, sigma[:, 1], prior)
        by_rho = gaussian.to_rho(by_sigma[:, 1] + k * kl_sigma, q[:, 1])
        by_rho = by_rho if real is None else by_rho * real
        slope = torch.stack([by_mu[:, 1] + k * kl_mu, by_rho], 1)
        personal.update(q, slope, optim.under("q.", working))
        return loss[:, 0], by_mu[:, 0], by_sigma[:, 0]

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        mu, rho = working["mu"], working["rho"]
        message = {"v": torch.stack([mu, rho], 1)}
        if not own:
            return message, {"q": message["v"]}
        private = {k: x for k, x in working.items() if k == "q" or k.startswith("q.")}
        if config.control:
            mean = (broadcast["v"][:, 0] - mu) / working["pace"].unsqueeze(-1)
            private |= {"slope": mean - working["correction"], "pace": working["pace"]}
        return message, private

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        personal = {"v": gaussian.narrowed(private["q"], mask)}
        return {"personal": personal, "global": {"v": gaussian.narrowed(broadcast["v"], mask)}}

    return Method(
        name="shared-start",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=lambda server, update: aggregate(config, server, update),
        models=models,
        predict=lambda tree, x, noise: predictive(model, tree["v"], x, noise),
        noise=(2 * draws if own else draws, model.size),
        traits=Traits(
            sent=("v", "drift") if config.control else ("v",),
            posteriors=("v",),
            mean="examples" if config.fusion == "average" else "",
            restarts=True,
        ),
    )


def aggregate(config: Config, server: Tree, update: Update) -> Tree:
    """Means by points; widths by points too, or the plain mean of precisions.

    Precisions of clients count alike, because each has the same share of the prior: that of client
    i is n_i h_i / zeta + 1 / prior_std^2, and that of F's minimum their mean.
    """
    uploads = update.message["v"]  # [S, 2, P]
    n = update.examples.to(uploads)
    mean, rho = torch.einsum("s,sap->ap", n / n.sum(), uploads)
    if config.fusion == "precision":
        rho = gaussian.rho_of(gaussian.sigma(uploads[:, 1]).pow(-2).mean(0).rsqrt())
    if not (config.server_momentum or config.control):
        return {"v": torch.stack([mean, rho])}
    start = server["v"][0]
    mu, state = moved(config.server_momentum, server, start, mean)
    if config.control:
        state["drift"] = torch.lerp(server["drift"], start - mean, config.control)
    return {"v": torch.stack([mu, rho]), **state}


def posteriors(working: Tree) -> tuple[Tensor, Tensor]:
    """What a selector sees for q and z: the personal posterior and the shared one it has now."""
    shared = torch.stack([working["mu"], working["rho"]], 1)
    return working.get("q", shared), shared
