"""What the project's own selectors match: rows of numbers per point, g [C, n, S].

`match=potentials` (Eq. 4): centred log-likelihoods at S draws of pi-hat (`potentials.py`). pi-hat
is centred, as `around` says, at

    posterior   the client's posterior q now,
    path        q now, and as far ahead of q as it has come since the last selection: training
                will move on from q,
    global      the global model z,

and its sigma is multiplied by each of `widths`.

`match=gradients`: the last layer's gradients at F draws of q, or a random projection of them to S
numbers. Narrow potentials are such projections too, of the gradients of all layers: to first order
log p_theta - log p_mu = <gradient, theta - mu>.

Gradient norms of the last layer come from the same draws, without another pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.models.network import Model
from corefed.selectors import gradients, potentials
from corefed.selectors.frame import Look
from corefed.selectors.potentials import Place
from corefed.selectors.settings import Selection

DRAWS = 64
"""Default number of draws to calibrate weights on. Calibration pulls weights towards those that
points were drawn with, so S need not exceed k."""


class Sketch(NamedTuple):
    g: Tensor  # [C, n, S]; 0 on padding
    norms: Tensor  # [C, n] of the last layer's gradients, at draws of the first block


def sketch(look: Look, purpose: str = "coreset") -> Sketch:
    """The rows to match, and gradient norms from the same draws."""
    settings, draws = look.settings, look.settings.draws or DRAWS
    if settings.match == "gradients":
        layer = gradients.last_layer(look, max(1, settings.feature_draws), purpose)
        rows = layer.rows(draws, look.streams, f"{purpose}/sketch")
        return Sketch(rows, layer.squared_norms().sqrt_())
    pairs = [(centre, width) for centre in centres(look) for width in settings.widths]
    places = [
        Place(f"{purpose}/{number}", gaussian.widen(centre, width))
        for number, (centre, width) in enumerate(pairs)
    ]
    here, norms = look._replace(q=places[0].pi), list[Tensor]()

    def visit(some: slice, theta: Tensor, features: Tensor) -> None:
        part = here._replace(data=ClientData(*(field[:, some] for field in here.data)))
        layer = gradients.layer_at(part, gradients.forward_on(part, theta, features))
        norms.append(layer.squared_norms())

    g = potentials.stack(
        look.model, places, look.data, draws, settings.feature_draws, look.streams,
        scaled=True, visit=visit,
    )  # fmt: skip
    if not norms:
        norms = [gradients.last_layer(here, 1, f"{places[0].name}/norms").squared_norms()]
    return Sketch(g, torch.cat(norms, 1).sqrt_())


def centres(look: Look) -> list[Tensor]:
    """Where pi-hat is centred: posteriors [C, 2, P]."""
    if look.settings.around == "global":
        return [look.z]
    if look.settings.around == "path" and look.before is not None:
        return [look.q, 2 * look.q - look.before]
    return [look.q]


def passes(model: Model, settings: Selection) -> float:
    """Forward passes per point that a sketch costs: those of the lower layers, and the heads."""
    shared = settings.feature_draws
    if settings.match == "gradients":
        return float(max(1, shared))
    draws, many = settings.draws or DRAWS, len(settings.widths)
    many *= 2 if settings.around == "path" else 1
    each, lower = -(-draws // many), -(-shared // many)
    if model.head is None or lower == 0 or lower > each:
        return many * each + 1.0  # one more for the gradients' norms
    part = (model.head.bias.stop - model.head.weight.start) / model.size
    return float(many * (lower + each * part))
