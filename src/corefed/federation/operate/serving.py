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
from corefed.base.locks import exclusively
from corefed.federation.operate import clock, processes, registering
from corefed.federation.operate.certificates import days_left
from corefed.federation.operate.folder import ClientFolder, ServerFolder
from corefed.federation.operate.program import Program, say
from corefed.federation.operate.supervising import EndedError, Supervisor, supervised

START = 180.0
"""Seconds SuperLink has to answer; importing Flower on a busy machine takes some."""
LOOK, LOOK_AGAIN = 2.0, 10.0
"""Seconds between looks at the public keys, and after one that could not be registered."""
WARN_DAYS = 30
REFUSED = 60.0
"""Seconds that a client keeps asking a server that refuses its key: it may soon be registered, or
an earlier session may still have to expire."""
ANSWER = 3.0
"""Seconds that SuperLink has for one answer, when it is watched."""

StopSignal = Callable[[], "int | None"]  # the signal that asks to stop, if one came


def serve(directory: Path) -> int:
    """Run SuperLink, and register the clients of the folder with it; an exit code."""
    processes.require_flower()
    server = ServerFolder.read(directory)
    _check_certificate(server)
    server.keys()
    with exclusively(server.path), processes.catch_stop_signals() as stop_signal:
        processes.refuse_taken_port(server.own_address)
        processes.prepare_home(server.path, server)
        with supervised(processes.server_parts(server), _answers(server)) as supervisor:
            # Nothing is started again yet: what fails at its first start needs the operator.
            processes.wait_for_answer(server, supervisor.programs(), START, stop_signal)
            try:
                return _keep_serving(server, supervisor, stop_signal)
            except EndedError as error:
                say(f"error: {error}")
                return 1


def _answers(server: ServerFolder) -> dict[str, Callable[[], bool]]:
    """How to see that a part answers. The gate is asked only while SuperLink behind it does."""
    link, last = processes.link_address(server), {"superlink": False}

    def superlink() -> bool:
        last["superlink"] = processes.is_answering(server, ANSWER, link)
        return last["superlink"]

    def gate() -> bool:
        return not last["superlink"] or processes.is_answering(server, ANSWER)

    return {"superlink": superlink, "gate": gate}


def _keep_serving(server: ServerFolder, supervisor: Supervisor, stop_signal: StopSignal) -> int:
    seen: dict[str, str] | None = None
    while stop_signal() is None:
        supervisor.look()
        server = _reread(server)
        now = registering.key_digests(server)
        if now == seen:
            _pause(LOOK, stop_signal)
        elif not _synchronise(server):
            _pause(LOOK_AGAIN, stop_signal, supervisor.look)
        else:
            if seen is None:
                place = shlex.quote(str(server.path))
                say(f"ready: {len(now)} clients may connect to {server.address}")
                say(f"train with: corefed federation run {place}")
            for name in (seen or {}).keys() - now.keys():
                say(f"{name} gets no tasks any more")
            seen = now
    return _exit_code(stop_signal)


def _synchronise(server: ServerFolder) -> bool:
    """Register new keys. A failure must not end a running server: it is printed and tried again."""
    try:
        for sentence in registering.synchronise(server):
            say(sentence)
    except UserError as error:
        say(f"error: {error}")
        return False
    return True


def _reread(server: ServerFolder) -> ServerFolder:
    """The folder as it is now, or as it was while a file of it cannot be read."""
    try:
        return ServerFolder.read(server.path)
    except UserError:
        return server


def join(directory: Path, data: str, device: str | None) -> int:
    """Run SuperNode for a client's data; an exit code."""
    processes.require_flower()
    client = ClientFolder.read(directory)
    where = _absolute(data)
    with exclusively(client.path), processes.catch_stop_signals() as stop_signal:
        check_data(processes.client_environment(client, where, device))
        processes.prepare_home(client.path)
        if not _reach(client, stop_signal):
            return _exit_code(stop_signal)
        parts = processes.client_parts(client, where, device)
        with supervised(parts, excuse=Excuses(client)) as supervisor:
            try:
                while stop_signal() is None:
                    _pause(LOOK, stop_signal, supervisor.look)
            except EndedError as error:
                say(f"error: {error}")
                return 1
        return _exit_code(stop_signal)


def check_data(environment: Mapping[str, str]) -> None:
    """Read the data once, in a subprocess, to refuse them before the server asks."""
    command = [sys.executable, "-m", "corefed.federation.operate.data_check"]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(done.stdout.strip() or "The data cannot be read.")
    say(done.stdout.strip())


def _reach(client: ClientFolder, stop_signal: StopSignal) -> bool:
    """Wait for the server and check its certificate."""
    if "https" in getproxies() and not proxy_bypass(client.address.host):
        return True  # SuperNode goes through the proxy, and checks the certificate as well
    context = ssl.create_default_context(cafile=str(client.path / "ca.crt"))
    said = 0.0
    while stop_signal() is None:
        try:
            with (
                socket.create_connection(client.address, timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=client.address.host),
            ):
                pass
            clock.refuse_skew(client)
            return True
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"The server at {client.address} shows a certificate that {client.path}/ca.crt "
                f"does not vouch for ({error.verify_message}); is it the right server, and ca.crt "
                f"that of this federation?{clock.hint(error.verify_message)}"
            ) from error
        except ssl.SSLError as error:
            raise UserError(
                f"What answers at {client.address} does not speak TLS ({error.reason})."
            ) from error
        except OSError as error:
            if time.monotonic() - said > 30:
                said = time.monotonic()
                say(f"waiting for the server at {client.address}: {error.strerror or error}")
        _pause(1.0, stop_signal)
    return False


class Excuses:
    """Why a SuperNode ended that is not to blame: the server refused it, or could not take it."""

    def __init__(self, client: ClientFolder) -> None:
        self.client = client
        self.since = self.last = 0.0  # of the refusals that follow each other

    def __call__(self, name: str, program: Program) -> str:
        """The sentence to print, or nothing; a UserError where the server refuses for too long."""
        if program.has_logged("Failed to activate"):
            client, now = self.client.name, time.monotonic()
            sentence = (
                f"The server refuses the key of {client}: it is not registered there (the operator "
                f"puts key.pub into server/clients/{client}.pub), or another process uses it."
            )
            if now - self.last > REFUSED:
                self.since = now
            self.last = now
            if now - self.since > REFUSED:
                raise UserError(sentence)
            return sentence
        if program.has_logged("Failed to initialize the connection"):
            last = program.last_lines()
            return f"The server has an error of its own, and takes no clients now: {last}."
        if program.has_logged("terminated gracefully"):  # by the server's answer 401
            clock.refuse_skew(self.client)
            return "The server does not believe that this client is who it says it is."
        return ""


def _check_certificate(server: ServerFolder) -> None:
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


def _pause(
    seconds: float, stop_signal: StopSignal, meanwhile: Callable[[], None] = lambda: None
) -> None:
    until = time.monotonic() + seconds
    while stop_signal() is None and time.monotonic() < until:
        meanwhile()
        time.sleep(0.1)


def _exit_code(stop_signal: StopSignal) -> int:
    """130 after Ctrl-C, as a shell expects; 0 for a service that was asked to stop."""
    return 128 + signal.SIGINT if stop_signal() == signal.SIGINT else 0
