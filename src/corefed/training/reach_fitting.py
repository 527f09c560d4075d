"""Fit how far the training points of a run reach; `reach.py` says what that is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from corefed.base.streamed import Streamed, values
from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed.training import reach
from corefed.training.reach import Reach

SHARE = 0.004
"""Of points like the training points that either check may flag."""
LEAST = 2.0
"""The smallest margin, in spreads."""
BEYOND = 1.5
"""Where there are too few points for SHARE, the limit is the largest score times this."""
FEWEST = 40
"""Training points of a joint limit."""
OWN = 40
"""Training points of a client that has a centre of its own."""
MOST_POINTS = 4096
"""Points that the covariance and the limit are fitted to."""
MOST_DIRECTIONS = 64
MOST_CENTRES = 1 << 22
"""Numbers in all clients' centres; larger runs keep the centre of all clients alone."""
PIECE = 1 << 22
"""Numbers that are looked at at once."""
FLAT = 0.1
"""A column varies by at least this share of what columns vary by: one that was constant in training
may change a little."""
SHRINK = 0.05
"""Of an eigenvalue towards their mean."""


def measure(data: FederatedData) -> list[Reach]:
    """Of every seed, from its clients' training points."""
    if isinstance(data.train.x, Streamed):
        data = data._replace(train=_some(data.train))
    each = len(data.names) // len(data.preparations)
    return [
        _of_run(data, preparation, range(g * each, (g + 1) * each))
        for g, preparation in enumerate(data.preparations)
    ]


