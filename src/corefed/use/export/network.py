"""A run's network as an ordinary nn.Module, with the names and shapes that torch gives its layers.

Training sees a flat vector (`models.py`); its entries lie in the order of the module's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corefed.base.types import Tree
from corefed.models import cnn, resnet
from corefed.models.checks import Point
from corefed.models.own import Factory, make_module
from corefed.models.series import SERIES, Series
from corefed.settings.run import Run


class ExportedLayer(NamedTuple):
    """A layer of torch.nn, as code and as a module."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def code(self) -> str:
        given = [repr(each) for each in self.arguments]
        given += [f"{key}={value!r}" for key, value in self.options.items()]
        return f"nn.{self.name}({', '.join(given)})"

    def make(self) -> nn.Module:
        module: nn.Module = getattr(nn, self.name)(*self.arguments, **self.options)
        return module


class ExportedNetwork(NamedTuple):
    module: nn.Module
    code: str  # Python code that makes it

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters in the order of the flat vector."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.trained.values())

    def with_weights(self, theta: Tensor) -> nn.Module:
        """A copy with the parameters of a flat vector; the rest of the vector is ignored."""
        own = deepcopy(self.module)
        named = dict(own.named_parameters())
        for name, value in self.split(theta).items():
            named[name].data.copy_(value)
        return own.requires_grad_(False)

    def split(self, theta: Tensor) -> Tree:
        """A flat vector, split by the names of the module's parameters."""
        parts = theta[: self.size].split([p.numel() for p in self.trained.values()])
        named = zip(self.trained.items(), parts, strict=True)
        return {name: part.view(p.shape).contiguous() for (name, p), part in named}


def network(
    run: Run,
    shape: Sequence[int],
    outputs: int,
    growth: int = 1,
    factory: Factory | None = None,
) -> ExportedNetwork:
    """The module of a run; `growth` times as wide where neurons were matched (bnfed).

    A user's own is made by `factory`.
    """
    if factory is not None:
        point = Point(run.model, tuple(shape), outputs)
        module = make_module(factory, point, seed=0)
        path, _, name = run.model.partition(":")
        code = f"import {path}\n\nnetwork = {path}.{name}(...)  # as it was trained"
        return ExportedNetwork(module, code)
    if run.model in SERIES:
        series = Series(run.model, run.channels, run.hidden)
        module = make_module(series, Point(run.model, tuple(shape), outputs), seed=0)
        code = (
            "from corefed.models.series import Series\n\n"
            f"network = {series!r}({list(shape)!r}, {outputs})"
        )
        return ExportedNetwork(module, code)
    if run.model == resnet.NAME:
        with torch.random.fork_rng(devices=[]):  # these weights are replaced
            residual = resnet.Residual(shape, run.channels, outputs)
        code = (
            "from corefed.models.resnet import Residual\n\n"
            f"network = Residual({list(shape)!r}, {tuple(run.channels)!r}, {outputs})"
        )
        return ExportedNetwork(residual.eval(), code)
    hidden = [growth * width for width in run.hidden]
    if run.model in cnn.PUBLISHED:
        layers = convolutional(shape, cnn.PUBLISHED[run.model], outputs)
    elif run.model == "cnn":
        sizes = cnn.Sizes(tuple(run.channels), tuple(hidden), kernel=3, padding=1)
        layers = convolutional(shape, sizes, outputs)
    else:
        layers = [ExportedLayer("Flatten"), *dense((math.prod(shape), *hidden, outputs))]
    with torch.random.fork_rng(
        devices=[]
    ):  # these weights are replaced, so they must not use up random numbers
        module = nn.Sequential(*(layer.make() for layer in layers))
    lines = "".join(f"    {layer.code},\n" for layer in layers)
    return ExportedNetwork(
        module.eval(), f"from torch import nn\n\nnetwork = nn.Sequential(\n{lines})"
    )


def dense(widths: Sequence[int]) -> list[ExportedLayer]:
    layers = [
        part
        for pair in pairwise(widths)
        for part in (ExportedLayer("Linear", pair), ExportedLayer("ReLU"))
    ]
    return layers[:-1]  # no ReLU after the last


def convolutional(shape: Sequence[int], sizes: cnn.Sizes, outputs: int) -> list[ExportedLayer]:
    """The layers of `cnn.cnn`; flat points are folded up first."""
    channels, hidden, kernel, padding = sizes
    options = {"padding": padding} if padding else {}
    image = cnn.image_shape(shape, "this run")
    layers = [] if tuple(shape) == image else [ExportedLayer("Unflatten", (1, image))]
    _, height, width = image
    for ends in pairwise((image[0], *channels)):
        layers.append(ExportedLayer("Conv2d", (*ends, kernel), options))
        height, width = (side + 2 * padding - kernel + 1 for side in (height, width))
        if min(height, width) > 1:
            layers.append(ExportedLayer("MaxPool2d", (2,)))
            height, width = height // 2, width // 2
        layers.append(ExportedLayer("ReLU"))
    flat = channels[-1] * height * width
    return [*layers, ExportedLayer("Flatten"), *dense((flat, *hidden, outputs))]
