"""Between processes of one machine: there is a task to do; the parent has ended.

Flower's SuperExec asks its SuperNode or SuperLink for tasks over and over, and each question is a
request with TLS and a look into a database. Here it asks when the bell was rung, and as often as
Flower itself would in case that was not heard. The bell is the time of an empty file in FLWR_HOME,
and looking at it costs next to nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

BELL = "bell"
LOOK = 0.05
"""Seconds between looks at the bell."""
PARENT_LOOK = 0.2
"""Seconds between looks at the parent."""


class Bell:
    """The end that listens."""

    def __init__(self) -> None:
        self.heard = _last_ring()

    def wait(self, seconds: float) -> None:
        """Until it is rung, or was since the last time; no longer than this."""
        until = time.monotonic() + seconds
        while _last_ring() == self.heard and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))
        self.heard = _last_ring()


def ring() -> None:
    """Wake who listens. A full disk must not end who rings: Flower's own questions go on."""
    with suppress(OSError):
        _bell().touch(0o600)


def _last_ring() -> int:
    """When it was rung last, in nanoseconds; 0 where it never was."""
    try:
        return _bell().stat().st_mtime_ns
    except OSError:
        return 0


def _bell() -> Path:
    return Path(os.environ["FLWR_HOME"]) / BELL


def end_with_parent() -> None:
    """Ask this process to end when the one that started it is gone, even by kill -9."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
