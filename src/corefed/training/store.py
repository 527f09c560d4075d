"""Where the private state of simulated clients lives between their rounds.

    OnDevice   stacked tensors on the device: nothing is copied when all clients train
    InHost     one record per client in the machine's memory
    InFile     one record per client in a sparse file without a name, removed with the process

A record has all tensors of a client side by side. A client that never took part has none: its
state is made again from the initial state of its run whenever it is needed, and only `put` writes.

The file is read and written by position, not through a memory map: a write into a map ends the
process where the disk is full, and the pages of a map count as memory of the process.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import Tree, places

Start = Callable[[Sequence[int]], Tree]
"""The state of some rows before their first round, on the device."""

ALIGNMENT = 64
"""Of a tensor in a record, and of a record, in bytes: that of PyTorch's own memory on a CPU."""

PROBE = 1 << 24
"""Bytes of the hole that shows whether a file system has sparse files."""


class Store(Protocol):
    """State of C clients, in rows."""

    layout: Layout
    touched: Tensor  # [C] bool: who has a state other than the initial one

    @property
    def whole(self) -> Tree | None:
        """All rows as they lie on the device; None where they do not."""

    def take(self, rows: Sequence[int]) -> Tree:
        """The state of some clients, on the device; to be read, not written."""

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        """Keep the state of some clients. Threads may put different rows at the same time."""


class Part(NamedTuple):
    """One tensor in a client's record."""

    shape: torch.Size  # without the client axis
    dtype: torch.dtype
    start: int  # in bytes

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize


class Layout(NamedTuple):
    """What a record is made of."""

    parts: dict[str, Part]
    size: int  # of a record, in bytes

    @property
    def content(self) -> int:
        """Bytes of a client's tensors, without the gaps between them."""
        return sum(part.stop - part.start for part in self.parts.values())

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        """The layout of clients whose state, of any number of them, is `tree`."""
        parts, end = {}, 0
        for name, value in tree.items():
            parts[name] = Part(value.shape[1:], value.dtype, end)
            end = _aligned(parts[name].stop)
        return cls(parts, max(ALIGNMENT, end))

    def pack(self, tree: Tree, count: int) -> Tensor:
        """[count, size] bytes on the host, put together on the device and copied once."""
        device = next((value.device for value in tree.values()), torch.device("cpu"))
        records = torch.zeros(count, self.size, dtype=torch.uint8, device=device)
        for name, part in self.parts.items():
            value = tree[name].detach().to(device, part.dtype)
            if value.shape != (count, *part.shape):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, not {(count, *part.shape)}"
                )
            if value.numel():
                here = records[:, part.start : part.stop].view(part.dtype)
                here.copy_(value.reshape(count, -1))
        if device.type != "cuda":
            return records
        host = torch.empty(records.shape, dtype=torch.uint8, pin_memory=True)
        return host.copy_(records)

    def unpack(self, records: Tensor, device: torch.device) -> Tree:
        """The inverse, on the device; it may share memory with `records`."""
        here = records.to(device)
        return {
            name: here[:, part.start : part.stop]
            .contiguous()
            .view(part.dtype)
            .view(len(records), *part.shape)
            for name, part in self.parts.items()
        }


class OnDevice:
    """All clients stacked on the device. `take` of neighbours is a view."""

    def __init__(self, tree: Tree, clients: int) -> None:
        self.tree = tree
        self.layout = Layout.of(tree)
        self.touched = torch.zeros(clients, dtype=torch.bool)

    @property
    def whole(self) -> Tree:
        return self.tree

    @whole.setter
    def whole(self, tree: Tree) -> None:
        """Other tensors, also of another number of clients or on another device."""
        self.tree = tree
        clients = max([len(value) for value in tree.values()], default=len(self.touched))
        self.touched = torch.ones(clients, dtype=torch.bool)

    def take(self, rows: Sequence[int]) -> Tree:
        here = places(rows)
        return {name: value[here] for name, value in self.tree.items()}

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        here = places(rows)
        for name, value in self.tree.items():
            value[here] = tree[name].to(value.device)
        self.touched[list(rows)] = True


