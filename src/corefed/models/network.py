"""Networks as functions of one flat parameter vector, for many clients and draws at once.

`Model.log_likelihood(theta [C, K, P], x [C, n, ...], y)` is all that the methods need. An MLP has
its own batched forward pass here; `modules.py` has that of any other nn.Module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.models.likelihood import Likelihood

Forward = Callable[[Tensor, Tensor], Tensor]

USUAL = 100
"""Inputs of a layer up to which its weights have the usual size, that of a hidden layer here."""

PIXELS, STANDARDISED = 0.1, 1.0
"""Mean square of an input: of pixels from 0 to 1 about (0.10 in MNIST), of standardised numbers."""

IN_TURN = frozenset({"cpu"})
"""Types of device on which networks take turns."""

BLOCK, BLOCK_ONE = 1 << 25, 1 << 23
"""Numbers that a pass without gradients keeps at once: all networks together 128 MiB, one in turn
32 MiB (a CNN on a CPU took 1.2 times as long with 8 MiB, 1.7 times with 512 MiB)."""


class Head(NamedTuple):
    """The last linear layer, so that many draws of it can share a few draws of the features."""

    features: Forward  # (theta [C, K, P], x [C, n, ...]) -> [C, K, n, h]
    width: int  # h
    weight: slice  # where [outputs, h] lies in theta
    bias: slice
    both: Forward | None = None  # features and outputs of one pass, [C, K, n, h + outputs]


class Model(NamedTuple):
    size: int  # P
    outputs: int
    forward: Forward  # (theta [C, K, P], x [C, n, ...]) -> [C, K, n, outputs]
    init: Callable[[torch.Generator, float], Tensor]  # (generator, std) -> mu [P]
    likelihood: Likelihood
    head: Head | None
    widths: tuple[int, ...] = ()  # of a ReLU network, input and output included; else empty
    activation: int = 0  # numbers per point and draw that are kept for back-propagation; 0: few
    notes: tuple[str, ...] = ()  # about the network, for readers of the results
    scale: Callable[[], Tensor | None] = lambda: None  # [P] how large each weight should be by its
    # layer's inputs, at most 1 (`scale_for`); None: 1 for all
    layers: tuple[tuple[str, slice], ...] = ()  # their names, and where each lies in theta

    def log_likelihood(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """log p_theta(D_j) for every client, draw and point: [C, K, n]."""
        y = y.unsqueeze(1)
        return self.likelihood.log_prob(theta, self.forward(theta, x), y)


def mlp(widths: Sequence[int], likelihood: Likelihood, mean_square: float = PIXELS) -> Model:
    """A ReLU network of any widths, e.g. (784, 100, 10); mu starts as N(0, std^2).

    `mean_square` is that of an input, as far as it is known: `scale` goes by it.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise UserError(f"a network needs an input and an output width of at least 1, not {widths}")
    layers: list[tuple[slice, slice, int, int]] = []
    offset = 0
    for fan_in, fan_out in pairwise(widths):
        weight = slice(offset, offset + fan_in * fan_out)
        bias = slice(weight.stop, weight.stop + fan_out)
        layers.append((weight, bias, fan_in, fan_out))
        offset = bias.stop
    size = offset + likelihood.extra
    lengths = [part.stop - part.start for layer in layers for part in layer[:2]]

    def hidden(theta: Tensor, x: Tensor, upto: int, *, below: bool = False) -> Tensor:
        """The output of a layer; with `below` beside its input, along the last axis."""
        clients, draws = theta.shape[:2]
        # One split, whose backward pass is one concatenation; slices would each add a full vector.
        parts = theta.split([*lengths, likelihood.extra], -1)
        h = x.flatten(2)  # [C, n, d]: the first layer's input is shared by all draws
        under = h.unsqueeze(1).expand(-1, draws, -1, -1)
        for index, (_, _, fan_in, fan_out) in enumerate(layers[:upto]):
            w = parts[2 * index].unflatten(-1, (fan_out, fan_in))  # [C, K, out, in]
            b = parts[2 * index + 1]  # [C, K, out]
            under = under if index == 0 else h
            if index == 0:  # one product for all K draws
                h = torch.baddbmm(b.flatten(1).unsqueeze(1), h, w.flatten(1, 2).mT)
                h = h.unflatten(-1, (draws, fan_out)).movedim(2, 1)
            elif draws > 1 and not h.requires_grad and h.device.type == "cpu":
                # Client by client, as all at once would copy h: its draws lie side by side.
                each = zip(b.unsqueeze(2), h, w.mT, strict=True)
                h = torch.stack([torch.baddbmm(*factors) for factors in each])
            else:
                h = torch.baddbmm(
                    b.flatten(0, 1).unsqueeze(1), h.flatten(0, 1), w.flatten(0, 1).mT
                ).unflatten(0, (clients, draws))
            if index < len(layers) - 1:
                h = h.relu() if h.requires_grad else h.relu_()
        return torch.cat([under, h], -1) if below else h

    def features(theta: Tensor, x: Tensor) -> Tensor:
        if len(layers) == 1:
            return x.flatten(2).unsqueeze(1).expand(-1, theta.shape[1], -1, -1)
        return hidden(theta, x, len(layers) - 1)

    def init(g: torch.Generator, std: float) -> Tensor:
        return with_noise(torch.randn(offset, generator=g) * std, likelihood)

    weight, bias, fan_in, _ = layers[-1]
    return Model(
        size=size,
        outputs=widths[-1],
        forward=lambda theta, x: hidden(theta, x, len(layers)),
        init=init,
        likelihood=likelihood,
        head=Head(
            features,
            fan_in,
            weight,
            bias,
            lambda theta, x: hidden(theta, x, len(layers), below=True),
        ),
        widths=tuple(widths),
        scale=cache(
            lambda: scale_for(
                [
                    (bias.stop - weight.start, fan_in * (mean_square if weight.start == 0 else 1.0))
                    for weight, bias, fan_in, _ in layers
                ],
                likelihood.extra,
            )
        ),
        layers=tuple(
            (f"layer-{number}", slice(weight.start, bias.stop))
            for number, (weight, bias, _, _) in enumerate(layers, 1)
        ),
    )


def scale_for(sizes: Sequence[tuple[int, float]], extra: int = 0) -> Tensor | None:
    """[P] sqrt(USUAL / inputs), at most 1, for layers given as (parameters, inputs); None: all 1.

    A layer's output moves with the norm of its inputs. With means, widths and steps in this
    proportion, it moves by as much in a layer of 1280 inputs as in one of 100. `inputs` is their
    number times their mean square, where that is known.
    """
    parts = [torch.full((size,), min(1.0, (USUAL / inputs) ** 0.5)) for size, inputs in sizes]
    scale = torch.cat([*parts, torch.ones(extra)])
    return None if bool((scale == 1).all()) else scale


def with_noise(mu: Tensor, likelihood: Likelihood) -> Tensor:
    """Append the log noise if the likelihood learns it."""
    if not likelihood.extra:
        return mu
    noise = float(getattr(likelihood, "noise", 1.0))
    return torch.cat([mu, torch.full((likelihood.extra,), math.log(noise))])
