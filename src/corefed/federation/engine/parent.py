"""A process that ends when the one that started it is gone, also by kill -9."""

from __future__ import annotations

import os
import signal
import threading
import time

EVERY = 0.2  # seconds


def follow() -> None:
    """Watch the parent from a thread; ask this process to end when it has another one."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
