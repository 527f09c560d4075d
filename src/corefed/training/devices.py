"""Simulated devices: what each client does in a round, and how long that takes it.

A client of speed s (passes per simulated second) has s times the deadline passes for a round; what
it needs, and what it does if it is late, is in `tasks.py`. With `late=drop` a late client takes no
part; if all of a cohort are late, the quickest is waited for.

A round takes as long as the slowest client of its cohort; sending takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import Method, Work
from corefed.settings import devices as settings
from corefed.settings.run import Run
from corefed.training.tasks import Need, Task, needs_of, refuse_uncounted, work_for

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
        return work_for(work, [self.tasks[row] for row in rows], device)

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
    refuse_uncounted(run, method)
    per_run = len(sizes) // len(run.seeds)
    speeds = [s for seed in run.seeds for s in draw_speeds(run.speeds, seed, per_run)]
    of = needs_of(run, own, method, sizes)
    tasks = [need.task for need in of]
    late = [False] * len(sizes)
    if run.deadline:
        allowed = [run.deadline * speed for speed in speeds]
        late = [need.total > most for need, most in zip(of, allowed, strict=True)]
        if run.late == "drop":
            _refuse_nobody(run, of, speeds, late)
        for row, (need, most) in enumerate(zip(of, allowed, strict=True)):
            # Dropped clients have no plan; if all are, the quickest is waited for.
            task = need.within(max(most, need.total) if run.late == "drop" else most)
            if task is None:
                raise UserError(_no_time(run, need, most, row % per_run, speeds[row]))
            tasks[row] = task
    return Devices(
        tasks, late, [need.total for need in of], speeds, bool(run.deadline) and run.late == "drop"
    )


def _no_time(run: Run, need: Need, passes: float, client: int, speed: float) -> str:
    least, selects = need.least(passes)
    return (
        f"deadline is {run.deadline:g} s, in which client {client} of speed {speed:.3g} cannot "
        f"finish one minibatch{' after a selection' if selects else ''}: that takes "
        f"{least / speed:.3g} s. Give it more time, a smaller batch_size, or late=drop."
    )


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
    run: Run, of: Sequence[Need], speeds: Sequence[float], late: Sequence[bool]
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
