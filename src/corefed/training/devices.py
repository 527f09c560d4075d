"""Simulated devices: what each client does in a round, and how long that takes it.

A client of speed s (passes per simulated second) has s times the deadline passes for a round. For
R steps on k of its n points it needs

    R min(k, b) x passes per point  +  FORWARD x look x n, where k < n     (steps, selection)

and R is `local_steps`, or `local_epochs` x ceil(k / b). If that is more than it has, it is late:

    drop      it takes no part; if all of a cohort are late, the quickest is waited for
    partial   it takes as many steps as fit
    fit       it trains on the k points, at most those of `fraction`, that fit. In a round in which
              they are reselected, fewer steps fit. Where selecting alone would take more than nine
              tenths of what it has, it trains on all points as with `partial`.

A round takes as long as the slowest client of its cohort; sending takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.passes import FORWARD
from corefed.base.rng import Streams, Who
from corefed.base.types import Method, Work
from corefed.selectors.subset import subset_sizes
from corefed.settings import devices as settings
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


class Devices(NamedTuple):
    """The devices of all clients, by row: client i of the g-th seed is row g N + i."""

    tasks: list[Task]
    late: list[bool]  # would miss the deadline with all of its work
    needed: list[float]  # passes of all of its work
    speeds: list[float]  # passes per simulated second; empty: time is not simulated
    drops: bool  # late clients take no part

    def sorted(self, rows: Sequence[int]) -> list[int]:
        """The rows in the order of their steps, so that those trained at once end together."""
        return sorted(rows, key=lambda row: self.tasks[row].steps)

    def work(self, work: Work, rows: Sequence[int], device: torch.device) -> Work:
        """The work of the clients in these rows."""
        tasks = [self.tasks[row] for row in rows]
        steps, points = (
            torch.tensor(each, device=device)
            for each in zip(*(task[:2] for task in tasks), strict=True)
        )
        passes = torch.tensor([task.passes for task in tasks], dtype=torch.float64, device=device)
        return work._replace(
            steps=max(task.steps for task in tasks), counts=steps, points=points,
            passes=passes if any(math.isfinite(task.passes) for task in tasks) else None,
        )  # fmt: skip

    def in_time(self, rows: Sequence[int]) -> list[int]:
        """The rows of one run's cohort that take part."""
        if not self.drops:
            return list(rows)
        fine = [row for row in rows if not self.late[row]]
        return fine or [min(rows, key=lambda row: self.needed[row] / self.speeds[row])]

    def seconds(self, rows: Sequence[int], passes: Tensor) -> float:
        """Simulated seconds of a round in which the clients of these rows took these passes."""
        speeds = torch.tensor([self.speeds[row] for row in rows], dtype=torch.float64)
        return float((passes.double().cpu() / speeds).max())


def plan(run: Run, own: DataclassInstance, method: Method, sizes: Sequence[int]) -> Devices | None:
    """The devices of a run whose clients have so many points; None: there are none to simulate.

    `own` are the settings of the method. A deadline that leaves somebody no time is refused.
    """
    if not settings.simulated(run):
        return None
    _refuse_uncounted(run, method)
    per_run = len(sizes) // len(run.seeds)
    speeds = [s for seed in run.seeds for s in draw_speeds(run.speeds, seed, per_run)]
    fraction = getattr(own, "fraction", 1.0) if method.subset is not None else 1.0
    of = [
        _Need(run, method, n, k) for n, k in zip(sizes, subset_sizes(sizes, fraction), strict=True)
    ]
    tasks = [Task(need.steps, need.k) for need in of]
    late = [False] * len(sizes)
    if run.deadline:
        allowed = [run.deadline * speed for speed in speeds]
        late = [need.total > most for need, most in zip(of, allowed, strict=True)]
        if run.late == "drop":
            _refuse_nobody(run, of, speeds, late)
        for row, (need, most) in enumerate(zip(of, allowed, strict=True)):
            if late[row] and run.late != "drop":
                tasks[row] = need.within(most, row % per_run, speeds[row])
            elif need.selection:  # no more than it was said to need
                tasks[row] = Task(need.steps, need.k, max(most, need.total))
    return Devices(
        tasks, late, [need.total for need in of], speeds, bool(run.deadline) and run.late == "drop"
    )


