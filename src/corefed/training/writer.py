"""A thread that writes one thing at a time, from pieces that it is given one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Generic, TypeVar

Piece = TypeVar("Piece")


class AbandonedError(Exception):
    """What is being written is no longer wanted."""


class Writer(Generic[Piece]):
    """At most one job is under way. What it raises is raised again by `wait`.

    A job gets an iterator of its pieces. At most `ahead` of them wait in memory; `give` then waits.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.abandoned = False
        self._thread: Thread | None = None
        self._pieces: Queue[Piece | None] = Queue(ahead)
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[Iterator[Piece]], None], done: Callable[[float], None]) -> None:
        """Begin a job; `done` gets the seconds that it worked, if it ends well."""
        self.wait()
        self.abandoned = False
        self._pieces = Queue(self.ahead)
        self._thread = Thread(
            target=self._run, args=(job, done), name="corefed-checkpoint", daemon=True
        )
        self._thread.start()

    def give(self, piece: Piece | None) -> None:
        """Hand over a piece, None after the last one. A job that has failed takes none."""
        while self.busy:
            try:
                return self._pieces.put(piece, timeout=0.1)
            except Full:
                continue

    def wait(self) -> None:
        """Until the job has ended; raises what it raised."""
        if self._thread is not None:
            try:
                self._thread.join()
            except KeyboardInterrupt:
                self.abandon()
                raise
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """End the job after the piece at hand."""
        self.abandoned = True
        with suppress(Full):  # then it is not waiting for one
            self._pieces.put_nowait(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._error = None

    def _run(self, job: Callable[[Iterator[Piece]], None], done: Callable[[float], None]) -> None:
        waited = 0.0

        def pieces() -> Iterator[Piece]:
            nonlocal waited
            while True:
                began = time.perf_counter()
                piece = self._pieces.get()
                waited += time.perf_counter() - began
                if self.abandoned:
                    raise AbandonedError
                if piece is None:
                    return
                yield piece

        began = time.perf_counter()
        try:
            job(pieces())
            done(time.perf_counter() - began - waited)
        except Exception as error:
            self._error = error
