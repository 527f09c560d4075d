"""A small residual network as a function of one flat parameter vector.

    h_0 = pool(conv(x)),   then one block per stage:   a = relu(norm(h)),
    h <- shortcut + conv(relu(norm(conv(a)))),   then a linear layer on the mean of relu(norm(h))

with 3 x 3 convolutions. The first stage keeps the size; every other one halves it by a stride of 2,
and so does its shortcut, a 1 x 1 convolution of a. Other shortcuts are h itself, or a 1 x 1
convolution of a where the width changes. `norm` is group norm: each image by itself, so there are
no batch statistics, which have no meaning for a posterior over weights and for clients whose data
differ. The last convolution of a branch starts smaller, by one over the root of the number of
blocks, so that the sum of the branches is no larger with more of them.

Every client and draw is a network with its own kernels. As in `cnn.py`, on a CPU they take turns,
elsewhere they are groups of one convolution, and of one group norm. Parameters lie in the order of
the module `Residual`, which is the same network for one client and draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corefed.base.errors import UserError
from corefed.models import cnn, network
from corefed.models.likelihood import Likelihood
from corefed.models.network import Forward, Head, Model, mlp, scale_for

NAME = "resnet"

GROUPS = 8
"""Groups of channels of a norm, where they divide the width."""


class Part(NamedTuple):
    """One tensor of parameters."""

    shape: tuple[int, ...]
    fan_in: int = 0  # of a convolution; 0: a gain or an offset
    start: float = 1.0  # a gain's or an offset's value; a kernel's size as part of He's

    @property
    def length(self) -> int:
        return math.prod(self.shape)


class Stage(NamedTuple):
    """A block, from `inputs` to `outputs` channels."""

    inputs: int
    outputs: int
    stride: int

    @property
    def changes(self) -> bool:
        """Whether its shortcut is a convolution."""
        return self.inputs != self.outputs or self.stride > 1


def stages(channels: Sequence[int]) -> list[Stage]:
    widths = [channels[0], *channels]
    return [Stage(widths[n], width, 2 if n else 1) for n, width in enumerate(channels)]


def groups(width: int) -> int:
    return math.gcd(width, GROUPS)


def resnet(shape: tuple[int, int, int], channels: Sequence[int], likelihood: Likelihood) -> Model:
    """A network for images [channels, height, width], one block per width; a flat x is reshaped.

    mu starts at N(0, 2 / fan-in) times std / 0.1, as in `cnn.py`; gains start at 1, biases at 0.
    """
    if len(channels) < 1 or min(channels) < 1:
        raise UserError(f"A residual network needs channels of at least 1, not {channels}.")
    if min(shape[1:]) < cnn.SMALLEST:
        raise UserError(
            f"Images of {shape[1]} x {shape[2]} pixels are too small for a residual network, which "
            f"needs {cnn.SMALLEST} x {cnn.SMALLEST}; use model=mlp."
        )
    blocks = stages(channels)
    parts = _parts(shape[0], blocks)
    lengths = [part.length for part in parts]
    below = sum(lengths)
    top = mlp((channels[-1], likelihood.outputs), likelihood)
    assert top.head is not None
    head, both = top.head, top.head.both
    assert both is not None
    activation = _activation(shape, blocks)

    def through(theta: Tensor, x: Tensor, follow: Forward) -> Tensor:
        """All below the linear layer and what follows, in blocks of points without gradients."""
        *tensors, rest = theta.split([*lengths, top.size], -1)
        rest = rest.flatten(0, 1).unsqueeze(1)  # to the linear layer a draw is a client
        in_turn = theta.device.type in network.IN_TURN
        way = one_by_one if in_turn else grouped
        most = network.BLOCK_ONE if in_turn else cnn.BLOCK_ALL // math.prod(theta.shape[:2])
        size = x.shape[1] if theta.requires_grad else max(1, most // activation)
        some = x.reshape(*x.shape[:2], *shape).split(size, 1)
        output = torch.cat([follow(rest, way(blocks, parts, tensors, block)) for block in some], 2)
        return output.view(*theta.shape[:2], *output.shape[2:])

    def init(g: torch.Generator, std: float) -> Tensor:
        drawn = torch.randn(below, generator=g).split(lengths)
        linear = (2 / channels[-1]) ** 0.5 * std / cnn.STD
        values = [
            draw * (part.start * (2 / part.fan_in) ** 0.5 * std / cnn.STD)
            if part.fan_in
            else torch.full_like(draw, part.start)
            for part, draw in zip(parts, drawn, strict=True)
        ]
        last = top.init(g, 1.0)
        last[head.weight] *= linear
        last[head.bias] = 0.0
        return torch.cat([*values, last])

    def scale() -> Tensor | None:
        sizes = [(part.length, part.fan_in or 1) for part in parts]
        return scale_for([*sizes, (top.size - likelihood.extra, channels[-1])], likelihood.extra)

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
        scale=cache(scale),
    )


def _parts(inputs: int, blocks: Sequence[Stage]) -> list[Part]:
    """The parameters below the linear layer, in the order of `Residual`."""
    small = len(blocks) ** -0.5

    def norm(width: int) -> list[Part]:
        return [Part((width,), start=1.0), Part((width,), start=0.0)]

    def conv(fan_in: int, fan_out: int, side: int = 3, start: float = 1.0) -> Part:
        return Part((fan_out, fan_in, side, side), fan_in * side**2, start)

    found = [conv(inputs, blocks[0].inputs)]
    for block in blocks:
        found += [*norm(block.inputs), conv(block.inputs, block.outputs)]
        found += [*norm(block.outputs), conv(block.outputs, block.outputs, start=small)]
        found += [conv(block.inputs, block.outputs, 1)] if block.changes else []
    return [*found, *norm(blocks[-1].outputs)]


def _activation(shape: tuple[int, int, int], blocks: Sequence[Stage]) -> int:
    """Numbers per image that are kept for back-propagation, about."""
    height, width = shape[1:]
    total = math.prod(shape) + 2 * blocks[0].inputs * height * width
    height, width = height // 2, width // 2
    for block in blocks:
        total += 2 * block.inputs * height * width  # norm and ReLU before the stride
        height, width = -(-height // block.stride), -(-width // block.stride)
        total += 5 * block.outputs * height * width
    return total


def one_by_one(
    blocks: Sequence[Stage], parts: Sequence[Part], tensors: Sequence[Tensor], images: Tensor
) -> Tensor:
    """Parameters [C, K, ...] one after the other, images [C, n, channels, height, width] ->
    [C K, n, width]."""
    draws = tensors[0].shape[1]
    outputs = []
    for place, tensor in enumerate(zip(*(each.flatten(0, 1) for each in tensors), strict=True)):
        own = [each.view(part.shape) for each, part in zip(tensor, parts, strict=True)]
        # Channels first in memory: group norm has no forward derivative for another order.
        outputs.append(_network(blocks, own, images[place // draws], 1, 1))
    return torch.stack(outputs)


def grouped(
    blocks: Sequence[Stage], parts: Sequence[Part], tensors: Sequence[Tensor], images: Tensor
) -> Tensor:
    """The same, with the networks side by side as groups of channels."""
    clients, draws = tensors[0].shape[:2]
    own = [each.reshape(-1, *part.shape[1:]) for each, part in zip(tensors, parts, strict=True)]
    h = images.transpose(0, 1).flatten(1, 2)  # [n, C channels, height, width]
    # All draws of a client share its images.
    h = _network(blocks, own, h, clients, clients * draws)
    return h.view(len(h), clients * draws, -1).transpose(0, 1)


def _network(
    blocks: Sequence[Stage], parameters: Sequence[Tensor], h: Tensor, first: int, networks: int
) -> Tensor:
    """[n, networks width] means over pixels; `first` groups in the first convolution."""
    own = iter(parameters)

    def activated(h: Tensor, width: int) -> Tensor:
        return F.group_norm(h, networks * groups(width), next(own), next(own)).relu()

    h = F.max_pool2d(F.conv2d(h, next(own), padding=1, groups=first), 2)
    for block in blocks:
        a = activated(h, block.inputs)
        r = F.conv2d(a, next(own), stride=block.stride, padding=1, groups=networks)
        r = F.conv2d(activated(r, block.outputs), next(own), padding=1, groups=networks)
        if block.changes:
            h = F.conv2d(a, next(own), stride=block.stride, groups=networks)
        h = h + r
    return activated(h, blocks[-1].outputs).mean((-2, -1))


class Residual(nn.Module):
    """The same network as a module of torch: for exports, and what tests compare with."""

    def __init__(self, shape: Sequence[int], channels: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.shape = cnn.image_shape(shape, "this run")
        blocks = stages(channels)
        self.stem = nn.Conv2d(self.shape[0], channels[0], 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(ResidualBlock(block) for block in blocks)
        self.norm = nn.GroupNorm(groups(channels[-1]), channels[-1])
        self.out = nn.Linear(channels[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.stem(x.reshape(-1, *self.shape)), 2)
        for block in self.blocks:
            h = block(h)
        output: Tensor = self.out(self.norm(h).relu().mean((-2, -1)))
        return output


class ResidualBlock(nn.Module):
    def __init__(self, block: Stage) -> None:
        super().__init__()
        inputs, outputs, stride = block
        self.first = nn.GroupNorm(groups(inputs), inputs)
        self.up = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.GroupNorm(groups(outputs), outputs)
        self.down = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if block.changes else None

    def forward(self, h: Tensor) -> Tensor:
        a = self.first(h).relu()
        r: Tensor = self.down(self.second(self.up(a)).relu())
        return r + (h if self.shortcut is None else self.shortcut(a))