class _Records(ABC):
    """Records of the clients that took part, wherever they are; the others start anew."""

    def __init__(self, start: Start, clients: int, device: torch.device) -> None:
        self._start, self._device = start, device
        self.layout = Layout.of(start([0]))
        self.touched = torch.zeros(clients, dtype=torch.bool)

    @property
    def whole(self) -> None:
        return None

    def take(self, rows: Sequence[int]) -> Tree:
        rows = list(rows)
        there = self.touched[rows]
        if not bool(there.any()):
            return self._start(rows)
        known = [row for row, kept in zip(rows, there.tolist(), strict=True) if kept]
        found = self.layout.unpack(self._read(known), self._device)
        if len(known) == len(rows):
            return found
        tree = {name: value.clone() for name, value in self._start(rows).items()}
        for name, value in tree.items():
            value[there.to(value.device)] = found[name]
        return tree

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        self._write(list(rows), self.layout.pack(tree, len(rows)))
        self.touched[list(rows)] = True

    @abstractmethod
    def _read(self, rows: list[int]) -> Tensor:
        """[len(rows), size] the records of these rows."""

    @abstractmethod
    def _write(self, rows: list[int], records: Tensor) -> None:
        """Keep these records."""


class InHost(_Records):
    """Records in the machine's memory."""

    def __init__(self, start: Start, clients: int, device: torch.device) -> None:
        super().__init__(start, clients, device)
        self._kept: dict[int, Tensor] = {}

    def _read(self, rows: list[int]) -> Tensor:
        return torch.stack([self._kept[row] for row in rows])

    def _write(self, rows: list[int], records: Tensor) -> None:
        for row, record in zip(rows, records, strict=True):
            self._kept[row] = record.clone()


class InFile(_Records):
    """Records in a sparse file on the disk of `folder`, which need not exist yet.

    The file has no name, so that nothing is left of it when the process ends, however it ends.
    """

    def __init__(
        self, start: Start, clients: int, device: torch.device, folder: Path | None
    ) -> None:
        super().__init__(start, clients, device)
        self._folder = existing(folder)
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            os.truncate(self._file, PROBE)
            sparse = os.fstat(self._file).st_blocks * 512 < PROBE
            if sparse:
                os.truncate(self._file, clients * self.layout.size)
        except OSError as error:
            raise UserError(
                f"Cannot keep the clients' state in a file in {self._folder}: {error.strerror}. "
                "Name a folder that can be written to, or use --set client_state=host."
            ) from error
        if not sparse:
            raise UserError(
                f"The file system of {self._folder} has no sparse files, which the state of "
                f"{clients:,} clients needs; use another folder, or --set client_state=host."
            )

    def _read(self, rows: list[int]) -> Tensor:
        pin = self._device.type == "cuda"  # copied to the device in one go
        records = torch.empty(len(rows), self.layout.size, dtype=torch.uint8, pin_memory=pin)
        for first, last in _neighbours(rows):
            view = _bytes(records[first:last])
            place = rows[first] * self.layout.size
            while view:
                done = os.preadv(self._file, [view], place)
                if done == 0:
                    raise UserError(f"The file of the clients' state in {self._folder} was cut.")
                view, place = view[done:], place + done
        return records

    def _write(self, rows: list[int], records: Tensor) -> None:
        try:
            for first, last in _neighbours(rows):
                view = _bytes(records[first:last])
                place = rows[first] * self.layout.size
                while view:
                    done = os.pwrite(self._file, view, place)
                    view, place = view[done:], place + done
        except OSError as error:
            raise UserError(
                f"Cannot keep the clients' state on the disk of {self._folder}: {error.strerror}. "
                "The rounds before this one are kept; make room, and resume the run."
            ) from error


def existing(folder: Path | None) -> Path:
    """The folder or the nearest one above it that exists; the system's temporary one for None."""
    if folder is None:
        return Path(tempfile.gettempdir())
    path = folder.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _neighbours(rows: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of the stretches in which rows follow one another."""
    breaks = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    yield from pairwise([0, *breaks, len(rows)])


def _bytes(records: Tensor) -> memoryview:
    """The memory of records that follow one another."""
    return memoryview(records.numpy().data).cast("B")


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT
