"""The log-likelihood of an nn.Module: its output for x, read by a likelihood of y."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from corefed.base.errors import UserError
from corefed.coreset.draws import Theta
from corefed.coreset.likelihoods import LogLikelihood
from corefed.models.checks import refuse_layers


def as_log_likelihood(target: object, likelihood: object, noise: float) -> LogLikelihood:
    """The log-likelihood of a function (itself), or of a module read by a likelihood."""
    if isinstance(target, nn.Module):
        refuse_layers(target, stored_statistics=True)
        return _of_module(target, _reader(likelihood, noise))
    if not callable(target):
        raise UserError(
            f"log_likelihood is a {type(target).__name__}; give a function of (theta, x, y) or an "
            "nn.Module."
        )
    function: LogLikelihood = target
    return function


def _of_module(module: nn.Module, read: Callable[[Tensor, Any], Tensor]) -> LogLikelihood:
    shapes = {name: p.shape for name, p in module.named_parameters()}
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    lengths = [shape.numel() for shape in shapes.values()]

    def named(theta: Theta) -> dict[str, Tensor]:
        if isinstance(theta, dict):
            for name, value in theta.items():
                if name not in state:
                    raise UserError(f"The module has no parameter or buffer {name!r}.")
                if value.shape != state[name].shape:
                    raise UserError(
                        f"Draws of {name!r} have shape {list(value.shape)}, the module's has "
                        f"{list(state[name].shape)}."
                    )
            return theta
        if theta.shape != (sum(lengths),):
            raise UserError(
                f"A flat draw for this module has {sum(lengths)} numbers, its parameters in the "
                f"order of named_parameters(); these have shape {list(theta.shape)}."
            )
        parts = zip(shapes.items(), theta.split(lengths), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def call(theta: Theta, x: Any, y: Any) -> Tensor:
        drawn = named(theta)
        like = next(iter(drawn.values()))
        fixed = {
            name: t.detach().to(like.device, like.dtype if t.is_floating_point() else t.dtype)
            for name, t in state.items()
            if name not in drawn
        }
        arguments = (x if isinstance(x, tuple) else ()) if not isinstance(x, Tensor) else (x,)
        keywords = x if isinstance(x, dict) else {}
        return read(functional_call(module, {**fixed, **drawn}, arguments, keywords), y)

    return call


def _reader(likelihood: object, noise: float) -> Callable[[Tensor, Any], Tensor]:
    """(output, y) -> one log-likelihood per point."""
    if callable(likelihood):
        own: Callable[[Tensor, Any], Tensor] = likelihood
        return own
    if likelihood not in ("auto", "categorical", "gaussian"):
        raise UserError(
            f"likelihood is {likelihood!r}; it must be 'auto', 'categorical', 'gaussian' or a "
            "function of (output, y)."
        )
    if not 0 < noise < math.inf:
        raise UserError(f"noise is {noise!r}; a standard deviation must be positive.")

    def read(output: Tensor, y: Any) -> Tensor:
        if not isinstance(y, Tensor):
            raise UserError(
                "With several targets per point, give likelihood=function of (output, y)."
            )
        whole = not (y.is_floating_point() or y.is_complex())
        if likelihood == "categorical" or (likelihood == "auto" and whole):
            return _categorical(output, y)
        return _gaussian(output, y, noise)

    return read


def _categorical(output: Tensor, y: Tensor) -> Tensor:
    """log softmax of the true class; further axes, as of a segmentation, are summed over."""
    if output.dim() < 2 or output.shape[1] < 2 or output[:, 0].shape != y.shape:
        raise UserError(
            f"The module's output has shape {list(output.shape)} for labels of shape "
            f"{list(y.shape)}; logits are [points, classes] for labels [points]. For another "
            "likelihood give likelihood=function of (output, y)."
        )
    # y is no batched tensor of vmap, so its values can be read. cross_entropy skips label -100.
    least, most = int(y.min()), int(y.max())
    if least < 0 or most >= output.shape[1]:
        raise UserError(
            f"There is a label {least if least < 0 else most}, but the module has outputs for the "
            f"classes 0 to {output.shape[1] - 1} only."
        )
    loss = F.cross_entropy(output, y.long(), reduction="none")
    return -loss.flatten(1).sum(1) if loss.dim() > 1 else -loss


def _gaussian(output: Tensor, y: Tensor, noise: float) -> Tensor:
    """Independent N(output, noise^2), summed over the targets of a point."""
    if output.shape[0] != y.shape[0] or output[:1].numel() != y[:1].numel():
        raise UserError(
            f"The module's output has shape {list(output.shape)} for targets of shape "
            f"{list(y.shape)}; they must agree."
        )
    z = (
        (output.flatten(1) - y.reshape(len(y), -1)) / noise
        if output.dim() > 1
        else ((output - y.reshape(-1)) / noise).unsqueeze(1)
    )
    return (-0.5 * z.square() - math.log(noise) - 0.5 * math.log(2 * math.pi)).sum(1)
