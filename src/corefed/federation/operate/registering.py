"""Who may take part: the public keys in server/clients/, made known to Flower.

A key that is new there is registered with Flower. One that is gone stays registered, but is no
client any more: the server gives it no tasks (`folder.Server.keys`). `remove` takes it off for
good, for Flower never admits a key again that was taken off.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from corefed.errors import UserError
from corefed.federation.operate import processes
from corefed.federation.operate.folder import Server

REMOVED = "unregistered"


class Node(NamedTuple):
    """A key that Flower knows."""

    number: str
    status: str  # registered (and never seen), online, offline or unregistered


def digests(server: Server) -> dict[str, str]:
    """Name -> digest of its public key: what is compared to see that something changed."""
    return {name: _digest(path) for name, path in server.public_keys().items()}


def nodes(server: Server) -> dict[bytes, Node]:
    """Public key -> what Flower says about it."""
    done = subprocess.run(
        [sys.executable, "-m", "corefed.federation.operate.nodes"],
        env=processes.server_environment(server),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"Flower does not say which clients it knows: {last}")
    rows = json.loads(done.stdout.splitlines()[-1])  # Flower speaks before
    return {row["key"].encode(): Node(row["node"], row["status"]) for row in rows}


def synchronise(server: Server) -> list[str]:
    """Register the keys that are new; what was done, in sentences."""
    found, done = nodes(server), []
    for key, name in server.keys().items():
        path = server.path / "clients" / f"{name}.pub"
        if key not in found:
            link = (processes.LINK, "--name", name)
            processes.flwr(server, "supernode", "register", str(path), *link)
            done.append(f"{name} is registered")
        elif found[key].status == REMOVED:
            done.append(f"{name} has a key that was taken off for good; it needs a new one: {path}")
    return done


def states(server: Server) -> dict[str, str]:
    """Name -> Flower's word for its state; 'not registered' or 'excluded' where it has none."""
    found = nodes(server)
    keys = {name: key for key, name in server.keys().items()}
    state = dict.fromkeys(server.clients, "excluded")
    for name, key in keys.items():
        state[name] = found[key].status if key in found else "not registered"
    return state


def remove(server: Server, name: str) -> str:
    """Exclude a client: no tasks from now on, and, where the server runs, no connection either."""
    keys = {each: key for key, each in server.keys().items()}
    if name not in keys:
        known = ", ".join(keys) or "none"
        raise UserError(f"{name!r} is no client that may take part; those are: {known}.")
    (server.path / "clients" / f"{name}.pub").unlink()
    if not processes.answers(server):
        return f"{name} gets no tasks any more"
    node = nodes(server).get(keys[name])
    if node is not None and node.status != REMOVED:
        processes.flwr(server, "supernode", "unregister", node.number, processes.LINK)
    return f"{name} gets no tasks any more, and its key is taken off for good"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
