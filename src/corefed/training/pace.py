"""When a checkpoint is due: every n rounds, or as often as a share of the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

AUTO = -1
"""Value of `checkpoint_every`: by the share of the time."""


class Pace:
    """Decides after each round, and counts what saves cost.

    The cost of a save is the seconds that the run was held up plus the seconds that its writer
    took. With `AUTO`, the first round is saved, which tells the cost. Then a save begins when the
    one before began at least cost / share ago, or `minutes` ago whatever it costs.
    """

    def __init__(
        self,
        every: int,
        share: float,
        minutes: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every, self.share, self.minutes, self.clock = every, share, minutes, clock
        self.notes: list[str] = []
        self.written = 0
        self.seconds = 0.0
        self.longest_gap = 0.0  # from the state of a save until the next one is on the disk
        self._safe = clock()  # when the state of the newest save, or of the start, was the run's
        self._began: float | None = None
        self._cost = 0.0

    def due(self, round_: int, last: bool, busy: bool) -> bool:
        """Whether to save this round; `busy` says that the save before is still being written."""
        if self.every == 0:
            return False
        if last:
            return True
        if self.every != AUTO:
            return round_ % self.every == 0
        if self._began is None:
            return True
        since = self.clock() - self._began
        if not busy and since >= self._cost / self.share:
            return True
        if since < 60 * self.minutes:
            return False
        if not self.notes:
            self.notes.append(
                f"checkpoints take more than checkpoint_share = {self.share:g} of the time, since "
                f"one is written every {self.minutes:g} minutes; a larger checkpoint_minutes "
                "saves time."
            )
        return True

    def begin(self) -> float:
        """A save begins; the time now."""
        self._began = self.clock()
        return self._began

    def end(self, began: float, held: float, writing: float, ended: float) -> None:
        """A save is on the disk."""
        self.written += 1
        self._cost = held + writing
        self.seconds += self._cost
        self.longest_gap = max(self.longest_gap, ended - self._safe)
        self._safe = began

    def summary(self) -> dict[str, Any]:
        return {
            "written": self.written,
            "seconds": self.seconds,
            "longest_gap_seconds": self.longest_gap,
        }
