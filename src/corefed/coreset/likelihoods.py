"""log p_theta(D_j) of every point under every draw, for any function of (theta, x, y).

It is called for many draws at once through torch.func.vmap, or one draw after the other where vmap
fails (control flow that depends on values, operations in place). A function can bring its own way,
an attribute `stacked(thetas, x, y) -> [S, b]`; its `width` is then the number of values that it
holds per draw and point. Before the first pass the function is tried on a few points: it must give
one number per point, whatever other points are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from corefed.base.errors import UserError
from corefed.coreset import sources
from corefed.coreset.draws import Draws, Theta, leaves, tree

LogLikelihood = Callable[[Any, Any, Any], Tensor]
"""(theta, x, y) -> one log-likelihood per point."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far, relative to 1 + |value|, a value may change with its batch. This is rounding, which
reaches 1e-3 where a GPU multiplies in TensorFloat-32. Half precision: 5e-2."""

PROBE = 4
"""Points and, at most, draws that a function is tried on."""


class PerExample(NamedTuple):
    call: LogLikelihood  # for one draw, differentiable in it
    many: LogLikelihood  # for stacked draws: [S, b]
    width: int  # numbers of its largest intermediate result, per point
    dtype: torch.dtype  # of the potentials: float64 stays, everything else is float32


def prepare(call: LogLikelihood, draws: Draws, x: Any, y: Any) -> PerExample:
    """Try a log-likelihood on the first points (x, y), and refuse it if it fails."""
    few = min(PROBE, sources.count(x))
    x, y = sources.rows(x, slice(few)), sources.rows(y, slice(few))
    theta = draws.block(0, min(PROBE, draws.number))

    def first() -> Theta:  # a copy each time: a function may work on its theta in place
        return tree(lambda t: t[0].clone(), theta)

    versions = [t._version for t in sources.flat((x, y))]
    with _Sizes() as sizes:
        together = call(first(), x, y)
    if versions != [t._version for t in sources.flat((x, y))]:
        raise UserError("The log-likelihood changes x or y in place; let it work on copies.")
    _check_shape(together, few)
    dtype = torch.float64 if together.dtype == torch.float64 else torch.float32
    bound = TOLERANCE.get(together.dtype, 5e-2) * (1 + together.double().abs())
    for j in range(few):
        one = slice(j, j + 1)
        alone = call(first(), sources.rows(x, one), sources.rows(y, one))
        _check_shape(alone, 1)
        moved = (alone[0].double() - together[j].double()).abs() > bound[j]
        if bool(moved):
            raise UserError(
                f"The log-likelihood is not per example: point {j} alone has "
                f"{float(alone[0]):.6g}, in a batch of {few} it has {float(together[j]):.6g}. "
                "It must not average over the batch or draw at random."
            )
    half = max(1, few // 2)
    part = sources.rows(x, slice(half)), sources.rows(y, slice(half))
    with _Sizes() as fewer:
        call(first(), *part)
    width = getattr(call, "width", None) or _width(sizes.numel, fewer.numel, few, half)
    return PerExample(call, _many(call, theta, x, y), width, dtype)


def _many(call: LogLikelihood, theta: Theta, x: Any, y: Any) -> LogLikelihood:
    """The fastest way to many draws that agrees with one draw after the other."""
    one_by_one = partial(_loop, call)
    at_once = getattr(call, "stacked", None) or partial(_map, call)
    expected = one_by_one(theta, x, y)
    try:
        found = at_once(theta, x, y)
        bound = TOLERANCE.get(expected.dtype, 5e-2) * (1 + expected.abs())
        agrees = found.shape == expected.shape and bool(
            (((found - expected).abs() <= bound) | ~expected.isfinite()).all()
        )
    except Exception:  # whatever vmap or the function under it raises: the loop worked
        agrees = False
    return at_once if agrees else one_by_one


def _width(sizes: list[int], fewer: list[int], points: int, less: int) -> int:
    """Numbers per point of the largest result that grows with the points; parameters do not."""
    if len(sizes) != len(fewer) or points == less:
        return max(1, max(sizes, default=1) // points)
    grown = (a - b for a, b in zip(sizes, fewer, strict=True))
    return max(1, max(grown, default=1) // (points - less))


def evaluate(
    function: PerExample, draws: Draws, x: Any, y: Any, budget: int, first: int = 0
) -> Tensor:
    """[b, S] log-likelihoods, in tiles whose intermediate results take about `budget` numbers.

    `first` is the index of the first point, for messages.
    """
    b = sources.count(x)
    points = max(1, min(b, budget // function.width))
    block = max(1, min(draws.number, budget // (points * function.width), budget // draws.width))
    out: Tensor | None = None
    for s in range(0, draws.number, block):
        theta = draws.block(s, min(s + block, draws.number))
        for j in range(0, b, points):
            part = slice(j, j + points)
            values = function.many(theta, sources.rows(x, part), sources.rows(y, part))
            if out is None:
                out = values.new_empty(b, draws.number, dtype=function.dtype)
            out[j : j + points, s : s + block] = values.mT
    assert out is not None
    if not bool(torch.isfinite(out).all()):
        j, s = (~torch.isfinite(out)).nonzero()[0].tolist()
        raise UserError(
            f"The log-likelihood of point {first + j} under draw {s} is {float(out[j, s])}; it "
            "must be finite for every point and draw."
        )
    return out


def _map(call: LogLikelihood, theta: Theta, x: Any, y: Any) -> Tensor:
    mapped: Tensor = vmap(call, in_dims=(0, None, None), randomness="error")(theta, x, y)
    return mapped


def _loop(call: LogLikelihood, theta: Theta, x: Any, y: Any) -> Tensor:
    """One draw after the other, each a copy: the function may work in place."""

    def draw(s: int) -> Theta:
        return tree(lambda t: t[s].clone(), theta)

    return torch.stack([call(draw(s), x, y) for s in range(len(leaves(theta)[0]))])


def _check_shape(values: object, b: int) -> None:
    if not isinstance(values, Tensor):
        raise UserError(
            f"The log-likelihood returned a {type(values).__name__}; it must return a tensor of "
            "one value per point."
        )
    if values.shape != (b,):
        hint = " Do not sum or average over points." if values.dim() == 0 else ""
        raise UserError(
            f"The log-likelihood returned shape {list(values.shape)} for {b} points; it must be "
            f"[{b}], one value per point.{hint}"
        )
    if not values.is_floating_point():
        raise UserError(f"The log-likelihood returned {values.dtype}; it must be floating-point.")


class _Sizes(TorchDispatchMode):
    """Records the size of every result, 0 for a view, to bound the memory of a tile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and to say so torch would import its compiler: a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor):
                view = t.untyped_storage().data_ptr() in given
                self.numel.append(0 if view else t.numel())
        return result
