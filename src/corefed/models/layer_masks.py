"""Which entries of the flat parameter vector belong to some of a network's layers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from corefed.base.errors import UserError, did_you_mean
from corefed.models.network import Model

ALL, LAST = "all", "last"
"""Every layer; the one whose output is the network's."""


def layer_mask(model: Model, which: str) -> Tensor:
    """[P] true on the weights and biases of the layers: `all`, `last`, or names with commas.

    What the likelihood has of its own, a learnt noise, belongs to every choice.
    """
    if which == ALL:
        return torch.ones(model.size, dtype=torch.bool)
    mask = torch.zeros(model.size, dtype=torch.bool)
    mask[model.size - model.likelihood.extra :] = True
    layers = dict.fromkeys(name for name, _ in model.layers)
    names = [name.strip() for name in which.split(",") if name.strip()]
    if names == [LAST] and layers:
        names = [_last(model)]
    for name in names or [which]:
        parts = [at for each, at in model.layers if f"{each}.".startswith(f"{name}.")]
        if not parts:
            hint = did_you_mean(name, [ALL, LAST, *layers])
            raise UserError(
                f"The network has no layer {name!r}.{hint} It has {', '.join(layers)}; {LAST} and "
                f"{ALL} are words for some of them."
            )
        for at in parts:
            mask[at] = True
    return mask


def bayesian_entries(model: Model, which: str) -> Tensor | None:
    """The mask of the layers that have a posterior; None: all of them.

    One tensor for equal masks, however often a method is built: it is copied to a GPU once.
    """
    return None if which == ALL else _kept(layer_mask(model, which).numpy().tobytes())


@lru_cache(16)
def _kept(mask: bytes) -> Tensor:
    return torch.frombuffer(bytearray(mask), dtype=torch.bool)


def _last(model: Model) -> str:
    """The layer of the head, or the one with the last weights."""
    if model.head is None:
        return model.layers[-1][0]
    start = model.head.weight.start
    return next(name for name, at in model.layers if at.start <= start < at.stop)
