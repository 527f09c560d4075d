"""Between processes of one machine: there is a task to do; the parent has ended.

Flower's SuperExec keeps asking its SuperNode or SuperLink for tasks, and each question is a request
with TLS and a database query. Here it asks when the bell was rung, and otherwise as often as Flower
does, in case a ring was missed. The bell is the time of an empty file in FLWR_HOME, which is cheap
to look at.
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
    """The listening end."""

    def __init__(self) -> None:
        self.heard = _last_ring()

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, or was since the last wait; at most `seconds`."""
        until = time.monotonic() + seconds
        while _last_ring() == self.heard and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))
        self.heard = _last_ring()


def ring(home: Path | None = None) -> None:
    """Wake the listener. A full disk is no error: Flower asks by itself too."""
    with suppress(OSError):
        (home / BELL if home else _bell()).touch(0o600)


def _last_ring() -> int:
    """Time of the last ring in nanoseconds; 0 if there was none."""
    try:
        return _bell().stat().st_mtime_ns
    except OSError:
        return 0


def _bell() -> Path:
    return Path(os.environ["FLWR_HOME"]) / BELL


def end_with_parent() -> None:
    """End this process when its parent is gone, even by kill -9."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
