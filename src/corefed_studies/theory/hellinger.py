"""Definition 1: the squared Hellinger distance of two Gaussian likelihoods, and of a posterior.

    d^2(P_theta, P) = E_X [ 1 - exp(-(f_theta(X) - f(X))^2 / (8 sigma^2)) ]

is 1 - int sqrt(p q), for one noise sigma. Where theta has a noise s of its own and the truth t,

    d^2 = E_X [ 1 - sqrt(2 s t / (s^2 + t^2)) exp(-(f_theta(X) - f(X))^2 / (4 (s^2 + t^2))) ].

The error that the theorems speak of is int d^2 dq, here a mean over draws of theta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.bayes import gaussian
from corefed.models.likelihood import Gaussian
from corefed.models.network import Model

BLOCK = 16
"""Draws of a network's weights that are evaluated at once."""


class Estimate(NamedTuple):
    """A mean over draws and points, with the standard error that each of them leaves."""

    value: Tensor  # [...]
    draws_error: Tensor  # [...] for these points
    points_error: Tensor  # [...] for these draws, where points are drawn too


def hellinger_gaussian(
    difference: Tensor, noise: float | Tensor, own_noise: float | Tensor | None = None
) -> Tensor:
    """Squared Hellinger distance of N(a, noise^2) and N(b, own_noise^2), difference = a - b."""
    kind, device = difference.dtype, difference.device
    truth = torch.as_tensor(noise, dtype=kind, device=device)
    own = truth if own_noise is None else torch.as_tensor(own_noise, dtype=kind, device=device)
    if not (bool((truth > 0).all()) and bool((own > 0).all())):
        raise UserError("noise is a standard deviation; it must be above 0.")
    # Divided by the larger noise, so that no square leaves the range of a float.
    scale = torch.maximum(truth, own)
    s, t, d = own / scale, truth / scale, difference / scale
    total = s.square() + t.square()
    # 1 - sqrt(ratio) e^-x = -expm1(log(ratio)/2 - x): exact for distances near 0. The ratio is
    # 1 - (s - t)^2 / (s^2 + t^2).
    log_ratio = torch.log1p(-(s - t).square() / total)
    return -torch.expm1(log_ratio / 2 - d.square() / (4 * total))


def posterior_hellinger(
    outputs: Tensor, truth: Tensor, noise: float, own_noise: Tensor | None = None
) -> Estimate:
    """int d^2 dq from draws f_theta(x).

    Args:
        outputs: [..., draws, points], one output per point.
        truth: f(x), [..., points].
        noise: Standard deviation of the truth's noise, sigma_epsilon.
        own_noise: That of each draw, [..., draws], where it is learnt; the truth's if not given.
    """
    if outputs.dim() < 2 or min(outputs.shape[-2:]) < 2:
        raise UserError(
            f"outputs has the shape {tuple(outputs.shape)}; it must be [..., draws, points] with "
            "at least 2 of each, or there is no standard error."
        )
    if truth.shape != (*outputs.shape[:-2], outputs.shape[-1]):
        raise UserError(
            f"truth has the shape {tuple(truth.shape)}; it must be that of outputs without draws."
        )
    own = None if own_noise is None else own_noise.unsqueeze(-1)
    return _summary(hellinger_gaussian(outputs - truth.unsqueeze(-2), noise, own))


def of_model(
    model: Model,
    v: Tensor,
    x: Tensor,
    truth: Tensor,
    noise: float,
    *,
    draws: int,
    generator: torch.Generator,
) -> Estimate:
    """int d^2 dq of clients' mean-field posteriors v [C, 2, P] at x [C, n, ...], truth [C, n].

    A noise that is learnt is that of each draw.
    """
    if not isinstance(model.likelihood, Gaussian) or model.outputs != 1:
        raise UserError("Definition 1 is for a regression with one target.")
    distances = []
    for start in range(0, draws, BLOCK):
        shape = (len(v), min(BLOCK, draws - start), v.shape[-1])
        normals = torch.randn(shape, generator=generator, device=generator.device, dtype=v.dtype)
        theta = gaussian.sample(v, normals.to(v.device))
        with torch.no_grad():
            output = model.forward(theta, x).squeeze(-1)  # [C, K, n]
        own = model.likelihood.log_noise(theta).exp()
        own = own.squeeze(-1) if own.dim() else own  # [C, K, 1]
        distances.append(hellinger_gaussian(output - truth.unsqueeze(-2), noise, own))
    if draws < 2 or x.shape[1] < 2:
        raise UserError("a standard error needs at least 2 draws and 2 points.")
    return _summary(torch.cat(distances, -2))


def _summary(distance: Tensor) -> Estimate:
    """Of d^2 [..., draws, points]."""
    draws, points = distance.shape[-2:]
    by_draw, by_point = distance.mean(-1), distance.mean(-2)
    return Estimate(by_draw.mean(-1), by_draw.std(-1) / draws**0.5, by_point.std(-1) / points**0.5)
