"""A small convolutional network as a function of one flat parameter vector.

    h_0 = x,   h_l = relu(pool(conv_l(h_{l-1}))),   then an MLP on the flattened last h

with 3 x 3 convolutions that keep the size, and 2 x 2 max-pooling while there is something to pool.
Networks of published benchmarks have 5 x 5 convolutions of whole neighbourhoods only, which take
four pixels off each side (`PUBLISHED`). There are no batch statistics, which have no meaning for a
posterior over weights. Parameters lie in the order of an nn.Sequential of the same layers.

Every client and draw is a network with its own kernels. The fastest way to convolve for all of them
depends on the device (32-64-64 channels, 10 clients, 100 images of 32 x 32, forward and backward,
float32):

| ms                                 | CPU, one core | H200 |
|---|---|---|
| one grouped convolution            |          1470 |  4.3 |
| one network after the other        |           880 |  8.5 |
| the same, channels last in memory  |           580 |   11 |
| vmap of functional_call            |          1790 |  5.6 |
| unfolded images, matrix products   |          3390 |  9.3 |

So on a CPU it is one network after the other, elsewhere one grouped convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corefed.base.errors import UserError
from corefed.models import network
from corefed.models.likelihood import Likelihood
from corefed.models.network import Forward, Head, Model, mlp, scale_for

SMALLEST = 8
"""Pixels that an image must have along each side."""

FIVE_BY_FIVE = 16
"""The same for two 5 x 5 convolutions without padding: 16, 12, 6, 2, 1."""

STD = 0.1
"""The initial_std that stands for He's initial weights, N(0, 2 / fan-in)."""

BLOCK_ALL = 1 << 29
"""Numbers that a pass without gradients keeps at once of all networks of a grouped convolution:
2 GiB (on an H200 512 MiB took twice as long, 8 GiB were no faster)."""


class Layer(NamedTuple):
    """A convolution of an image's `inputs` to `outputs` channels, and whether pooling follows."""

    inputs: int
    outputs: int
    pooled: bool
    kernel: int = 3
    padding: int = 1


class Sizes(NamedTuple):
    """What a network with a name of its own is made of."""

    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    kernel: int = 5
    padding: int = 0


PUBLISHED = {
    "cnn-pfllib": Sizes((32, 64), (512,)),
    "cnn-niid": Sizes((6, 16), (120, 84)),
}
"""PFLlib's "4-layer CNN", and that of NIID-Bench."""


def published(name: str, shape: tuple[int, int, int], likelihood: Likelihood) -> Model:
    """A network of a published benchmark, by its name."""
    channels, hidden, kernel, padding = PUBLISHED[name]
    if min(shape[1:]) < FIVE_BY_FIVE:
        raise UserError(
            f"Images of {shape[1]} x {shape[2]} pixels are too small for {name}, which needs "
            f"{FIVE_BY_FIVE} x {FIVE_BY_FIVE}; use model=cnn."
        )
    return cnn(shape, channels, hidden, likelihood, kernel=kernel, padding=padding)


