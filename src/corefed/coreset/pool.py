"""Two phases for many points: a calibrated pool of candidates, then the exact solver on the pool.

The scan (`scan.py`) gives y, the exact target of all data, and a score per point. Points enter the
pool independently with chance

    pi_j = min(1, m (EVEN / n + (1 - EVEN) score_j / sum_i score_i)),

so sum_{j in pool} g_j / pi_j has expectation y whatever the scores are. The solver works on the
columns g_j / pi_j, whose weights v_j are of the order m/k for all points, and w_j = v_j / pi_j. It
fits y itself, not the pool's estimate of it: a pool only limits who may join.

A pool's potentials are computed again by one thread. Where they do not agree with the scan's
scores, the scan is done again by one thread too; if they still do not, the data change.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.coreset import passes, sources
from corefed.coreset.draws import Draws
from corefed.coreset.passes import DataPass, Progress
from corefed.coreset.scan import Scan, scan, scores
from corefed.coreset.sources import Batch
from corefed.coreset.store import Recompute, Sink

EACH, LEAST = 20, 10_000
"""Candidates of an automatic pool: EACH per point of the coreset, and at least LEAST."""
WORTH = 5
"""A pool is made where the data have at least WORTH times as many points ..."""
MANY = 100_000
"""... and at least MANY."""
EVEN = 0.1
"""The part of the chances that does not depend on scores: no point's weight is above n/(m EVEN)."""
AGREE = 0.02
"""The part of the pool's points whose score may differ from the scan's by AGREE of it."""


class Pool(NamedTuple):
    at: Tensor  # [m] ascending indices
    chance: Tensor  # [m]
    points: Batch
    work: DataPass  # passes over the pool alone


def size_for(pool: int | str, k: int, n: int, pooled: bool) -> int:
    """Candidates to draw; 0 is none, where the solver reads all points."""
    if isinstance(pool, str):
        if pool != "auto":
            raise UserError(f"pool is {pool!r}; it must be 'auto', 0 or a number of points.")
        m = max(EACH * k, LEAST)
        return m if pooled and n >= max(MANY, WORTH * m) else 0
    if isinstance(pool, bool) or pool < 0:
        raise UserError(f"pool is {pool!r}; it must be 'auto', 0 or a number of points.")
    if pool and not pooled:
        raise UserError("This solver reads all points at every step; choose another, or pool=0.")
    if 0 < pool < k:
        raise UserError(f"pool is {pool}; a coreset of {k} points needs at least that many.")
    return pool if pool < n else 0


def survey(
    work: DataPass, fitted: Draws, fresh: Draws, size: int, seed: int, threads: int, show: Progress
) -> tuple[Scan, Pool]:
    """The scan of all points and a pool drawn by its scores."""
    for alone in (False, True) if threads > 1 else (True,):
        try:
            found = scan(work, fitted, fresh, 1 if alone else threads, show)
            pool = draw(work, found.score, size, seed)
            if agrees(found.score[pool.at], scores(pool.work, fitted, pool.points)):
                return found, pool
        except UserError:
            if alone:
                raise
        except Exception:  # whatever a function raises that is called twice at once
            if alone:
                raise
    raise UserError(
        "The same points had other log-likelihoods when they were read again; the data must "
        "not change between readings, so turn random augmentation off."
    )


def draw(work: DataPass, score: Tensor, size: int, seed: int) -> Pool:
    """Points by their chances; drawn on the CPU, so that a GPU takes the same ones."""
    n = len(score)
    score = score.double().cpu()
    chance = size * (EVEN / n + (1 - EVEN) * score / score.sum())
    luck = torch.rand(n, generator=rng.generator(seed, 0, 0, "pool"), dtype=torch.float64)
    index = (luck < chance).nonzero().squeeze(-1)
    points = work.take(index)
    x, y = points
    inside = sources.adapt((x, y), work.function.dtype)
    near = chance[index].clamp_max(1.0).to(work.device, work.function.dtype)
    return Pool(index, near, points, work._replace(source=inside))


def agrees(scanned: Tensor, again: Tensor) -> bool:
    """Nearly all scores are the same, up to rounding."""
    slack = 0.05 * scanned + 1e-3 * scanned.mean()
    return float(((again - scanned).abs() > slack).double().mean()) <= AGREE


def potentials(pool: Pool, fitted: Draws, kind: str, scratch: Path | None) -> Sink:
    """The pool's columns g_j / pi_j in a store of that kind."""

    def columns(points: Batch, start: int) -> Tensor:
        g = passes.centred(pool.work.log_p(fitted, points, start))
        return g.div_(pool.chance[start : start + len(g)].unsqueeze(-1))

    def some(index: Tensor) -> Tensor:
        g = passes.centred(pool.work.log_p(fitted, pool.work.take(index)))
        return g.div_(pool.chance[index.to(pool.chance.device)].unsqueeze(-1))

    sink = passes.sink_for(kind, pool.work, fitted, scratch)
    if kind == "recompute":
        shape = (len(pool.at), fitted.number)
        sink = Recompute(
            *shape,
            pool.work.function.dtype,
            pool.work.device,
            lambda: (columns(points, start) for start, points in pool.work.chunks()),
            some,
        )
    for start, points in pool.work.chunks():
        sink.append(columns(points, start))
    return sink