def _some(train: ClientData) -> ClientData:
    """Points that are streamed: as many per client as fit into an eighth of a piece, evenly spaced.

    What is computed from them takes several times their memory."""
    clients, width = len(train.weight), max(1, train.x.shape[2:].numel())
    most = max(OWN, PIECE // (8 * clients * width))
    sizes = train.size.clamp_max(most)
    step = (train.size / sizes.clamp_min(1)).unsqueeze(1)
    place = torch.arange(int(sizes.max()))
    at = (place * step).long().clamp_max(train.weight.shape[1] - 1)
    real = place < sizes.unsqueeze(1)
    client = torch.arange(clients).unsqueeze(1)
    return ClientData(values(train.x[client, at]), train.y[client, at], real.float())


def _of_run(data: FederatedData, preparation: Preparation, rows: range) -> Reach:
    train = data.train.of(rows)
    numbers = reach.numbers(preparation)
    low, high, mean, within = _moments(train.x, train.weight > 0)
    sizes = train.size.cpu()
    common = (mean * sizes.unsqueeze(1)).sum(0) / sizes.sum()
    between = ((mean - common).square() * sizes.unsqueeze(1)).sum(0) / sizes.sum()
    spread = _floored((within + between).sqrt(), numbers)
    margin = _margin(train.x, train.weight > 0, spread, numbers)
    own = sizes >= OWN
    if mean.numel() > MOST_CENTRES:
        own = torch.zeros_like(own)
        centre = common.unsqueeze(0)
    else:
        centre = torch.cat([torch.where(own.unsqueeze(1), mean, common), common.unsqueeze(0)])
    joint = _joint(train.x, train.weight > 0, sizes, own, centre, spread)
    target = train.y.new_zeros(0)
    if data.targets:
        y = preparation.unit[1] * train.y[train.weight > 0].double().cpu()
        target = y.var(0, correction=0)
    return Reach(
        low.amin(0), high.amax(0), spread, margin, centre.float(), *joint, target.float().cpu()
    )


def _pieces(x: Tensor, real: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some clients after the other: which, their points [c, n, d] and which are real.

    Without the padding that all of them have, which takes no memory until it is looked at.
    """
    width = max(1, x.shape[1:].numel())
    step = max(1, PIECE // width)
    for first in range(0, len(x), step):
        here = slice(first, min(len(x), first + step))
        there = real[here].cpu()
        there = there[:, : max(1, int(there.sum(1).max()))]
        yield here, x[here][:, : there.shape[1]].flatten(2).cpu(), there


def _moments(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[C, d] smallest and largest values and means of each client; [d] variance within clients."""
    low, high, mean = [], [], []
    squares, count = torch.zeros(()), 0
    for _, points, there in _pieces(x, real):
        n = there.sum(1).clamp_min(1)
        least, most, total = [], [], list[Tensor]()
        for some, mask in _blocks(points, there):
            least.append(some.masked_fill(~mask, math.inf).amin(1))
            most.append(some.masked_fill(~mask, -math.inf).amax(1))
            total.append((some.double() * mask).sum(1))
        m = torch.stack(total).sum(0) / n.unsqueeze(1)
        for some, mask in _blocks(points, there):
            off = (some - m.unsqueeze(1)) * mask
            squares = squares + off.square().sum((0, 1))
        low.append(torch.stack(least).amin(0))
        high.append(torch.stack(most).amax(0))
        mean.append(m)
        count += int(there.sum())
    return torch.cat(low), torch.cat(high), torch.cat(mean), squares / max(1, count)


def _blocks(points: Tensor, there: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The points of a piece, some after the other where a client alone has more than a piece."""
    step = max(1, PIECE // max(1, points[:, 0].numel()))
    pairs = zip(points.split(step, 1), there.split(step, 1), strict=True)
    return ((some, mask.unsqueeze(-1)) for some, mask in pairs)


def _floored(std: Tensor, numbers: Tensor) -> Tensor:
    """[d] float32; a feature that hardly varies gets a share of what the others vary by."""
    usual = std[numbers] if bool(numbers.any()) else std
    return std.clamp_min(FLAT * float(usual.square().mean().sqrt()) or 1.0).float()


def _margin(x: Tensor, real: Tensor, spread: Tensor, numbers: Tensor) -> Tensor:
    """The excess over the range of the others that at most SHARE of the training points have."""
    if not bool(numbers.any()):  # images: no feature has a range
        return torch.tensor(LEAST)
    top, bottom = _extremes(x, real, 1), _extremes(x, real, -1)
    excess: dict[int, float] = {}
    for gap, at in (top, bottom):
        for point, value in zip(
            at[numbers].tolist(), (gap / spread)[numbers].tolist(), strict=True
        ):
            excess[point] = max(value, excess.get(point, 0.0))
    count = int(real.sum())
    scores = torch.zeros(max(count, 1), dtype=torch.float64)
    scores[: len(excess)] = torch.tensor(sorted(excess.values(), reverse=True)).double()[:count]
    return torch.tensor(max(LEAST, _quantile(scores)))


def _extremes(x: Tensor, real: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """[d] by how much the largest value exceeds the second largest, and which point has it."""
    values, places = torch.empty(0), torch.empty(0)
    for here, points, there in _pieces(x, real):
        flat = (sign * points).masked_fill(~there.unsqueeze(-1), -math.inf).flatten(0, 1)
        best, at = flat.topk(min(2, len(flat)), 0)
        at = (here.start + at // there.shape[1]) * real.shape[1] + at % there.shape[1]
        if values.numel():
            best, at = torch.cat([values, best]), torch.cat([places, at])
            best, order = best.topk(min(2, len(best)), 0)
            at = at.gather(0, order)
        values, places = best, at
    gap = values[0] - values[1] if len(values) > 1 else torch.zeros_like(values[0])
    return gap.nan_to_num(0.0, 0.0, 0.0).double(), places[0]


def _quantile(scores: Tensor) -> float:
    """Exceeded by at most SHARE of new points of the same distribution."""
    n = len(scores)
    rank = math.ceil((1 - SHARE) * (n + 1))
    if rank > n:
        return BEYOND * float(scores.max())
    return float(scores.sort().values[rank - 1])


def _joint(
    x: Tensor, real: Tensor, sizes: Tensor, own: Tensor, centre: Tensor, spread: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """limit [N + 1] (or [1]), basis, scale and rest."""
    client, point = real.cpu().nonzero(as_tuple=True)
    if len(client) > MOST_POINTS:
        kept = torch.linspace(0, len(client) - 1, MOST_POINTS).long()
        client, point = client[kept], point[kept]
    points = x[client.to(x.device), point.to(x.device)].flatten(1).cpu().double()
    last = len(centre) - 1
    place = torch.where(own[client], client, last)
    n = sizes[client].double()
    # Around the mean of the client's other points, as a new point is.
    alone = torch.where(own[client], n / (n - 1).clamp_min(1), 1.0).unsqueeze(1)
    z = (points - centre[place]) * alone / spread
    fit = torch.arange(len(z)) % 2 == 0
    limit = torch.full((len(centre),), math.inf)
    basis, scale, rest = _directions(z[fit])
    if len(z) < FEWEST:
        return limit, basis, scale, rest
    far = reach.distance(z[~fit], basis, scale, rest)
    shared = reach.distance((points[~fit] - centre[last]) / spread, basis, scale, rest)
    limit[:] = _quantile(shared)
    mine, far = client[~fit][own[client][~fit]], far[own[client][~fit]]
    if len(far):
        pooled = _quantile(far)
        for i in mine.unique().tolist():  # a client may vary more than the others
            here = far[mine == i]
            few = len(here) < 1 / SHARE
            limit[i] = max(pooled, float(here.max()) if few else _quantile(here))
    return limit, basis, scale, rest


def _directions(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest eigenvectors [d, r] of z's covariance, their standard deviations, the rest's."""
    n, d = z.shape
    r = max(1, min(d, MOST_DIRECTIONS, n // 10))
    total = z.square().sum(0).sum() / n
    _, s, vt = torch.linalg.svd(z, full_matrices=False)
    variance = s.square()[:r] / n
    mean = max(float(total) / d, 1e-12)
    left = float(total - variance.sum()) / (d - r) if d > r else mean
    shrunk = (1 - SHRINK) * variance + SHRINK * mean
    rest = (1 - SHRINK) * max(left, 0.0) + SHRINK * mean
    return vt[:r].T.float(), shrunk.sqrt().float(), torch.tensor(math.sqrt(rest))
