"""The user's own network, `--model package.module:factory`: find, make and check it.

    factory(inputs=, shape=, outputs=) -> nn.Module       with those arguments that it takes

`inputs` is the number of features of a flat point, `shape` the shape of a point as the network sees
it, `outputs` the number of classes or targets. The module maps [n, *shape] to [n, outputs], each
point on its own. It is put into evaluation mode: a posterior over weights replaces dropout.
Posteriors start at the weights that the factory makes, those in torch's default size enlarged to
He's (`_start`). Buffers, and parameters that need no
gradient, never change.

The factory's random numbers are seeded by the run's seed, so the same seed gives the same start.
What is fixed is made once, with a seed that never changes, so that a run read again has the same
network.

A file may name code, and may come from a stranger. So code is imported only where a person names
it, on the command line or in Python (`named`), and never because a file does.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from corefed.base.errors import UserError, did_you_mean
from corefed.models import cnn, modules, network, resnet
from corefed.models.checks import (
    Point,
    drops_out,
    line,
    refuse_detached,
    refuse_layers,
    refuse_probabilities,
    try_module,
)
from corefed.models.likelihood import Categorical, Likelihood
from corefed.models.network import Model
from corefed.models.series import SERIES

Factory = Callable[..., object]

COPIES = 8 * 2 * 4
"""Bytes per parameter in training: about eight copies of a mean and a deviation."""

HE = 6**0.5
"""From the size of torch's initial weights, 1 / sqrt(3 inputs), to He's, sqrt(2 / inputs)."""

MAKING = threading.Lock()
"""Layers draw their weights from the process's one generator: one network is made at a time."""

BUILT_IN = ("auto", "mlp", "cnn", *cnn.PUBLISHED, resnet.NAME, *SERIES)
"""Values of the setting `model` that are not the user's own code."""


def is_own(model: str) -> bool:
    """Whether the setting `model` names the user's own code."""
    return model not in BUILT_IN


def build(
    name: str,
    shape: Sequence[int],
    likelihood: Likelihood,
    *,
    memory_mb: int,
    batch: int,
    factory: Factory,
) -> Model:
    """The network that a factory makes; messages call it by its name."""
    point = Point(name, tuple(shape), likelihood.outputs)
    module = make_module(factory, point, seed=0)
    shapes = _trained(module)
    size = sum(math.prod(each) for each in shapes.values())
    _refuse_large(name, size, 0, memory_mb)
    refuse_layers(module)
    output = try_module(module, point)
    if isinstance(likelihood, Categorical):
        refuse_probabilities(module, point)
    _refuse_large(name, size, output.activation * batch, memory_mb)
    model = modules.from_module(
        module, likelihood, last=output.last, activation=output.activation, example=point.batch
    )
    refuse_detached(model, point, output)

    def init(g: torch.Generator, std: float) -> Tensor:
        seed = int(torch.randint(1 << 62, (), generator=g, device=g.device))
        fresh = make_module(factory, point, seed)
        if _trained(fresh) != shapes:
            raise UserError(f"The model {name} has other parameters each time it is made.")
        return network.with_noise(_start(fresh, module), likelihood)

    return model._replace(init=init, notes=_notes(name, module))


# --- finding --------------------------------------------------------------------------------------


def named(name: str | None) -> Factory | None:
    """The factory that a person has named; None where they name none, or a built-in network."""
    return find(name) if name is not None and is_own(name) else None


def refuse_unnamed(name: str) -> NoReturn:
    """Refuse to import what only a file names."""
    if ":" not in name:
        raise UserError(
            "The network of this run was made in Python and has no module:factory to find it by; "
            "load it with Federation.load(folder, model=factory)."
        )
    raise UserError(
        f"The network is the code {name}, which a file names; code runs only where you name it "
        f"yourself. If you trust it, add --model {name} (in Python: the factory). It is looked for "
        "in the working folder first."
    )


