"""How much work a client does for its server: the table [limits] of client.toml, and its checks.

A server chooses the settings of a run, so it could ask for a training that never ends. A task above
a limit is refused before any data are read. One that takes too long is ended.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from corefed.base.errors import UserError
from corefed.base.settings import Positive, PositiveInt, Unit
from corefed.settings.fields import list_settings, to_flat

if TYPE_CHECKING:
    from types import FrameType

    from corefed.settings.run import Experiment


@dataclass(frozen=True)
class Limits:
    """What a server may ask of this client at most."""

    local_steps: PositiveInt = 10_000
    """Gradient steps in a round."""
    repeats: PositiveInt = 10_000
    """Largest value of evaluate_draws, and of each whole number among the method's own settings,
    such as draws, inner steps and iterations."""
    parameters: PositiveInt = 20_000_000
    """Weights of the network."""
    memory_mb: Annotated[PositiveInt, Unit("MB")] = 4096
    """Memory for this client's points, and for what a method stores to select among them."""
    rounds: PositiveInt = 1000
    """Rounds of a run."""
    attempts: PositiveInt = 8
    """Different tasks of one kind in one round; the same task again does not count."""
    runs: PositiveInt = 100
    """Runs whose state is kept. Another run is refused until folders of old runs are removed from
    state/."""
    descriptions: PositiveInt = 10
    """Different descriptions of this client's data that are sent, over all runs in state/."""
    seconds: Annotated[Positive, Unit("seconds")] = 3600.0
    """Seconds that a task may take; then it is ended and answered."""


class LimitError(UserError):
    """A task above a limit. Its sentence speaks of the task and of client.toml, never of data."""


def check_settings(wanted: Experiment, limits: Limits) -> None:
    """Refuse settings that ask for more work than the limits allow."""
    run = wanted.run
    _refuse("rounds", run.rounds, limits.rounds)
    _refuse("local_steps", run.local_steps, limits.local_steps)
    _refuse("local_epochs", run.local_epochs, limits.local_steps, "local_steps")
    _refuse("evaluate_draws", run.evaluate_draws, limits.repeats, "repeats")
    values = to_flat(wanted.settings)
    for each in list_settings(type(wanted.settings)):
        value = values[each.name]
        if type(value) is not int:
            continue
        if each.unit == "MB":
            _refuse(each.name, value, limits.memory_mb, "memory_mb")
        else:
            _refuse(each.name, value, limits.repeats, "repeats")


def check_steps(steps: int, limits: Limits) -> None:
    """Refuse local epochs that are too many steps, once it is known how many they are."""
    _refuse("local_steps", steps, limits.local_steps)


def check_size(weights: int, limits: Limits) -> None:
    """Refuse a network that is too large, before tensors are made for it."""
    _refuse("the number of weights", weights, limits.parameters, "parameters")


def _refuse(name: str, value: float, most: float, limit: str = "") -> None:
    if value > most:
        raise LimitError(
            f"The task has {name} = {value:g}, and this client allows {most:g} ({limit or name} in "
            "the table [limits] of its client.toml)."
        )


class TimeUpError(BaseException):
    """The task took too long. No code that catches errors of its own catches this one."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block by a TimeUpError after so many seconds.

    Flower runs a task in the main thread of its process, where the signal arrives between two steps
    of Python. In another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def late_sentence(limits: Limits) -> str:
    return f"The task took longer than the {limits.seconds:g} s that this client allows."
