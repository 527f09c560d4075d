"""The server's way to its clients through Flower's grid.

Who a node is follows from its public key, which Flower has authenticated: the operator's folder
says which key is whose, and a node with another key is ignored, even if somebody registered it with
Flower.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from flwr.app import Message
from flwr.serverapp import Grid

from corefed.federation import wire
from corefed.federation.engine.patches import replace
from corefed.federation.flower import records
from corefed.federation.link import SILENT, is_answer
from corefed.federation.protocol import ENVELOPE, Kind, Reply, Task
from corefed.federation.waiting import Waiting

TYPES: dict[Kind, str] = {"join": "query", "train": "train", "evaluate": "evaluate"}
"""Flower's names of the kinds of task."""
POLL = 0.2
"""Seconds between looks for replies."""
LOOK = 1.0
"""Seconds between looks for what the SuperLink has refused."""
SLACK = 30.0
"""Seconds by which a message outlives its deadline, so that a late answer can be reported."""


class FlowerLink:
    """The clients as Flower's grid reaches them.

    A round that is asked again takes an answer to the first question too. It is the same answer,
    and a client that needs longer than the deadline would otherwise always be late.

    Each question has a thread that waits for its answer: a client that stops in the middle of
    sending blocks Flower's `pull_messages` for minutes, and must not block the others' answers.
    """

    def __init__(
        self,
        grid: Grid,
        keys: Mapping[bytes, str],
        max_message_mb: float = 0.0,
        announce: Callable[[int], None] = lambda most: None,
        turned_away: Callable[[str], str] = lambda name: "",
    ) -> None:
        self.grid = grid
        self.keys = keys  # public key -> name
        self.max_bytes = int(max_message_mb * 2**20)
        self.announce = announce  # called with the bound of a message before it is asked for
        self.turned_away = turned_away  # why the SuperLink refused what a client pushed, if it did
        self.bound = 0
        self.inbox: queue.Queue[tuple[str, Message]] = queue.Queue()
        self.given_up: dict[str, tuple[str, Task]] = {}  # message id -> name and task
        self.came_late: list[tuple[str, int]] = []

    def online(self) -> set[str]:
        return set(self._nodes())

    def _nodes(self) -> dict[str, int]:
        nodes = self.grid.get_nodes()
        found = {self.keys.get(node.public_key): node.node_id for node in nodes}
        return {name: node for name, node in found.items() if name is not None}

    def ask(self, tasks: Mapping[str, Task], waiting: Waiting) -> dict[str, Reply | str]:
        self._bound(tasks)
        nodes = self._nodes()
        answers: dict[str, Reply | str] = dict.fromkeys(tasks, "not connected")
        pending = {  # message id -> name
            self._send(task, nodes[name], waiting.deadline): name
            for name, task in tasks.items()
            if name in nodes
        }
        began, arrived = time.monotonic(), list[float]()
        until = began + waiting.deadline
        for identity in pending:
            threading.Thread(target=self._listen, args=(identity, until), daemon=True).start()
        while pending or not self.inbox.empty():
            left = began + waiting.end(arrived, pending.values()) - time.monotonic()
            try:
                identity, message = self.inbox.get(timeout=max(0.0, min(left, LOOK)))
            except queue.Empty:
                if left <= 0:
                    break
                self._turn_away(pending, tasks, answers)
                continue
            if identity in pending:
                name = pending.pop(identity)
                answers[name] = _read(message, self.bound)
            elif not message.has_error():
                name, task = self.given_up.pop(identity)
                again = next((i for i, other in pending.items() if other == name), None)
                if again is None or not _same(task, tasks[name]):
                    self.came_late.append((name, task.round))
                    continue
                answers[name] = _read(message, self.bound)
                self.given_up[again] = (pending.pop(again), task)
            else:
                continue
            if is_answer(answers[name]):
                arrived.append(time.monotonic() - began)
        limit = waiting.end(arrived, pending.values())
        within = f"{round(limit, 1):g} s" if limit else "the time that the others took"
        for identity, name in pending.items():
            answers[name] = f"{SILENT} {within}"
            self.given_up[identity] = (name, tasks[name])
        return answers

    def _turn_away(
        self, pending: dict[str, str], tasks: Mapping[str, Task], answers: dict[str, Reply | str]
    ) -> None:
        """Stop waiting for what the SuperLink has refused to take."""
        for identity, name in list(pending.items()):
            reason = self.turned_away(name)
            if reason:
                answers[name] = reason
                self.given_up[identity] = (pending.pop(identity), tasks[name])

    def late(self) -> list[tuple[str, int]]:
        noted, self.came_late = self.came_late, []
        return noted

    def _bound(self, tasks: Mapping[str, Task]) -> None:
        """Bound answers by twice the size of what is sent, which a right answer has."""
        largest = max((wire.size(task.tree) for task in tasks.values()), default=0)
        self.bound = self.max_bytes or 2 * largest + (1 << 20)
        self.announce(self.bound)

    def _send(self, task: Task, node: int, deadline: float) -> str:
        message = Message(
            records.task_to_records(task),
            dst_node_id=node,
            message_type=TYPES[task.kind],
            group_id=str(task.round + 1),
            ttl=deadline + SLACK,
        )
        (identity,) = self.grid.push_messages([message])
        return identity

    def _listen(self, identity: str, until: float) -> None:
        """Wait for one answer, a little longer than its deadline."""
        while time.monotonic() < until + SLACK:
            for message in self.grid.pull_messages([identity]):
                self.inbox.put((identity, message))
                return
            time.sleep(POLL)


def _read(message: Message, most: int) -> Reply | str:
    """The reply, or why there is none that can be read."""
    if message.has_error():
        return f"Flower says: {message.error.reason}"
    try:
        return records.reply_from(message.content, most)
    except (ValueError, TypeError, KeyError) as error:
        return f"unreadable: {error}"


def _same(one: Task, other: Task) -> bool:
    """Whether two tasks are equal."""
    return one._replace(tree={}) == other._replace(tree={}) and one.tree is other.tree


@contextmanager
def bounded_pulls(link: FlowerLink) -> Iterator[None]:
    """Within this block a message longer than the link's bound is given up before it is in memory.

    Flower's grid collects a message's objects through one function, to which this adds a counter.
    """
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects

    def bounded(object_ids: list[str], pull_object_fn: Any, **options: Any) -> dict[str, bytes]:
        taken = 0

        def pull(object_id: str) -> bytes:
            nonlocal taken
            content = cast("bytes", pull_object_fn(object_id))
            taken += len(content)
            if taken > link.bound + ENVELOPE:
                reason = f"the message has more than the {link.bound} bytes allowed"
                raise ObjectPullError(object_id, reason)
            return content

        return pull_objects(object_ids, pull, **options)

    replace("superlink.grid.http_grid", pull_objects=bounded)
    try:
        yield
    finally:
        replace("superlink.grid.http_grid", pull_objects=pull_objects)
