"""A federation without Flower: the server calls its clients."""

from __future__ import annotations

from collections.abc import Mapping

from corefed.federation import client, task_context
from corefed.federation.protocol import Reply, Task
from corefed.federation.rules import Rules
from corefed.federation.waiting import Waiting

AS_SIMULATED = Rules(
    join_wait=0.0, aggregation="plain", join="pooled", class_quorum=1, max_weight=0.0
)
"""The rules under which a federation has the numbers of its simulation."""


class Call:
    """A link that is a function call."""

    def __init__(self, places: Mapping[str, task_context.ClientSettings]) -> None:
        self.places = places

    def online(self) -> set[str]:
        return set(self.places)

    def ask(self, tasks: Mapping[str, Task], waiting: Waiting) -> dict[str, Reply | str]:
        return {name: client.answer(task, self.places[name]) for name, task in tasks.items()}

    def late(self) -> list[tuple[str, int]]:
        return []