class _Need:
    """What a client of n points needs for a round on k of them."""

    def __init__(self, run: Run, method: Method, n: int, k: int) -> None:
        self.run, self.n, self.k = run, n, k
        self.each = passes_per_point(method)
        self.look = FORWARD * method.subset.look * n if method.subset is not None else 0.0

    @property
    def steps(self) -> int:
        return self._steps(self.k)

    @property
    def selection(self) -> float:
        return self.look if self.k < self.n else 0.0

    @property
    def total(self) -> float:
        return self.steps * self._step(self.k) + self.selection

    def within(self, passes: float, client: int, speed: float) -> Task:
        """The task of a client that has no more than these passes."""
        k, look = self.k, self.selection
        if self.run.late == "fit":
            k, look = self._fitting(passes)
        if look + self._step(k) > passes * (1 + ROUNDING):
            raise UserError(
                f"deadline is {self.run.deadline:g} s, in which client {client} of speed "
                f"{speed:.3g} cannot finish one minibatch{' after a selection' if look else ''}: "
                f"that takes {(look + self._step(k)) / speed:.3g} s. Give it more time, a smaller "
                "batch_size, or late=drop."
            )
        steps = min(self._steps(k), int(passes / self._step(k) + ROUNDING))
        return Task(max(1, steps), k, passes if look else math.inf)

    def _fitting(self, passes: float) -> tuple[int, float]:
        """The most points that fit, and the passes of selecting them."""
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


def draw_speeds(text: str, seed: int, clients: int) -> list[float]:
    """The speed of each client of a seed; a client's own depends on no other client."""
    if not text:
        return []
    kind, numbers = settings.parse(text)
    if not kind:
        if len(numbers) not in (1, clients):
            raise UserError(
                f"speeds has {len(numbers)} numbers and the run {clients} clients; give one number "
                "for all, or one per client."
            )
        return list(numbers) * (clients if len(numbers) == 1 else 1)
    streams = Streams([Who(seed, client) for client in range(clients)], 0)
    if kind == "uniform":
        drawn = numbers[0] + (numbers[1] - numbers[0]) * streams.uniform("speed", 1).double()
    else:
        drawn = numbers[0] * (numbers[1] * streams.normal("speed", 1).double()).exp()
    found: list[float] = drawn.squeeze(-1).tolist()
    return found


def _refuse_nobody(
    run: Run, of: Sequence[_Need], speeds: Sequence[float], late: Sequence[bool]
) -> None:
    """A run in which nobody is in time, so that every round would wait for one client."""
    per_run = len(of) // len(run.seeds)
    needed = [need.total / speed for need, speed in zip(of, speeds, strict=True)]
    for g, seed in enumerate(run.seeds):
        mine = slice(g * per_run, (g + 1) * per_run)
        if all(late[mine]):
            raise UserError(
                f"deadline is {run.deadline:g} s: with late=drop no client of seed {seed} takes "
                f"part, since the quickest needs {min(needed[mine]):.3g} s."
            )


def _refuse_uncounted(run: Run, method: Method) -> None:
    subset = method.subset
    if subset is None and run.deadline and run.late == "fit":
        raise UserError(
            f"late=fit takes a method that trains on a part of the points, such as "
            f"coreset-pfedbayes or random-subset; {run.method} trains on all: use late=partial."
        )
    if run.speeds and subset is not None and subset.cost is None and not subset.free:
        raise UserError(
            f"speeds is given, but {run.method} with these settings does not count what selecting "
            "its points takes, so its time cannot be simulated."
        )
