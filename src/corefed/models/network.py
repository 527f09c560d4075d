"""Networks as functions of one flat parameter vector, for many clients and draws at once.

`Model.log_likelihood(theta [C, K, P], x [C, n, ...], y)` is all that the methods need. An MLP has
its own batched forward pass; any other nn.Module without batch statistics goes through
`torch.func.functional_call` under vmap. A test checks that both give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from corefed.base.errors import UserError
from corefed.models.checks import refuse_layers
from corefed.models.likelihood import Likelihood

Forward = Callable[[Tensor, Tensor], Tensor]

USUAL = 100
"""Inputs of a layer up to which its weights have the usual size, that of a hidden layer here."""

PIXELS, STANDARDISED = 0.1, 1.0
"""Mean square of an input: of pixels from 0 to 1 about (0.10 in MNIST), of standardised numbers."""

BLOCK = 1 << 25
"""Activations that a module keeps at once in a pass without gradients: 128 MiB."""


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


def from_module(
    module: nn.Module, likelihood: Likelihood, *, last: str = "", activation: int = 0
) -> Model:
    """Any module without batch statistics. mu starts at the module's own weights.

    Buffers, and parameters that need no gradient, never change. `last` names the nn.Linear whose
    output is the module's, if there is one: its input is the features of the head. `activation`,
    the numbers kept per point for back-propagation, bounds the blocks of a pass without gradients.
    """
    refuse_layers(module)
    named = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    frozen |= {name: b.detach() for name, b in module.named_buffers()}
    lengths = [p.numel() for p in named.values()]
    offset = sum(lengths)

    def call(theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split([*lengths, likelihood.extra])
        parameters = {
            name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=False)
        }
        fixed = {name: b.to(theta.device) for name, b in frozen.items()}
        with plain_attention():
            output: Tensor = functional_call(module, {**parameters, **fixed}, (x,))
        return output

    def call_to_head(theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        inputs: list[Tensor] = []
        hook = module.get_submodule(last).register_forward_pre_hook(
            lambda layer, arguments: inputs.append(arguments[0])
        )
        try:
            output = call(theta, x)
        finally:
            hook.remove()
        return inputs[0], output

    def call_features(theta: Tensor, x: Tensor) -> Tensor:
        return call_to_head(theta, x)[0]

    def call_both(theta: Tensor, x: Tensor) -> Tensor:
        return torch.cat(call_to_head(theta, x), -1)

    head = None
    if last:
        order = list(named)
        before = sum(lengths[: order.index(f"{last}.weight")])
        weight = slice(before, before + named[f"{last}.weight"].numel())
        bias = slice(weight.stop, weight.stop + likelihood.outputs)
        width = named[f"{last}.weight"].shape[1]
        head = Head(
            _in_blocks(_stacked(call_features), activation), width, weight, bias,
            _in_blocks(_stacked(call_both), activation),
        )  # fmt: skip

    def init(g: torch.Generator, std: float) -> Tensor:
        return with_noise(torch.cat([p.reshape(-1) for p in named.values()]), likelihood)

    return Model(
        size=offset + likelihood.extra,
        outputs=likelihood.outputs,
        forward=_in_blocks(_stacked(call), activation),
        init=init,
        likelihood=likelihood,
        head=head,
        activation=activation,
        scale=cache(lambda: scale_for([*_inputs(named.values())], likelihood.extra)),
        layers=_layers(named),
    )


def _layers(named: Mapping[str, Tensor]) -> tuple[tuple[str, slice], ...]:
    """A module's layers, each with the parameters that follow one another under its name."""
    found: list[tuple[str, slice]] = []
    at = 0
    for full, p in named.items():
        name, end = full.rpartition(".")[0] or full, at + p.numel()
        if found and found[-1][0] == name:
            found[-1] = (name, slice(found[-1][1].start, end))
        else:
            found.append((name, slice(at, end)))
        at = end
    return tuple(found)


def scale_for(sizes: Sequence[tuple[int, float]], extra: int = 0) -> Tensor | None:
    """[P] sqrt(USUAL / inputs), at most 1, for layers given as (parameters, inputs); None: all 1.

    A layer's output moves with the norm of its inputs. With means, widths and steps in this
    proportion, it moves by as much in a layer of 1280 inputs as in one of 100. `inputs` is their
    number times their mean square, where that is known.
    """
    parts = [torch.full((size,), min(1.0, (USUAL / inputs) ** 0.5)) for size, inputs in sizes]
    scale = torch.cat([*parts, torch.ones(extra)])
    return None if bool((scale == 1).all()) else scale


def _inputs(parameters: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """(parameters, inputs) of each tensor of a module; a bias has those of the weights before."""
    inputs = 1
    for p in parameters:
        inputs = p[0].numel() if p.dim() > 1 else inputs
        yield p.numel(), inputs


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention in plain operations: its fused kernels have no derivative, or no rule for vmap."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _stacked(call: Forward) -> Forward:
    """From theta [P] and x [n, ...] to theta [C, K, P] and x [C, n, ...]."""
    over_draws = vmap(call, in_dims=(0, None), randomness="error")
    over_clients: Forward = vmap(over_draws, in_dims=(0, 0), randomness="error")
    return over_clients


def _in_blocks(forward: Forward, activation: int) -> Forward:
    """The same function; without gradients it works in blocks of bounded size."""

    def through(theta: Tensor, x: Tensor) -> Tensor:
        if theta.requires_grad or not activation:
            return forward(theta, x)
        most = max(1, BLOCK // (activation * len(theta)))  # points times draws per client
        points = min(most, x.shape[1])
        draws = theta.split(max(1, most // max(1, points)), 1)
        blocks = x.split(max(1, points), 1)
        return torch.cat(
            [torch.cat([forward(some, block) for block in blocks], 2) for some in draws], 1
        )

    return through


def with_noise(mu: Tensor, likelihood: Likelihood) -> Tensor:
    """Append the log noise if the likelihood learns it."""
    if not likelihood.extra:
        return mu
    noise = float(getattr(likelihood, "noise", 1.0))
    return torch.cat([mu, torch.full((likelihood.extra,), math.log(noise))])
