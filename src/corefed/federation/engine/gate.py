"""The server's one open port: `python -m corefed.federation.engine.gate`.

Flower serves three APIs on one port: the clients' (fleet), that of its own processes (runtime), and
the operator's (control), which has no authentication. So SuperLink listens on the loopback alone,
and this gate stands before it. It speaks TLS with the server's certificate and passes on:

    what          POST /v1/fleet/NAME and GET /health, nothing else, whoever asks
    how much      a body of at most 16 MiB, counted while it is read; a few large ones at a time
    how long      seconds for the handshake, for a request's head, and for so many bytes of its body
    how many      connections in all, and from one address
    replies       in the client's own name, of the length that the training expects (`replies.py`)

Every request is read whole, and written anew for SuperLink, with the headers that Flower's own
clients send. So the two cannot take the same bytes for different requests.

Where SuperLink fails (500), or does not answer, a client that asks for something is told to ask
again (503). Flower's SuperNode would otherwise stop its signs of life for good.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple

import h11
import httpx

from corefed.base.errors import UserError
from corefed.federation.engine import signals
from corefed.federation.engine.replies import PUSH_MESSAGES, PUSH_OBJECT, Replies, decode
from corefed.federation.operate.folder import ServerFolder

BODY = 16 << 20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
SMALL, LARGE = 1 << 16, 8
"""Bytes that anybody's request may have, and how many requests of clients may have more at once."""
HEAD = 1 << 15
"""Bytes of a request's first lines."""
PIECE = 1 << 16
KEY, KEYS = "flwr-public-key", 2.0
"""Flower's header that names a client, and the seconds between looks at the clients' keys."""
LINGER = 1.0
"""Seconds that the other end has to read the last answer, and to close."""
WAKE = 5.0
"""Seconds after which the gate wakes up by itself, so that one can see that it is alive."""
BACKEND = 60.0
"""Seconds in which SuperLink has to answer."""
FLEET = re.compile(r"/v1/fleet/[a-z-]{1,64}")
KEPT = re.compile(r"content-type|flwr-[a-z0-9-]{1,64}")
"""Headers that are passed on."""


class Limits(NamedTuple):
    """In seconds, bytes a second, and connections."""

    connections: int
    per_address: int
    handshake: float = 10.0
    head: float = 10.0
    idle: float = 75.0
    body: float = 20.0  # and longer, by the bytes that have come
    rate: float = 16 << 10


def limits_for(clients: int) -> Limits:
    """A client has about ten connections, and all of them may share one address."""
    of_one = 32 * (1 + clients)
    return Limits(2 * of_one, of_one)


