"""Ctrl-C during training, and a file that asks for the same: the round is finished first.

Another process of the same user stops a run by putting a file `stop` into its folder, as the live
page does (`show/live`). The run takes the file away, so that resuming it does not stop again.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from corefed.base import files
from corefed.base.shown import say
from corefed.training import record

STOP = "stop"
"""A file in the folder of a run: it should stop after this round."""


class Asked:
    """True once a run should stop after its round: by Ctrl-C, or by the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signals: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.signals) or is_asked(self.folder)


def ask(folder: Path) -> None:
    """Have the run in this folder stop after its round; an OSError if that cannot be written."""
    files.replace(folder / STOP, b"Stop after this round.\n")


def is_asked(folder: Path) -> bool:
    return (folder / STOP).exists()


def forget(folder: Path) -> None:
    """Take the file away, where there is one."""
    with suppress(OSError):
        (folder / STOP).unlink(missing_ok=True)


@contextmanager
def stop_on_interrupt(
    folder: Path, begun_by: str = record.EXPERIMENT, apart: float = 0.0
) -> Iterator[Asked]:
    """Notes the first Ctrl-C, so that the round can finish; a second one aborts.

    While data are still being loaded, the first one aborts: until the folder has its first file.
    Signals less than `apart` seconds from the first are the same Ctrl-C: torchrun passes on what a
    terminal sends to all its processes anyway.
    """
    forget(folder)  # of a run before this one
    asked = Asked(folder)
    caught, first = asked.signals, 0.0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if caught and time.monotonic() < first + apart:
            return
        if caught or not (folder / begun_by).exists():
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        if not apart:
            signal.signal(signal.SIGINT, before)
        first = time.monotonic()
        caught.append(number)
        say("\nfinishing this round; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
        forget(folder)
