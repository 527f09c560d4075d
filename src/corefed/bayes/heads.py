"""Many draws of a network's head on one forward pass of the layers below it.

A network with a linear head shares the features of one draw theta of all its parameters between S
draws of the head. Each of the S networks is a draw of the posterior; those that share their lower
layers are correlated. They cost one forward pass of all points and S of the head alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.models.network import Head, Model


def span(head: Head) -> slice:
    """Where a head's H numbers lie in theta, the weights before the bias."""
    return slice(head.weight.start, head.bias.stop)


def log_likelihoods(
    model: Model, theta: Tensor, features: Tensor, heads: Tensor, y: Tensor
) -> Tensor:
    """log p of every point under each of the heads [C, S, H]: [C, n, S].

    theta [C, P] is the draw that has these features [C, n, h]; y is [C, n, ...]. The axis of
    clients may be left out of all of them.
    """
    head = model.head
    assert head is not None
    split = head.weight.stop - head.weight.start
    product = torch.addmm if features.dim() == 2 else torch.baddbmm
    output = product(
        heads[..., split:].flatten(-2).unsqueeze(-2),
        features,
        heads[..., :split].reshape(*heads.shape[:-2], -1, head.width).mT,
    )  # [C, n, S out]
    output = output.unflatten(-1, (heads.shape[-2], model.outputs))  # [C, n, S, out], contiguous
    y = y.unsqueeze(features.dim() - 1)
    return model.likelihood.log_prob(theta.unsqueeze(-2), output, y)
