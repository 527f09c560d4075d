"""Reads the arrays of .npz and .npy files.

Pickled objects are never loaded. Headers are read first: an array that is larger than its file, or
that needs more memory than allowed, is refused before it is unpacked. An .npy file is read like an
.npz file whose only array is called X.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.errors import UserError

Array = npt.NDArray[Any]

MEMORY_MB = 4096
"""The bound where the user cannot set one."""


class Header(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def headers(path: Path) -> dict[str, Header]:
    """The headers of all arrays, by name; no array is read."""
    with _members(path) as members:
        return {name: _header(path, name, member) for name, member in members.items()}


def load(
    path: Path,
    names: Sequence[str],
    memory_mb: int,
    *,
    working: int = 0,
    remedy: str = "raise memory_mb, or use fewer points",
) -> dict[str, Array]:
    """These arrays of the file, by name.

    They and the `working` bytes that the caller needs in addition must fit into `memory_mb`;
    `remedy` says what to do if they do not.
    """
    with _members(path) as members:
        missing = [name for name in names if name not in members]
        if missing:
            there = ", ".join(members) or "nothing"
            raise UserError(f"{path} has no array {missing[0]}; it holds {there}.")
        found = {name: _header(path, name, members[name]) for name in names}
        for name, header in found.items():
            if header.dtype.hasobject:
                raise UserError(
                    f"{name} in {path} holds Python objects, which are never loaded; save it as an "
                    "array of numbers."
                )
        needed = (sum(header.size for header in found.values()) + working) / 2**20
        if needed > memory_mb:
            raise UserError(
                f"{path} needs {needed:.0f} MB of memory, more than the {memory_mb} MB allowed; "
                f"{remedy}."
            )
        arrays: dict[str, Array] = {}
        for name in names:
            with members[name].open() as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return arrays


def stored_at(path: Path, name: str) -> int | None:
    """Where in the file the numbers of an array begin; None where they are packed, or not in the
    order of rows."""
    with _members(path) as members:
        start = members[name].start
    if start is None:
        return None
    try:
        with path.open("rb") as file:
            if path.suffix.lower() != ".npy":  # names of files, and more, come before the array
                file.seek(start + 26)
                lengths = file.read(4)
                start += 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            file.seek(start)
            version = np.lib.format.read_magic(file)
            _, columns_first, _ = (
                np.lib.format.read_array_header_1_0(file)
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0(file)
            )
            return None if columns_first else file.tell()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error


class _Member(NamedTuple):
    """A stored array: how to open it, and its size in bytes with the header."""

    open: Callable[[], IO[bytes]]
    size: int
    start: int | None  # in the file, where it is not packed


@contextmanager
def _members(path: Path) -> Iterator[dict[str, _Member]]:
    """The arrays of a file by name; an unreadable file is a UserError."""
    single = path.suffix.lower() == ".npy"
    try:
        if single:
            yield {"X": _Member(lambda: path.open("rb"), path.stat().st_size, 0)}
            return
        with zipfile.ZipFile(path) as archive:
            yield {
                info.filename.removesuffix(".npy"): _Member(
                    partial(archive.open, info),
                    info.file_size,
                    info.header_offset if info.compress_type == zipfile.ZIP_STORED else None,
                )
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,  # encrypted, or compressed in a way that Python does not know
    ) as error:
        kind = ".npy" if single else ".npz"
        raise UserError(f"{path} is not a whole {kind} file: {error}.") from error


def _header(path: Path, name: str, member: _Member) -> Header:
    with member.open() as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:  # 3.0 has names of columns
            raise UserError(f"{name} in {path} is no plain array; save an array of numbers.")
    header = Header(tuple(shape), dtype)
    if header.size > member.size and not dtype.hasobject:  # a pickle may be shorter
        raise UserError(f"{name} in {path} claims shape {header.shape}, more than it has.")
    return header
