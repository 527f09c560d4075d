"""Ctrl-C during training: the current round is finished first."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from corefed.training import record


@contextmanager
def stop_on_interrupt(folder: Path, begun_by: str = record.EXPERIMENT) -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that the round can finish; a second one aborts.

    While data are still being loaded, the first one aborts: until the folder has its first file.
    """
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        if not (folder / begun_by).exists():
            raise KeyboardInterrupt
        caught.append(number)
        print("\nfinishing this round; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
