"""The gate before SuperLink: what it lets through, how much, how slowly, from how many."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import Message, Metadata, PushObjectRequest
from flwr.proto.node_pb2 import Node

from corefed.federation.engine import gate, replies
from corefed.federation.engine.conversation import BODY, SMALL, Limits
from corefed.federation.engine.gate import Gate
from corefed.federation.engine.replies import PUSH_MESSAGES, PUSH_OBJECT, Replies
from corefed.federation.operate import creating
from corefed.federation.operate.folder import ServerFolder
from corefed.federation.protocol import ENVELOPE

PULL = "/v1/fleet/pull-messages"
WIDE = Limits(50, 50)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerFolder:
    path = tmp_path_factory.mktemp("gate") / "fed"
    creating.create(path, ["alice", "bob"], "127.0.0.1:8000")
    return ServerFolder.read(path)


def key_of(server: ServerFolder, name: str) -> str:
    """As Flower's header has it."""
    (key,) = (key for key, each in server.keys().items() if each == name)
    return base64.b64encode(key).decode()


class Standing(NamedTuple):
    """A gate that stands, and what came through it."""

    port: int
    authority: Path
    gate: Gate
    through: list[httpx.Request]

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        context = ssl.create_default_context(cafile=str(self.authority))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def say(self, *words: bytes) -> bytes:
        """What is answered to these bytes, until the connection is closed or nothing comes."""
        with self.connect() as connection:
            with suppress(OSError):  # it may be closed before all is said
                for each in words:
                    connection.sendall(each)
            return read(connection)

    def ask(self, *words: bytes) -> int:
        return int(self.say(*words).split()[1])


def read(connection: ssl.SSLSocket, seconds: float = 5.0) -> bytes:
    """One answer, or nothing where the connection is closed without one."""
    connection.settimeout(seconds)
    heard = b""
    while b"\r\n\r\n" not in heard:
        piece = connection.recv(1 << 16)
        if not piece:
            return heard
        heard += piece
    head, _, body = heard.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def head(path: str = PULL, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode("latin-1")


@contextmanager
def standing(
    server: ServerFolder,
    limits: Limits = WIDE,
    answer: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(200),
) -> Iterator[Standing]:
    through: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        through.append(request)
        return answer(request)

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(server.path / "server.crt", server.path / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    made: queue.Queue[tuple[Gate, Callable[[], object]]] = queue.Queue()

    async def stand() -> None:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="https://link") as backend:
            one = Gate(backend, Replies(server.path), limits)
            task = asyncio.create_task(one.listen(listener, tls))
            loop = asyncio.get_running_loop()
            made.put((one, lambda: loop.call_soon_threadsafe(task.cancel)))
            await asyncio.wait({task})

    thread = threading.Thread(target=asyncio.run, args=(stand(),))
    thread.start()
    one, stop = made.get()
    try:
        yield Standing(listener.getsockname()[1], server.path / "ca.crt", one, through)
    finally:
        stop()
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def wide(server: ServerFolder) -> Iterator[Standing]:
    """A gate with room for everybody, before a SuperLink that says yes."""
    with standing(server) as one:
        yield one


# What


def test_the_clients_api_comes_through(wide: Standing) -> None:
    wide.through.clear()
    assert wide.ask(head("/health", method="GET")) == 200
    lines = ["content-length: 3", "content-type: application/protobuf", "flwr-signature: s",
             "x-forwarded-for: 127.0.0.1", "forwarded: for=127.0.0.1", "cookie: c",
             "content-encoding: gzip"]  # fmt: skip
    assert wide.ask(head(PULL, *lines), b"abc") == 200
    health, pull = wide.through
    assert (health.method, health.url.path, health.content) == ("GET", "/health", b"")
    assert (pull.method, pull.url.path, pull.content) == ("POST", PULL, b"abc")
    assert pull.headers["content-type"] == "application/protobuf"
    assert pull.headers["flwr-signature"] == "s"
    assert pull.headers["host"] == "link"
    for name in ("x-forwarded-for", "forwarded", "cookie", "content-encoding"):
        assert name not in pull.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in (
            "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet", "/v1/fleet/",
            "//v1/fleet/x", "/V1/fleet/x", "/v1/fleet/../control/start-run", "/v1/fleet/x?y=1",
            "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/x/y", "http://x/v1/fleet/x", "*",
            "/v2/control/start-run", "/health", "/v1/fleet/x;y", "/v1/fleet/\\x",
        )),
        *(("GET", path) for path in ("/docs", "/openapi.json", "/", "/health/x", PULL)),
        ("HEAD", "/health"), ("PUT", PULL), ("CONNECT", "x:1"), ("OPTIONS", PULL),
    ],
)  # fmt: skip
def test_nothing_else_comes_through_whoever_asks(method: str, path: str, wide: Standing) -> None:
    wide.through.clear()
    assert wide.ask(head(path, method=method)) == 403
    assert wide.through == []


