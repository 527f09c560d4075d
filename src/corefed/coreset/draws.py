"""From any posterior to draws theta_1..theta_S of it, a block at a time.

| what the user has                                   | what it means                             |
|-----------------------------------------------------|-------------------------------------------|
| a tensor [S, ...], a dict name -> [S, ...]          | S draws, stacked                          |
| a list of tensors, state_dicts or modules           | one draw each: an ensemble, MCMC          |
| a tuple (mean, scale), or `MeanField(mean, scale)`  | N(mean, scale^2); a lower-triangular      |
|                                                     | [P, P] scale L means N(mean, L L^T)       |
| a `bayes.regression.Normal(mean, covariance)`       | that Gaussian, with its covariance        |
| an object with .sample(shape)                       | a distribution of torch.distributions     |

A distribution gives as many draws as needed, to fit and to judge by. Of a list of draws the last
fifth, and at least two, is held out to judge by. It is one block, because neighbours in a Markov
chain are similar: a draw between two fitted ones would flatter the coreset.

Each draw has its own random stream, so it is the same in whatever blocks the draws are made. If S
draws do not fit into memory, they are made again for each chunk of points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.bayes.regression import Normal

Theta = Tensor | dict[str, Tensor]
"""One draw, or many stacked along the first axis: one tensor, or tensors by name."""

LEAST = 4
"""Two draws to fit and two to judge by: the centred potentials of one draw are zero."""


class MeanField(NamedTuple):
    """A Gaussian N(mean, scale^2): tensors or dicts of tensors; scale may be a plain number."""

    mean: Any
    scale: Any


class Draws(NamedTuple):
    """S draws; `block` stacks those from start to stop."""

    number: int  # S
    width: int  # numbers in one draw
    block: Callable[[int, int], Theta]


MakeDraws = Callable[[int, int, str], Draws]
"""(count, seed, purpose) -> as many draws as wanted."""
Posterior = Draws | MakeDraws


def interpret(draws: object) -> Posterior:
    """What the user gave, by the table above."""
    if isinstance(draws, Normal):
        return _normal(draws.mean, torch.linalg.cholesky(draws.covariance))
    if isinstance(draws, MeanField) or (isinstance(draws, tuple) and len(draws) == 2):
        return _normal(*draws)
    if isinstance(draws, Tensor | np.ndarray | Mapping):
        return wrap_stacked(draws)
    if isinstance(draws, Sequence) and not isinstance(draws, str):
        return _one_by_one(draws)
    sample = getattr(draws, "sample", None)
    if callable(sample) and not isinstance(draws, nn.Module):
        return _sampled(sample)
    raise UserError(
        f"draws is a {type(draws).__name__}; give stacked draws, a list of draws or state_dicts, "
        "a (mean, scale) pair, or a distribution with .sample()."
    )


def split(posterior: Posterior, samples: int, fresh: int, seed: int) -> tuple[Draws, Draws]:
    """Draws to fit and draws to judge by; never the same ones.

    Of given draws, `samples` bounds those fitted, taken at even distances.
    """
    if not isinstance(posterior, Draws):
        return posterior(samples, seed, "fitted"), posterior(fresh, seed, "fresh")
    number = posterior.number
    if number < LEAST:
        raise UserError(
            f"There are {number} draws; a coreset needs at least {LEAST}: two to fit the "
            "weights and two, held out, to judge them by."
        )
    available = number - max(2, number // 5)
    count = min(available, samples) if samples else available
    chosen = [s * available // count for s in range(count)]
    fitted = posterior if count == available else _some(posterior, chosen)
    return fitted._replace(number=count), _some(posterior, list(range(available, number)))


def hold(draws: Draws, device: torch.device, limit: int) -> Draws:
    """The same draws on `device`, kept in memory where they take at most `limit` bytes."""

    def moved(start: int, stop: int) -> Theta:
        return tree(lambda t: t.to(device), draws.block(start, stop))

    first = moved(0, 1)
    itemsize = max(t.element_size() for t in leaves(first))
    if draws.number * draws.width * itemsize > limit:
        return draws._replace(block=moved)
    return wrap_stacked(moved(0, draws.number))


def wrap_stacked(theta: object) -> Draws:
    """Draws that lie in memory, stacked along the first axis."""
    theta = _floating(theta)
    counts = {len(t) if t.dim() else 0 for t in leaves(theta)}
    if len(counts) != 1 or counts == {0}:
        raise UserError(
            "Stacked draws share their first axis, one entry per draw; these have lengths "
            f"{sorted(counts)}."
        )
    for t in leaves(theta):
        if not bool(torch.isfinite(t).all()):
            raise UserError("The draws hold NaN or infinite values; remove those draws.")
    return Draws(
        counts.pop(),
        sum(t[0].numel() for t in leaves(theta)),
        lambda start, stop: tree(lambda t: t[start:stop], theta),
    )


def refuse_equal(draws: Draws) -> None:
    """Refuse draws that are all the same."""
    first = leaves(draws.block(0, 1))
    for s in range(1, draws.number):
        other = leaves(draws.block(s, s + 1))
        if any(not torch.equal(a, b) for a, b in zip(first, other, strict=True)):
            return
    raise UserError(
        f"All {draws.number} draws are the same, so they say nothing about how the log-likelihood "
        "changes over the posterior; give draws that differ."
    )


def tree(function: Callable[[Tensor], Tensor], theta: Theta) -> Theta:
    """`function` of every tensor."""
    if isinstance(theta, Tensor):
        return function(theta)
    return {name: function(t) for name, t in theta.items()}


def leaves(theta: Theta) -> list[Tensor]:
    return [theta] if isinstance(theta, Tensor) else list(theta.values())


def _normal(mean: object, scale: object) -> MakeDraws:
    mean = _floating(mean)
    if isinstance(scale, int | float):
        value = float(scale)
        scale = tree(lambda m: torch.full_like(m, value), mean)
    scale = _floating(scale)
    triangular = (
        isinstance(mean, Tensor)
        and isinstance(scale, Tensor)
        and scale.shape == (mean.numel(), mean.numel())
    )
    _check_scale(mean, scale, triangular)

    def draw(generator: torch.Generator) -> Theta:
        def noise(m: Tensor) -> Tensor:  # on the CPU, so that every device has the same draws
            return torch.randn(m.shape, generator=generator, dtype=m.dtype).to(m.device)

        if isinstance(mean, Tensor):
            assert isinstance(scale, Tensor)
            return mean + (scale @ noise(mean) if triangular else scale * noise(mean))
        assert isinstance(scale, dict)
        return {name: m + scale[name] * noise(m) for name, m in mean.items()}

    def make(count: int, seed: int, purpose: str) -> Draws:
        def block(start: int, stop: int) -> Theta:
            rows = [draw(rng.generator(seed, s, 0, purpose)) for s in range(start, stop)]
            return _stack(rows)

        return Draws(count, sum(m.numel() for m in leaves(mean)), block)

    return make


def _check_scale(mean: Theta, scale: Theta, triangular: bool) -> None:
    if triangular:
        assert isinstance(scale, Tensor)
        if not (torch.equal(scale, scale.tril()) and bool((scale.diagonal() > 0).all())):
            raise UserError(
                "A square scale is a lower-triangular factor L of the covariance L L^T with a "
                "positive diagonal, as torch.linalg.cholesky gives; this one is not."
            )
    elif _shapes(mean) != _shapes(scale):
        raise UserError("mean and scale of a Gaussian must have the same names and shapes.")
    elif not all(bool((s > 0).all()) for s in leaves(scale)):
        raise UserError("The scale of a Gaussian holds standard deviations: all must be positive.")
    if not all(bool(torch.isfinite(t).all()) for t in (*leaves(mean), *leaves(scale))):
        raise UserError("The mean or the scale of the posterior holds NaN or infinite values.")


def _one_by_one(items: Sequence[object]) -> Draws:
    """A list of draws; stacked a block at a time, so that memory never holds them twice."""
    if not items:
        raise UserError("The list of draws is empty.")
    rows = [_floating(i.state_dict() if isinstance(i, nn.Module) else i) for i in items]
    for s, row in enumerate(rows):
        if _shapes(row) != _shapes(rows[0]):
            raise UserError(f"Draw {s} of the list has other names or shapes than draw 0.")
        if not all(bool(torch.isfinite(t).all()) for t in leaves(row)):
            raise UserError(f"Draw {s} of the list holds NaN or infinite values; remove it.")
    width = sum(t.numel() for t in leaves(rows[0]))
    return Draws(len(rows), width, lambda start, stop: _stack(rows[start:stop]))


def _sampled(sample: Callable[[torch.Size], Any]) -> MakeDraws:
    """torch.distributions use the global generators, whose state is put back after the call."""

    def make(count: int, seed: int, purpose: str) -> Draws:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(rng.key(seed, 0, 0, purpose))
            drawn = wrap_stacked(sample(torch.Size((count,))))
        if drawn.number != count:
            raise UserError(f".sample(({count},)) gave {drawn.number} draws along its first axis.")
        return drawn

    return make


def _floating(theta: object) -> Theta:
    """Detached floating-point tensors; integer buffers of a state_dict are not part of a draw."""
    if isinstance(theta, np.ndarray):
        theta = torch.tensor(theta)
    if isinstance(theta, Tensor) and theta.is_floating_point():
        return theta.detach()
    if isinstance(theta, Mapping):
        tensors = {str(k): torch.as_tensor(v).detach() for k, v in theta.items()}
        kept = {name: t for name, t in tensors.items() if t.is_floating_point()}
        if kept:
            return kept
    raise UserError(
        "A draw must be a floating-point tensor, or a dict of such tensors by parameter name, not "
        f"{type(theta).__name__}{f' of {theta.dtype}' if isinstance(theta, Tensor) else ''}."
    )


def _some(draws: Draws, index: Sequence[int]) -> Draws:
    def block(start: int, stop: int) -> Theta:
        return _join([draws.block(s, s + 1) for s in index[start:stop]])

    return Draws(len(index), draws.width, block)


def _join(rows: Sequence[Theta]) -> Theta:
    """Blocks one after the other."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat([r for r in rows if isinstance(r, Tensor)])
    return {name: torch.cat([r[name] for r in rows if isinstance(r, dict)]) for name in first}


def _stack(rows: Sequence[Theta]) -> Theta:
    """Single draws side by side, along a new first axis."""
    return _join([tree(lambda t: t.unsqueeze(0), row) for row in rows])


def _shapes(theta: Theta) -> dict[str, torch.Size]:
    return (
        {"": theta.shape} if isinstance(theta, Tensor) else {k: t.shape for k, t in theta.items()}
    )
