"""Checks of a user's module with one tiny batch, before anything is trained.

The output for a point may depend on theta and that point only: not on other points of the batch,
not on chance, not on earlier calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from corefed.base.errors import UserError

if TYPE_CHECKING:
    from corefed.models.network import Model

POINTS = 4
TOLERANCE = 1e-3
"""Relative difference of two float32 results that only differ in the order of their sums."""


class Point(NamedTuple):
    """The input and output of a model."""

    name: str  # of the model
    shape: tuple[int, ...]
    outputs: int

    @property
    def batch(self) -> Tensor:
        """Between 0 and 1, where logarithms, roots and tables of embeddings have values."""
        return torch.rand(POINTS, *self.shape, generator=torch.Generator().manual_seed(0))

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        """[n, outputs], or a UserError."""
        many = f"{len(x)} points" if len(x) > 1 else "one point alone"
        try:
            output: object = module(x)
        except Exception as error:
            raise UserError(
                f"The model {self.name} fails for {many} of shape {self.shape}: {line(error)}."
            ) from error
        if not isinstance(output, Tensor):
            raise UserError(
                f"The model {self.name} gives a {type(output).__name__}; it must give one tensor "
                f"[points, {self.outputs}]."
            )
        if output.shape != (len(x), self.outputs) or not output.is_floating_point():
            raise UserError(
                f"The model {self.name} gives {str(output.dtype).removeprefix('torch.')} of shape "
                f"{list(output.shape)} for {many}; the data need floating-point numbers of shape "
                f"{[len(x), self.outputs]}, one for each class or target."
            )
        return output


def refuse_layers(module: nn.Module, *, stored_statistics: bool = False) -> None:
    """Refuse layers whose output for a point depends on chance or on other points.

    A posterior over weights cannot use batch statistics. With `stored_statistics`, for given
    weights, a layer in evaluation mode may use those that it has stored.
    """
    for name, layer in module.named_modules():
        what = f"Layer {name!r} ({type(layer).__name__})"
        if layer.training and drops_out(layer):
            raise UserError(
                f"{what} is in training mode and drops out at random; call .eval() on the module "
                "first, or leave the layer out."
            )
        if not isinstance(layer, nn.modules.batchnorm._NormBase) or not (
            isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats
        ):
            continue
        if not stored_statistics:
            raise UserError(
                f"{what} keeps statistics of its batches, which have no meaning for a posterior "
                "over weights; use nn.GroupNorm or nn.LayerNorm."
            )
        if layer.running_mean is None:
            raise UserError(
                f"{what} always uses statistics of its batch, so a point has no log-likelihood of "
                "its own; use nn.GroupNorm, or let it track running statistics."
            )
        if layer.training:
            raise UserError(
                f"{what} is in training mode and uses statistics of its batch; call .eval() on "
                "the module first."
            )


def drops_out(layer: nn.Module) -> bool:
    """Whether a layer has dropout, on or off."""
    own = isinstance(layer, nn.modules.dropout._DropoutNd)
    rate = getattr(layer, "p" if own else "dropout", 0)  # the latter of RNNs and attention
    return isinstance(rate, int | float) and rate > 0


class Output(NamedTuple):
    """The output of a module for `Point.batch`."""

    value: Tensor
    activation: int  # numbers that a point leaves for back-propagation
    last: str  # the nn.Linear whose output it is; empty where there is none


def try_module(module: nn.Module, point: Point) -> Output:
    """The module's output, or a UserError if a point's output depends on more than the point."""
    x, buffers = point.batch, {name: b.clone() for name, b in module.named_buffers()}
    linear: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda layer, inputs, output, name=name: linear.setdefault(name, []).append(output)
        )
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    parameters = {p.data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value = point.call(module, x)
        finally:
            for hook in hooks:
                hook.remove()
        if not torch.equal(x, point.batch):
            raise UserError(f"The model {point.name} changes its input in place; copy it first.")
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise UserError(
                    f"The model {point.name} changes its buffer {name!r} when it is called; what "
                    "it gives may depend on its parameters and one point alone."
                )
        if not _close(point.call(module, x), value):
            raise UserError(
                f"The model {point.name} draws random numbers: the same points give another "
                "output each time; leave that out, a posterior over the weights takes its place."
            )
        alone = torch.cat([point.call(module, one) for one in x.split(1)])
    if not _close(alone, value):
        raise UserError(
            f"The model {point.name} gives another output for a point when others are in its "
            "batch; normalise within a point, as nn.LayerNorm and nn.GroupNorm do."
        )
    ends = [name for name, seen in linear.items() if len(seen) == 1 and seen[0] is value]
    last = ends[0] if ends and _is_head(module, ends[0]) else ""
    return Output(value.detach(), sum(saved.values()) // POINTS, last)


_ENDS = {"SoftmaxBackward": "a softmax", "SigmoidBackward": "a sigmoid"}


def refuse_probabilities(module: nn.Module, point: Point) -> None:
    """Refuse outputs that are probabilities of classes: a likelihood makes these of scores.

    Probabilities that are taken for scores can never get far from 1 / classes.
    """
    value = point.call(module, point.batch)
    last = type(value.grad_fn).__name__ if value.grad_fn is not None else ""
    what = next((words for name, words in _ENDS.items() if last.startswith(name)), "")
    sums = value.detach().sum(-1)
    if not what and point.outputs > 1 and bool((value >= 0).all()):
        what = "a softmax" if torch.allclose(sums, torch.ones_like(sums), atol=1e-5) else ""
    if what:
        raise UserError(
            f"The model {point.name} ends with {what}, so it gives probabilities where the "
            "likelihood expects class scores (logits), to which it applies a softmax itself; leave "
            "that layer out."
        )


def refuse_detached(model: Model, point: Point, output: Output) -> None:
    """One pass forward and back of two clients with two draws each."""
    mu = model.init(torch.Generator(), 1.0)
    theta = mu.expand(2, 2, -1).clone().requires_grad_()
    found = model.forward(theta, point.batch.expand(2, -1, *point.shape))
    if not found.requires_grad:
        raise UserError(f"The output of the model {point.name} depends on no parameter.")
    try:
        torch.autograd.grad(found.sum(), theta)
    except RuntimeError as error:
        raise UserError(f"The model {point.name} has no gradient: {line(error)}.") from error
    if not _close(found.detach(), output.value.expand_as(found)):
        raise UserError(
            f"The model {point.name} gives another output when its parameters are handed to it; "
            "it may keep copies of them."
        )


def line(error: BaseException, most: int = 200) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    short = text if len(text) <= most else f"{text[:most]}..."
    return f"{type(error).__name__}: {short.rstrip('.')}" if text else type(error).__name__


def _close(one: Tensor, other: Tensor) -> bool:
    scale = max(1.0, float(other.detach().abs().nan_to_num(0, 0, 0).max()))
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE * scale, equal_nan=True)


def _is_head(module: nn.Module, name: str) -> bool:
    """Whether a layer's weight and bias are trained, and its own."""
    trained = [each for each, p in module.named_parameters() if p.requires_grad]
    weight, bias = f"{name}.weight", f"{name}.bias"
    return weight in trained and trained[trained.index(weight) + 1 :][:1] == [bias]
