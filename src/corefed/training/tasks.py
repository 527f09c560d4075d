"""What a client does in a round, in the time that it has.

A client of n points needs for R steps on k of them

    R min(k, b) x passes per point  +  FORWARD x look x n, where k < n     (steps, selection)

passes, and R is `local_steps`, or `local_epochs` x ceil(k / b). If that is more than it has, it is
late:

    partial   it takes as many steps as fit
    fit       it trains on the k points, at most those of `fraction`, that fit. In a round in which
              they are reselected, fewer steps fit. Where selecting alone would take more than nine
              tenths of what it has, it trains on all points as with `partial`.

How many passes it has is its speed times the deadline: a simulated speed (`devices.py`), or on a
machine of its own the one that it has measured (`federation/own_speed.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.passes import FORWARD
from corefed.base.types import Method, Work
from corefed.selectors.subset import subset_sizes
from corefed.settings.run import Run
from corefed.training.allowance import ROUNDING, passes_per_point

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_ON_SELECTION = 0.9
"""Part of a late client's passes above which it does not select."""


class Task(NamedTuple):
    """What a client does in a round."""

    steps: int
    points: int  # that it trains on
    passes: float = math.inf  # that it has, selection included


class Need:
    """What a client of n points needs for a round on k of them."""

    def __init__(self, run: Run, method: Method, n: int, k: int) -> None:
        self.run, self.n, self.k = run, n, k
        self.each = passes_per_point(method)
        self.look = FORWARD * method.subset.look * n if method.subset is not None else 0.0

    @property
    def task(self) -> Task:
        """All of its work, without a deadline."""
        return Task(self.steps, self.k)

    @property
    def steps(self) -> int:
        return self._steps(self.k)

    @property
    def selection(self) -> float:
        return self.look if self.k < self.n else 0.0

    @property
    def total(self) -> float:
        return self.steps * self._step(self.k) + self.selection

    def within(self, passes: float) -> Task | None:
        """The task of a client that has these passes; None: not even one minibatch fits."""
        if self.total <= passes:  # no more than it was said to need
            return self.task._replace(passes=passes) if self.selection else self.task
        k, look = self._most(passes)
        if look + self._step(k) > passes * (1 + ROUNDING):
            return None
        steps = min(self._steps(k), int(passes / self._step(k) + ROUNDING))
        return Task(max(1, steps), k, passes if look else math.inf)

    def on_all(self, passes: float) -> tuple[Task, bool]:
        """The steps on all points, without a selection, that fit, at least one; whether it does."""
        step = self._step(self.n)
        fitting = int(passes / step + ROUNDING)
        return Task(max(1, min(self.steps, fitting)), self.n), fitting > 0

    def least(self, passes: float) -> tuple[float, bool]:
        """Passes of the least that a late client does, and whether it selects for it."""
        k, look = self._most(passes)
        return look + self._step(k), look > 0

    def _most(self, passes: float) -> tuple[int, float]:
        """The points that a late client trains on, and the passes of selecting them."""
        if self.run.late != "fit":
            return self.k, self.selection
        if self.look > MOST_ON_SELECTION * passes:
            return self.n, 0.0
        epochs = self.run.local_epochs or self.run.local_steps
        k = min(self.k, max(1, int(passes / (epochs * self.each) + ROUNDING)))
        if self.look + self._step(k) > passes:  # the round in which it selects has room for a step
            k = max(1, int((passes - self.look) / self.each))
        return k, self.look if k < self.n else 0.0

    def _steps(self, k: int) -> int:
        run = self.run
        return run.local_epochs * -(-max(1, k) // run.batch_size) or run.local_steps

    def _step(self, k: int) -> float:
        return float(self.each * max(1, min(k, self.run.batch_size)))


def needs_of(run: Run, own: DataclassInstance, method: Method, sizes: Sequence[int]) -> list[Need]:
    """What clients of so many points need; `own` are the settings of the method."""
    fraction = getattr(own, "fraction", 1.0) if method.subset is not None else 1.0
    points = subset_sizes(sizes, fraction)
    return [Need(run, method, n, k) for n, k in zip(sizes, points, strict=True)]


def work_for(work: Work, tasks: Sequence[Task], device: torch.device) -> Work:
    """The work of the clients that have these tasks."""
    steps, points = (
        torch.tensor(each, device=device)
        for each in zip(*(task[:2] for task in tasks), strict=True)
    )
    passes = torch.tensor([task.passes for task in tasks], dtype=torch.float64, device=device)
    return work._replace(
        steps=max(task.steps for task in tasks), counts=steps, points=points,
        passes=passes if any(math.isfinite(task.passes) for task in tasks) else None,
    )  # fmt: skip


def passes_taken(method: Method, examples: Tensor, looked: Tensor | float = 0.0) -> Tensor:
    """[C] passes of a round, from its gradient passes at one draw and its forward passes."""
    return math.prod(method.noise[:-1]) * examples.double() + FORWARD * looked


def refuse_uncounted(run: Run, method: Method) -> None:
    """Refuse a method whose work cannot be planned as these settings ask for."""
    subset = method.subset
    if subset is None and run.deadline and run.late == "fit":
        raise UserError(
            f"late=fit takes a method that trains on a part of the points, such as "
            f"coreset-pfedbayes or random-subset; {run.method} trains on all: use late=partial."
        )
    timed = "speeds" if run.speeds else "deadline" if run.deadline else ""
    if timed and subset is not None and subset.cost is None and not subset.free:
        raise UserError(
            f"{timed} is given, but {run.method} with these settings does not count what selecting "
            "its points takes, so the time of its rounds cannot be planned."
        )
