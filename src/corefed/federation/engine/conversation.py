"""One connection to the gate: requests that are read whole, and answers.

The bytes are read by h11, which refuses what is no HTTP. A request is given up where its head, its
body or the reading of its answer takes too long, and refused before its body is read where it is
not one that may be passed on. After a request that was not read to its end the connection closes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import suppress
from email.utils import formatdate
from typing import TYPE_CHECKING, NamedTuple

import h11

if TYPE_CHECKING:
    from corefed.federation.engine.gate import Gate

BODY = 16 << 20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
SMALL = 1 << 16
"""Bytes of a request of somebody who shows no client's key."""
HEAD = 1 << 15
"""Bytes of a request's first lines, about."""
PIECE = 1 << 16
LINGER = 1.0
"""Seconds that the other end has to read the last answer, and to close."""
FLEET = re.compile(r"/v1/fleet/[a-z-]{1,64}")
KEPT = re.compile(r"content-type|flwr-[a-z0-9-]{1,64}")
"""Headers that are passed on."""

Headers = list[tuple[str, str]]


class Limits(NamedTuple):
    """In seconds, bytes a second, and connections."""

    connections: int
    per_address: int
    handshake: float = 10.0
    head: float = 10.0
    idle: float = 75.0
    body: float = 20.0  # and longer, by the bytes that have come
    rate: float = 16 << 10


class RefusedError(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Conversation:
    """One connection: requests and answers, one after the other."""

    def __init__(
        self, gate: Gate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self.gate, self.reader, self.writer, self.address = gate, reader, writer, address
        self.limits = gate.limits
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
        self.begun = False  # whether a part of the present request has come

    async def hold(self) -> None:
        wait = self.limits.head
        while await self._exchange(wait):
            wait = self.limits.idle
            self.http.start_next_cycle()

    async def _exchange(self, wait: float) -> bool:
        """One request and its answer; whether another may follow."""
        path, request = "", None
        try:
            request = await self._head(wait)
            if request is None:
                return False
            path = request.target.decode("latin-1")
            method, headers = _checked(request)
            status, content, answer = await self._with_body(method, path, headers)
        except h11.RemoteProtocolError as error:
            status, content, answer = _refusal(error.error_status_hint, str(error))
        except TimeoutError:
            if not self.begun:
                return False  # nobody is waiting for an answer
            status, content, answer = _refusal(408, "The request took too long.")
        except RefusedError as error:
            status, content, answer = _refusal(error.status, str(error))
            answer = b"" if request is not None and request.method == b"HEAD" else answer
        if status in (400, 401, 403, 408, 412, 413, 431):
            log(f"{status} to {self.address} for {path!r}")
        return await self._send(status, content, answer)

    async def _head(self, wait: float) -> h11.Request | None:
        """The next request; none where the other end has nothing more to say."""
        self.begun = False
        async with asyncio.timeout(wait) as timer:
            while True:
                event = self.http.next_event()
                if event is h11.NEED_DATA:
                    piece = await self.reader.read(PIECE)
                    if piece and not self.begun:  # from now on a head has its own time
                        self.begun = True
                        begun = asyncio.get_running_loop().time() + self.limits.head
                        timer.reschedule(min(begun, timer.when() or begun))
                    self.http.receive_data(piece)
                elif isinstance(event, h11.Request):
                    return event
                else:
                    return None

    async def _with_body(self, method: str, path: str, headers: Headers) -> tuple[int, str, bytes]:
        kept = [(name, value) for name, value in headers if KEPT.fullmatch(name)]
        known = self.gate.is_known(kept)
        most = BODY if known else SMALL
        if int(header(headers, "content-length") or 0) > most:
            raise _too_long(most)
        if known and not 0 <= int(header(headers, "content-length") or -1) <= SMALL:
            async with self.gate.large:
                return await self.gate.forward(method, path, kept, await self._body(most))
        return await self.gate.forward(method, path, kept, await self._body(SMALL))

    async def _body(self, most: int) -> bytes:
        """The body, which comes at the least rate that is allowed, or is given up."""
        loop = asyncio.get_running_loop()
        body, began = bytearray(), loop.time()
        if self.http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._write(self.http.send(go_on))
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                until = began + self.limits.body + len(body) / self.limits.rate
                async with asyncio.timeout_at(until):
                    self.http.receive_data(await self.reader.read(PIECE))
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > most:
                    raise _too_long(most)
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            else:
                raise h11.RemoteProtocolError("the request was cut off")

    async def _send(self, status: int, content: str, answer: bytes) -> bool:
        """Whether another request may follow: not where the rest of this one was not read."""
        whole = self.http.their_state is h11.DONE
        date = formatdate(usegmt=True)  # by which a client sees how far its clock is off
        headers = [("content-type", content), ("content-length", str(len(answer))), ("date", date)]
        if not whole:
            headers.append(("connection", "close"))
        parts = [
            self.http.send(h11.Response(status_code=status, headers=headers)),
            self.http.send(h11.Data(data=answer)),
            self.http.send(h11.EndOfMessage()),
        ]
        await self._write(b"".join(part for part in parts if part))
        if not whole:
            await self._discard()
        return whole and self.http.our_state is h11.DONE

    async def _discard(self) -> None:
        """Read on for a moment: closing at once would take the answer away from who still sends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while await self.reader.read(PIECE):
                    pass

    async def _write(self, data: bytes | None) -> None:
        self.writer.write(data or b"")
        async with asyncio.timeout(self.limits.body + len(data or b"") / self.limits.rate):
            await self.writer.drain()


def _checked(request: h11.Request) -> tuple[str, Headers]:
    """Method and headers of a request that may be passed on."""
    method, path = request.method.decode("ascii"), request.target.decode("latin-1")
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers]
    names = [name for name, _ in headers]
    if "content-length" in names and "transfer-encoding" in names:
        raise RefusedError(400, "A request has one length.")
    if any(names.count(name) > 1 for name in names if KEPT.fullmatch(name)):
        raise RefusedError(400, "A header is there twice.")
    if (method, path) != ("GET", "/health") and not (method == "POST" and FLEET.fullmatch(path)):
        raise RefusedError(403, "The server has this for nobody.")
    return method, headers


def header(headers: Headers, wanted: str) -> str:
    """A header that is there once; empty where it is not."""
    values = [value for name, value in headers if name == wanted]
    return values[0] if len(values) == 1 else ""


def _too_long(most: int) -> RefusedError:
    return RefusedError(413, f"A request of yours has at most {most} bytes.")


def _refusal(status: int, sentence: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"detail": sentence}).encode()


def log(text: str) -> None:
    print(f"corefed: {text}", file=sys.stderr, flush=True)
