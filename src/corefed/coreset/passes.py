"""One pass over the data: potentials into a store, and the sums that judge a coreset afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.coreset import likelihoods, sources
from corefed.coreset.draws import Draws
from corefed.coreset.likelihoods import PerExample
from corefed.coreset.problem import Potentials, Problem
from corefed.coreset.sources import Batch, PointSource
from corefed.coreset.store import FileStore, MemorySink, Recompute, Sink
from corefed.coreset.uniform import uniform_error

Progress = Callable[[str, int, int], None]
"""(stage, done, total)"""

AGAIN = 8
"""Chosen points that are read a second time, to see that they have not changed."""


class DataPass(NamedTuple):
    """What every pass needs."""

    function: PerExample
    source: PointSource
    device: torch.device
    chunk: int  # points at once
    tile: int  # numbers of an intermediate result at once

    def log_p(self, draws: Draws, points: Batch, first: int = 0) -> Tensor:
        """[b, S] log-likelihoods of points that are on the device."""
        return likelihoods.evaluate(self.function, draws, *points, self.tile, first)

    def chunks(self) -> Iterator[tuple[int, Batch]]:
        """(index of the first, points) of all data in order, on the device."""
        start = 0
        for x, y in self.source.batches(self.chunk):
            yield start, self.moved((x, y))
            start += sources.count(x)
        if start != self.source.n:
            raise UserError(f"The data gave {start} points where they had {self.source.n} before.")

    def take(self, index: Tensor) -> Batch:
        """The points of these ascending indices."""
        return self.moved(self.source.take(index.cpu()))

    def moved(self, points: Batch) -> Batch:
        return mover(self.device)(points[0]), mover(self.device)(points[1])


class Check(NamedTuple):
    """Sums over all points of their potentials under the fresh draws."""

    total: Tensor  # [F] sum_j g_j, float64
    squares: float  # sum_j ||g_j||^2


@contextmanager
def exact_products() -> Iterator[None]:
    """Switch off TF32: its three digits are too few for potentials, which are small differences."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def mover(device: torch.device) -> Callable[[Any], Any]:
    """A function that moves a part of a batch to the device."""
    return lambda part: sources.tree(lambda t: t.to(device), part)


def centred(log_p: Tensor) -> Tensor:
    """g_j = S^{-1/2} (log p_s(D_j) - mean_s), one row per point, in place."""
    return log_p.sub_(log_p.mean(-1, keepdim=True)).mul_(log_p.shape[-1] ** -0.5)


def sink_for(kind: str, work: DataPass, draws: Draws, scratch: Path | None) -> Sink:
    """An empty store of one kind for the potentials of all points under `draws`."""
    n, dtype, device = work.source.n, work.function.dtype, work.device
    if kind == "memory":
        return MemorySink(n, draws.number, dtype, device)
    if kind == "disk":
        return FileStore(n, draws.number, dtype, device, scratch)
    return Recompute(
        n,
        draws.number,
        dtype,
        device,
        lambda: (centred(work.log_p(draws, points, j)) for j, points in work.chunks()),
        lambda index: centred(work.log_p(draws, work.take(index))),
    )


def survey(
    work: DataPass,
    fitted: Draws,
    sink: Sink,
    fresh: Draws | None = None,
    show: Progress = lambda stage, done, total: None,
) -> tuple[Tensor, Check]:
    """All potentials into `sink`; returns y = sum_j g_j [S], and the sums under the fresh draws."""
    y = torch.zeros(fitted.number, dtype=torch.float64, device=work.device)
    check = y.new_zeros(fresh.number if fresh else 0)
    energy, squares, rounding = y.new_zeros(()), y.new_zeros(()), y.new_zeros(())
    for start, points in work.chunks():
        log_p = work.log_p(fitted, points, start)
        rounding += log_p[:, 0].square().sum(dtype=torch.float64)
        g = centred(log_p)
        energy += g.square().sum(dtype=torch.float64)
        y += g.sum(0, dtype=torch.float64)
        sink.append(g)
        if fresh is not None:
            h = centred(work.log_p(fresh, points, start))
            check += h.sum(0, dtype=torch.float64)
            squares += h.square().sum(dtype=torch.float64)
        show("potentials", start + len(g), work.source.n)
    # Rounding alone makes constant log-likelihoods differ by about eps |log p|.
    epsilon = torch.finfo(work.function.dtype).eps
    if float(energy) <= (2 * epsilon) ** 2 * float(rounding):
        raise UserError(
            "The log-likelihood is the same under every draw, so it does not depend on theta; "
            "check that it uses its first argument."
        )
    return y, Check(check, float(squares))


def as_problem(points: Potentials, y: Tensor, k: int) -> Problem:
    n = points.shape[1]
    return Problem(
        points,
        y.to(points.dtype).unsqueeze(0),
        torch.tensor([k], device=points.device),
        torch.ones(1, n, dtype=torch.bool, device=points.device),
    )


class Judgement(NamedTuple):
    full: Tensor  # [F] log-likelihood of all data under each fresh draw, less its mean
    approximate: Tensor  # [F] of the coreset
    error: float  # ||full - approximate||^2 / ||full||^2
    uniform: float  # expected error of k points at random with weights n/k


def judge(
    work: DataPass, fresh: Draws, check: Check, points: Batch, w: Tensor, k: int
) -> Judgement:
    """The error on fresh draws, and the expected error of a uniform subset of k points."""
    mine = torch.zeros_like(check.total)
    if len(w):
        mine = w.double() @ centred(work.log_p(fresh, points)).double()
    y2 = check.total.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    squares, n, size = (y2.new_tensor(v) for v in (check.squares, work.source.n, k))
    uniform = float(uniform_error(y2, squares, n, size))
    error = float((check.total - mine).square().sum() / y2)
    scale = fresh.number**0.5
    return Judgement(check.total * scale, mine * scale, error, max(uniform, 0.0))


def refuse_changing(work: DataPass, draws: Draws, points: Batch, stored: Tensor) -> None:
    """Refuse data that change between readings, such as by random augmentation."""
    few: Any = tuple(sources.rows(part, slice(len(stored))) for part in points)
    log_p = work.log_p(draws, few)
    slack = 1e-4 * float(log_p.abs().max()) * log_p.shape[-1] ** -0.5
    again = centred(log_p)
    if bool(((again - stored).abs() > 0.1 * stored.abs().max() + slack).any()):
        raise UserError(
            "The same points had other log-likelihoods when they were read again; the data must "
            "not change between readings, so turn random augmentation off."
        )
