"""One task of Flower's, done by the installed corefed and by no other code.

Stock Flower hands every client the bundle (FAB) that was submitted to the server, installs it and
runs what is in it. Here Flower's own programs pull the task, send heartbeats and push the answer,
but what they would install and load is replaced. The bundle is neither written nor imported, and
the app is `corefed.federation.flower.app` of this machine's own installation. So a server can ask a
client only for what `corefed.federation.protocol` has.

`python -m corefed.federation.engine.sandbox` does one task, read from stdin as JSON; `warm.py` does
the same in processes that have imported everything.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from corefed.federation.engine import patches

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

APP = "corefed.federation.flower.app"
STOP_WITHIN, CALL = 2, 5
"""Seconds in which a stopped training notices it; Flower's bound on a heartbeat."""
CLIENT, SERVER = "flwr-clientapp", "flwr-serverapp"  # Flower's names of the kinds of task


class Order(NamedTuple):
    """What SuperExec passes to a task's process."""

    kind: str
    address: str  # of the Runtime API
    token: str
    insecure: bool
    root_certificates: str | None
    parent: int  # SuperExec's process; the task ends when it is gone

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Order:
        return cls(*json.loads(text))


def allowed_kind() -> str:
    """The one kind of task that this process may do: a client's, or the server's."""
    return SERVER if "COREFED_SERVER" in os.environ else CLIENT


def prepare(kind: str) -> None:
    """Import what a task needs, with Flower's installing and loading replaced."""
    program: patches.Program = "client task" if kind == CLIENT else "server task"
    patches.check(program)
    if kind == CLIENT:
        _replace_client_code()
    else:
        _replace_server_code()
    if not patches.is_quick(program):
        return
    patches.shorten_backoff()
    if kind == SERVER:
        patches.replace("supercore.heartbeat", HEARTBEAT_DEFAULT_INTERVAL=STOP_WITHIN + CALL)


def run_task(order: Order) -> NoReturn:
    """Do a task by Flower's own program, and end the process."""
    if order.kind != allowed_kind():
        sys.exit(f"error: a task of kind {order.kind!r} is not done here")
    prepare(order.kind)
    program = patches.flower_program(order.kind)
    # Arguments of this process alone: what others see is the command that it was started by.
    sys.argv = [
        order.kind,
        *("--runtime-api-address", order.address),
        *("--token", order.token),
        *("--parent-pid", str(order.parent)),
        *(["--root-certificates", order.root_certificates] if order.root_certificates else []),
        *(["--insecure"] if order.insecure else []),
    ]
    program()
    sys.exit(0)


def _replace_client_code() -> None:
    def load(*about: object, **more: object) -> Callable[..., ClientApp]:
        return lambda *bundle: import_module(APP).client_app

    patches.replace(
        "supernode.runtime.run_clientapp",
        install_from_fab=_do_nothing,
        get_load_client_app_fn=load,
    )


def _replace_server_code() -> None:
    patches.replace(
        "superlink.runtime.run_serverapp",
        install_from_fab=_do_nothing,
        get_project_dir=_give_our_folder,
    )


def _do_nothing(*arguments: object, **more: object) -> None:
    """Instead of installing a bundle."""


def _give_our_folder(*about: object) -> Path:
    """Instead of the folder of an installed bundle: one that names our app, and has no code."""
    return Path(__file__).parent / "app"


if __name__ == "__main__":
    run_task(Order.from_json(sys.stdin.readline()))
