"""Every private name of Flower that we replace, and why. Flower has no settings for these.

    SECURITY   what must hold: six names. A Flower of a version that was not tested, or without one
               of the names, stops the program; going on would run code that a server sent
    COMFORT    what makes a federation quicker, or lets it recover sooner. Where Flower has another
               version they stay as they are, and the program says so in one line

All else is done by Flower's own flags, by its programs under their public names, and by a gate of
our own before the server (`gate.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, NoReturn

VERSIONS = ("1.40", "1.41", "1.42")
"""Of Flower, as tested; a newer one may keep the names and use them differently."""
QUICK = VERSIONS
"""Those among them in which the names of COMFORT mean what is written there: all, today."""

Program = Literal["superlink", "supernode", "superexec", "client task", "server task"]
Table = dict[Program, dict[str, dict[str, str]]]  # program -> module of flwr -> name -> why

SECURITY: Table = {
    "superexec": {
        "supercore.superexec.run_superexec": {
            "get_executor": "a task's token stays off command lines, which all users can read",
        },
    },
    "client task": {
        "supernode.runtime.run_clientapp": {
            "install_from_fab": "code that was sent is not written",
            "get_load_client_app_fn": "nor loaded: the installed corefed is run in its place",
        },
    },
    "server task": {
        "superlink.runtime.run_serverapp": {
            "install_from_fab": "code that was submitted is not written",
            "get_project_dir": "nor loaded: names the installed corefed in its place",
        },
        "superlink.grid.http_grid": {
            "pull_objects": "a message that is too long is given up before it is in memory",
        },
    },
}

BACKOFF = {
    "supercore.inflatable.inflatable_utils": {
        "pull_objects": "asks for the missing parts of a message after 0.05 s, not 1 s",
        "pull_and_inflate_object_from_tree": "the same",
    },
}
"""Functions whose default is changed in place, for all their callers."""

COMFORT: Table = {
    "supernode": {
        **BACKOFF,
        "supercore.heartbeat": {
            "HEARTBEAT_DEFAULT_INTERVAL": "the interval that the client's owner chose",
        },
        "supernode.fleet_http_connection": {
            "HEARTBEAT_DEFAULT_INTERVAL": "the same; imported there by value",
        },
        "supercore.retry.http_retry": {
            "MAX_RETRY_DELAY": "finds a restarted server within 5 s",
        },
        "supernode.start_client_internal": {
            "time": "asks often within a round, seldom between runs",
            "http_request_response": "after kill -9: ends the last session before a new one",
            "_pull_and_store_message": "remembers which message is to be answered",
            "_push_messages": "waits until that message is answered",
        },
    },
    "superexec": {
        "supercore.superexec.run_superexec": {
            "time": "asks for a task when there is one",
        },
    },
    "client task": {**BACKOFF},
    "server task": {
        **BACKOFF,
        "supercore.heartbeat": {
            "HEARTBEAT_DEFAULT_INTERVAL": "a training that was stopped notices it within 2 s",
        },
    },
}


def check(program: Program) -> None:
    """Stop if Flower has another version, or lacks a name that the program must replace."""
    version = _version()
    if not version.startswith(tuple(f"{each}." for each in VERSIONS)):
        _refuse(f"this is {version}")
    missing = _missing(SECURITY.get(program, {}))
    if missing:
        _refuse(f"it has no {missing}")


@cache
def is_quick(program: Program) -> bool:
    """Whether the names of COMFORT can be replaced; a line where they cannot."""
    version = _version()
    reason = "" if version.startswith(tuple(f"{each}." for each in QUICK)) else f"flwr {version}"
    missing = _missing(COMFORT[program])
    reason = reason or (f"a flwr without {missing}" if missing else "")
    if reason:
        print(f"corefed: {program} runs at Flower's own pace on {reason}", file=sys.stderr)
    return not reason


def replace(module: str, **ours: object) -> None:
    """Replace names of a module of flwr by `ours`; all must be listed in a table."""
    tables = (*SECURITY.values(), *COMFORT.values())
    listed = {name for each in tables for name in each.get(module, ())}
    if not ours.keys() <= listed:
        raise KeyError(f"{ours.keys() - listed} of {module} are not in the table of patches")
    there = import_module(f"flwr.{module}")
    for name, value in ours.items():
        setattr(there, name, value)


def shorten_backoff(seconds: float = 0.05) -> None:
    """Look sooner for the missing parts of a message; Flower waits a second."""
    for module, names in BACKOFF.items():
        for name in names:
            defaults = getattr(import_module(f"flwr.{module}"), name).__kwdefaults__ or {}
            if "initial_backoff" in defaults:
                defaults["initial_backoff"] = seconds


def flower_program(name: str) -> Callable[[], object]:
    """A program of Flower's by the name that one would type."""
    (found,) = entry_points(group="console_scripts", name=name)
    program: Callable[[], object] = found.load()
    return program


def _missing(table: dict[str, dict[str, str]]) -> str:
    """The first of a table's names that Flower does not have."""
    for module, names in table.items():
        try:
            there: Any = import_module(f"flwr.{module}")
        except ImportError:
            return f"flwr.{module}"
        for name in names:
            if not hasattr(there, name):
                return f"flwr.{module}.{name}"
    return ""


def _version() -> str:
    from flwr import __version__

    return str(__version__)


def _refuse(reason: str) -> NoReturn:
    first, last = VERSIONS[0], VERSIONS[-1]
    sys.exit(
        f"error: corefed runs on flwr {first} to {last}, and {reason}; "
        "in a checkout, pip install -e '.[flower]'"
    )
