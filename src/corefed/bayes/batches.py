"""Minibatches and noise of the local steps, drawn before the steps are made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Batch, ClientData


def batches(
    data: ClientData, weight: Tensor, streams: Streams, steps: int, size: int, each: int = 1
) -> Iterator[Batch]:
    """`steps` minibatches of each client's support {j : w_j > 0}, in shuffled epochs.

    A support no larger than a batch is used whole. Each position of a batch is uniform on the
    support, so scaling by (m / b) (w_j / n) makes the sum over the batch unbiased for
    (1/n) sum_j w_j nll_j, with m the support's size and n the client's number of points.

    With `each` > 1 a step gets that many minibatches side by side, of equal width; `parts` splits
    them.
    """
    count = steps * each
    clients, n = weight.shape
    host = weight.cpu()
    supports = [row.nonzero().squeeze(-1) for row in host]
    width = max(1, min(size, max(len(s) for s in supports)))
    index = torch.zeros(clients, count, width, dtype=torch.int64)
    factor = torch.zeros(clients, count, width)
    real = data.size.tolist()
    generators = streams.generators("batch", host=True)
    for c, (support, g) in enumerate(zip(supports, generators, strict=True)):
        m = len(support)
        if m <= size:
            index[c, :, :m] = support
            factor[c, :, :m] = host[c, support] / real[c]
        else:
            epochs = -(-count * size // m)
            order = torch.rand(epochs, m, generator=g).argsort(-1).flatten()[: count * size]
            chosen = support[order].view(count, size)
            index[c] = chosen
            factor[c] = host[c, chosen] * (m / size / real[c])
    index += (torch.arange(clients) * n).view(-1, 1, 1)
    index, factor = index.to(weight.device), factor.to(weight.device)
    x, y = data.x.flatten(0, 1), data.y.flatten(0, 1)
    for r in range(0, count, each):
        rows = index[:, r : r + each].flatten()
        yield Batch(
            x.index_select(0, rows).unflatten(0, (clients, each * width)),
            y.index_select(0, rows).unflatten(0, (clients, each * width)),
            factor[:, r : r + each].flatten(1),
        )


def parts(batch: Batch, number: int) -> list[Batch]:
    """The minibatches of a step of a method with `batches` = number."""
    return [Batch(*fields) for fields in zip(*(f.chunk(number, 1) for f in batch), strict=True)]


GPU_BLOCK = 1 << 22
"""Most normals per client and GPU launch: 16 MiB, so that launches do not dominate."""


def noises(streams: Streams, shape: tuple[int, ...], steps: int) -> Iterator[Tensor]:
    """The standard normals of `steps` steps, [C, *shape] each, in blocks where launches cost."""
    numel = torch.Size(shape).numel()
    block = 1 if streams.source.type == "cpu" else max(1, min(steps, GPU_BLOCK // max(1, numel)))
    for start in range(0, steps, block):
        many = streams.normal("theta", min(block, steps - start), *shape, together=True)
        yield from many.unbind(1)
