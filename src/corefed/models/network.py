"""Networks as functions of one flat parameter vector, for many clients and draws at once.

`Model.log_likelihood(theta [C, K, P], x [C, n, ...], y)` is all that the methods need. An MLP has
its own batched forward pass. Any other nn.Module without batch statistics is called with the
parameters of one network after the other on a CPU, and under vmap elsewhere. A call replaces a
module's parameters for as long as it lasts, so every thread has a copy of the module.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from corefed.base.errors import UserError
from corefed.models.checks import refuse_layers
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


def from_module(
    module: nn.Module,
    likelihood: Likelihood,
    *,
    last: str = "",
    activation: int = 0,
    example: Tensor | None = None,
) -> Model:
    """Any module without batch statistics. mu starts at the module's own weights.

    Buffers, and parameters that need no gradient, never change. `last` names the nn.Linear whose
    output is the module's, if there is one: its input is the features of the head. `activation`,
    the numbers kept per point for back-propagation, bounds the blocks of a pass without gradients.
    On `example`, a few points, what a module may not allow is tried: channels last in memory, and
    vmap.
    """
    refuse_layers(module)
    named = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    frozen |= {name: b.detach() for name, b in module.named_buffers()}
    aliases = _aliases(module)
    lengths = [p.numel() for p in named.values()]
    offset = sum(lengths)
    copies = Copies(module)
    images = example is not None and _convolves(module)

    @cache
    def fixed(device: torch.device) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in frozen.items()}

    def call(parts: Sequence[Tensor], x: Tensor) -> Tensor:
        last = images and parts[0].device.type in IN_TURN  # vmap takes no memory format
        parameters = {
            name: _channels_last(part.view(p.shape)) if last else part.view(p.shape)
            for (name, p), part in zip(named.items(), parts, strict=False)
        }
        parameters |= {other: parameters[name] for other, name in aliases.items()}
        if parts[0].device.type != "cpu":
            parameters |= fixed(parts[0].device)
        output: Tensor = functional_call(copies.module, parameters, (x,), tie_weights=False)
        return output

    def call_to_head(parts: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        inputs: list[Tensor] = []
        hook = copies.module.get_submodule(last).register_forward_pre_hook(
            lambda layer, arguments: inputs.append(arguments[0])
        )
        try:
            output = call(parts, x)
        finally:
            hook.remove()
        return inputs[0], output

    def call_features(parts: Sequence[Tensor], x: Tensor) -> Tensor:
        return call_to_head(parts, x)[0]

    def call_both(parts: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.cat(call_to_head(parts, x), -1)

    sizes = (*lengths, likelihood.extra)
    points = torch.zeros(0) if example is None else example
    images = images and _works(lambda: call([*named.values()], points))

    @cache
    def stackable() -> bool:
        mu = torch.cat([*(p.reshape(-1) for p in named.values()), torch.zeros(likelihood.extra)])
        return example is None or _works(lambda: _try_vmap(_stacked(call, sizes), mu, example))

    def all_networks(one: Call) -> Forward:
        in_turn = _in_turn(one, sizes, activation)
        stacked = _in_blocks(_stacked(one, sizes), activation)

        def through(theta: Tensor, x: Tensor) -> Tensor:
            if theta.device.type in IN_TURN or not stackable():
                return in_turn(theta, x)
            with PlainAttention():
                return stacked(theta, x)

        return through

    head = None
    if last:
        order = list(named)
        before = sum(lengths[: order.index(f"{last}.weight")])
        weight = slice(before, before + named[f"{last}.weight"].numel())
        bias = slice(weight.stop, weight.stop + likelihood.outputs)
        width = named[f"{last}.weight"].shape[1]
        head = Head(
            all_networks(call_features), width, weight, bias, all_networks(call_both)
        )  # fmt: skip

    def init(g: torch.Generator, std: float) -> Tensor:
        return with_noise(torch.cat([p.reshape(-1) for p in named.values()]), likelihood)

    return Model(
        size=offset + likelihood.extra,
        outputs=likelihood.outputs,
        forward=all_networks(call),
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


class Copies(threading.local):
    """A module of its own for each thread that asks, copied from one that nobody calls."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)
        for layer in self.module.modules():
            if isinstance(layer, nn.RNNBase):  # cuDNN has their gradients in training mode alone
                layer.dropout = 0.0
                layer.train()


def _aliases(module: nn.Module) -> dict[str, str]:
    """Other names of trained parameters that are used twice, each with the first name."""
    first = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.get(id(p), name) != name}


class PlainAttention(TorchFunctionMode):
    """Attention in plain operations, in this thread: its fused kernels have no second derivative
    and no rule for vmap, and torch takes none of them while such a mode is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            return func(*args, **{**kwargs, "need_weights": True})[0], None  # in plain operations
        plain = _attention if func is F.scaled_dot_product_attention else func
        return plain(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query key^T / sqrt(width) + mask) value."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(times, -3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0) @ value


Call = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(parameters [size] each, x [n, ...]) -> [n, outputs], of one network."""


def _in_turn(call: Call, sizes: Sequence[int], activation: int) -> Forward:
    """Of one network after the other: theta [C, K, P], x [C, n, ...] -> [C, K, n, outputs]."""

    def through(theta: Tensor, x: Tensor) -> Tensor:
        draws = theta.shape[1]
        bounded = activation > 0 and not theta.requires_grad
        most = max(1, BLOCK_ONE // activation if bounded else x.shape[1])
        blocks = [own.split(most) for own in x]
        # One split of all networks, whose backward pass is one concatenation.
        parts = theta.flatten().split([*sizes] * theta.shape[:2].numel())
        outputs = []
        for place in range(0, len(parts), len(sizes)):
            mine = parts[place : place + len(sizes)]
            found = [call(mine, block) for block in blocks[place // len(sizes) // draws]]
            outputs.append(torch.cat(found) if len(found) > 1 else found[0])
        whole: Tensor = torch.stack(outputs).unflatten(0, theta.shape[:2])
        return whole

    return through


def _stacked(call: Call, sizes: Sequence[int]) -> Forward:
    """The same of all networks at once."""

    def one(theta: Tensor, x: Tensor) -> Tensor:
        return call(theta.split([*sizes]), x)

    over_draws = vmap(one, in_dims=(0, None), randomness="error")
    over_clients: Forward = vmap(over_draws, in_dims=(0, 0), randomness="error")
    return over_clients


def _try_vmap(stacked: Forward, theta: Tensor, x: Tensor) -> None:
    """One pass forward and back of two clients with two draws each."""
    theta = theta.expand(2, 2, -1).clone().requires_grad_()
    torch.autograd.grad(stacked(theta, x.expand(2, *x.shape)).sum(), theta)


def _channels_last(p: Tensor) -> Tensor:
    """A kernel with its channels side by side in memory: a convolution lays out images alike."""
    return p.to(memory_format=torch.channels_last) if p.dim() == 4 else p


def _convolves(module: nn.Module) -> bool:
    kinds = nn.Conv2d | nn.ConvTranspose2d
    return any(isinstance(layer, kinds) for layer in module.modules())


def _works(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except Exception:  # of any kind: the module is the user's, and worked without
        return False
    return True


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
