"""One task of Flower's, done by the installed corefed and by no other code.

Stock Flower hands every client the bundle (FAB) that was submitted to the server, installs it and
runs what is in it. Here Flower's own runners pull the task, send heartbeats and push the answer,
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
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from corefed.federation.engine import patches

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

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
    patches.check("client task" if kind == CLIENT else "server task")
    patches.shorten_backoff()
    if kind == CLIENT:
        _replace_client_code()
    else:
        _replace_server_code()


def run_task(order: Order) -> NoReturn:
    """Do a task and end the process."""
    if order.kind != allowed_kind():
        sys.exit(f"error: a task of kind {order.kind!r} is not done here")
    prepare(order.kind)
    certificates = order.root_certificates and Path(order.root_certificates).read_bytes()
    common: dict[str, Any] = {
        "runtime_api_address": order.address,
        "token": order.token,
        "insecure": order.insecure,
        "certificates": certificates or None,
        "parent_pid": order.parent,
        "runtime_dependency_install": False,
    }
    if order.kind == CLIENT:
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        run_clientapp(**common)
    else:
        from queue import Queue

        from flwr.superlink.runtime.run_serverapp import run_serverapp

        run_serverapp(log_queue=Queue(), **common)
    sys.exit(0)


def _replace_client_code() -> None:
    def load(*about: object, **more: object) -> Callable[..., ClientApp]:
        return lambda *bundle: import_module(APP).client_app

    patches.replace(
        "supernode.runtime.run_clientapp",
        install_from_fab=_do_nothing,
        get_project_dir=_give_no_folder,
        install_app_dependencies=_do_nothing,
        get_load_client_app_fn=load,
    )


def _replace_server_code() -> None:
    components = {"components": {"serverapp": f"{APP}:server_app"}}

    def config(folder: object, override: Mapping[str, Any]) -> dict[str, Any]:
        return dict(override)  # what `flwr run --run-config` said, without the bundle's own

    def run(*, grid: Grid, context: Context, **bundle: object) -> Context:
        import_module(APP).server_app(grid=grid, context=context)
        return context

    patches.replace("supercore.heartbeat", HEARTBEAT_DEFAULT_INTERVAL=STOP_WITHIN + CALL)
    patches.replace(
        "superlink.runtime.run_serverapp",
        install_from_fab=_do_nothing,
        get_fab_metadata=lambda bundle: ("corefed/corefed", "0"),
        get_project_dir=_give_no_folder,
        install_app_dependencies=_do_nothing,
        get_project_config=lambda folder: {"tool": {"flwr": {"app": components}}},
        get_fused_config_from_dir=config,
        run_=run,
        # The server keeps its own log; copying it to Flower's database would delay the end.
        start_log_uploader=_do_nothing,
    )


def _do_nothing(*arguments: object, **more: object) -> None:
    """Instead of installing a bundle."""


def _give_no_folder(*about: object) -> Path:
    """Instead of the folder of an installed bundle."""
    return Path(os.devnull)


if __name__ == "__main__":
    run_task(Order.from_json(sys.stdin.readline()))