def test_a_socket_is_no_way_around(wide: Standing) -> None:
    wide.through.clear()
    upgrade = ["connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13"]
    assert wide.ask(head(PULL, *upgrade, method="GET")) == 403
    assert wide.through == []


INNER = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        ["content-length: 5", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "content-length: 5"],
        ["content-length: 5", "content-length: 6"],
        ["content-length: 5, 6"],
        ["content-length: +5"],
        ["content-length: 0x5"],
        ["content-length: -1"],
        ["transfer-encoding: chunked, identity"],
        ["transfer-encoding: xchunked"],
        ["transfer-encoding : chunked"],
        ["transfer-encoding: chunked", "transfer-encoding: chunked"],
        ["content-length: 5\0"],
    ],
)
def test_a_request_has_one_length(lines: list[str], wide: Standing) -> None:
    """Two that read a request differently would take a part of its body for another request."""
    wide.through.clear()
    answer = wide.say(head(PULL, *lines) + b"0\r\n\r\n" + INNER)
    assert answer.split()[1] in (b"400", b"501")
    assert b"connection: close" in answer.lower()
    assert wide.through == []


def test_what_follows_a_request_is_a_request_of_its_own(wide: Standing) -> None:
    """And is checked as such; a body that looks like one stays a body."""
    wide.through.clear()
    chunk = f"{len(INNER):x}\r\n".encode() + INNER + b"\r\n0\r\n\r\n"
    with wide.connect() as connection:
        connection.sendall(head(PULL, "transfer-encoding: chunked") + chunk + INNER)
        assert read(connection).split()[1] == b"200"
        assert read(connection).split()[1] == b"403"
    (request,) = wide.through
    assert request.content == INNER
    assert request.headers["content-length"] == str(len(INNER))
    assert "transfer-encoding" not in request.headers


def test_bytes_that_are_no_text_go_through_as_they_are(wide: Standing) -> None:
    wide.through.clear()
    assert wide.ask(head(PULL, "flwr-signature: \xff\xfe")) == 200
    assert (b"flwr-signature", b"\xff\xfe") in wide.through[0].headers.raw


def test_nobody_shows_two_keys(wide: Standing) -> None:
    wide.through.clear()
    assert wide.ask(head(PULL, "flwr-public-key: a", "Flwr-Public-Key: b")) == 400
    assert wide.through == []


def test_a_connection_can_be_used_again(wide: Standing) -> None:
    with wide.connect() as connection:
        for _ in range(3):
            connection.sendall(head(PULL, "content-length: 2") + b"ab")
            assert read(connection).split()[1] == b"200"


