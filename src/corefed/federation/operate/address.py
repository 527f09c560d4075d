"""Where clients reach a server, and where it listens for them."""

from __future__ import annotations

import re
from typing import NamedTuple

from corefed.base.errors import UserError

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
LISTEN = {"127.0.0.1": "127.0.0.1", "::1": "::1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server may listen -> how its own machine reaches it then: over the loopback."""


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, where: str) -> Address:
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host, known = host[1:-1], re.fullmatch(r"[0-9A-Fa-f:.]+", host[1:-1])
        else:
            known = HOST.fullmatch(host)
        if not (colon and known and port.isdigit() and 0 < int(port) < 65536):
            raise UserError(f"{where} is {text!r}; it must be HOST:PORT, as in example.org:8000.")
        if host in ("0.0.0.0", "::"):
            raise UserError(
                f"{where} is {text!r}, which means all addresses of a machine; give the name or "
                "address by which clients reach the server."
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def default_bind(host: str) -> str:
    """Where a server listens whose clients call it by this name."""
    own = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
    return own.get(host, "::" if ":" in host else "0.0.0.0")
