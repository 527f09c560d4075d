"""What `corefed federation server` and `corefed federation client` do while they run."""

from __future__ import annotations

import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from corefed.base.errors import UserError
from corefed.federation.operate import processes, registering
from corefed.federation.operate.certificates import days_left
from corefed.federation.operate.folder import Client, Server, exclusively
from corefed.federation.operate.processes import Program, say

START = 90.0
"""Seconds SuperLink has to answer; importing Flower on a busy machine takes some."""
LOOK, LOOK_AGAIN = 2.0, 10.0
"""Seconds between looks at the public keys, and after one that could not be registered."""
WARN_DAYS = 30
REFUSED = 60.0
"""Seconds that a client goes on asking a server that refuses its key: it may be about to be
registered, or an earlier session of it has to run out."""
QUICKLY, AGAIN, TRIES = 10.0, 3.0, 3
"""A SuperNode that ends so soon after its start is started again after a pause, so many times."""

Told = Callable[[], "int | None"]  # the signal that asks to stop, if one came


def serve(directory: Path) -> int:
    """Run SuperLink, and keep the clients it knows those of the folder; an exit code."""
    processes.require_flower()
    server = Server.read(directory)
    _check_certificate(server)
    server.keys()
    with exclusively(server.path), processes.until_told() as told:
        processes.refuse_taken_port(server.own_address)
        processes.prepare_home(server.path, server)
        log = server.path / "flower" / "server.log"
        program = Program(processes.superlink(server), processes.server_environment(server), log)
        try:
            processes.wait_for_answer(server, program, START, told)
            return _keep(server, program, told)
        finally:
            program.stop()


def _keep(server: Server, program: Program, told: Told) -> int:
    seen: dict[str, str] | None = None
    while told() is None:
        if not program.running():
            say(f"error: SuperLink ended; {program.log} has its words: {program.words()}")
            return 1
        server = _reread(server)
        now = registering.digests(server)
        if now == seen:
            _pause(LOOK, told)
        elif not _synchronise(server):
            _pause(LOOK_AGAIN, told)
        else:
            if seen is None:
                place = shlex.quote(str(server.path))
                say(f"ready: {len(now)} clients may connect to {server.address}")
                say(f"train with: corefed federation run {place}")
            for name in (seen or {}).keys() - now.keys():
                say(f"{name} gets no tasks any more")
            seen = now
    return _code(told)


def _synchronise(server: Server) -> bool:
    """Registration must not end a server that runs: what fails is said and tried again."""
    try:
        for sentence in registering.synchronise(server):
            say(sentence)
    except UserError as error:
        say(f"error: {error}")
        return False
    return True


def _reread(server: Server) -> Server:
    """The folder as it is now; a file that is being edited is taken when it can be read again."""
    try:
        return Server.read(server.path)
    except UserError:
        return server


def join(directory: Path, data: str, device: str | None) -> int:
    """Run SuperNode for a client's data; an exit code."""
    processes.require_flower()
    client = Client.read(directory)
    environment = processes.client_environment(client, _absolute(data), device)
    with exclusively(client.path), processes.until_told() as told:
        look(environment)
        processes.prepare_home(client.path)
        if not _reach(client, told):
            return _code(told)
        return _stay(client, environment, told)


def look(environment: Mapping[str, str]) -> None:
    """Read the data once, in a process of its own, to refuse them before the server asks."""
    command = [sys.executable, "-m", "corefed.federation.operate.look"]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(done.stdout.strip() or "The data cannot be read.")
    say(done.stdout.strip())


def _reach(client: Client, told: Told) -> bool:
    """Wait for the server and see that it is the one whose certificate we have."""
    if "https" in getproxies() and not proxy_bypass(client.address.host):
        return True  # SuperNode goes through the proxy, and checks the certificate as well
    context = ssl.create_default_context(cafile=str(client.path / "ca.crt"))
    said = 0.0
    while told() is None:
        try:
            with (
                socket.create_connection(client.address, timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=client.address.host),
            ):
                return True
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"The server at {client.address} shows a certificate that {client.path}/ca.crt "
                f"does not vouch for ({error.verify_message}); is it the right server, and ca.crt "
                "that of this federation?"
            ) from error
        except ssl.SSLError as error:
            raise UserError(
                f"What answers at {client.address} does not speak TLS ({error.reason})."
            ) from error
        except OSError as error:
            if time.monotonic() - said > 30:
                said = time.monotonic()
                say(f"waiting for the server at {client.address}: {error.strerror or error}")
        _pause(1.0, told)
    return False


def _stay(client: Client, environment: Mapping[str, str], told: Told) -> int:
    """Keep a SuperNode running. It ends by itself when the server refuses it, or by a crash."""
    log = client.path / "flower" / "client.log"
    refused_since: float | None = None
    short = 0
    while True:
        began = time.monotonic()
        program = Program(processes.supernode(client), environment, log)
        try:
            while told() is None and program.running():
                time.sleep(0.1)
        finally:
            program.stop()
        if told() is not None:
            return _code(told)
        if program.said("Failed to activate"):
            refused_since = refused_since or began
            sentence = (
                f"The server refuses the key of {client.name}: it is not registered there (the "
                f"operator puts key.pub into server/clients/{client.name}.pub), or another "
                "process uses it."
            )
            if time.monotonic() - refused_since > REFUSED:
                raise UserError(sentence)
            say(f"{sentence} Trying again.")
        elif time.monotonic() - began > QUICKLY:
            refused_since, short = None, 0
        elif short + 1 >= TRIES:
            say(f"error: SuperNode ended; {log} has its words: {program.words()}")
            return 1
        else:
            short += 1
        _pause(AGAIN, told)


def _check_certificate(server: Server) -> None:
    days = days_left((server.path / "server.crt").read_bytes())
    renew = f"corefed federation renew {shlex.quote(str(server.path))}"
    if days <= 0:
        raise UserError(f"{server.path}/server.crt has expired; type: {renew}")
    if days < WARN_DAYS:
        say(f"note: server.crt expires in {days:.0f} days; renew it with: {renew}")


def _absolute(data: str) -> str:
    """A path that means the same in every process, with its kind before it where one was given."""
    kind, colon, path = data.partition(":")
    if colon and kind in ("npz", "table", "image-folder"):
        return f"{kind}:{Path(path).expanduser().absolute()}"
    return str(Path(data).expanduser().absolute())


def _pause(seconds: float, told: Told) -> None:
    until = time.monotonic() + seconds
    while told() is None and time.monotonic() < until:
        time.sleep(0.1)


def _code(told: Told) -> int:
    """130 after Ctrl-C, as a shell expects; a service that was asked to stop has done well."""
    return 128 + signal.SIGINT if told() == signal.SIGINT else 0
