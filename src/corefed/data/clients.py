"""Stack the clients of a split into the tensors that every runtime trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corefed.base.errors import UserError
from corefed.base.streamed import Streamed
from corefed.base.types import ClientData
from corefed.data import scaling
from corefed.data.dataset import Dataset
from corefed.data.fingerprint import Fingerprint
from corefed.data.partition import Split
from corefed.data.preparation import Preparation, TargetUnit
from corefed.data.streaming import ClientRows

BLOCK = 1 << 12
"""Points that are converted at once: many clients are not converted one by one, and a large pool is
not converted whole."""

LARGEST = 1 << 16
"""Points of one client that are converted at once."""


class FederatedData(NamedTuple):
    """All clients side by side, padded with zeros that have weight 0."""

    train: ClientData  # [C, n, ...]; regression targets as they are learnt
    test: ClientData  # [C, m, ...]; regression targets in their own unit
    classes: int  # 0 for regression
    targets: int  # width of the regression output; 0 for classification
    names: list[str]  # [C]
    labels: tuple[str, ...] = ()  # names of the classes; empty for regression
    notes: tuple[str, ...] = ()  # about the data, for readers of the results
    preparations: tuple[Preparation, ...] = ()  # one per seed: how to prepare later points
    validation: ClientData | None = None  # [C, l, ...]; targets as those of test points
    fingerprint: Fingerprint | None = None  # of the user's own data, as they were read
    source: Tensor | None = None  # [C, m] test points in the pool; None: each seed has its own

    def to(self, device: torch.device) -> FederatedData:
        validation = None if self.validation is None else self.validation.to(device)
        return self._replace(
            train=self.train.to(device), test=self.test.to(device), validation=validation
        )

    def part(self, clients: range) -> FederatedData:
        """Some clients of every seed, padded as all of them are."""
        each = len(self.names) // len(self.preparations)
        starts = range(0, len(self.names), each)
        rows = [start + client for start in starts for client in clients]

        def of(points: ClientData) -> ClientData:
            return ClientData(*(field[rows] for field in points))

        return self._replace(
            train=of(self.train),
            test=of(self.test),
            validation=None if self.validation is None else of(self.validation),
            names=[self.names[row] for row in rows],
            source=None if self.source is None else self.source[rows],
        )

    @property
    def unit(self) -> TargetUnit | None:
        """The unit of the test targets, where networks learn standardised ones."""
        if not any(each.target_mean for each in self.preparations):
            return None
        each = len(self.names) // len(self.preparations)
        means, stds = zip(*(one.unit for one in self.preparations), strict=True)
        here = self.test.x.device
        pair = (torch.stack(m).repeat_interleave(each, 0).to(here) for m in (means, stds))
        return TargetUnit(*pair)


def federate(
    dataset: Dataset,
    splits: list[Split],
    *,
    scale: str = "unit",
    memory_mb: int = 8192,
    names: Sequence[str] = (),
) -> FederatedData:
    """Stack the clients of a split, scaled by their training points (`scaling.py`).

    Standardised regression targets are for training only. Those of test points stay in their own
    unit, in which predictions are compared with them.
    """
    for client, one in enumerate(splits):
        if len(one.train) == 0:
            raise UserError(f"Client {client} has no training points; use fewer clients.")
    _check_memory(dataset, splits, memory_mb)
    called = list(names) or [f"client {client}" for client in range(len(splits))]
    preparation = scaling.fit(dataset, splits, scale, called)
    train = _pad(dataset, [one.train for one in splits], preparation, called)
    if preparation.target_mean:
        # Padding stays 0, so that it is recognisable; its weight is 0 anyway.
        learnt = preparation.standardise(train.y) * train.weight.unsqueeze(-1)
        train = train._replace(y=learnt)
    return FederatedData(
        train=train,
        test=_pad(dataset, [one.test for one in splits], preparation, called),
        classes=dataset.classes,
        targets=len(preparation.targets),
        names=called,
        labels=preparation.labels,
        notes=dataset.notes,
        preparations=(preparation,),
        validation=_pad(dataset, [one.validation for one in splits], preparation, called)
        if any(len(one.validation) for one in splits)
        else None,
        source=pad_sequence([one.test for one in splits], batch_first=True),
    )


def stack(many: list[FederatedData]) -> FederatedData:
    """Join federations along the client axis, so that all seeds train together."""
    first = many[0]
    if any((one.classes, one.targets) != (first.classes, first.targets) for one in many):
        raise ValueError("federations with different classes or targets cannot be stacked")
    return FederatedData(
        train=_concatenate([one.train for one in many]),
        test=_concatenate([one.test for one in many]),
        classes=first.classes,
        targets=first.targets,
        names=[name for one in many for name in one.names],
        labels=first.labels,
        notes=tuple(dict.fromkeys(note for one in many for note in one.notes)),
        preparations=tuple(each for one in many for each in one.preparations),
        validation=_concatenate([one.validation for one in many if one.validation is not None])
        if first.validation is not None
        else None,
        fingerprint=first.fingerprint,
        source=_joined([one.source for one in many]),
    )


def _check_memory(dataset: Dataset, splits: list[Split], memory_mb: int) -> None:
    """All clients are padded to the largest: check the memory before allocating it."""
    streamed = isinstance(dataset.x, Streamed)  # and padding without points takes no memory
    point = (
        (0 if streamed else 4 * dataset.x[0].numel())
        + dataset.y[0].numel() * dataset.y.element_size()
        + 4
    )
    parts = zip(*splits, strict=True)  # train, test, validation
    padded = sum(max(map(len, rows)) for rows in parts)
    needed_mb = point * padded * len(splits) / 2**20
    if needed_mb > memory_mb:
        sizes = [len(one.train) + len(one.test) for one in splits]
        largest = max(range(len(splits)), key=sizes.__getitem__)
        raise UserError(
            f"{len(splits)} clients padded to the largest need {needed_mb:.0f} MB, more than the "
            f"{memory_mb} MB allowed. Client {largest} is the largest, with {sizes[largest]} "
            "points; use a more even partition, fewer points, or raise memory_mb."
        )


def _pad(
    dataset: Dataset, rows: list[Tensor], preparation: Preparation, names: list[str]
) -> ClientData:
    sizes = torch.tensor([len(one) for one in rows])
    shape = len(rows), int(sizes.max())
    # Zeros of numpy's take no memory until they are written: padding is not.
    streamed = isinstance(dataset.x, Streamed)
    x = (
        Streamed(ClientRows(dataset, rows, preparation, names), shape)
        if streamed
        else torch.from_numpy(np.zeros((*shape, *dataset.x.shape[1:]), np.float32))
    )
    y = torch.from_numpy(np.zeros((*shape, *dataset.y.shape[1:]), dataset.y.numpy().dtype))
    real = torch.arange(shape[1]) < sizes.unsqueeze(-1)
    for first, last in _blocks(sizes.tolist(), alone=bool(preparation.clients)):
        if last == first + 1:  # perhaps a large client
            done = 0
            for points in rows[first].split(LARGEST):
                here = slice(done, done := done + len(points))
                if not streamed:
                    x[first, here] = preparation.scale(dataset.values(points), names[first])
                y[first, here] = dataset.y[points]
            continue
        points, mask = torch.cat(rows[first:last]), real[first:last]
        if not streamed:
            x[first:last][mask] = preparation.scale(dataset.values(points), names[first])
        y[first:last][mask] = dataset.y[points]
    return ClientData(x, y, real.float())


def _blocks(sizes: list[int], *, alone: bool) -> Iterator[tuple[int, int]]:
    """(first, last) of clients whose points are converted together; `alone`: each by itself."""
    first = points = 0
    for client, size in enumerate(sizes):
        points += size
        if alone or points >= BLOCK or client + 1 == len(sizes):
            yield first, client + 1
            first, points = client + 1, 0


def _concatenate(many: list[ClientData]) -> ClientData:
    length = max(one.weight.shape[1] for one in many)
    return ClientData(
        x=torch.cat([_lengthen(one.x, length) for one in many]),
        y=torch.cat([_lengthen(one.y, length) for one in many]),
        weight=torch.cat([_lengthen(one.weight, length) for one in many]),
    )


def _joined(many: list[Tensor | None]) -> Tensor | None:
    known = [one for one in many if one is not None]
    if len(known) < len(many):
        return None
    length = max(one.shape[1] for one in known)
    return torch.cat([_lengthen(one, length) for one in known])


def _lengthen(values: Tensor, length: int) -> Tensor:
    missing = length - values.shape[1]
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)