class RefusedError(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Gate:
    def __init__(self, backend: httpx.AsyncClient, replies: Replies, limits: Limits) -> None:
        self.backend = backend
        self.replies = replies
        self.limits = limits
        self.open: Counter[str] = Counter()  # address -> connections
        self.large = asyncio.Semaphore(LARGE)
        self.keys: frozenset[bytes] = frozenset()
        self.looked = -KEYS

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """Take connections; those beyond the limits are closed before a byte is read."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                plain, peer = await loop.sock_accept(listener)
            except OSError as error:  # out of files, for instance
                log(f"cannot take a connection: {error.strerror}")
                await asyncio.sleep(0.5)
                continue
            address = str(peer[0])
            here, all_ = self.open[address], self.open.total()
            if here >= self.limits.per_address or all_ >= self.limits.connections:
                plain.close()
                log(f"no more connections from {address}: {here} of it, {all_} in all")
                continue
            self.open[address] += 1
            task = asyncio.create_task(self._connection(plain, address, tls))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _connection(self, plain: socket.socket, address: str, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE)
        writer: asyncio.StreamWriter | None = None
        try:
            transport, protocol = await loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader),
                plain,
                ssl=tls,
                ssl_handshake_timeout=self.limits.handshake,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await Conversation(self, reader, writer, address).hold()
        except (OSError, h11.ProtocolError):
            pass  # no TLS, another authority, too slow, gone
        finally:
            if writer is not None:
                await _close(writer)
            self.open[address] -= 1
            if not self.open[address]:
                del self.open[address]

    def is_known(self, headers: list[tuple[str, str]]) -> bool:
        """Whether a request shows the key of a client; SuperLink checks that it has it."""
        if time.monotonic() > self.looked + KEYS:
            with suppress(UserError):
                self.keys = frozenset(ServerFolder.read(self.replies.server).keys())
            self.looked = time.monotonic()
        return decode(_header(headers, KEY)) in self.keys

    async def forward(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, str, bytes]:
        """SuperLink's status, type of content and answer."""
        checked = self.replies.check(path, _header(headers, KEY), body)
        if isinstance(checked, tuple):
            raise RefusedError(*checked)
        try:
            answer = await self.backend.request(method, path, headers=headers, content=body)
        except httpx.HTTPError as error:
            checked(503, b"")
            reason = f"SuperLink does not answer ({type(error).__name__})."
            raise RefusedError(503, reason) from error
        checked(answer.status_code, answer.content)
        status = answer.status_code
        if status >= 500 and path not in (PUSH_MESSAGES, PUSH_OBJECT):
            status = 503
        return status, answer.headers.get("content-type", "application/json"), answer.content


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
        if status in (400, 403, 408, 413, 431):
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

    async def _with_body(
        self, method: str, path: str, headers: list[tuple[str, str]]
    ) -> tuple[int, str, bytes]:
        kept = [(name, value) for name, value in headers if KEPT.fullmatch(name)]
        known = self.gate.is_known(kept)
        most = BODY if known else SMALL
        if int(_header(headers, "content-length") or 0) > most:
            raise _too_long(most)
        if known and not 0 <= int(_header(headers, "content-length") or -1) <= SMALL:
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


def _checked(request: h11.Request) -> tuple[str, list[tuple[str, str]]]:
    """Method and headers of a request that may be passed on."""
    method, path = request.method.decode("ascii"), request.target.decode("latin-1")
    headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers]
    names = [name for name, _ in headers]
    if "content-length" in names and "transfer-encoding" in names:
        raise RefusedError(400, "A request has one length.")
    if (method, path) != ("GET", "/health") and not (method == "POST" and FLEET.fullmatch(path)):
        raise RefusedError(403, "This is for processes of the server's machine.")
    return method, headers


def _header(headers: list[tuple[str, str]], wanted: str) -> str:
    """A header that is there once; empty where it is not."""
    values = [value for name, value in headers if name == wanted]
    return values[0] if len(values) == 1 else ""


def _too_long(most: int) -> RefusedError:
    return RefusedError(413, f"A request of yours has at most {most} bytes.")


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, also where the other end does not."""
    writer.close()
    with suppress(OSError):
        async with asyncio.timeout(LINGER):
            await writer.wait_closed()
    writer.transport.abort()


def _refusal(status: int, sentence: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"detail": sentence}).encode()


def log(text: str) -> None:
    print(f"corefed: {text}", file=sys.stderr, flush=True)


async def serve(server: ServerFolder, link: str) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(server.path / "server.crt", server.path / "server.key")
    own = ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    family = socket.AF_INET6 if ":" in server.bind else socket.AF_INET
    place = (server.bind, server.address.port)
    limits = limits_for(len(server.clients))
    settings: dict[str, Any] = {"base_url": f"https://{link}", "verify": own, "trust_env": False}
    pool = httpx.Limits(max_connections=64, max_keepalive_connections=32, keepalive_expiry=4.0)
    with socket.create_server(place, family=family, backlog=limits.connections) as listener:
        listener.setblocking(False)
        async with httpx.AsyncClient(**settings, limits=pool, timeout=BACKEND) as backend:
            gate = Gate(backend, Replies(server.path), limits)
            task = asyncio.create_task(gate.listen(listener, tls))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, task.cancel)
            log(f"the gate is open at {server.bind}:{server.address.port}")
            while not task.done():
                await asyncio.wait({task}, timeout=WAKE)
            if not task.cancelled():
                task.result()


def main() -> None:
    signals.end_with_parent()
    server = ServerFolder.read(Path(os.environ["COREFED_SERVER"]))
    asyncio.run(serve(server, os.environ["COREFED_LINK"]))


if __name__ == "__main__":
    main()
