"""The folders of a federation, read: what the server has, what a client has.

    DIR/server/           federation.toml  experiment.toml  ca.crt ca.key server.crt server.key
                          clients/NAME.pub  start.sh  corefed-server.service  app/
                          and, once it runs: link.db  nodes.json  flower/  runs/RUN/
    DIR/clients/NAME/     client.toml  ca.crt  key  key.pub  start.sh  corefed-client.service
                          and, once it runs: flower/  state/  models/

`creating.py` makes them. A secret that others on the machine can read is refused.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corefed.base import files
from corefed.base.errors import UserError
from corefed.federation.limits import Limits as Limits
from corefed.federation.operate.address import LISTEN, Address, default_bind
from corefed.federation.operate.client_tables import About as About
from corefed.federation.operate.client_tables import Data as Data
from corefed.federation.operate.client_tables import Privacy as Privacy
from corefed.federation.protocol import check_run
from corefed.federation.rules import Rules
from corefed.settings import toml

if TYPE_CHECKING:
    from corefed.federation.task_context import ClientSettings

FEDERATION, CLIENT = "federation.toml", "client.toml"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
LIMIT, REFUSED = "message_limit", "refused.jsonl"  # between the training and `replies.py`


@dataclass(frozen=True)
class FederationTable:
    """The table [federation] of federation.toml."""

    address: str
    """HOST:PORT by which clients reach the server; server.crt is valid for this host."""
    clients: tuple[str, ...]
    """Names of the clients, in an order that must not change: the position is a client's number."""
    bind: str = ""
    """Address to listen on: 127.0.0.1 or ::1 for clients of this machine alone, 0.0.0.0 or :: for
    all; empty chooses by the host of `address`."""


@dataclass(frozen=True)
class ServerFolder:
    """DIR/server."""

    path: Path
    address: Address
    bind: str
    clients: tuple[str, ...]
    rules: Rules

    @classmethod
    def read(cls, path: Path) -> ServerFolder:
        """Of DIR or DIR/server."""
        path = path.absolute()
        path = path if (path / FEDERATION).exists() else path / "server"
        where = path / FEDERATION
        content = toml.read(where, "make a federation with: corefed federation init DIR")
        tables = toml.groups(content, ("federation", "rules"), str(where))
        if tables[""]:
            raise UserError(f"{where}: {next(iter(tables['']))!r} must stand in [federation].")
        one = toml.table(tables["federation"], FederationTable, f"[federation] of {where}")
        check_names(one.clients, f"clients in {where}")
        address = Address.parse(one.address, f"address in {where}")
        for name in ("ca.crt", "server.crt", "server.key"):
            require(path / name, "it belongs to the server's folder; restore it")
        for name in ("server.key", "ca.key"):
            refuse_readable(path / name)
        bind = one.bind or default_bind(address.host)
        if bind not in LISTEN:
            raise UserError(
                f"bind in {where} is {bind!r}; it must be one of {', '.join(LISTEN)}, for the "
                "server's own programs use the loopback address."
            )
        rules = toml.table(tables["rules"], Rules, f"[rules] of {where}")
        return cls(path, address, bind, one.clients, rules)

    @classmethod
    def from_environment(cls) -> ServerFolder:
        """In a process that `corefed federation server` started."""
        return cls.read(Path(os.environ["COREFED_SERVER"]))

    @property
    def own_address(self) -> Address:
        """For commands on the server's own machine, which alone may use the control API."""
        return Address(LISTEN[self.bind], self.address.port)

    def public_keys(self) -> dict[str, Path]:
        """Name -> file with its public key. A client without one may not take part."""
        paths = {name: self.path / "clients" / f"{name}.pub" for name in self.clients}
        return {name: path for name, path in paths.items() if path.exists()}

    def keys(self) -> dict[bytes, str]:
        """Public key, in Flower's form, -> name."""
        from corefed.federation.operate.certificates import key_to_pem  # cryptography is an extra

        found: dict[bytes, str] = {}
        for name, path in self.public_keys().items():
            key = key_to_pem(path.read_bytes(), str(path))
            if key in found:
                raise UserError(f"{path} is the key of {found[key]} too; each client has its own.")
            found[key] = name
        return found

    def run_folder(self, name: str) -> Path:
        """The folder of a training run, which must have been prepared."""
        path = self.runs / check_run(name)
        require(path / "experiment.toml", "start runs with: corefed federation run")
        return path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def bound_messages(self, most: int) -> None:
        """Let SuperLink take no longer reply; forget what it refused before."""
        files.replace(self.path / LIMIT, str(most).encode(), 0o600)
        (self.path / REFUSED).unlink(missing_ok=True)

    def turned_away(self, name: str) -> str:
        """Why SuperLink refused what a client sent since then; empty where it did not."""
        path = self.path / REFUSED
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        reasons = [
            one["reason"] for one in map(json.loads, text.splitlines()) if one["client"] == name
        ]
        return reasons[-1] if reasons else ""