def cnn(
    shape: tuple[int, int, int],
    channels: Sequence[int],
    hidden: Sequence[int],
    likelihood: Likelihood,
    *,
    kernel: int = 3,
    padding: int = 1,
) -> Model:
    """A network for images [channels, height, width]; a flat x is reshaped.

    mu starts at N(0, 2 / fan-in) times std / 0.1, biases at 0. So an initial_std of 0.1, which
    suits an MLP of 100 hidden units, gives He's initialisation here.
    """
    if len(channels) < 1 or min(channels) < 1:
        raise UserError(f"A convolutional network needs channels of at least 1, not {channels}.")
    if min(shape[1:]) < SMALLEST:
        raise UserError(
            f"Images of {shape[1]} x {shape[2]} pixels are too small for a convolutional network, "
            f"which needs {SMALLEST} x {SMALLEST}; use model=mlp."
        )
    height, width = shape[1:]
    layers: list[Layer] = []
    activation = math.prod(shape)
    for inputs, outputs in pairwise((shape[0], *channels)):
        height, width = (side + 2 * padding - kernel + 1 for side in (height, width))
        pooled = min(height, width) > 1
        layers.append(Layer(inputs, outputs, pooled, kernel, padding))
        activation += 2 * outputs * height * width  # the convolution, and what pooling makes of it
        height, width = (height // 2, width // 2) if pooled else (height, width)
    flat = channels[-1] * height * width
    top = mlp((flat, *hidden, likelihood.outputs), likelihood)
    assert top.head is not None
    head, both = top.head, top.head.both
    assert both is not None
    square = kernel**2
    lengths = [
        length
        for layer in layers
        for length in (square * layer.inputs * layer.outputs, layer.outputs)
    ]
    below = sum(lengths)

    def through(theta: Tensor, x: Tensor, follow: Forward) -> Tensor:
        """The convolutions and what follows them, in blocks of points without gradients."""
        *parts, rest = theta.split([*lengths, top.size], -1)
        rest = rest.flatten(0, 1).unsqueeze(1)  # to the MLP a draw is a client
        in_turn = theta.device.type in network.IN_TURN
        way = one_by_one if in_turn else grouped
        most = network.BLOCK_ONE if in_turn else BLOCK_ALL // math.prod(theta.shape[:2])
        size = x.shape[1] if theta.requires_grad else max(1, most // activation)
        blocks = x.reshape(*x.shape[:2], *shape).split(size, 1)
        output = torch.cat([follow(rest, way(layers, parts, block)) for block in blocks], 2)
        return output.view(*theta.shape[:2], *output.shape[2:])

    fan_ins = [*(square * layer.inputs for layer in layers), flat, *hidden]
    fan_outs = [*channels, *hidden, likelihood.outputs]
    sizes = [(fan_in + 1) * fan_out for fan_in, fan_out in zip(fan_ins, fan_outs, strict=True)]

    def init(g: torch.Generator, std: float) -> Tensor:
        he = [
            value
            for fan_in, fan_out in zip(fan_ins, fan_outs, strict=True)
            for value in (
                torch.full((fan_in * fan_out,), (2 / fan_in) ** 0.5),
                torch.zeros(fan_out),
            )
        ]
        noise = torch.ones(likelihood.extra)  # of the likelihood: as in the MLP
        scale = torch.cat([*(value * (std / STD) for value in he), noise])
        return torch.cat([torch.randn(below, generator=g), top.init(g, 1.0)]) * scale

    return Model(
        size=below + top.size,
        outputs=likelihood.outputs,
        forward=lambda theta, x: through(theta, x, top.forward),
        init=init,
        likelihood=likelihood,
        head=Head(
            lambda theta, x: through(theta, x, head.features),
            head.width,
            slice(below + head.weight.start, below + head.weight.stop),
            slice(below + head.bias.start, below + head.bias.stop),
            lambda theta, x: through(theta, x, both),
        ),
        activation=activation,
        scale=cache(lambda: scale_for([*zip(sizes, fan_ins, strict=True)], likelihood.extra)),
        layers=(
            *(
                (f"conv-{n + 1}", slice(sum(sizes[:n]), sum(sizes[: n + 1])))
                for n in range(len(layers))
            ),
            *((name, slice(below + at.start, below + at.stop)) for name, at in top.layers),
        ),
    )


def one_by_one(layers: Sequence[Layer], parts: Sequence[Tensor], images: Tensor) -> Tensor:
    """Kernels and biases [C, K, ...] by layer, images [C, n, channels, height, width] ->
    [C K, n, flat]."""
    outputs = []
    draws = parts[0].shape[1]
    for place, own in enumerate(zip(*(part.flatten(0, 1) for part in parts), strict=True)):
        h = images[place // draws]
        for layer, kernel, bias in zip(layers, own[::2], own[1::2], strict=True):
            h = _layer(layer, _channels_last(h), kernel, bias, 1)
        outputs.append(h.flatten(1))
    return torch.stack(outputs)


def grouped(layers: Sequence[Layer], parts: Sequence[Tensor], images: Tensor) -> Tensor:
    """The same, with the networks side by side as groups of channels."""
    clients, draws = parts[0].shape[:2]
    h = images.transpose(0, 1).flatten(1, 2)  # [n, C channels, height, width]
    groups = clients  # all draws of a client share its images
    for layer, kernel, bias in zip(layers, parts[::2], parts[1::2], strict=True):
        h = _layer(layer, h, kernel, bias.flatten(), groups)
        groups = clients * draws
    return h.reshape(len(h), groups, -1).transpose(0, 1)


def _layer(layer: Layer, h: Tensor, kernel: Tensor, bias: Tensor, groups: int) -> Tensor:
    square = kernel.reshape(-1, layer.inputs, layer.kernel, layer.kernel)
    h = F.conv2d(h, square, bias, padding=layer.padding, groups=groups)
    # ReLU after pooling is the same as before, on a quarter of the numbers.
    return (F.max_pool2d(h, 2) if layer.pooled else h).relu()


def _channels_last(h: Tensor) -> Tensor:
    """The same values, channels side by side in memory; vmap takes no memory_format."""
    return h.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def image_shape(point: Sequence[int], name: str) -> tuple[int, int, int]:
    """Channels, height and width of a point; a flat one is a grey square, if its length allows."""
    if len(point) == 3:
        return point[0], point[1], point[2]
    side = math.isqrt(math.prod(point))
    if len(point) == 1 and side * side == point[0]:
        return 1, side, side
    raise UserError(
        f"A convolutional network needs images; a point of {name} has {math.prod(point)} features, "
        "which make no square. Use model=mlp."
    )
