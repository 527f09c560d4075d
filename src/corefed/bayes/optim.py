"""First-order optimisers for stacked clients, each client with its own step count.

torch.optim keeps one step count per tensor. Here clients that were sampled at different times share
one tensor [C, ...], so the bias corrections differ along the first axis. A test compares `adam`
with torch.optim.Adam.

A learning rate is a float, or a tensor [C] where runs with different rates are trained together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from corefed.base.errors import UserError
from corefed.base.types import Tree

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Kingma and Ba (2015), as in torch.optim.Adam
MOMENTUM = 0.9
LARGEST_ADAM = 0.05
"""Rate of Adam above which a network's initial weights, of about 0.1, are lost in two steps."""

Rule = Literal["sgd", "momentum", "adam"]
"""Of methods that train weights and no posterior."""


class Optimizer(NamedTuple):
    init: Callable[[Tensor], Tree]  # parameters [C, ...] -> state
    update: Callable[[Tensor, Tensor, Tree], None]  # (parameters, gradient, state), in place


def adam(learning_rate: float | Tensor, scale: Tensor | None = None) -> Optimizer:
    """Adam; with a `scale` [P] each weight has the learning rate times its own."""

    def init(p: Tensor) -> Tree:
        step = torch.zeros(p.shape[0], dtype=torch.float64, device=p.device)
        return {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "step": step}

    def update(p: Tensor, gradient: Tensor, state: Tree) -> None:
        m, v, step = state["m"], state["v"], state["step"]
        alike = isinstance(learning_rate, float) and p.device.type == "cpu"
        if alike and bool((step == step[0]).all()):
            # Clients in step, the usual case: torch's fused kernel, one pass instead of eight.
            before = p if scale is None else p.clone()
            torch_adam(
                [p], [gradient], [m], [v], [], [step[0].float()],
                fused=True, amsgrad=False, beta1=BETA_1, beta2=BETA_2, lr=learning_rate,
                weight_decay=0.0, eps=EPSILON, maximize=False,
            )  # fmt: skip
            step.add_(1)
            if scale is not None:
                torch.lerp(before, p, scale, out=p)
            return
        step.add_(1)
        # 1 - beta^step by expm1, which is exact in single precision; a compiler may well compute it
        # again for every weight, where double precision would take longer than all the rest.
        steps = step.to(p.dtype)
        correction_2 = torch.expm1(steps * math.log(BETA_2)).neg_().sqrt_()
        rate = learning_rate * correction_2 / torch.expm1(steps * math.log(BETA_1)).neg_()
        m.lerp_(gradient, 1 - BETA_1)
        v.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
        # m / (sqrt(v / c2^2) + eps) / c1  =  (c2 / c1) m / (sqrt(v) + c2 eps)
        denominator = torch.sqrt(v, out=gradient).add_(column(correction_2 * EPSILON, p))
        step_size = torch.div(m, denominator, out=gradient).mul_(column(rate, p))
        if scale is not None:
            step_size.mul_(on_device(p.device, scale))
        p.sub_(step_size)

    return Optimizer(init, update)


@overload
def on_device(device: torch.device, constant: Tensor) -> Tensor: ...
@overload
def on_device(device: torch.device, constant: None) -> None: ...
@overload
def on_device(device: torch.device, constant: Tensor | None) -> Tensor | None: ...
def on_device(device: torch.device, constant: Tensor | None) -> Tensor | None:
    """What a network has one number per weight of, its scale or a mask, copied to a device once."""
    return None if constant is None else _copied(device, constant)


@lru_cache(16)
def _copied(device: torch.device, constant: Tensor) -> Tensor:
    return constant.to(device)


def sgd(learning_rate: float | Tensor) -> Optimizer:
    def update(p: Tensor, gradient: Tensor, state: Tree) -> None:
        state["step"].add_(1)
        descend(p, gradient, learning_rate)

    def init(p: Tensor) -> Tree:
        return {"step": torch.zeros(p.shape[0], dtype=torch.float64, device=p.device)}

    return Optimizer(init, update)


def momentum(learning_rate: float | Tensor) -> Optimizer:
    """Heavy-ball momentum as in torch.optim.SGD: m <- 0.9 m + gradient, p <- p - rate m."""

    def update(p: Tensor, gradient: Tensor, state: Tree) -> None:
        descend(p, state["m"].mul_(MOMENTUM).add_(gradient), learning_rate)

    return Optimizer(lambda p: {"m": torch.zeros_like(p)}, update)


def of_weights(name: str, learning_rate: float | Tensor, scale: Tensor | None) -> Optimizer:
    """The rule of a method that trains weights and no posterior; sgd keeps nothing.

    Adam has the `scale` of the Bayesian methods' Adam, so that a comparison is of methods.
    """
    if name == "adam":
        return adam(learning_rate, scale)
    if name == "momentum":
        return momentum(learning_rate)
    return Optimizer(lambda p: {}, lambda p, gradient, state: descend(p, gradient, learning_rate))


def refuse_large_steps(name: str, setting: str, rate: float) -> None:
    """Adam moves every weight by about its rate, however small the gradient."""
    if name == "adam" and rate > LARGEST_ADAM:
        raise UserError(
            f"{setting} is {rate:g} with optimizer=adam, which moves every weight by about that in "
            f"each step; take {LARGEST_ADAM:g} or less, such as {setting}=0.005."
        )


OPTIMIZERS: dict[str, Callable[[float | Tensor], Optimizer]] = {"adam": adam, "sgd": sgd}


def descend(p: Tensor, gradient: Tensor, learning_rate: float | Tensor) -> None:
    """p <- p - learning_rate gradient, in place."""
    if isinstance(learning_rate, Tensor):
        p.addcmul_(gradient, column(learning_rate, p), value=-1)
    else:
        p.sub_(gradient, alpha=learning_rate)


def towards(p: Tensor, q: Tensor, part: float | Tensor) -> None:
    """p <- (1 - part) p + part q, in place."""
    p.lerp_(q, column(part, p) if isinstance(part, Tensor) else part)


def scaled(factor: float | Tensor, value: Tensor) -> Tensor:
    """factor value, with one factor for all clients or one per client."""
    return (column(factor, value) if isinstance(factor, Tensor) else factor) * value


def prefixed(prefix: str, tree: Tree) -> Tree:
    """State under names of its own, beside that of another optimiser."""
    return {prefix + name: value for name, value in tree.items()}


def under(prefix: str, tree: Tree) -> Tree:
    """The part of a tree below a prefix; tensors are shared, so in-place updates go through."""
    return {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}


def column(per_client: Tensor, like: Tensor) -> Tensor:
    """[C] as [C, 1, ...] in the dtype of `like`."""
    return per_client.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
