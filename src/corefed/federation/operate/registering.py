"""Who may take part: the public keys in server/clients/, made known to Flower.

A key that is new there is registered with Flower. One that is gone stays registered, but the server
gives it no tasks (`ServerFolder.keys`). `remove` takes it off for good: Flower never again admits a
key that was taken off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from corefed.base.errors import UserError
from corefed.federation.operate import control, processes
from corefed.federation.operate.folder import ServerFolder

REMOVED = "unregistered"


class KnownKey(NamedTuple):
    """A key that Flower knows."""

    number: str
    status: str  # registered (and never seen), online, offline or unregistered


def key_digests(server: ServerFolder) -> dict[str, str]:
    """Name -> digest of its public key, to see when a key changes."""
    keys = server.public_keys().items()
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in keys}


def list_nodes(
    server: ServerFolder, new: Mapping[bytes, str] | None = None
) -> dict[bytes, KnownKey]:
    """Public key -> what Flower says about it, before those that are `new` to it are registered."""
    rows = control.ask(server, "nodes", {name: key.decode() for key, name in (new or {}).items()})
    return {row["key"].encode(): KnownKey(row["node"], row["status"]) for row in rows}


def synchronise(server: ServerFolder) -> list[str]:
    """Register the keys that are new; what was done, in sentences."""
    keys = server.keys()
    found, done = list_nodes(server, keys), []
    for key, name in keys.items():
        if key not in found:
            done.append(f"{name} is registered")
        elif found[key].status == REMOVED:
            path = server.path / "clients" / f"{name}.pub"
            done.append(f"{name} has a key that was taken off for good; it needs a new one: {path}")
    return done


def client_states(server: ServerFolder) -> dict[str, str]:
    """Name -> Flower's word for its state; 'not registered' or 'excluded' where it has none."""
    found = list_nodes(server)
    states = dict.fromkeys(server.clients, "excluded")
    for key, name in server.keys().items():
        states[name] = found[key].status if key in found else "not registered"
    return states


def remove(server: ServerFolder, name: str) -> str:
    """Exclude a client: no tasks from now on, and, where the server runs, no connection either."""
    keys = {each: key for key, each in server.keys().items()}
    if name not in keys:
        known = ", ".join(keys) or "none"
        raise UserError(f"{name!r} is no client that may take part; those are: {known}.")
    (server.path / "clients" / f"{name}.pub").unlink()
    if not processes.is_answering(server):
        return f"{name} gets no tasks any more"
    node = list_nodes(server).get(keys[name])
    if node is not None and node.status != REMOVED:
        processes.run_flwr(server, "supernode", "unregister", node.number, processes.LINK)
    return f"{name} gets no tasks any more, and its key is taken off for good"
