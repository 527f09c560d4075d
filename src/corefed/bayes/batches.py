"""Minibatches and noise of the local steps, drawn for all clients at once before the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.streamed import values
from corefed.base.types import Augment, Batch, ClientData
from corefed.bayes import augment as augmenting

AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Most normals per client that are drawn at once: on a CPU they stay in the cache, on a GPU
launches do not dominate."""


class Plan(NamedTuple):
    """Which points are in each minibatch: position r of a client belongs to step r / each."""

    at: Tensor  # [C, count, b] int64, within the client's points
    scale: Tensor  # [C, count, b]; 0 on padding
    each: int  # minibatches per step, side by side
    words: Tensor | None = None  # [C, count, b] what changes each image (`augment.py`); None: as is


def plan(
    data: ClientData,
    weight: Tensor,
    streams: Streams,
    steps: int,
    size: int | Sequence[int],
    each: int = 1,
    points: Sequence[int] | None = None,
) -> Plan:
    """Minibatches of each client's support {j : w_j > 0}, in shuffled epochs.

    A support no larger than a batch is used whole. Each position of a batch is uniform on the
    support, so scaling by (m / b) (w_j / n) makes the sum over the batch unbiased for
    (1/n) sum_j w_j nll_j, with m the support's size and n the client's number of points.

    `size` is b, of all clients or of each. The order of an epoch is that of random words, one per
    point of the support. A call is an epoch, so a client's orders depend neither on padding nor on
    other clients. `points`, the sizes of the supports, save a question to the device where they
    are known.
    """
    count, device = steps * each, weight.device
    m = (weight > 0).sum(-1)
    sizes = m.tolist() if points is None else points  # shapes depend on them
    longest = max(1, *sizes)
    own = [size] * len(sizes) if isinstance(size, int) else size
    b = size if isinstance(size, int) else torch.tensor(own, device=device)
    pairs = list(zip(sizes, own, strict=True))
    width = max(1, *(min(pair) for pair in pairs))
    more = [-(-count * many // one) for one, many in pairs if one > many]
    order = _epochs(m, longest, max(more), count, width, b, streams) if more else None
    plain = torch.arange(width, device=device).expand(len(m), count, width)
    at = plain if order is None else torch.where((m > b).view(-1, 1, 1), order, plain)
    if weight is not data.weight:  # a part of the points: the first of its support, the second, ..
        first = (weight > 0).to(torch.int8).argsort(stable=True, descending=True)[:, :longest]
        at = first.gather(1, at.flatten(1)).view_as(at)
    share = torch.where(m > b, m / b, 1.0) / data.size.clamp_min(1)
    scale = weight.gather(1, at.flatten(1)).view_as(at) * share.view(-1, 1, 1)  # 0 outside
    if isinstance(b, Tensor):
        scale = scale * (torch.arange(width, device=device) < b.view(-1, 1, 1))
    return Plan(at, scale, each)


def _epochs(
    m: Tensor, longest: int, epochs: int, count: int, width: int, b: int | Tensor, streams: Streams
) -> Tensor:
    """[C, count, width] places among m points per client, shuffled epoch after epoch."""
    words = streams.words("batch", longest, calls=epochs, counted=count)
    real = torch.arange(longest, device=m.device) < m.unsqueeze(-1)
    words = words.masked_fill(~real.unsqueeze(1), torch.iinfo(torch.int64).max)
    order = words.argsort(stable=True).flatten(1)  # [C, epochs longest]
    rows = torch.arange(count, device=m.device).view(1, -1, 1)
    first = rows * (b if isinstance(b, int) else b.view(-1, 1, 1))  # places of each minibatch
    place = (first + torch.arange(width, device=m.device)).flatten(1)
    of = m.clamp_min(1).unsqueeze(-1)
    epoch = (place // of).clamp_max(epochs - 1)  # more only where the result is not used
    return order.gather(1, epoch * longest + place % of).view(len(m), count, width)


def batches(
    data: ClientData, weight: Tensor, streams: Streams, steps: int, size: int, each: int = 1
) -> Iterator[Batch]:
    """`steps` minibatches of each client (`plan`).

    With `each` > 1 a step gets that many minibatches side by side, of equal width; `parts` splits
    them.
    """
    return gather(data, plan(data, weight, streams, steps, size, each))


def changing(chosen: Plan, augment: Augment | None, streams: Streams) -> Plan:
    """The plan with words for its images, if they are to be changed."""
    if augment is None:
        return chosen
    return chosen._replace(words=augmenting.draw(streams, *chosen.at.shape[1:]))


def gather(data: ClientData, chosen: Plan, augment: Augment | None = None) -> Iterator[Batch]:
    """The minibatches of a plan, step by step."""
    index, scale, each, words = chosen
    clients, n = data.weight.shape
    index = index + (torch.arange(clients, device=index.device) * n).view(-1, 1, 1)
    x, y = data.x.flatten(0, 1), data.y.flatten(0, 1)
    for r in range(0, index.shape[1], each):
        rows = index[:, r : r + each].flatten()
        points = values(x.index_select(0, rows)).unflatten(0, (clients, -1))
        if augment is not None and words is not None:
            points = augmenting.apply(augment, points, words[:, r : r + each])
        yield Batch(
            points,
            y.index_select(0, rows).unflatten(0, (clients, -1)),
            scale[:, r : r + each].flatten(1),
        )


def tally(seen: Tensor, at: Tensor, scale: Tensor, squares: Tensor) -> None:
    """Add the squares [C, b] of a step's points to seen [C, 2, n + 1]: their sums, and counts.

    Padding, whose scale is 0, goes to the last column.
    """
    at = torch.where(scale > 0, at, seen.shape[-1] - 1).unsqueeze(1).expand(-1, 2, -1)
    seen.scatter_add_(2, at, torch.stack([squares, torch.ones_like(squares)], 1))


def parts(batch: Batch, number: int) -> list[Batch]:
    """The minibatches of a step of a method with `batches` = number."""
    return [Batch(*fields) for fields in zip(*(f.chunk(number, 1) for f in batch), strict=True)]


def noises(streams: Streams, shape: tuple[int, ...], steps: int) -> Iterator[Tensor]:
    """The standard normals of `steps` steps, [C, *shape] each: one call, a stretch per step."""
    draw = streams.stretches("theta", *shape)
    numel = torch.Size(shape).numel()
    block = max(1, min(steps, AT_ONCE.get(streams.device.type, 0) // max(1, numel)))
    for start in range(0, steps, block):
        yield from draw(start, min(block, steps - start)).unbind(1)
