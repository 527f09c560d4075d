"""PFedBayes (Zhang et al., ICML 2022): personalised Bayesian federated learning on all data.

Client i keeps a mean-field Gaussian q_i. In each round it starts a localized global model z_i at
the broadcast v and alternates R times a step of q_i on Eq. 9 with a step of z_i on KL(q_i || z_i);
it uploads z_i. The server averages: v <- (1 - beta) v + (beta / S) sum_i z_i.

The client's half (`begin`, `step`, `end`) is shared with coreset-pfedbayes and random-subset,
which differ only in the weights w of the likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import (
    ABLATION,
    PER_RUN,
    Finite,
    Follows,
    LearningRate,
    NotNegative,
    OneOf,
    Part,
    Plus,
    PositiveInt,
    Range,
    Start,
    Times,
)
from corefed.base.types import Batch, ClientData, Method, Traits, Tree, Update
from corefed.bayes import elbo, gaussian, ivon, optim
from corefed.bayes.predict import predictive
from corefed.models.layer_masks import bayesian_entries
from corefed.models.network import Model

PAPER: dict[str, object] = {
    "zeta": 10.0, "eta_1": 0.001, "eta_2": 0.001, "initial_rho": -3.0, "anneal": 0.0,
    "by_layer": False,
}  # fmt: skip
"""The constants of Chanda et al. (2024)."""

PRESETS: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {**PAPER, "calibrate": "off"},  # a setting of every run: the paper has no temperatures
}

PRESET_NAMES = OneOf(lambda: PRESETS)
PART_OR_NONE = Range(lambda v: 0 <= v <= 1, "from 0 to 1")


@dataclass(frozen=True)
class Config:
    """Settings of PFedBayes; the paper's symbol in brackets."""

    preset: Annotated[str, PRESET_NAMES] = "default"
    """`default`: as chosen on validation points of other problems (docs/defaults.md). `paper`: the
    constants of the paper."""
    zeta: Annotated[NotNegative, PER_RUN, Times(1 / 50, 5)] = 1.0
    """Weight of KL(q || z) against the full-data likelihood (zeta): more means less personal."""
    beta: Part = 1.0
    """Server mixing (beta): v <- (1 - beta) v + beta mean of uploads. Above 1 a posterior might
    have no positive variance."""
    eta_1: LearningRate = 0.012
    """Learning rate of the personal posterior q."""
    eta_2: Annotated[LearningRate, Follows("eta_1")] = 0.0018
    """Learning rate of the localized global model z."""
    monte_carlo: PositiveInt = 1
    """Draws of theta per step (K)."""
    optimizer: Annotated[Literal["adam", "sgd", "ivon"], ABLATION] = "adam"
    """Update rule of both steps. ivon: that of q, by natural gradients (Shen 2024), with eta_1
    as the part of a Newton step, such as 0.02; z then is by adam."""
    fusion: Literal["average", "precision"] = "average"
    """How the server joins posteriors: the paper's average of (mu, rho), or natural parameters."""
    initial_std: Start = 0.1
    """Standard deviation of the initial means (mu ~ N(0, 0.1^2) in the paper)."""
    initial_rho: Annotated[Finite, PER_RUN, Plus(-2, 1)] = -4.0
    """Initial rho of every weight; sigma = softplus(rho)."""
    by_layer: Annotated[bool, ABLATION] = True
    """A layer of more than 100 inputs has smaller initial means and widths and smaller steps of
    Adam, by sqrt(100 / inputs), so that its output moves as much as that of others."""
    bayesian: Annotated[str, ABLATION] = "all"
    """Layers that have a posterior: all, last, or names with commas. The others are point
    estimates, pulled towards z as by a Gaussian of the initial width."""
    anneal: Annotated[float, PART_OR_NONE, PER_RUN] = 1.0
    """Part of the planned rounds over which zeta rises to its value, along a line from near 0; 0
    has it from the first round."""

    def at(self, done: float) -> Self:
        """The settings when a part `done` of the planned rounds is over."""
        if done >= self.anneal:
            return self
        return replace(self, zeta=self.zeta * done / self.anneal)


def check(config: Config) -> None:
    if config.optimizer == "ivon" and config.zeta == 0:
        raise UserError("zeta is 0 with optimizer=ivon, which needs a prior; give zeta a value.")


