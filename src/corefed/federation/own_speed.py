"""A client's own speed, which it measures, and with it what it does in a round with a deadline.

A speed is in passes per second of local work, selection included (`base/passes.py` says what a pass
is). Before its first round a client takes a few minibatches and throws their result away; after
each round it has another measurement. Its speed is the median of the last five, so that one slow
round changes little. What it then does in `deadline` seconds is decided as in a simulation
(`training/tasks.py`), but nobody is refused: without the time for a selection a client trains on
all of its points, and without the time for one minibatch it takes one all the same, and is late.

    RUN/speed.json    measurements, and how many passes the last rounds were given

A round that is asked again is given the passes that it was given before, so that its answer is the
same. Neither number leaves the client. The file can be lost: the client measures again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.federation.store import KEPT
from corefed.settings.run import Run
from corefed.training.tasks import Need, Task

SPEED = "speed.json"
PROBE = "probe"
LAST = 5
"""Measurements that the speed is the median of. Two slow rounds in a row do not change it much, and
a machine that has become slower is known as such after three."""
STEPS = 3
"""Minibatches of the measurement before the first round, after as many that are not timed: the
first of a process takes much longer than all others."""

Clock = Callable[[], float]
Probe = Callable[[], float]
"""Takes some minibatches, whose result nobody uses; their passes."""


class OwnSpeed:
    """The speed of this client in one run, kept in the folder of the run's state."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SPEED
        self.measured: dict[str, float] = {}  # by round, or PROBE; the newest is last
        self.given: dict[str, float] = {}  # passes, by round
        try:
            kept = digests.read_json(self.path)
            self.measured = _numbers(kept["measured"])
            self.given = _numbers(kept["given"])
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError):
            self.measured, self.given = {}, {}  # damaged: nothing depends on the old numbers

    @property
    def speed(self) -> float | None:
        """Passes per second; None: not measured yet."""
        return statistics.median(self.measured.values()) if self.measured else None

    def give(self, round_: int, deadline: float, probe: Probe, clock: Clock) -> float:
        """Passes that this round has, the same if it is asked again."""
        if self.speed is None:
            self.measured[PROBE] = measure(probe, clock)
            self.given.clear()
        if str(round_) not in self.given:
            earlier = sorted((each for each in self.given if int(each) < round_), key=int)
            self.given = {each: self.given[each] for each in earlier[1 - KEPT :]}
            self.given[str(round_)] = (self.speed or 0.0) * deadline
            self._save()
        return self.given[str(round_)]

    def note(self, round_: int, passes: float, seconds: float) -> None:
        """Enter what a round took."""
        self.measured.pop(str(round_), None)  # asked again: it is the newest now
        self.measured[str(round_)] = passes / max(seconds, 1e-9)
        self.measured = dict(list(self.measured.items())[-LAST:])
        self._save()

    def _save(self) -> None:
        content = {"measured": self.measured, "given": self.given}
        try:
            files.replace(self.path, digests.to_json(content), 0o600)
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error


def measure(probe: Probe, clock: Clock) -> float:
    """Passes per second of the second call of `probe`."""
    probe()
    began = clock()
    passes = probe()
    return passes / max(clock() - began, 1e-9)


class Planned(NamedTuple):
    """What a client does in a round, and a sentence for its log where it is less than all."""

    task: Task
    note: str = ""


def plan(run: Run, need: Need, passes: float) -> Planned:
    """The task of a client that has these passes, as it has measured.

    The size of a coreset follows the speed, but a coreset stays until it is reselected; therefore
    a late client's steps are always bounded by what it has.
    """
    task = need.within(passes)
    if task is not None and need.total <= passes:
        return Planned(task)
    speed = passes / run.deadline
    why = f"the deadline is {run.deadline:g} s and it does {speed:.3g} passes per second"
    if task is None:
        task, fits = need.on_all(passes)
        if not fits:
            return Planned(task, f"This client takes one minibatch, and is late: {why}.")
        return Planned(
            task,
            f"This client takes {task.steps} of {need.steps} local steps, on all of its points, "
            f"since it has no time to select: {why}.",
        )
    task = task._replace(passes=passes)
    if task.points < need.k:
        return Planned(task, f"This client trains on {task.points} of {need.n} points: {why}.")
    return Planned(task, f"This client takes {task.steps} of {need.steps} local steps: {why}.")


def _numbers(table: dict[str, float]) -> dict[str, float]:
    found = {str(key): float(value) for key, value in table.items()}
    if not all(math.isfinite(value) and value >= 0 for value in found.values()):
        raise ValueError("not all of its numbers are speeds")
    return found
