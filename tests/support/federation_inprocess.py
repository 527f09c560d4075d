"""A federation inside one process: Flower's messages, our apps, no network and no other process.

`InProcessGrid` answers a pushed message at once by the client app's own code; messages pass through
Flower's serialisation on their way there and back, and a test can change, lose or delay a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from federation_calls import AS_SIMULATED
from federation_points import deal
from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from corefed.federation import server, task_context
from corefed.federation.flower import app, records
from corefed.federation.flower import link as flower_link
from corefed.federation.rules import Rules
from corefed.settings import config
from corefed.training import record

LOST = "lost"
"""What a `tamper` returns for a reply that never comes."""

Tamper = Callable[[str, Message], "Message | str | None"]


class InProcessGrid(Grid):
    """Clients by name; node i + 1 is the i-th."""

    def __init__(
        self, places: dict[str, task_context.ClientSettings], tamper: Tamper | None = None
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # of this process
        self.places = places
        self.names = list(places)
        self.connected = set(places)
        self.tamper = tamper
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[str, str]] = []  # name and kind, in order
        self.bytes_up: dict[str, int] = {}  # of the last reply of each client, with its envelope
        self.bytes_down = 0

    def keys(self) -> dict[bytes, str]:
        return {name.encode(): name for name in self.names}

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [i + 1 for i, name in enumerate(self.names) if name in self.connected]

    def get_nodes(self) -> Iterable[NodeInfo]:
        nodes = [
            NodeInfo(node_id=i + 1, public_key=name.encode())
            for i, name in enumerate(self.names)
            if name in self.connected
        ]
        return [*nodes, NodeInfo(node_id=99, public_key=b"a stranger that somebody registered")]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            name = self.names[message.metadata.dst_node_id - 1]
            self.asked.append((name, message.metadata.message_type))
            there, self.bytes_down = travelled(message)
            reply: Message | str | None = app.answer_message(there, self.places[name])
            if self.tamper is not None:
                reply = self.tamper(name, reply)
            identity = message.metadata.message_id
            if isinstance(reply, Message):
                back, self.bytes_up[name] = travelled(reply)
                self.replies[identity] = back
            elif reply is None:
                self.replies[identity] = Message(Error(8, "the process died"), reply_to=message)
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]

    def send_and_receive(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        raise NotImplementedError


def travelled(message: Message) -> tuple[Message, int]:
    """The message after Flower's own serialisation, and the bytes that took."""
    identity = message.object_id
    objects = get_all_nested_objects(message)
    contents = {key: one.deflate() for key, one in objects.items()}
    size = sum(map(len, contents.values()))
    back = inflate_object_from_contents(identity, contents)
    assert isinstance(back, Message)
    back.metadata.__dict__["_message_id"] = identity
    return back, size


def changed(message: Message, **values: Any) -> Message:
    """The same reply with other plain values; `tree` replaces its tensors."""
    reply = records.reply_from(message.content, 1 << 40)
    content = records.reply_to_records(reply._replace(**values))
    return Message(RecordDict(dict(content)), reply_to=_question(message))


def _question(reply: Message) -> Message:
    """A stand-in for the message that this one answers."""
    question = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    question.metadata.__dict__.update(
        _message_id=reply.metadata.reply_to_message_id,
        _src_node_id=reply.metadata.dst_node_id,
        _message_type=reply.metadata.message_type,
        _group_id=reply.metadata.group_id,
    )
    return question


class Folders(NamedTuple):
    run: Path  # of the server's run
    grid: InProcessGrid
    names: list[str]

    def federate(self, rules: Rules | None = None) -> dict[str, Any]:
        link = flower_link.FlowerLink(self.grid, self.grid.keys())
        return server.federate(self.run, self.names, rules or QUICK, link)


QUICK = replace(AS_SIMULATED, deadline=0.3, attempts=1)


def federation(
    folder: Path, flags: dict[str, Any], tamper: Tamper | None = None, **place: Any
) -> Folders:
    """A federation whose clients hold what a simulation with the same flags would deal them."""
    wanted = config.resolve(flags=flags)
    deal(wanted.run, folder / "data")
    names = [f"client-{i}" for i in range(wanted.run.clients)]
    places = {
        name: task_context.ClientSettings(
            name, folder / name, f"npz:{folder / 'data' / f'{name}.npz'}", **place
        )
        for name in names
    }
    run = folder / "runs" / "first"
    record.Folder(run).create(config.resolve(flags={**flags, "data": "local"}))
    return Folders(run, InProcessGrid(places, tamper), names)
