"""Flower's programs as corefed runs them: command lines, environment, starting, waiting, stopping.

Every command is printed before it runs. Only SuperNode opens connections, to its server: telemetry,
update checks and the installation of an app's dependencies are off.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from corefed.base import files, machine
from corefed.base.errors import UserError, install
from corefed.federation.engine import signals
from corefed.federation.operate.address import Address
from corefed.federation.operate.folder import ClientFolder, ServerFolder
from corefed.federation.operate.program import COLOURS, Program, say

LINK = "corefed"
"""Name of the connection in Flower's own configuration."""
SECRET, PORT = "executor.secret", "link.port"
"""In FLWR_HOME: by which an executor may take tasks, and where SuperLink listens."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
OWN_HOSTS = "127.0.0.1,localhost,::1"
PATIENCE = 60.0
"""Seconds that a command of Flower's has to answer; one of a frozen server never would."""


def require_flower() -> None:
    if find_spec("flwr") is None:
        raise UserError(f"Federations need Flower: {install('flower')}.")


class Part(NamedTuple):
    """A program that a server or a client consists of; `Program` runs it."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path


def server_parts(server: ServerFolder) -> list[Part]:
    """What a server consists of, in the order of starting, once its home is prepared.

    Each part can be started again by itself, with the same command.
    """
    home = server.path / "flower"
    environment = server_environment(server)
    link = str(link_address(server))
    superlink = [
        *_ours("stock", "flower-superlink"),
        *("--host", link_address(server).host, "--port", str(link_address(server).port)),
        *("--ssl-ca-certfile", str(server.path / "ca.crt")),
        *("--ssl-certfile", str(server.path / "server.crt")),
        *("--ssl-keyfile", str(server.path / "server.key")),
        *("--database", str(server.path / "link.db")),
        *("--isolation", "process", "--superexec-auth-secret-file", str(home / SECRET)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]
    executor = _executor(home, link, server.path / "ca.crt")
    gate = _ours("gate")
    return [
        Part("superlink", superlink, environment, home / "server.log"),
        Part("executor", executor, environment, home / "executor.log"),
        Part("gate", gate, environment | {"COREFED_LINK": link}, home / "gate.log"),
    ]


def client_parts(client: ClientFolder, data: str, device: str | None) -> list[Part]:
    """What a client consists of, as for a server."""
    home = client.path / "flower"
    environment = client_environment(client, data, device)
    port = free_port()
    supernode = [
        *_ours("node"),
        *("--superlink", str(client.address)),
        *("--root-certificates", str(client.path / "ca.crt")),
        *("--auth-supernode-private-key", str(client.path / "key")),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(home / "own-ca.crt")),
        *("--ssl-certfile", str(home / "own.crt")),
        *("--ssl-keyfile", str(home / "own.key")),
        *("--isolation", "process", "--superexec-auth-secret-file", str(home / SECRET)),
    ]
    executor = _executor(home, f"127.0.0.1:{port}", home / "own-ca.crt")
    return [
        Part("supernode", supernode, environment, home / "client.log"),
        Part("executor", executor, environment, home / "executor.log"),
    ]


def _ours(name: str, *arguments: str) -> list[str]:
    """A program of `corefed.federation.engine`."""
    return [sys.executable, "-m", f"corefed.federation.engine.{name}", *arguments]


def _executor(home: Path, address: str, authority: Path) -> list[str]:
    return [
        *_ours("warm"),
        *("--runtime-api-address", address),
        *("--root-certificates", str(authority)),
        *("--superexec-auth-secret-file", str(home / SECRET)),
    ]


def link_address(server: ServerFolder) -> Address:
    """Where SuperLink listens: on this machine, behind the gate that clients reach."""
    place = server.path / "flower" / PORT
    try:
        return Address(server.own_address.host, int(place.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no {place}: start the server with: corefed federation server "
            f"{shlex.quote(str(server.path))}"
        ) from error


def server_environment(server: ServerFolder) -> dict[str, str]:
    return _environment(server.path) | {"COREFED_SERVER": str(server.path)}


def client_environment(client: ClientFolder, data: str, device: str | None) -> dict[str, str]:
    own = {
        "COREFED_CLIENT": str(client.path),
        "COREFED_CLIENT_DATA": data,
        "COREFED_CLIENT_DEVICE": device or "",
        "COREFED_HEARTBEAT": str(client.about.heartbeat),
    }
    return _environment(client.path) | own


def _environment(path: Path) -> dict[str, str]:
    """For Flower's programs. What they would start by name is not found.

    A site's machine has other work too, so threads wait passively, on the cores it may use.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "COREFED_"))}
    kept |= {k: v for k, v in os.environ.items() if k == "COREFED_DATA"}
    home = path / "flower"
    programs = os.pathsep.join(("/usr/bin", "/bin"))
    # Processes of one machine talk over the loopback, even where a proxy is set.
    direct = ",".join(filter(None, [kept.get("NO_PROXY", kept.get("no_proxy", "")), OWN_HOSTS]))
    proxies = {"NO_PROXY": direct, "no_proxy": direct}
    return {**machine.polite(kept), **QUIET, **proxies, "FLWR_HOME": str(home), "PATH": programs}


