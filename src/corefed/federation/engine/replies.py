"""What a client may push to the server: its own reply, of the length that the training expects.

The gate (`gate.py`) asks before it passes a request on, and tells what SuperLink answered.
SuperLink checks keys and signatures; nothing is charged to a client before SuperLink has accepted
a request of it. For each reply SuperLink makes a session with a random name, which it tells only
the client that it has authenticated. What is then pushed under this name is counted:

    a reply             at most the bytes that the running training expects (the file message_limit)
    all replies         of a client, since the training last asked: at most four times as many
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest
from google.protobuf.message import DecodeError

from corefed.federation.operate.folder import LIMIT, REFUSED, ServerFolder
from corefed.federation.protocol import ENVELOPE

PUSH_MESSAGES, PUSH_OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
REPLY = 256 << 20
"""Bytes of a reply where no training has set a limit."""
AGAIN = 4
"""Replies that a client may send for one question: late ones, and ones that were cut off."""
SESSIONS = 4096
"""Sessions to remember."""

Refusal = tuple[int, str]  # status, sentence


@dataclass
class Session:
    """A reply that is being pushed."""

    key: bytes
    left: int
    told: bool = False  # whether its refusal was


@dataclass
class Replies:
    """What clients have pushed, and may still push."""

    server: Path
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    spent: Counter[bytes] = field(default_factory=Counter)  # key -> bytes since `asked`
    asked: int = 0

    def check(self, path: str, key: str, body: bytes) -> Refusal | Callable[[int, bytes], None]:
        """Why a request is refused; else what to call with SuperLink's status and answer."""
        try:
            if path == PUSH_MESSAGES:
                return self._reply(PushMessagesRequest.FromString(body), decode(key))
            if path == PUSH_OBJECT:
                return self._piece(PushObjectRequest.FromString(body), decode(key))
        except DecodeError:
            return 400, "This is no such message."
        return _nothing

    def _reply(
        self, request: PushMessagesRequest, key: bytes
    ) -> Refusal | Callable[[int, bytes], None]:
        node = request.node.node_id
        if [message.metadata.src_node_id for message in request.messages_list] != [node]:
            return 403, "A client replies for itself, one reply at a time."

        def done(status: int, answer: bytes) -> None:
            if status == 200:
                session = PushMessagesResponse.FromString(answer).session_id
                self.sessions[session] = Session(key, self._limit() + ENVELOPE)
                while len(self.sessions) > SESSIONS:
                    self.sessions.popitem(last=False)

        return done

    def _piece(
        self, request: PushObjectRequest, key: bytes
    ) -> Refusal | Callable[[int, bytes], None]:
        session = self.sessions.get(request.session_id)
        if session is None or session.key != key:
            return 409, "This is no piece of a reply that was announced."
        self._forget_earlier()
        length, limit = len(request.object_content), self._limit()
        if length > session.left or self.spent[key] + length > AGAIN * (limit + ENVELOPE):
            if not session.told:
                self._tell(key, f"its message has more than the {limit} bytes allowed")
            session.told, session.left = True, 0
            return 413, "The reply is longer than the server expects."
        session.left -= length
        self.spent[key] += length

        def done(status: int, answer: bytes) -> None:
            if status != 200:  # not stored, so not charged
                session.left += length
                self.spent[key] -= length

        return done

    def _forget_earlier(self) -> None:
        """Begin to count anew when the training has asked again."""
        try:
            asked = (self.server / LIMIT).stat().st_mtime_ns
        except OSError:
            asked = 0
        if asked != self.asked:
            self.asked = asked
            self.spent.clear()

    def _limit(self) -> int:
        try:
            return int((self.server / LIMIT).read_text())
        except (OSError, ValueError):
            return REPLY

    def _tell(self, key: bytes, reason: str) -> None:
        """Note it for the training, which then stops waiting for this client."""
        name = ServerFolder.read(self.server).keys().get(key, "")
        time = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"time": time, "client": name, "reason": reason}
        with (self.server / REFUSED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"corefed: {name or 'a client'} refused: {reason}", file=sys.stderr, flush=True)


def decode(key: str) -> bytes:
    try:
        return base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _nothing(status: int, answer: bytes) -> None:
    """What is to be noted about other requests."""
