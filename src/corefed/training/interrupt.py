"""Ctrl-C during training: the current round is finished first."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from corefed.base.shown import say
from corefed.training import record


@contextmanager
def stop_on_interrupt(
    folder: Path, begun_by: str = record.EXPERIMENT, apart: float = 0.0
) -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that the round can finish; a second one aborts.

    While data are still being loaded, the first one aborts: until the folder has its first file.
    Signals less than `apart` seconds from the first are the same Ctrl-C: torchrun passes on what a
    terminal sends to all its processes anyway.
    """
    caught: list[int] = []
    first = 0.0

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
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