def test_a_port_that_is_taken_is_named(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COREFED_SERVER", str(server.path))
    monkeypatch.setenv("COREFED_LINK", "127.0.0.1:1")
    monkeypatch.setattr(gate.signals, "end_with_parent", lambda: None)
    monkeypatch.setattr(gate, "_allow_files", lambda: 1024)
    taken = pytest.raises(SystemExit, match=r"cannot listen on 127.0.0.1:8000: Address already")
    monkeypatch.setattr(socket, "create_server", refuse)
    with taken:
        gate.main()


def refuse(*arguments: object, **more: object) -> socket.socket:
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


# How much


def test_bodies_are_bounded_by_what_they_say_and_by_what_they_are(
    server: ServerFolder, wide: Standing
) -> None:
    wide.through.clear()
    key = f"flwr-public-key: {key_of(server, 'alice')}"
    other = f"flwr-public-key: {base64.b64encode(b'another').decode()}"
    chunked, piece = "transfer-encoding: chunked", b"x" * SMALL
    small = f"{SMALL:x}\r\n".encode() + piece + b"\r\n"

    assert wide.ask(head(PULL, f"content-length: {SMALL}"), piece) == 200
    assert wide.ask(head(PULL, f"content-length: {SMALL + 1}")) == 413
    assert wide.ask(head(PULL, other, f"content-length: {SMALL + 1}")) == 413
    assert wide.ask(head(PULL, chunked), small, b"1\r\nx\r\n") == 413
    assert len(wide.through) == 1

    assert wide.ask(head(PULL, key, f"content-length: {BODY}"), bytes(BODY)) == 200
    assert wide.ask(head(PULL, key, f"content-length: {BODY + 1}")) == 413
    assert wide.ask(head(PULL, key, chunked), small, b"1\r\nx\r\n0\r\n\r\n") == 200
    assert [len(each.content) for each in wide.through] == [SMALL, BODY, SMALL + 1]


def test_who_waits_to_be_asked_for_a_body_is_asked_unless_it_is_refused(wide: Standing) -> None:
    waiting = "expect: 100-continue"
    with wide.connect() as connection:
        connection.sendall(head(PULL, waiting, "content-length: 2"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"ab")
        assert read(connection).split()[1] == b"200"
    assert wide.ask(head(PULL, waiting, f"content-length: {SMALL + 1}")) == 413


def test_a_head_is_bounded(wide: Standing) -> None:
    assert wide.ask(head(PULL, *(f"x-{i}: {'y' * 100}" for i in range(2000)))) == 431


# How long, how many


def test_slow_requests_are_given_up(server: ServerFolder) -> None:
    """Byte by byte, so that each of them comes in time and the whole does not."""
    quick = Limits(50, 50, handshake=0.3, head=0.3, idle=0.2, body=0.3, rate=1 << 20)
    with standing(server, quick) as one:
        for start, rest in (
            (b"", head(PULL, "content-length: 0")),
            (head(PULL, "content-length: 99"), b"x" * 99),
            (head(PULL, "transfer-encoding: chunked"), b"1\r\nx\r\n" * 99),
        ):
            with one.connect() as connection:
                connection.sendall(start)
                began = time.monotonic()
                with suppress(OSError):  # it is closed
                    for byte in rest * 9:
                        connection.sendall(bytes([byte]))
                        time.sleep(0.02)
                assert time.monotonic() - began < 5
        with one.connect() as idle:  # says nothing, and is told nothing
            assert read(idle) == b""
        with one.connect() as idle:
            idle.sendall(head(PULL, "content-length: 0"))
            assert read(idle).split()[1] == b"200"
            assert read(idle) == b""
        assert [request.content for request in one.through] == [b""]


def test_a_slow_request_is_told_so(server: ServerFolder) -> None:
    with standing(server, Limits(50, 50, head=0.3, body=0.3)) as one:
        assert one.ask(head(PULL)[:-2]) == 408
        assert one.ask(head(PULL, "content-length: 9"), b"x") == 408


def test_connections_are_counted_from_their_first_moment(server: ServerFolder) -> None:
    """Also those that never begin to speak TLS; each that ends makes room for another."""
    with standing(server, Limits(50, 2, handshake=1.0)) as one:
        silent = [socket.create_connection(("127.0.0.1", one.port), timeout=10) for _ in range(2)]
        time.sleep(0.2)
        with pytest.raises(OSError):  # noqa: PT011
            one.connect()
        for each in silent:
            assert each.recv(1) == b""  # the handshake took too long
            each.close()
        until = time.monotonic() + 5
        while one.gate.open.total() and time.monotonic() < until:
            time.sleep(0.02)
        assert one.ask(head(PULL)) == 200
    with standing(server, Limits(1, 50)) as one, one.connect(), pytest.raises(OSError):  # noqa: PT011
        one.connect()


def test_room_for_all_clients_at_one_address() -> None:
    few, many = gate.limits_for(3), gate.limits_for(100)
    assert few.per_address >= 3 * 10 and many.per_address >= 100 * 10
    assert few.connections > few.per_address
    assert gate.limits_for(100, 1024).connections <= 1024 - gate.OWN_FILES


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("10.0.0.1", "10.0.0.2", False), ("::ffff:10.0.0.1", "10.0.0.1", True),
     ("2001:db8::1", "2001:db8::ffff:2", True), ("2001:db8::1", "2001:db8:0:1::1", False),
     ("fe80::1%eth0", "fe80::2", True)],
)  # fmt: skip
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (gate.neighbourhood(one) == gate.neighbourhood(other)) == same


