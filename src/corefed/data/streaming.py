"""Training points that stay in their files, with the points of the coresets alone in memory.

`ClientRows` are the points of all clients, padded and scaled, of rows in files (`file_rows.py`). It
holds those that clients train on, until they are reselected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from corefed.base.streamed import Rows, Streamed, values
from corefed.data.file_rows import MeteredRows

if TYPE_CHECKING:
    from corefed.data.dataset import Dataset
    from corefed.data.preparation import Preparation

BLOCK = 1 << 20
"""Numbers of points that are looked at together."""


class ClientRows:
    """The points of all clients as networks see them; point j of client i has number i n + j."""

    dtype = torch.float32

    def __init__(
        self, dataset: Dataset, rows: Sequence[Tensor], preparation: Preparation, names: list[str]
    ) -> None:
        self.dataset, self.rows, self.preparation, self.names = dataset, rows, preparation, names
        self.shape = tuple(dataset.x.shape[1:])
        self.n = max(map(len, rows))
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # client -> ascending places, points

    @property
    def resident(self) -> int:
        """Points in memory."""
        return sum(len(places) for places, _ in self.held.values())

    def read(self, index: Tensor) -> Tensor:
        found = torch.zeros(len(index), *self.shape)
        client = index.div(self.n, rounding_mode="floor")
        for one in client.unique().tolist():
            mine = (client == one).nonzero().squeeze(-1)
            places = index[mine] - one * self.n
            real = places < len(self.rows[one])
            found[mine[real]] = self._points(one, places[real])
        return found

    def hold(self, client: int, places: Tensor) -> None:
        """Keep the points in these ascending places in memory, and no others of the client."""
        before = self.held.get(client)
        if before is not None and torch.equal(before[0], places):
            return
        self.held[client] = places, self._points(client, places)

    def _points(self, client: int, places: Tensor) -> Tensor:
        held = self.held.get(client)
        if held is not None and len(held[0]):
            at = torch.searchsorted(held[0], places).clamp_max(len(held[0]) - 1)
            if torch.equal(held[0][at], places):
                return held[1][at]
        rows = self.rows[client][places]
        if not len(rows):
            return torch.zeros(0, *self.shape)
        step = max(1, BLOCK // max(1, int(np.prod(self.shape))))
        name = self.names[client]
        parts = [
            self.preparation.scale(values(self.dataset.values(some)), name)
            for some in rows.split(step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def hold(x: Tensor, weight: Tensor) -> None:
    """Keep the points [C, n] with a weight in memory, if they are streamed."""
    if not isinstance(x, Streamed) or not isinstance(x.rows, ClientRows):
        return
    for numbers, mine in zip(x.numbers(), weight > 0, strict=True):
        client = int(numbers[0]) // x.rows.n
        x.rows.hold(client, numbers[mine] - client * x.rows.n)


def said(x: Tensor) -> dict[str, float]:
    """For a summary: the points in memory, and what was read so far; empty: not streamed."""
    if not isinstance(x, Streamed) or not isinstance(x.rows, ClientRows):
        return {}
    source = x.rows.dataset.x
    assert isinstance(source, Streamed)
    meter = cast(MeteredRows, source.rows).meter
    return {
        "resident_points": x.rows.resident,
        "read_points": meter.points,
        "read_seconds": meter.seconds,
    }


def blocks(x: Tensor) -> Iterator[Tensor]:
    """Points some after the other, as ordinary tensors; those in memory all at once."""
    if not isinstance(x, Streamed):
        yield x
        return
    step = max(1, BLOCK // max(1, x.shape[1:].numel()))
    for start in range(0, len(x), step):
        yield values(x[start : start + step])


def of_rows(rows: Rows, count: int) -> Tensor:
    return Streamed(rows, (count,))
