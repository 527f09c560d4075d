"""Any nn.Module as a function of one flat parameter vector, for many clients and draws.

On a CPU it is called with the parameters of one network after the other, elsewhere under vmap. A
call replaces a module's parameters for as long as it lasts, so every thread has a copy.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from corefed.models import network
from corefed.models.attention import PlainAttention
from corefed.models.checks import refuse_layers
from corefed.models.likelihood import Likelihood
from corefed.models.network import Forward, Head, Model, scale_for, with_noise

Call = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(parameters [size] each, x [n, ...]) -> [n, outputs], of one network."""


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
    every = module.named_parameters(remove_duplicate=False)
    frozen = {name: p.detach() for name, p in every if not p.requires_grad}
    frozen |= {name: b.detach() for name, b in module.named_buffers(remove_duplicate=False)}
    aliases = _aliases(module)
    lengths = [p.numel() for p in named.values()]
    offset = sum(lengths)
    copies = Copies(module)
    images = example is not None and _convolves(module)

    @cache
    def fixed(device: torch.device) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in frozen.items()}

    def call(parts: Sequence[Tensor], x: Tensor) -> Tensor:
        turned = images and parts[0].device.type in network.IN_TURN  # vmap takes no memory format
        parameters = {
            name: _channels_last(part.view(p.shape)) if turned else part.view(p.shape)
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
            if theta.device.type in network.IN_TURN or not stackable():
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


def _in_turn(call: Call, sizes: Sequence[int], activation: int) -> Forward:
    """Of one network after the other: theta [C, K, P], x [C, n, ...] -> [C, K, n, outputs]."""

    def through(theta: Tensor, x: Tensor) -> Tensor:
        draws = theta.shape[1]
        bounded = activation > 0 and not theta.requires_grad
        most = max(1, network.BLOCK_ONE // activation if bounded else x.shape[1])
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
        most = max(1, network.BLOCK // (activation * len(theta)))  # points times draws per client
        points = min(most, x.shape[1])
        draws = theta.split(max(1, most // max(1, points)), 1)
        blocks = x.split(max(1, points), 1)
        return torch.cat(
            [torch.cat([forward(some, block) for block in blocks], 2) for some in draws], 1
        )

    return through


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


def _inputs(parameters: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """(parameters, inputs) of each tensor of a module; a bias has those of the weights before."""
    inputs = 1
    for p in parameters:
        inputs = p[0].numel() if p.dim() > 1 else inputs
        yield p.numel(), inputs