def test_plain_http_and_other_authorities_get_no_answer(wide: Standing) -> None:
    with socket.create_connection(("127.0.0.1", wide.port), timeout=10) as plain:
        plain.sendall(head("/health", method="GET"))
        assert plain.recv(100)[:5] != b"HTTP/"
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(
            socket.create_connection(("127.0.0.1", wide.port)), server_hostname="127.0.0.1"
        )


# What SuperLink says


@pytest.mark.parametrize(
    ("path", "said", "heard"),
    [(PULL, 500, 503), (PULL, 502, 503), ("/v1/fleet/send-node-heartbeat", 500, 503),
     (PULL, 401, 401), (PULL, 412, 412), (PUSH_OBJECT, 409, 409)],
)  # fmt: skip
def test_a_failure_of_the_server_makes_clients_ask_again(
    path: str, said: int, heard: int, server: ServerFolder
) -> None:
    with standing(server, answer=lambda request: httpx.Response(said, json={"x": 1})) as one:
        answer = one.say(head(path))
        assert int(answer.split()[1]) == heard


def test_a_server_that_is_away_makes_clients_ask_again(server: ServerFolder) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with standing(server, answer=away) as one:
        assert one.ask(head(PULL)) == 503


# Replies


def reply(node: int, *senders: int) -> bytes:
    messages = [Message(metadata=Metadata(src_node_id=each)) for each in senders]
    return PushMessagesRequest(node=Node(node_id=node), messages_list=messages).SerializeToString()


def piece(session: str, length: int) -> bytes:
    request = PushObjectRequest(session_id=session, object_content=bytes(length))
    return request.SerializeToString()


class Pushed:
    """Requests to `Replies`, as the gate passes them on."""

    def __init__(self, server: ServerFolder) -> None:
        self.server = server
        self.replies = Replies(server.path)

    def reply(self, name: str, session: str, status: int = 200) -> int:
        checked = self.replies.check(PUSH_MESSAGES, key_of(self.server, name), reply(7, 7))
        assert not isinstance(checked, tuple)
        answer = PushMessagesResponse(session_id=session).SerializeToString()
        checked(status, answer if status == 200 else b"refused")
        return status

    def piece(self, name: str, session: str, length: int, status: int = 200) -> int:
        body = piece(session, length)
        checked = self.replies.check(PUSH_OBJECT, key_of(self.server, name), body)
        if isinstance(checked, tuple):
            return checked[0]
        checked(status, b"")
        return status


@pytest.fixture
def pushed(server: ServerFolder) -> Pushed:
    server.bound_messages(1000)
    return Pushed(server)


