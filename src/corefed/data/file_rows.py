"""Rows that are read from files whenever they are asked for, and what says that a file is the same.

    FileRows     numbers in a file, read by position: an array of an .npz, or a scratch file that a
                 table was unpacked to, block by block
    JoinedRows   the rows of several files
    ImageRows    images that are decoded whenever they are asked for

Files are read by position, not through memory maps: a file that is cut ends a mapping process. The
size, date and number of a file are looked at before and after every reading, so that a run never
goes on with data it did not begin with.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.streamed import Rows

WINDOW = 1 << 20
"""Bytes of a file that are read at once, at most: neighbours share a reading."""

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "uint8": torch.uint8
}  # fmt: skip


class Meter:
    """What was read: points, and seconds of this process's time that reading and decoding took."""

    def __init__(self) -> None:
        self.points = 0
        self.seconds = 0.0

    def count(self, points: int, begun: float) -> None:
        self.points += points
        self.seconds += time.process_time() - begun


class MeteredRows(Rows, Protocol):
    """Rows that count what is read of them."""

    @property
    def meter(self) -> Meter: ...


class State(NamedTuple):
    """What says that a file is still the same."""

    size: int
    changed: int  # nanoseconds
    number: int  # another file under the name has another

    @classmethod
    def of(cls, path: Path) -> State | None:
        """None where there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


def refuse_changed(path: Path, before: State | None) -> None:
    if State.of(path) != before:
        raise UserError(
            f"{path} changed while it was streamed; what was recorded up to the round before is "
            "kept: put the file back as it was and resume the run, or start another one."
        )


# --- numbers in a file ----------------------------------------------------------------------------


class FileRows:
    """Rows of numbers that follow one another in a file from `offset` on."""

    def __init__(
        self,
        handle: int,
        offset: int,
        stored: tuple[np.dtype[Any], tuple[int, ...]],
        dtype: torch.dtype,
        path: Path | None = None,
    ) -> None:
        """`stored` are the type and the shape of a row; without a `path` nobody else has it."""
        self.handle, self.offset, self.dtype = handle, offset, dtype
        self._kind, self.shape = stored
        self._width = self._kind.itemsize * int(np.prod(self.shape))
        self._path = path
        self._before = None if path is None else State.of(path)
        self.meter = Meter()
        weakref.finalize(self, os.close, handle)

    def read(self, index: Tensor) -> Tensor:
        begun = time.process_time()
        found = np.empty((len(index), *self.shape), self._kind)
        wanted = index.numpy()
        order = np.argsort(wanted, kind="stable")
        self._check()
        first, sorted_ = 0, wanted[order]
        while first < len(order):
            start = int(sorted_[first])
            most = start + max(1, WINDOW // self._width)
            last = int(np.searchsorted(sorted_, most))
            stretch = self._stretch(start, int(sorted_[last - 1]) + 1)
            found[order[first:last]] = stretch[sorted_[first:last] - start]
            first = last
        self._check()
        with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused
            read = torch.from_numpy(found.astype(_numpy(self.dtype), copy=False))
        self.meter.count(len(index), begun)
        return read

    def _check(self) -> None:
        if self._path is not None:
            refuse_changed(self._path, self._before)

    def _stretch(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows that follow one another."""
        content = bytearray((stop - start) * self._width)
        view, place = memoryview(content), self.offset + start * self._width
        while view:
            done = os.preadv(self.handle, [view], place)
            if done == 0:
                raise UserError(f"{self._path or 'A scratch file'} was cut while it was streamed.")
            view, place = view[done:], place + done
        return np.frombuffer(content, self._kind).reshape(stop - start, *self.shape)


def _numpy(dtype: torch.dtype) -> npt.DTypeLike:
    return next(name for name, each in DTYPES.items() if each == dtype)


def stored(
    path: Path, offset: int, kind: np.dtype[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> FileRows:
    """Rows in a file of the user's."""
    return FileRows(os.open(path, os.O_RDONLY), offset, (kind, shape), dtype, path)


class Scratch:
    """A file without a name that rows are written to, and read from again; none is left behind."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self._done = shape, dtype, 0
        folder = tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                self._handle = os.dup(file.fileno())
        except OSError as error:
            raise UserError(
                f"Cannot unpack the points to a file in {folder}: {error.strerror}; set TMPDIR to "
                "another folder."
            ) from error

    def append(self, rows: npt.NDArray[Any]) -> None:
        content = np.ascontiguousarray(rows, _numpy(self.dtype))
        view = content.data.cast("B") if content.size else memoryview(b"")
        try:
            while view:
                done = os.pwrite(self._handle, view, self._done)
                view, self._done = view[done:], self._done + done
        except OSError as error:
            raise UserError(
                f"Cannot unpack the points to a file in {tempfile.gettempdir()}: "
                f"{error.strerror}; make room, or set TMPDIR to another folder."
            ) from error

    def rows(self) -> FileRows:
        kind: np.dtype[Any] = np.dtype(_numpy(self.dtype))
        return FileRows(self._handle, 0, (kind, self.shape), self.dtype)


class JoinedRows:
    """The rows of several files one after the other."""

    def __init__(self, parts: Sequence[FileRows], sizes: Sequence[int]) -> None:
        self.parts, self.starts = list(parts), [0, *np.cumsum(sizes).tolist()]
        self.shape, self.dtype = parts[0].shape, parts[0].dtype

    @property
    def meter(self) -> Meter:
        whole = Meter()
        whole.points = sum(each.meter.points for each in self.parts)
        whole.seconds = sum(each.meter.seconds for each in self.parts)
        return whole

    def read(self, index: Tensor) -> Tensor:
        found = torch.empty(len(index), *self.shape, dtype=self.dtype)
        for place, part in enumerate(self.parts):
            mine = (index >= self.starts[place]) & (index < self.starts[place + 1])
            if bool(mine.any()):
                found[mine] = part.read(index[mine] - self.starts[place])
        return found


# --- images ---------------------------------------------------------------------------------------


class ImageRows:
    """Pixels [channels, size, size] of images, decoded whenever they are asked for."""

    dtype = torch.uint8

    def __init__(self, files: Sequence[Path], pixels: Callable[[int], Tensor], size: int) -> None:
        """`pixels` of an image by its number, [3, size, size]."""
        self.files, self.pixels, self.channels, self.size = files, pixels, 3, size
        self._before = [State.of(path) for path in files]
        self.meter = Meter()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.channels, self.size, self.size

    def read(self, index: Tensor) -> Tensor:
        begun = time.process_time()
        found = torch.empty(len(index), *self.shape, dtype=self.dtype)
        for place, number in enumerate(index.tolist()):
            refuse_changed(self.files[number], self._before[number])
            try:
                found[place] = self.pixels(number)[: self.channels]
            except Exception as error:
                refuse_changed(self.files[number], self._before[number])
                raise UserError(f"{self.files[number]} cannot be read: {error}.") from error
            refuse_changed(self.files[number], self._before[number])
        self.meter.count(len(index), begun)
        return found
