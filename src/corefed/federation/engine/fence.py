"""SuperLink behind a fence: `python -m corefed.federation.engine.fence <arguments of SuperLink>`.

Flower serves three APIs on one port: the clients' (fleet), that of its own processes (runtime), and
the operator's (control), which has no authentication: whoever reaches it can start and stop runs
and register nodes. What the fence adds, to the server's own process:

    control, runtime, all else    only for processes of this machine (a loopback address)
    a request's body              at most 16 MiB, counted while it is read
    a client's reply              comes from the client it names, and has at most the bytes that the
                                  running training expects (the file message_limit)

Requests through a proxy or tunnel that ends on this machine count as local: do not put one before
the server.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from corefed.federation.engine import patches, signals
from corefed.federation.operate.folder import LIMIT, REFUSED
from corefed.federation.protocol import ENVELOPE

BODY = 16 << 20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
REPLY = 256 << 20
"""Bytes of a reply where no training has set a limit."""
START = "/v1/control/start-run"
"""After which there is a task for the server's own processes."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Fence:
    """The outermost middleware: who may ask for what, and how long a request may be."""

    def __init__(self, app: App, most: int = BODY) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif not (is_public(scope) or is_local(scope.get("client"))):
            await _answer(scope, send, 403, "This is for processes of the server's machine.")
        elif _declared(scope) > self.most:
            await _answer(scope, send, 413, f"A request has at most {self.most} bytes.")
        else:
            await self._counted(scope, receive, send)
            if scope["path"] == START:
                signals.ring()

    async def _counted(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on; one that turns out too long is answered and cut off."""
        read, over = 0, False

        async def counted() -> Message:
            nonlocal read, over
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most and not over:
                over = True
                await _answer(scope, send, 413, f"A request has at most {self.most} bytes.")
            return {"type": "http.disconnect"} if over else message

        async def unless_over(message: Message) -> None:
            if not over:
                await send(message)

        try:
            await self.app(scope, counted, unless_over)
        except Exception:
            if not over:  # otherwise the request has been answered, and Flower saw it cut off
                raise


def is_public(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request is of the clients' API, or asks whether the server is there."""
    path = str(scope["path"])
    return scope["type"] == "http" and (path.startswith("/v1/fleet/") or path == "/health")


def is_local(peer: tuple[str, int] | None) -> bool:
    """Whether the other end of a connection is on this machine."""
    try:
        address = ipaddress.ip_address(peer[0] if peer else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _declared(scope: MutableMapping[str, Any]) -> int:
    """Content-Length; 0 where there is none, since the body is counted too."""
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return max((int(each) for each in lengths if each.isdigit()), default=0)


async def _answer(scope: MutableMapping[str, Any], send: Send, status: int, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    _log(f"{status} to {(scope.get('client') or ['?'])[0]} for {scope['path']!r}")
    body = json.dumps({"detail": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Replies(NamedTuple):
    """Checks on what clients push, after Flower has authenticated them."""

    server: Path
    left: dict[int, int]  # node -> bytes that it may still send
    lock: threading.Lock

    def push_messages(self, original: Any) -> Any:
        from fastapi import HTTPException

        def push(request: Any, state: Any) -> Any:
            node = request.node.node_id
            senders = [message.metadata.src_node_id for message in request.messages_list]
            if senders != [node]:
                self.refuse(state, node, "it sent a reply in another client's name")
                raise HTTPException(403, "A client replies for itself, one reply at a time.")
            response = original(request=request, state=state)
            if response.objects_to_push:
                with self.lock:
                    self.left[node] = self.limit() + ENVELOPE
            return response

        return push

    def push_object(self, original: Any) -> Any:
        from fastapi import HTTPException

        def push(request: Any, state: Any) -> Any:
            node, length = request.node.node_id, len(request.object_content)
            with self.lock:
                left = self.left.setdefault(node, self.limit() + ENVELOPE)
                self.left[node] = left - length
            if length > left:
                if left >= 0:  # logged once per reply
                    reason = f"its message has more than the {self.limit()} bytes allowed"
                    self.refuse(state, node, reason)
                raise HTTPException(413, "The reply is longer than the server expects.")
            return original(request=request, state=state)

        return push

    def limit(self) -> int:
        try:
            return int((self.server / LIMIT).read_text())
        except (OSError, ValueError):
            return REPLY

    def refuse(self, state: Any, node: int, reason: str) -> None:
        known = state.get_node_info(node_ids=[node])
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "client": known[0].name if known else "",
            "node": node,
            "reason": reason,
        }
        with (self.server / REFUSED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        _log(f"{line['client'] or node} refused: {reason}")


def _log(text: str) -> None:
    print(f"corefed: {text}", file=sys.stderr, flush=True)


def main() -> None:
    signals.end_with_parent()
    # Whatever the environment says, no header may claim where a request comes from.
    os.environ["FORWARDED_ALLOW_IPS"] = "127.0.0.1"
    patches.check("superlink")
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    patches.replace("superlink.extensions", get_middleware=lambda: (Middleware(Fence),))
    replies = Replies(Path(os.environ["COREFED_SERVER"]), {}, threading.Lock())
    patches.replace(
        "superlink.servicer.fleet.fleet_handlers",
        push_messages=replies.push_messages(fleet_handlers.push_messages),
        push_object=replies.push_object(fleet_handlers.push_object),
    )
    flower_superlink()


if __name__ == "__main__":
    main()
