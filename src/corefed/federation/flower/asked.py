"""asked.json of a run: who has been asked and has not answered yet, for `run` and `status`.

    {"since": 1789000000.0, "silent": ["bob"]}

`since` is when the last question was sent or the last answer came. The file is written by the
training, which knows, around Flower's grid; it is no part of the result.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from corefed.federation.operate.run_state import ASKED


class NotedGrid:
    """A grid that notes in a run's folder who is to answer. All else is the grid's."""

    def __init__(self, grid: Grid, keys: Mapping[bytes, str], folder: Path) -> None:
        self.grid = grid
        self.keys = keys  # public key -> name
        self.path = folder / ASKED
        self.names: dict[int, str] = {}  # node -> name
        self.question = ""
        self.waiting: dict[str, str] = {}  # message id -> name
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def get_nodes(self) -> Any:
        nodes = list(self.grid.get_nodes())
        self.names = {node.node_id: self.keys.get(node.public_key, "") for node in nodes}
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Any:
        sent = list(messages)
        identities = list(self.grid.push_messages(sent))
        with self.lock:
            for identity, message in zip(identities, sent, strict=True):
                about = message.metadata
                question = f"{about.message_type} {about.group_id}"
                if question != self.question:  # whoever did not answer the last one is given up
                    self.question, self.waiting = question, {}
                name = self.names.get(about.dst_node_id, "")
                again = [old for old, who in self.waiting.items() if who == name]
                for old in again:
                    del self.waiting[old]
                self.waiting[identity] = name
            self._write()
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        wanted = list(message_ids)
        replies = list(self.grid.pull_messages(wanted))
        if replies:
            with self.lock:
                for reply in replies:
                    self.waiting.pop(reply.metadata.reply_to_message_id, None)
                self._write()
        return replies

    def _write(self) -> None:
        about = {"since": time.time(), "silent": sorted(filter(None, self.waiting.values()))}
        with suppress(OSError):  # a full disk must not end a training that only tells about itself
            self.path.write_text(json.dumps(about), encoding="utf-8")