def prepare_home(path: Path, server: ServerFolder | None = None) -> None:
    """FLWR_HOME with what the parts share: a new secret, and certificates or a port."""
    home = path / "flower"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(home / SECRET, secrets.token_bytes(32), 0o600)
        if server is None:
            _certify(home)
            return
        files.replace(home / PORT, str(free_port(server.own_address.host)).encode(), 0o600)
        connection = (
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\n'
            f"address = {json.dumps(str(link_address(server)))}\n"
            f"root-certificates = {json.dumps(str(server.path / 'ca.crt'))}\n"
        )
        files.replace(home / "config.toml", connection.encode(), 0o600)
    except OSError as error:
        raise UserError(f"Cannot write into {home}: {error.strerror}.") from error


def _certify(home: Path) -> None:
    """What a client's SuperNode shows its own executor, so that no other program can pose as it."""
    from corefed.federation.operate import certificates  # cryptography is an extra

    authority = certificates.make_authority("a client's own programs")
    own = certificates.sign_server(authority, "127.0.0.1")
    files.replace(home / "own-ca.crt", authority.public, 0o600)
    files.replace(home / "own.crt", own.public, 0o600)
    files.replace(home / "own.key", own.key, 0o600)


def run_flwr(server: ServerFolder, *arguments: str, quiet: bool = False) -> dict[str, Any]:
    """What a command of Flower's own command line answers, as JSON."""
    program = shutil.which("flwr", path=sysconfig.get_path("scripts"))
    command = [program] if program else [sys.executable, "-m", "flwr.cli.app"]
    command += [*arguments, "--format", "json"]
    if not quiet:
        say(f"$ {shlex.join(['flwr', *command[-len(arguments) - 2 :]])}")
    environment = server_environment(server)
    words = f"`flwr {' '.join(arguments[:2])}`"
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{words} did not end within {PATIENCE:.0f} s.") from error
    try:
        # FORCE_COLOR, which notebooks set, colours JSON as well.
        answer: dict[str, Any] = json.loads(COLOURS.sub("", done.stdout))
    except ValueError:
        answer = {"success": False, "error-message": done.stderr or done.stdout}
    if not answer.get("success"):
        reason = COLOURS.sub("", str(answer.get("error-message", ""))).split()
        raise UserError(f"{words} failed: {' '.join(reason)}")
    if arguments[0] == "run":
        signals.ring(server.path / "flower")  # there is a task for the executor
    return answer


def is_answering(
    server: ServerFolder, timeout: float = 2.0, address: Address | None = None
) -> bool:
    """Whether a server with this federation's certificate answers on this machine, at its own
    address or at another one."""
    context = ssl.create_default_context(cafile=str(server.path / "ca.crt"))
    host, port = address or server.own_address
    connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def require_answer(server: ServerFolder) -> None:
    if not is_answering(server, 10.0):
        raise UserError(
            f"No server of this federation answers at {server.own_address}; start it with: "
            f"corefed federation server {shlex.quote(str(server.path))}"
        )


def wait_for_answer(
    server: ServerFolder,
    programs: list[Program],
    seconds: float,
    stop_signal: Callable[[], int | None],
) -> None:
    """Until the server answers or a signal asks to stop; a sentence if it does not answer."""
    until = time.monotonic() + seconds
    while stop_signal() is None and not is_answering(server):
        ended = [program for program in programs if not program.running()]
        if ended or time.monotonic() > until:
            program = (ended or programs)[0]
            what = "ended" if ended else "does not answer"
            program.stop()
            raise UserError(
                f"The SuperLink at {server.own_address} {what}; {program.log} has its output: "
                f"{program.last_lines()}"
            )
        time.sleep(0.2)


def refuse_taken_port(address: Address) -> None:
    """Refuse a port that another program uses; Flower would report it after many lines."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise UserError(
                f"Cannot listen on {address}: {error.strerror}; another server may be running."
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], int | None]]:
    """Catch Ctrl-C and SIGTERM; yields a function that returns the signal caught, or None."""
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def process_tree(pid: int) -> list[int]:
    """A process and its descendants, of whatever session (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(entry.name))
    found, look = [], [pid]
    while look:
        found.append(look.pop())
        look += children.get(found[-1], [])
    return found