def build(config: Config, model: Model, *, scored: bool = False) -> Method:
    """`scored`: steps also tell the squared norms of their points' last-layer gradients."""
    scale = model.scale() if config.by_layer else None
    mask = bayesian_entries(model, config.bayesian)
    newton = config.optimizer == "ivon"
    personal, localized = (_optimizer(config, eta, scale) for eta in (config.eta_1, config.eta_2))

    def init_server(streams: Streams) -> Tree:
        v = initial_posterior(model, config.initial_std, config.initial_rho, scale, streams)
        return {"v": v}

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        v = broadcast["v"]
        state = ivon.init(v[:, 0]) if newton else personal.init(v)
        return {"q": v.clone(), "z": v.clone(), **optim.prefixed("q.", state)}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        z = broadcast["v"].clone()  # v_{z,0} = v^t
        kept = {name: value.clone() for name, value in private.items() if name != "z"}
        n = data.size.to(z.dtype).clamp_min(1.0)  # a client without points has its prior alone
        sigma = gaussian.sigma(kept["q"][:, 1])
        prior = (config.zeta / n).unsqueeze(-1)
        optim.on_device(z.device, mask)  # a recorded step must not copy
        state = optim.prefixed("z.", localized.init(z))
        return {**kept, "z": z, "sigma": sigma, "prior": prior, **state}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        q, z, prior, sigma_q = working["q"], working["z"], working["prior"], working["sigma"]
        gradient = torch.empty_like(q)
        real = optim.on_device(q.device, mask)
        if real is not None:
            noise = noise * real

        # q: one step on Eq. 9, likelihood by back-propagation, KL in closed form.
        info: Tree = {}
        if scored:
            info["loss"], by_mu, by_sigma, info["squares"] = elbo.scored_gradient(
                model, q[:, 0], sigma_q, batch, noise
            )
        else:
            info["loss"], by_mu, by_sigma = elbo.gradient(model, q[:, 0], sigma_q, batch, noise)
        sigma_z = gaussian.sigma(z[:, 1])
        if newton:
            reference = (z[:, 0], sigma_z.pow(-2), prior)
            state = optim.under("q.", working)
            ivon.update(q[:, 0], q[:, 1], (by_mu, by_sigma), reference, config.eta_1, state, real)
        else:
            kl_mu, kl_sigma = gaussian.kl_grads(q, z, sigma_q, sigma_z)
            torch.addcmul(by_mu, prior, kl_mu, out=gradient[:, 0])
            by_sigma.addcmul_(prior, kl_sigma)
            gaussian.to_rho(by_sigma, q[:, 1], out=gradient[:, 1])
            if real is not None:
                gradient[:, 1] *= real
            personal.update(q, gradient, optim.under("q.", working))

        # z_i: one step on KL(q || z_i), q held fixed.
        working["sigma"] = sigma_q = gaussian.sigma(q[:, 1])
        kl_mu, kl_sigma = gaussian.kl_grads_reference(q, z, sigma_q, sigma_z)
        torch.mul(prior, kl_mu, out=gradient[:, 0])
        gaussian.to_rho(kl_sigma.mul_(prior), z[:, 1], out=gradient[:, 1])
        if real is not None:
            gradient[:, 1] *= real
        localized.update(z, gradient, optim.under("z.", working))
        return working, info

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        dropped = ("sigma", "prior")
        private = {
            name: value
            for name, value in working.items()
            if name not in dropped and not name.startswith("z.")
        }
        return {"v": working["z"]}, private

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        found = {"personal": private["q"], "global": broadcast["v"], "localized": private["z"]}
        return {kind: {"v": gaussian.narrowed(v, mask)} for kind, v in found.items()}

    return Method(
        name="pfedbayes",
        init_server=init_server,
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        aggregate=lambda server, update: aggregate(config, server, update),
        models=models,
        predict=lambda tree, x, noise: predictive(model, tree["v"], x, noise),
        noise=(config.monte_carlo, model.size),
        traits=Traits(posteriors=("v",), mean="equal" if config.fusion == "average" else ""),
    )


def initial_posterior(
    model: Model, std: float, rho: float, scale: Tensor | None, streams: Streams
) -> Tensor:
    """[2, P] the server's posterior before the first round; `scale` makes it one by layer."""
    mu = model.init(streams.generators("init")[0], std)
    rhos = torch.full_like(mu, rho)
    if scale is not None:
        rhos = gaussian.rho_of(gaussian.sigma(rhos) * scale)
        mu = mu * scale if model.widths else mu  # other networks' means follow the layer anyway
    return torch.stack([mu, rhos])


def aggregate(config: Config, server: Tree, update: Update) -> Tree:
    """v^{t+1} = (1 - beta) v^t + (beta / S) sum_i v_i, in (mu, rho) or in natural parameters."""
    uploads = update.message["v"]  # [S, 2, P]
    if config.fusion == "average":
        return {"v": torch.lerp(server["v"], uploads.mean(0), config.beta)}
    # Natural parameters: precision, and precision times mean; the server's own with 1 - beta.
    precisions = gaussian.sigma(uploads[:, 1]).pow(-2)
    old = gaussian.sigma(server["v"][1]).pow(-2)
    precision = torch.lerp(old, precisions.mean(0), config.beta)
    shift = torch.lerp(old * server["v"][0], (precisions * uploads[:, 0]).mean(0), config.beta)
    return {"v": torch.stack([shift / precision, gaussian.rho_of(precision.rsqrt())])}


def _optimizer(config: Config, rate: float, scale: Tensor | None) -> optim.Optimizer:
    if config.optimizer != "sgd":
        return optim.adam(rate, scale)
    return optim.sgd(rate)  # its steps follow the size of gradients, and with it the layer