def find(name: str) -> Factory:
    """The callable that `module:factory` names; the working folder is searched first."""
    path, _, attribute = name.partition(":")
    with _working_folder_first():
        found: object = _import(path, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(_missing(found, part, path, name))
        found = getattr(found, part)
    if isinstance(found, nn.Module) or not callable(found):
        raise UserError(
            f"The model {name} is of type {type(found).__name__}; it must be a function that makes "
            "an nn.Module, or its class."
        )
    return found


def name_of(factory: Factory) -> str:
    """`module:factory` if that leads back to it, else nothing."""
    module, name = (getattr(factory, each, "") for each in ("__module__", "__qualname__"))
    if module == "__main__" or not re.fullmatch(r"[\w.]+", f"{module}.{name}"):
        return ""  # also <lambda> and <locals>
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is factory else ""


def _import(path: str, name: str) -> object:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{path}.".startswith(f"{missing}."):
            if path.endswith(".py"):
                hint = f"write the module's name, {path[:-3]}, and not the file's"
            else:
                hint = f"looked in {Path.cwd()} and among the installed packages"
            raise UserError(f"The model {name} needs a module {missing!r}: {hint}.") from error
        raise UserError(f"The module {path} of the model {name} fails: {line(error)}.") from error


def _missing(owner: object, part: str, path: str, name: str) -> str:
    public = [k for k, v in getattr(owner, "__dict__", {}).items() if k[0] != "_" and callable(v)]
    some = ", ".join(public[:8]) or "nothing to call"
    hint = did_you_mean(part, public, otherwise=f"it has {some}")
    return f"The model {name} is not there: {path} has no {part!r}{hint}"


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """Search modules in the working folder first, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


# --- making ---------------------------------------------------------------------------------------


def make_module(factory: Factory, point: Point, seed: int) -> nn.Module:
    """A module in float32 and evaluation mode, its weights drawn with `seed`.

    It is a copy: a factory may give the same module to several runs.
    """
    arguments = _arguments(factory, point)
    with MAKING, _working_folder_first(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = factory(**arguments)
        except (Exception, SystemExit) as error:
            raise UserError(f"The model {point.name} cannot be made: {line(error)}.") from error
        if not isinstance(module, nn.Module):
            raise UserError(
                f"The model {point.name} made a {type(module).__name__} value, not an nn.Module."
            )
        try:
            module = copy.deepcopy(module)
        except Exception as error:
            raise UserError(
                f"The model {point.name} cannot be copied for each thread: {line(error)}."
            ) from error
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            point.call(module.eval(), torch.zeros(2, *point.shape))  # lazy layers learn their size
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():  # complex numbers neither
            raise UserError(
                f"Parameter {name!r} of the model {point.name} is of type {parameter.dtype}; a "
                "posterior needs real floating-point numbers."
            )
    return module.to("cpu", torch.float32).eval()


def _arguments(factory: Factory, point: Point) -> dict[str, object]:
    given: dict[str, object] = {
        "inputs": math.prod(point.shape), "shape": point.shape, "outputs": point.outputs
    }  # fmt: skip
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = given
    else:
        names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
        taken = {name: value for name, value in given.items() if name in names}
    for p in parameters:
        optional = p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if p.name not in taken and not optional:
            raise UserError(
                f"The model {point.name} wants an argument {p.name!r}; it is given inputs, shape "
                "and outputs by keyword, so give others a default."
            )
    return taken


def _start(fresh: nn.Module, other: nn.Module) -> Tensor:
    """The trained weights [P] of a module; `other` is one of another seed.

    torch draws the weights of its layers uniformly within 1 / sqrt(inputs). Through ReLUs that
    leaves a sixth of the signal's variance per layer: a posterior that starts there learns slowly
    and is unsure of itself for long. Such weights are enlarged to He's, N(0, 2 / inputs) in size.
    Weights that the factory sets itself, and those that are the same for every seed (trained
    before), stay as they are.
    """
    layers = {
        f"{name}.weight".lstrip(".")
        for name, layer in fresh.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    }
    others, parts = dict(other.named_parameters()), []
    for name, p in fresh.named_parameters():
        if p.requires_grad:
            value = p.detach().reshape(-1)
            drawn = name in layers and not torch.equal(p, others[name]) and _as_torch_draws(p)
            parts.append(value * HE if drawn else value)
    return torch.cat(parts)


def _as_torch_draws(weight: Tensor) -> bool:
    """Uniform within 1 / sqrt(inputs), as far as so many numbers show."""
    bound = weight[0].numel() ** -0.5
    spread = float(weight.detach().square().mean().sqrt()) * 3**0.5 / bound
    # The standard error of the mean square of m uniform numbers is sqrt(4 / 5 m) of it.
    close = abs(spread - 1) < 0.05 + 2 / weight.numel() ** 0.5
    return bool((weight.abs() <= bound).all()) and close


def _trained(module: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in module.named_parameters() if p.requires_grad}


def _refuse_large(name: str, size: int, activations: int, memory_mb: int) -> None:
    if size == 0:
        raise UserError(f"The model {name} has no parameters to train.")
    needed = (COPIES * size + 5 * activations) / 2**20
    if needed > memory_mb:
        raise UserError(
            f"The model {name} has {size:,} parameters; training one client takes about "
            f"{needed:,.0f} MB, more than the {memory_mb} of memory_mb: make it smaller, or raise "
            "memory_mb."
        )


def _notes(name: str, module: nn.Module) -> tuple[str, ...]:
    """One sentence where the module has dropout."""
    layers = [f"{k!r} ({type(v).__name__})" for k, v in module.named_modules() if drops_out(v)]
    if not layers:
        return ()
    return (
        f"dropout is off in {', '.join(layers)} of the model {name}: a posterior over the weights "
        "takes its place",
    )
