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
import ipaddress
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import httpx

from corefed.base.errors import UserError
from corefed.federation.engine import signals
from corefed.federation.engine.conversation import (
    LINGER,
    PIECE,
    Conversation,
    Headers,
    Limits,
    RefusedError,
    header,
    log,
)
from corefed.federation.engine.replies import PUSH_MESSAGES, PUSH_OBJECT, Replies, decode
from corefed.federation.operate.folder import ServerFolder

LARGE = 8
"""How many requests of clients may have a large body at the same time."""
KEY, KEYS = "flwr-public-key", 2.0
"""Flower's header that names a client, and the seconds between looks at the clients' keys."""
WAKE = 5.0
"""Seconds after which the gate wakes up by itself, so that one can see that it is alive."""
BACKEND = 60.0
"""Seconds in which SuperLink has to answer."""
FILES, OWN_FILES = 1 << 20, 128
"""Files where the system sets no limit, and those for the gate itself, SuperLink's among them."""


def limits_for(clients: int, files: int = FILES) -> Limits:
    """A client has about ten connections, and all of them may share one address.

    Each takes one of the files that the process may open, of which it needs some for itself.
    """
    of_one = min(32 * (1 + clients), max(16, (files - OWN_FILES) // 2))
    return Limits(2 * of_one, of_one)


def neighbourhood(address: str) -> str:
    """What counts as one address: of IPv6 a network of 64 bits, which is what one person has."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or ipaddress.IPv6Network((known, 64), strict=False))


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
            address = neighbourhood(str(peer[0]))
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

    def is_known(self, headers: Headers) -> bool:
        """Whether a request shows the key of a client; SuperLink checks that it has it."""
        if time.monotonic() > self.looked + KEYS:
            with suppress(UserError):
                self.keys = frozenset(ServerFolder.read(self.replies.server).keys())
            self.looked = time.monotonic()
        return decode(header(headers, KEY)) in self.keys

    async def forward(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> tuple[int, str, bytes]:
        """SuperLink's status, type of content and answer."""
        checked = self.replies.check(path, header(headers, KEY), body)
        if isinstance(checked, tuple):
            raise RefusedError(*checked)
        try:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            answer = await self.backend.request(method, path, headers=raw, content=body)
        except httpx.HTTPError as error:
            checked(503, b"")
            reason = f"SuperLink does not answer ({type(error).__name__})."
            raise RefusedError(503, reason) from error
        checked(answer.status_code, answer.content)
        status = answer.status_code
        if status >= 500 and path not in (PUSH_MESSAGES, PUSH_OBJECT):
            status = 503
        return status, answer.headers.get("content-type", "application/json"), answer.content


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, also where the other end does not."""
    writer.close()
    with suppress(OSError):
        async with asyncio.timeout(LINGER):
            await writer.wait_closed()
    writer.transport.abort()


def _allow_files() -> int:
    """Open as many files as the system lets this user; how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def serve(server: ServerFolder, link: str) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(server.path / "server.crt", server.path / "server.key")
    own = ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    family = socket.AF_INET6 if ":" in server.bind else socket.AF_INET
    place = (server.bind, server.address.port)
    limits = limits_for(len(server.clients), _allow_files())
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
    try:
        asyncio.run(serve(server, os.environ["COREFED_LINK"]))
    except OSError as error:
        place = f"{server.bind}:{server.address.port}"
        sys.exit(f"error: the gate cannot listen on {place}: {error.strerror or error}")


if __name__ == "__main__":
    main()