@pytest.mark.parametrize("senders", [(8,), (7, 7), (), (0,)])
def test_a_reply_comes_from_the_client_that_it_names(
    senders: tuple[int, ...], pushed: Pushed, server: ServerFolder
) -> None:
    key = key_of(server, "alice")
    refused = pushed.replies.check(PUSH_MESSAGES, key, reply(7, *senders))
    assert isinstance(refused, tuple)
    assert refused[0] == 403
    assert server.turned_away("alice") == ""  # nobody has checked yet that it was she


def test_the_gate_asks_about_replies(server: ServerFolder) -> None:
    with standing(server) as one:
        for body, status in ((reply(7, 8), 403), (b"\xff\xff", 400)):
            assert one.ask(head(PUSH_MESSAGES, f"content-length: {len(body)}"), body) == status
        body = piece("nobody's", 3)
        assert one.ask(head(PUSH_OBJECT, f"content-length: {len(body)}"), body) == 409
        assert one.through == []
        body = reply(7, 7)
        assert one.ask(head(PUSH_MESSAGES, f"content-length: {len(body)}"), body) == 200


def test_a_reply_has_the_length_that_is_expected(pushed: Pushed, server: ServerFolder) -> None:
    whole = 1000 + ENVELOPE
    pushed.reply("alice", "a")
    pushed.reply("bob", "b")
    assert pushed.piece("alice", "a", whole - 1) == 200
    assert pushed.piece("bob", "b", whole) == 200  # each has its own
    for _ in range(2):
        assert pushed.piece("alice", "a", 2) == 413
    assert server.turned_away("alice") == "its message has more than the 1000 bytes allowed"
    assert server.turned_away("bob") == ""
    assert len((server.path / "refused.jsonl").read_text().splitlines()) == 1


def test_what_was_not_stored_is_not_charged(pushed: Pushed) -> None:
    """SuperLink may fail, and a stranger may use a client's public key without its private one."""
    whole = 1000 + ENVELOPE
    pushed.reply("alice", "a")
    for status in (401, 500, 503):
        assert pushed.piece("alice", "a", whole, status) == status
    assert pushed.piece("alice", "a", whole) == 200
    pushed.reply("alice", "refused", 401)
    assert pushed.piece("alice", "refused", 1) == 409


def test_pieces_belong_to_a_reply_that_was_announced_by_the_same_client(pushed: Pushed) -> None:
    pushed.reply("alice", "a")
    assert pushed.piece("bob", "a", 1) == 409
    assert pushed.piece("alice", "another", 1) == 409
    assert pushed.piece("alice", "", 1) == 409


def test_many_replies_are_no_way_around(pushed: Pushed, server: ServerFolder) -> None:
    """A message whose pieces come in several sessions, or replies without end."""
    whole = 1000 + ENVELOPE
    for i in range(replies.AGAIN):
        pushed.reply("alice", str(i))
        assert pushed.piece("alice", str(i), whole) == 200
    pushed.reply("alice", "more")
    assert pushed.piece("alice", "more", 1) == 413
    time.sleep(0.01)
    server.bound_messages(1000)  # the training asks again
    pushed.reply("alice", "next")
    assert pushed.piece("alice", "next", whole) == 200


def test_sessions_are_forgotten_in_the_end(pushed: Pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "SESSIONS", 2)
    for session in "abc":
        pushed.reply("alice", session)
    assert list(pushed.replies.sessions) == ["b", "c"]


def test_refusals_are_told_with_names(server: ServerFolder) -> None:
    """What the gate writes is what the training reads, by client, since its last question."""
    lines: list[dict[str, Any]] = [
        {"client": "alice", "reason": "one"}, {"client": "bob", "reason": "two"},
    ]  # fmt: skip
    (server.path / "refused.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert (server.turned_away("alice"), server.turned_away("bob")) == ("one", "two")
    server.bound_messages(12345)
    assert (server.path / "message_limit").read_text() == "12345"
    assert server.turned_away("bob") == ""