@dataclass(frozen=True)
class ClientFolder:
    """DIR/clients/NAME, or a copy of it elsewhere."""

    path: Path
    address: Address
    about: About
    privacy: Privacy
    data: Data
    limits: Limits

    @classmethod
    def read(cls, path: Path) -> ClientFolder:
        path = _one_client(path.absolute())
        where = path / CLIENT
        copy = "copy the client's whole folder (DIR/clients/NAME) to this machine"
        tables = toml.groups(toml.read(where, copy), ("privacy", "data", "limits"), str(where))
        about = toml.table(tables[""], About, str(where))
        privacy = toml.table(tables["privacy"], Privacy, f"[privacy] of {where}")
        data = toml.table(tables["data"], Data, f"[data] of {where}")
        limits = toml.table(tables["limits"], Limits, f"[limits] of {where}")
        check_names([about.name], f"name in {where}")
        for name in ("ca.crt", "key"):
            require(path / name, copy)
        refuse_readable(path / "key")
        address = Address.parse(about.address, f"address in {where}")
        return cls(path, address, about, privacy, data, limits)

    @classmethod
    def from_environment(cls) -> ClientFolder:
        """In a process that `corefed federation client` started."""
        return cls.read(Path(os.environ["COREFED_CLIENT"]))

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def state(self) -> Path:
        return self.path / "state"

    def settings(self) -> ClientSettings:
        """What the training needs to know, with the data that --data named."""
        from corefed.federation.task_context import ClientSettings  # torch takes a second

        return ClientSettings(
            name=self.name,
            state=self.state,
            data=os.environ["COREFED_CLIENT_DATA"],
            device=os.environ.get("COREFED_CLIENT_DEVICE") or self.about.device,
            target=self.data.target,
            classes=self.data.classes,
            test_fraction=self.data.test_fraction,
            share_metrics=self.about.share_metrics,
            model=self.about.model,
            models=self.path / "models",
            min_noise=self.privacy.min_noise,
            clip=self.privacy.clip,
            max_epsilon=self.privacy.max_epsilon,
            delta=self.privacy.delta,
            join=self.privacy.join,
            examples=self.privacy.examples,
            limits=self.limits,
        )


def _one_client(path: Path) -> Path:
    """A client's folder; of a whole federation, that of its only client."""
    if (path / CLIENT).exists() or not (path / "clients").is_dir():
        return path
    found = sorted(each.parent for each in path.glob(f"clients/*/{CLIENT}"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.name for each in found)
    raise UserError(f"{path} has the clients {names}; name one: {path / 'clients'}/NAME.")


def check_names(names: tuple[str, ...] | list[str], where: str) -> None:
    if not names:
        raise UserError(f"There are no {where}; a federation has at least one client.")
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(
                f"{name!r} ({where}) is no name for a client: up to 32 of a-z, 0-9, '.', '_' and "
                "'-', the first a letter or digit."
            )
        if list(names).count(name) > 1:
            raise UserError(f"{name!r} is there twice ({where}); every client has its own name.")


def require(path: Path, mend: str) -> None:
    if not path.is_file():
        raise UserError(f"There is no {path}; {mend}.")


def refuse_readable(path: Path) -> None:
    """Refuse a private key that others can read."""
    if path.exists() and path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others on this machine; type: chmod 600 {path}")
