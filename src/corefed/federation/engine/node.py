"""SuperNode, quicker: `python -m corefed.federation.engine.node <its arguments>`.

On a Flower for which `patches.COMFORT` is written, and otherwise as it is:

    polling     Flower asks for a message every 3 s; here it waits a tenth of the time since the
                last one, between 0.2 and 3 s: often in a round, seldom between runs. It rings
                (`signals.py`) for the process that does the task
    heartbeats  the client's own interval; the server counts it as gone after twice as long
    retrying    a server that was restarted is found again within 5 s, not 20
    answering   Flower takes any answer it finds as that to the last message. An answer that a
                stopped run left would be sent instead, and every later one a message late. Here
                the next message is taken only when the last one has been answered
    rejoining   after kill -9 Flower refuses a client until its old session expires; here the
                client first ends the session that its own folder recorded
    admission   a client that is refused ends; here it keeps asking for some seconds, since a
                server that was just started may be about to register the client's key

All else is Flower's.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corefed.base import files
from corefed.federation.engine import patches, signals

SESSION = "flower/session.json"
QUICK, SLOW = 0.2, 3.0
RETRY = 5
"""Seconds between attempts to reach a server that does not answer, at most."""
UNSEEN = 2.0
"""Seconds between signing off and on, in which the server sees that the old session is gone."""
REFUSED = 412
"""What Flower answers to a key that it does not know, or believes to be connected."""
SOON, AGAIN = 5.0, 0.5
"""Seconds for which a client that is refused asks again, and between the questions."""


class PollInterval:
    """How long to wait for a message. Replaces `time` in SuperNode's loop, which only sleeps."""

    def __init__(self) -> None:
        self.message = time.monotonic()

    def sleep(self, seconds: float) -> None:
        idle = time.monotonic() - self.message
        if seconds < SLOW:  # a task is being done; Flower looks every half second for its answer
            self.message = time.monotonic()
            time.sleep(seconds / 5)
        else:
            time.sleep(min(SLOW, max(QUICK, idle / 10)))


class OneAnswerPerMessage:
    """Flower's pull and push of a message; the push ends only when this message is answered."""

    def __init__(self, module: Any) -> None:
        self._pull, self._push = module._pull_and_store_message, module._push_messages
        self.asked = ""

    def pull(self, *, receive: Any, **rest: Any) -> int | None:
        def noted() -> Any:
            received = receive()
            if received is not None:
                self.asked = received[0].metadata.message_id
            return received

        run: int | None = self._pull(receive=noted, **rest)
        if run is not None:
            signals.ring()
        return run

    def push(self, *, send: Any, **rest: Any) -> None:
        answered: set[str] = set()

        def noted(message: Any, *more: Any) -> Any:
            answered.add(message.metadata.reply_to_message_id)
            return send(message, *more)

        while self.asked not in answered:
            self._push(send=noted, **rest)


def main() -> None:
    signals.end_with_parent()
    patches.check("supernode")
    program = patches.flower_program("flower-supernode")
    if patches.is_quick("supernode"):
        _quicken()
    program()


def _quicken() -> None:
    patches.shorten_backoff()
    from flwr.supernode import fleet_http_connection, start_client_internal

    interval = int(os.environ["COREFED_HEARTBEAT"])
    for module in ("supercore.heartbeat", "supernode.fleet_http_connection"):
        patches.replace(module, HEARTBEAT_DEFAULT_INTERVAL=interval)
    patches.replace("supercore.retry.http_retry", MAX_RETRY_DELAY=RETRY)
    answers = OneAnswerPerMessage(start_client_internal)
    session = Path(os.environ["COREFED_CLIENT"]) / SESSION
    patches.replace(
        "supernode.start_client_internal",
        time=SimpleNamespace(sleep=PollInterval().sleep),
        http_request_response=_rejoin(fleet_http_connection, session),
        _pull_and_store_message=answers.pull,
        _push_messages=answers.push,
    )


def _rejoin(module: Any, session: Path) -> Any:
    """Flower's connection, after ending the session that the folder recorded."""
    original = module.http_request_response

    @contextmanager
    def connection(address: str, *rest: Any) -> Iterator[Any]:
        insecure, root_certificates, keys = rest[:3]
        client = module.FleetHttpClient.from_server_address(
            address,
            insecure,
            root_certificates,
            interceptors=[
                module.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                module.NodeAuthHttpInterceptor(*keys),
            ],
        )
        with client:
            _sign_off(module, client, session)
        with ExitStack() as stack:
            connected = _enter(module, stack, lambda: original(address, *rest))
            about = {"node": connected[0], "machine": platform.node()}
            files.replace(session, json.dumps(about).encode(), 0o600)
            yield connected

    return connection


def _enter(
    module: Any, stack: ExitStack, connect: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Enter Flower's connection; where it is refused, ask again for some seconds."""
    until = time.monotonic() + SOON
    while True:
        try:
            return stack.enter_context(connect())
        except module.httpx.HTTPStatusError as error:
            if error.response.status_code != REFUSED or time.monotonic() >= until:
                raise
        time.sleep(AGAIN)


def _sign_off(module: Any, client: Any, session: Path) -> None:
    """End the last session, if it was on this machine."""
    try:
        about = json.loads(session.read_bytes())
    except (OSError, ValueError):
        return
    if about.get("machine") != platform.node():
        return  # a copy of the folder; the original may be connected
    with suppress(module.httpx.HTTPError):
        client.DeactivateNode(module.DeactivateNodeRequest(node_id=about["node"]))
        time.sleep(UNSEEN)


if __name__ == "__main__":
    main()
