"""The time of one round on simulated devices (`devices.py`), for the round's line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from corefed.base.types import Method
from corefed.training.cost import Line
from corefed.training.local import LocalClients
from corefed.training.tasks import passes_taken

Cohorts = Sequence[Sequence[int]]


class Clock:
    """Says who of a round's cohorts takes part, and after training how long it took."""

    def __init__(self, clients: LocalClients, method: Method, cohorts: Cohorts) -> None:
        self.clients, self.method, self.devices = clients, method, clients.devices
        self.cohorts: Cohorts = cohorts
        self.late: list[int] = []
        if self.devices is None:
            return
        n, devices = clients.per_run, self.devices
        rows = [[g * n + i for i in cohort] for g, cohort in enumerate(cohorts)]
        self.cohorts = [[row % n for row in devices.in_time(each)] for each in rows]
        self.late = [sum(devices.late[row] for row in each) for each in rows]
        self._before = self._looked()

    def line(self) -> Line:
        """Simulated seconds and late clients per run; nothing where time is not simulated."""
        if self.devices is None or not self.devices.speeds:
            return {}
        rows = self.clients.rows_of(self.cohorts)
        now = self._looked()
        looked: Tensor | float = 0.0
        if self._before is not None and now is not None:
            looked = (now - self._before)[rows]
        passes = passes_taken(self.method, self.clients.examples, looked)
        ends = itertools.accumulate(map(len, self.cohorts))
        spans = [slice(end - len(c), end) for end, c in zip(ends, self.cohorts, strict=True)]
        seconds = [self.devices.seconds(rows[span], passes[span]) for span in spans]
        return {"simulated_seconds": seconds, "late": self.late}

    def _looked(self) -> Tensor | None:
        """[C] forward passes of selection so far."""
        spent = self.clients.selection_cost()
        return None if spent is None else spent.double().cpu().clone()
