"""What is matched: a row of numbers a point, g [C, n, S], whose sum over all points is the target.

`potentials` (Eq. 4): centred log-likelihoods at S draws of pi-hat. pi-hat is taken

    around   posterior   the client's posterior q now,
             path        q now, and as far ahead of q as q has come since the last choice: the
                         coreset is trained on from here on, not here,
             global      the global model z,

each with its sigma times every one of `widths`. A block of draws a centre and width, scaled to
||y|| = 1 so that none drowns the others. F `feature_draws` of the layers below the last are shared
between S / F draws of the last; 0 draws every layer S times.

`gradients`: the last layer's gradients at F draws of q, or a random projection of them to S
numbers. Narrow potentials are such projections too, of the gradients of all layers: to first order
log p_theta - log p_mu = <gradient, theta - mu>.

Gradient norms of the last layer come from the same draws at no further pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.bayes import gaussian
from corefed.models.network import Model
from corefed.selectors import gradients, potentials
from corefed.selectors.frame import Look
from corefed.selectors.settings import Selection

DRAWS = 64
"""Draws that weights are calibrated on, where none are asked for: they are pulled towards those of
the drawing, so that S need not exceed k."""


class Sketch(NamedTuple):
    g: Tensor  # [C, n, S]; 0 on padding
    norms: Tensor  # [C, n] of the last layer's gradients, at draws of the first block


def sketch(look: Look, purpose: str = "coreset") -> Sketch:
    """The rows to match, and gradient norms from the same draws."""
    settings = look.settings
    draws = settings.draws or DRAWS
    if settings.match == "gradients":
        layer = gradients.last_layer(look, max(1, settings.feature_draws), purpose)
        rows = layer.rows(draws, look.streams, f"{purpose}/sketch")
        return Sketch(rows, layer.squared_norms().sqrt_())
    blocks, norms = [], None
    places = [(c, w) for c in centres(look) for w in settings.widths]
    each = -(-draws // len(places))
    shared = -(-settings.feature_draws // len(places))
    for number, (centre, width) in enumerate(places):
        pi = gaussian.widen(centre, width)
        here, name = look._replace(q=pi), f"{purpose}/{number}"
        log_p, ends = _drawn(here, each, shared, name, norms is None)
        if ends is not None:
            norms = ends.squared_norms().sqrt_()
        g = potentials.potentials(log_p, look.mask)
        length = g.sum(1).norm(dim=-1).clamp_min(torch.finfo(g.dtype).tiny)
        blocks.append(g / length.view(-1, 1, 1))
    assert norms is not None
    return Sketch(torch.cat(blocks, -1), norms)


def _drawn(
    look: Look, draws: int, shared: int, purpose: str, wanted: bool
) -> tuple[Tensor, gradients.LastLayer | None]:
    """Log-likelihoods [C, n, S] at draws of look.q, and the last layer's gradients if wanted."""
    model, streams = look.model, look.streams
    if model.head is None or shared == 0 or shared >= draws:
        log_p = potentials.log_likelihoods(model, look.q, look.data, draws, streams, purpose)
        return log_p, gradients.last_layer(look, 1, f"{purpose}/norms") if wanted else None
    seen = gradients.forward(look, shared, purpose)
    assert seen.features is not None
    log_p = potentials.with_heads(
        model, look.q, look.data, seen.theta, seen.features, draws, streams, purpose
    )
    return log_p, gradients.of_pass(look, seen) if wanted else None


def centres(look: Look) -> list[Tensor]:
    """Where pi-hat is taken: posteriors [C, 2, P]."""
    if look.settings.around == "global":
        return [look.z]
    if look.settings.around == "path" and look.before is not None:
        return [look.q, 2 * look.q - look.before]
    return [look.q]


def passes(model: Model, settings: Selection) -> float:
    """What a sketch costs a point, in forward passes: those of the lower layers, and the heads."""
    shared = settings.feature_draws
    if settings.match == "gradients":
        return float(max(1, shared))
    draws, many = settings.draws or DRAWS, len(settings.widths)
    many *= 2 if settings.around == "path" else 1
    each, lower = -(-draws // many), -(-shared // many)
    if model.head is None or lower == 0 or lower >= each:
        return many * each + 1.0  # one more for the gradients' norms
    part = (model.head.bias.stop - model.head.weight.start) / model.size
    return float(many * (lower + each * part))
