"""A federation without Flower: the server calls its clients."""

from __future__ import annotations

from collections.abc import Mapping

from corefed.federation import client, task_context
from corefed.federation.protocol import Reply, Task


class Call:
    """A link that is a function call."""

    def __init__(self, places: Mapping[str, task_context.ClientSettings]) -> None:
        self.places = places

    def online(self) -> set[str]:
        return set(self.places)

    def ask(self, tasks: Mapping[str, Task], deadline: float) -> dict[str, Reply | str]:
        return {name: client.answer(task, self.places[name]) for name, task in tasks.items()}

    def late(self) -> list[tuple[str, int]]:
        return []
