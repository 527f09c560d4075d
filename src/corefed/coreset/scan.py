"""One pass that keeps nothing of a point but a score: the first phase of a build with a pool.

    T_s = sum_j (log p_s(D_j) - c_j)        y = S^{-1/2} (T - mean T), exactly that of all data
    score_j                                 ||g_j|| over the first draws

c_j is the mean of log p(D_j) over those first draws. It cancels in y; without it, sums of a million
log-likelihoods in float32 would round away what the draws differ by. Blocks are as large as stays
in a core's cache, draws by points as the likelihood gives them: none is transposed or stored.

Threads each take blocks of their own: threads that share an operation wait for each other at its
end, and at ten operations a block they wait longer than they work. A function that must not be
called twice at once (it swaps parameters of a module) is found out: see `pool.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.threads import map_parts
from corefed.coreset import sources
from corefed.coreset.draws import Draws
from corefed.coreset.passes import Check, DataPass, Progress
from corefed.coreset.sources import Batch

SCORED = 64
"""Draws that the scores are computed from: their relative error is about 1 / sqrt(128)."""
BLOCK = 1 << 20
"""Numbers of a block of log-likelihoods, 4 MiB, on a CPU; a GPU has memory for larger ones."""
BLOCK_GPU = 1 << 26


class Scan(NamedTuple):
    y: Tensor  # [S] float64, sum_j g_j over all points
    score: Tensor  # [n] ||g_j|| over the first draws
    check: Check  # the same sums under the fresh draws


class _Sums(NamedTuple):
    """What is left of a chunk of points."""

    start: int
    fitted: Tensor  # [S] sums of log p - c, float64
    fresh: Tensor  # [F]
    score: Tensor  # [b]
    squares: Tensor  # sum_j ||h_j||^2 under the fresh draws
    rounding: Tensor  # sum_j log p_0(D_j)^2


def scan(work: DataPass, fitted: Draws, fresh: Draws, threads: int, show: Progress) -> Scan:
    """All points once, under the fitted and the fresh draws."""
    first = min(SCORED, fitted.number)
    block = BLOCK_GPU if work.device.type == "cuda" else BLOCK
    width = work.function.width
    points = max(1, block // (width * (fitted.number if width == 1 else first)))
    work = work._replace(chunk=points, tile=block)
    n = work.source.n
    y = torch.zeros(fitted.number, dtype=torch.float64, device=work.device)
    check = y.new_zeros(fresh.number)
    squares, rounding = y.new_zeros(()), y.new_zeros(())
    score = torch.empty(n, dtype=work.function.dtype, device=work.device)

    def sums(chunk: tuple[int, Batch]) -> _Sums:
        with torch.no_grad():  # a setting of each thread
            return _sums(work, fitted, fresh, first, *chunk)

    for found in map_parts(sums, work.chunks(), threads):
        y += found.fitted
        check += found.fresh
        squares += found.squares
        rounding += found.rounding
        stop = found.start + len(found.score)
        score[found.start : stop] = found.score
        show("potentials", stop, n)
    # Rounding alone makes constant log-likelihoods differ by about eps |log p|.
    epsilon = torch.finfo(score.dtype).eps
    if float(score.square().sum(dtype=torch.float64)) <= (2 * epsilon) ** 2 * float(rounding):
        raise UserError(
            "The log-likelihood is the same under every draw, so it does not depend on theta; "
            "check that it uses its first argument."
        )
    return Scan(_centred(y), score, Check(_centred(check), float(squares)))


def scores(work: DataPass, fitted: Draws, points: Batch) -> Tensor:
    """[b] the scores of some points, computed as `scan` does."""
    first = min(SCORED, fitted.number)
    log_p = work.log_p(fitted._replace(number=first), points)
    return _norm((log_p - log_p.mean(-1, keepdim=True)).mT)


def _sums(
    work: DataPass, fitted: Draws, fresh: Draws, first: int, start: int, points: Batch
) -> _Sums:
    """The sums of one chunk, a block of draws at a time."""
    x, y = points
    own = getattr(work.function.call, "sums", None)
    if own is not None and (fitted.number + fresh.number) * fitted.width <= work.tile * 16:
        thetas = (draws.block(0, draws.number) for draws in (fitted, fresh))
        sums, fresh_sums, score, squares, rounding = own(*thetas, first, x, y)
        found = _Sums(
            start, sums.double(), fresh_sums.double(), score, squares.double(), rounding.double()
        )
        return _finite(found, work, fitted, fresh, points)
    step = max(first, work.tile // (sources.count(x) * work.function.width))
    totals: list[Tensor] = []
    reference = score = rounding = torch.empty(0)
    for s in range(0, fitted.number, step):
        log_p = work.function.many(fitted.block(s, min(s + step, fitted.number)), x, y)
        if s == 0:
            rounding = log_p[0].square().sum(dtype=torch.float64)
            reference = log_p[:first].mean(0)
        # not in place where entries share memory, as of a function that ignores theta
        log_p = log_p.sub_(reference) if log_p.is_contiguous() else log_p - reference
        if s == 0:
            score = _norm(log_p[:first])
        totals.append(log_p.sum(1))
    judged, squares = [], torch.zeros((), dtype=torch.float64, device=work.device)
    mean, blocks = torch.zeros_like(reference), []
    for s in range(0, fresh.number, step):
        log_p = work.function.many(fresh.block(s, min(s + step, fresh.number)), x, y) - reference
        judged.append(log_p.sum(1))
        mean += log_p.sum(0)
        blocks.append(log_p.square().sum(dtype=torch.float64))
    if blocks:
        squares = torch.stack(blocks).sum() - mean.square().sum(dtype=torch.float64) / fresh.number
    found = _Sums(
        start,
        torch.cat(totals).double(),
        torch.cat(judged).double() if judged else squares.new_zeros(0),
        score,
        squares / max(1, fresh.number),
        rounding,
    )
    return _finite(found, work, fitted, fresh, points)


def _finite(found: _Sums, work: DataPass, fitted: Draws, fresh: Draws, points: Batch) -> _Sums:
    """The sums, refused if one is not finite."""
    if not bool(torch.isfinite(found.fitted.sum() + found.fresh.sum())):
        for draws in (fitted, fresh):
            work.log_p(draws, points, found.start)  # names the point and the draw
        last = found.start + len(found.score) - 1
        raise UserError(
            f"The log-likelihoods of points {found.start} to {last} are finite, but their sum is "
            "not; scale them, or compute in float64."
        )
    return found


def _norm(difference: Tensor) -> Tensor:
    """S^{-1/2} of the norm over draws, the first axis."""
    norm: Tensor = torch.linalg.vector_norm(difference, dim=0)
    return norm / math.sqrt(len(difference))


def _centred(total: Tensor) -> Tensor:
    """S^{-1/2} (T - mean T)."""
    return (total - total.mean()) / math.sqrt(len(total)) if len(total) else total
