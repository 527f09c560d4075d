"""One process at a time in a folder: a lock on a file in it, which ends with the process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from corefed.base.errors import UserError

LOCK = ".lock"
NOTHING = "Nothing was written"
PROBED, AGAIN = 0.5, 0.02
"""Seconds for which a taken lock is tried again, since `is_locked` holds it for a moment, and
between the tries."""


@contextmanager
def exclusively(path: Path, hint: str = "stop it first") -> Iterator[None]:
    """Let one process at a time work in a folder. `hint` says what to do where one does."""
    until = time.monotonic() + PROBED
    while (handle := _take(path)) is None:
        if time.monotonic() > until:
            raise UserError(f"Another process is at work in {path}; {hint}.")
        time.sleep(AGAIN)
    os.utime(handle)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def made_exclusively(path: Path, hint: str) -> Iterator[None]:
    """`exclusively` in a folder that is made where there is none, and gone again if left empty."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write into {path}: {error.strerror}. {NOTHING}.") from error
        with exclusively(path, hint):
            try:
                yield
            finally:
                if made and os.listdir(path) == [LOCK]:
                    (path / LOCK).unlink()
    finally:
        for each in made:
            with suppress(OSError):  # it is not empty
                each.rmdir()


def is_locked(path: Path) -> bool:
    """Whether a process works in a folder; a look leaves no trace."""
    if not (path / LOCK).exists():
        return False
    handle = _take(path)
    if handle is None:
        return True
    os.close(handle)
    return False


def locked_since(path: Path) -> float:
    """When the process at work in a folder, or the last one, began: seconds since the epoch."""
    lock = path / LOCK
    return lock.stat().st_mtime if lock.exists() else 0.0


def _take(path: Path) -> int | None:
    """The locked file of a folder, open; None if another process has it."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"Cannot write into {path}: {error.strerror}. {NOTHING}.") from error
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:  # else removed by the process that had it
            return handle
    os.close(handle)
    return None
