"""One program that runs beside corefed: its output, whether it lives, and how it is ended."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from corefed.base import shown

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOG_BYTES, LOG_FILES = 10_000_000, 3
GRACE = 8.0
"""Seconds a program has to end before it is killed."""
MESSAGES = {
    "Receiving: ": "received",
    "Sending: ": "sending",
    **dict.fromkeys(("Sent successfully", "Failed to send", "Failed to receive", "Ignoring"), ""),
}
"""What SuperNode logs about a message -> what it then waits for: a task to be done, or to give its
answer whole; nothing."""


def say(text: str) -> None:
    shown.say(text, file=sys.stderr)


class LogFile(RotatingFileHandler):
    """A log that a full disk interrupts, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Leave the line out."""


class Program:
    """A program of Flower's, in a session of its own; its output goes to stderr and to a log."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        say(f"$ {shlex.join(command)}")
        self.log = log
        self.last: deque[str] = deque(maxlen=20)
        self.broken = False  # a thread of it ended by an error
        self.pending = ""  # of SuperNode: what it does with a message, if it has one
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us to pass on
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        log = logging.Logger("flower")
        handler = LogFile(self.log, maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
        log.addHandler(handler)
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                plain = COLOURS.sub("", line)
                self.last.append(plain)
                self.broken = self.broken or plain.startswith("Exception in thread ")
                for words, pending in MESSAGES.items():
                    self.pending = pending if words in plain else self.pending
                log.info("%s", plain)
                with suppress(OSError, ValueError):  # nobody may be listening any more
                    say(line if sys.stderr.isatty() else plain)
        with suppress(OSError):
            handler.close()

    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the program and everything that it started in its session."""
        if self.running():
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(1.0)

    def has_logged(self, text: str) -> bool:
        """Whether its last lines have this text."""
        self.reader.join(1.0)
        return any(text in line for line in self.last)

    def last_lines(self) -> str:
        """Its last lines, for an error message."""
        self.reader.join(1.0)
        return " / ".join(line for line in list(self.last)[-6:] if line.strip())
