"""A new federation's folder: certificates, keys, settings, commands, and what to copy where.

Everything is made in a temporary folder, which is renamed when it is complete; an error leaves
nothing behind. Files are created with their final mode, so others can never read a secret.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from corefed.base import files
from corefed.base.errors import UserError
from corefed.federation.operate import certificates, folder, texts
from corefed.federation.operate.address import Address
from corefed.federation.rules import Rules
from corefed.settings import devices, toml
from corefed.settings.config import resolve, to_toml
from corefed.settings.run import LOCAL, Experiment

SECRET, PLAIN, PROGRAM = 0o600, 0o644, 0o755


def create(
    directory: Path,
    clients: Sequence[str],
    address: str,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    rules: Sequence[str] = (),
) -> list[str]:
    """Make the folder of a federation; notes about what was changed in the experiment.

    `assignments` are settings of the experiment, `rules` those of the federation, as KEY=VALUE.
    """
    folder.check_names(list(clients), "clients")
    parsed = _parse_rules(rules)
    where = Address.parse(address, "--address")
    experiment, notes = _experiment(config, assignments, len(clients))
    directory = directory.absolute()
    files.refuse_existing(directory, "choose another folder")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            _fill(made, directory, clients, where, experiment, parsed)
            made.rename(directory)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        files.flush(directory.parent)
    except OSError as error:
        raise UserError(f"Cannot make {directory}: {error.strerror}.") from error
    return notes


def add(directory: Path, name: str) -> Path:
    """Another client for a federation that exists; its folder, to be copied to its machine."""
    server = folder.ServerFolder.read(directory)
    folder.check_names([*server.clients, name], "clients")
    clients = server.path.parent / "clients"
    one = clients / name
    if one.exists():
        raise UserError(f"{one} exists already; choose another name, or move it away.")
    where = server.path / folder.FEDERATION
    text = where.read_text(encoding="utf-8")
    before, after = texts.clients_line(server.clients), texts.clients_line((*server.clients, name))
    if text.count(before) != 1:
        raise UserError(
            f"{where} has been edited so that {name!r} cannot be added; write it at the end of "
            "`clients` yourself in the form: " + after.strip()
        )
    pair = certificates.make_node_key()
    try:
        clients.mkdir(mode=0o700, exist_ok=True)
        _write(clients, _client_files(name, server.address, _read(server.path / "ca.crt"), pair))
        files.replace(server.path / "clients" / f"{name}.pub", pair.public, PLAIN)
        files.replace(where, text.replace(before, after).encode(), SECRET)
    except OSError as error:
        shutil.rmtree(one, ignore_errors=True)
        with suppress(OSError):
            (server.path / "clients" / f"{name}.pub").unlink(missing_ok=True)
        raise UserError(f"Cannot make {one}: {error.strerror}.") from error
    return one


def renew(directory: Path) -> None:
    """Sign a new certificate for the server by the same authority. Clients need not change."""
    server = folder.ServerFolder.read(directory)
    folder.require(server.path / "ca.key", "put it there for the moment; it signs the certificate")
    ca = certificates.KeyPair(_read(server.path / "ca.key"), _read(server.path / "ca.crt"))
    pair = certificates.sign_server(ca, server.address.host)
    files.replace_all(server.path, [("server.key", pair.key), ("server.crt", pair.public)], SECRET)


def _experiment(
    config: Path | None, assignments: Sequence[str], clients: int
) -> tuple[Experiment, list[str]]:
    """The experiment as a federation trains it: local data, one seed, as many clients as named."""
    given, default = resolve(config, assignments=assignments), resolve()
    experiment = as_federated(given, clients)
    notes = [
        f"{key} is {value or 'left out'} in a federation, not {was}"
        for key in ("data", "clients", "partition")
        for value, was in [(getattr(experiment.run, key), getattr(given.run, key))]
        if was not in (value, getattr(default.run, key))
    ]
    return experiment, notes


def as_federated(given: Experiment, clients: int) -> Experiment:
    """An experiment with the data and the number of clients of a federation, if it can be one."""
    if len(given.run.seeds) != 1:
        raise UserError("A federation trains with one seed; give one, as in --set seeds=0.")
    if given.run.cohort > clients:
        raise UserError(f"cohort is {given.run.cohort}; there are only {clients} clients.")
    if given.run.patience:
        raise UserError("A federation cannot stop early yet; leave out patience.")
    devices.refuse_on_machines(given.run)
    run = dataclasses.replace(given.run, data=LOCAL, clients=clients, partition="")
    return dataclasses.replace(given, run=run)


def _parse_rules(given: Sequence[str]) -> Rules:
    values = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--rule {text!r} is not written key=value.")
        values[key.strip()] = value.strip()
    return toml.table(values, Rules, "--rule")


def _fill(
    made: Path,
    directory: Path,
    clients: Sequence[str],
    address: Address,
    experiment: Experiment,
    rules: Rules,
) -> None:
    ca = certificates.make_authority(f"corefed federation {directory.name}"[:64])
    shown = certificates.sign_server(ca, address.host)
    pairs = {name: certificates.make_node_key() for name in clients}
    one = folder.FederationTable(str(address), tuple(clients))
    contents: dict[str, tuple[bytes, int]] = {
        "README.md": (texts.readme_text(directory, clients, address).encode(), PLAIN),
        "server/federation.toml": (texts.federation_toml(one, rules).encode(), SECRET),
        "server/experiment.toml": (to_toml(experiment).encode(), SECRET),
        "server/ca.key": (ca.key, SECRET),
        "server/ca.crt": (ca.public, PLAIN),
        "server/server.key": (shown.key, SECRET),
        "server/server.crt": (shown.public, PLAIN),
        "server/start.sh": (texts.SERVER_START.encode(), PROGRAM),
        "server/corefed-server.service": (texts.SERVER_UNIT.encode(), PLAIN),
        "server/app/pyproject.toml": (texts.APP.encode(), PLAIN),
        "server/app/corefed_app.py": (texts.APP_MODULE.encode(), PLAIN),
    }
    for name, pair in pairs.items():
        contents[f"server/clients/{name}.pub"] = (pair.public, PLAIN)
        own = _client_files(name, address, ca.public, pair)
        contents |= {f"clients/{each}": content for each, content in own.items()}
    _write(made, contents)


def _client_files(
    name: str, address: Address, ca: bytes, pair: certificates.KeyPair
) -> dict[str, tuple[bytes, int]]:
    tables = {"privacy": folder.Privacy(), "data": folder.Data(), "limits": folder.Limits()}
    text = toml.written(folder.About(name, str(address)))
    text += "".join(f"\n[{title}]\n{toml.written(table)}" for title, table in tables.items())
    return {
        f"{name}/client.toml": (text.encode(), SECRET),
        f"{name}/ca.crt": (ca, PLAIN),
        f"{name}/key": (pair.key, SECRET),
        f"{name}/key.pub": (pair.public, PLAIN),
        f"{name}/start.sh": (texts.CLIENT_START.encode(), PROGRAM),
        f"{name}/corefed-client.service": (texts.client_service(name).encode(), PLAIN),
    }


def _write(base: Path, contents: Mapping[str, tuple[bytes, int]]) -> None:
    """Files that did not exist, in folders for their owner alone."""
    for name, (content, mode) in contents.items():
        path = base / name
        for parent in reversed(path.relative_to(base).parents):
            (base / parent).mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            files.write(handle, content)
        finally:
            os.close(handle)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
