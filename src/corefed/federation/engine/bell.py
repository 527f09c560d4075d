"""A bell between two processes of one folder: who waits for a task is told when there is one.

Flower's SuperExec asks its SuperNode or SuperLink for tasks over and over, and each question is a
request with TLS and a look into a database. Here it asks when the bell was rung, and as often as
Flower itself would in case that was not heard. The bell is the time of an empty file in FLWR_HOME,
and looking at it costs next to nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NAME = "bell"
LOOK = 0.05
"""Seconds between looks at the file."""


class Bell:
    """The end that listens."""

    def __init__(self) -> None:
        self.heard = _rung()

    def wait(self, seconds: float) -> None:
        """Until it is rung, or was since the last time; no longer than this."""
        until = time.monotonic() + seconds
        while _rung() == self.heard and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))
        self.heard = _rung()


def ring() -> None:
    """Wake who listens. A disk that is full must not end who rings; it is asked anyway."""
    with suppress(OSError):
        _path().touch(0o600)


def _rung() -> int:
    """When it was rung last, in nanoseconds; 0 where it never was."""
    try:
        return _path().stat().st_mtime_ns
    except OSError:
        return 0


def _path() -> Path:
    return Path(os.environ["FLWR_HOME"]) / NAME
