"""Every private name of Flower that we replace, and why. Flower has no settings for these.

Each program calls `check` at start, before it replaces anything. A Flower of another version, or
without one of the program's names, stops the program. Going on without the change would run code
that a server sent, or leave the control API open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, NoReturn

VERSION = "1.41"
"""Of Flower, as checked; a newer one may keep the names and use them differently."""

Program = Literal["superlink", "supernode", "superexec", "client task", "server task"]

BACKOFF = {
    "supercore.inflatable.inflatable_utils": {
        "pull_objects": "speed: asks for the missing parts of a message after 0.05 s, not 1 s",
        "pull_and_inflate_object_from_tree": "the same",
    },
}
"""Functions whose default is changed in place, for all their callers."""

PATCHES: dict[Program, dict[str, dict[str, str]]] = {
    "superlink": {
        "superlink.extensions": {
            "get_middleware": "security: puts the fence before all of its APIs",
        },
        "superlink.servicer.fleet.fleet_handlers": {
            "push_messages": "security: a client replies in its own name only",
            "push_object": "security: a reply has at most the bytes that the training expects",
        },
    },
    "supernode": {
        **BACKOFF,
        "supercore.heartbeat": {
            "HEARTBEAT_DEFAULT_INTERVAL": "the interval that the client's owner chose",
        },
        "supernode.fleet_http_connection": {
            "HEARTBEAT_DEFAULT_INTERVAL": "the same; imported there by value",
        },
        "supercore.retry.http_retry": {
            "MAX_RETRY_DELAY": "speed: finds a restarted server within 5 s",
        },
        "supernode.start_client_internal": {
            "time": "speed: asks often within a round, seldom between runs",
            "http_request_response": "after kill -9: ends the last session before a new one",
            "_pull_and_store_message": "remembers which message is to be answered",
            "_push_messages": "waits until that message is answered",
        },
    },
    "superexec": {
        "supercore.superexec.run_superexec": {
            "get_executor": "speed: tasks are forked, not started",
            "time": "speed: asks for a task when there is one",
        },
    },
    "client task": {
        **BACKOFF,
        "supernode.runtime.run_clientapp": {
            "install_from_fab": "security: code that was sent is not written",
            "get_project_dir": "security: nor looked for",
            "install_app_dependencies": "security: nor what it asks to install",
            "get_load_client_app_fn": "security: the installed corefed is run in its place",
        },
    },
    "server task": {
        **BACKOFF,
        "supercore.heartbeat": {
            "HEARTBEAT_DEFAULT_INTERVAL": "speed: a training that was stopped notices it",
        },
        "superlink.runtime.run_serverapp": {
            "install_from_fab": "security: code that was sent is not written",
            "get_fab_metadata": "security: nor read",
            "get_project_dir": "security: nor looked for",
            "install_app_dependencies": "security: nor what it asks to install",
            "get_project_config": "security: names the installed corefed in its place",
            "get_fused_config_from_dir": "security: takes only what the operator set",
            "run_": "security: runs the installed corefed",
            "start_log_uploader": "speed: the log is the server's own, and needs no copy",
        },
        "superlink.grid.http_grid": {
            "pull_objects": "security: gives up a message that is too long before it is in memory",
        },
    },
}
"""Program -> module of flwr -> name -> why."""


def check(program: Program) -> None:
    """Stop if Flower has another version, or lacks a name that the program replaces."""
    from flwr import __version__

    if not __version__.startswith(f"{VERSION}."):
        _refuse(f"this is {__version__}")
    for module, names in PATCHES[program].items():
        try:
            there = import_module(f"flwr.{module}")
        except ImportError:
            _refuse(f"it has no flwr.{module}")
        for name in names:
            if not hasattr(there, name):
                _refuse(f"it has no flwr.{module}.{name}")


def replace(module: str, **ours: object) -> None:
    """Replace names of a module of flwr by `ours`; all must be listed in `PATCHES`."""
    listed = {name for each in PATCHES.values() for name in each.get(module, ())}
    if not ours.keys() <= listed:
        raise KeyError(f"{ours.keys() - listed} of {module} are not in the table of patches")
    there = import_module(f"flwr.{module}")
    for name, value in ours.items():
        setattr(there, name, value)


def shorten_backoff(seconds: float = 0.05) -> None:
    """Look sooner for the missing parts of a message; Flower waits a second."""
    for module, names in BACKOFF.items():
        for name in names:
            set_default(getattr(import_module(f"flwr.{module}"), name), initial_backoff=seconds)


def set_default(function: Callable[..., Any], **ours: object) -> None:
    """Change the defaults of a function's keywords."""
    defaults = function.__kwdefaults__ or {}
    for name, value in ours.items():
        if name not in defaults:
            _refuse(f"its {function.__qualname__} takes no {name}")
        defaults[name] = value


def _refuse(reason: str) -> NoReturn:
    sys.exit(f"error: corefed runs on flwr {VERSION}, and {reason}; pip install 'corefed[flower]'")
