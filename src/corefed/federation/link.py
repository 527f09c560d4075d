"""How the server reaches its clients, whatever carries the messages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from corefed.federation.protocol import Reply, Task
from corefed.federation.waiting import Waiting

SILENT = "no answer within"
"""How the sentence about a client begins that was asked and did not answer."""
PATIENCE = 0.5
"""Seconds between looks at who is connected."""


class Link(Protocol):
    """A transport. Names are the operator's; a client is known by its key."""

    def online(self) -> set[str]:
        """Names of the clients that are connected now."""

    def ask(self, tasks: Mapping[str, Task], waiting: Waiting) -> dict[str, Reply | str]:
        """An answer for every name: a reply, or a sentence why there is none in time."""

    def late(self) -> list[tuple[str, int]]:
        """(name, round from 0) of answers since the last call that came after the waiting."""


def wait_for(names: Iterable[str], number: int, seconds: float, link: Link) -> set[str]:
    """The connected clients of `names`, once there are `number` of them or the time is up."""
    wanted, until = set(names), time.monotonic() + seconds
    while True:
        present = link.online() & wanted
        if len(present) >= number or time.monotonic() >= until:
            return present
        time.sleep(PATIENCE)


def is_answer(reply: Reply | str) -> bool:
    """Whether a client did what it was asked; only such answers make a quorum."""
    return not isinstance(reply, str) and not reply.error


def mismatch(task: Task, reply: Reply) -> str:
    """Why a reply is no answer to this task; empty where it is one."""
    if reply.error:
        return f"says: {reply.error}"
    asked, got = _describe(task), _describe(reply)
    return "" if got == asked else f"answers another question: {got}, asked was {asked}"


def _describe(message: Task | Reply) -> str:
    where = f" of round {message.round + 1}" if message.round >= 0 else ""
    return f"{message.kind}{where} of run {message.run} as client {message.client}"
