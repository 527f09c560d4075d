"""A small real federation on the loopback whose parts can be killed, frozen, filled and cut off.

Server and clients are services: one that ends is started again after PAUSE seconds, as the units of
systemd that `corefed federation init` writes would do. The folders of the server and of one client
are small disks of their own where that is allowed (tmpfs, for which one must be root). The same
client reaches the server through a port that can stop forwarding.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from corefed.base import machine
from corefed.federation.operate import creating
from corefed.federation.operate.processes import free_port
from corefed.federation.operate.supervising import generations, read_processes

CLIENTS = ("alice", "bob", "carol")
VICTIM = "bob"
SETTINGS = (
    "method=pfedbayes", "rounds=4", "local_steps=100", "hidden=16", "evaluate_every=4",
    "evaluate_draws=3",
)  # fmt: skip
RULES = {"quorum": 1.0, "deadline": 25.0, "attempts": 10, "join_wait": 120.0}
PAUSE = 10.0
"""Seconds before a service that ended is started again (RestartSec of the units)."""
READY = 180.0
"""Seconds for a service to be ready on a busy machine."""
DISK = 64
"""MiB of a small disk."""

ROLES = {
    "engine.stock": "SuperLink",
    "engine.gate": "gate",
    "engine.node": "SuperNode",
    "engine.warm": "executor",
    "engine.sandbox": "task",
}
"""By what is on a command line."""


class Service:
    """A command of corefed that is kept running; what it said is in a file."""

    def __init__(self, name: str, log: Path, *words: object) -> None:
        self.name, self.log = name, log
        self.command = [sys.executable, "-m", "corefed", *map(str, words)]
        self.exits: list[tuple[float, int, str]] = []  # when it ended by itself, code, last words
        self.began = 0
        self.stopping = threading.Event()
        self.start()
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.began = log.tell()
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=machine.polite(os.environ, threads=1), start_new_session=True,
            )  # fmt: skip

    def _keep(self) -> None:
        while not self.stopping.wait(0.2):
            code = self.process.poll()
            if code is None:
                continue
            self.exits.append((time.monotonic(), code, last_error(self.said())))
            if not self.stopping.wait(PAUSE):
                self.start()

    def said(self) -> str:
        return self.log.read_bytes()[self.began :].decode(errors="replace")

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + READY
        while text not in self.said():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name} did not say {text!r}: {self.said()[-800:]}")
            time.sleep(0.2)

    def processes(self) -> dict[str, int]:
        """Role -> process: the service itself, Flower's programs, the nursery and a task."""
        table, found = read_processes(), dict[str, int]()
        for depth, level in enumerate(generations(table, self.process.pid)):
            for process in level:
                with suppress(OSError):
                    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
                    role = next((role for key, role in ROLES.items() if key in words), "")
                    role = "service" if depth == 0 else role
                    if role == "executor" and role in found:
                        role = "nursery" if process.parent == found["executor"] else "task"
                    found.setdefault(role, process.pid)
        return found

    def end(self) -> None:
        self.stopping.set()
        self.keeper.join()
        tree = [p.pid for level in generations(read_processes(), self.process.pid) for p in level]
        for sign in (signal.SIGCONT, signal.SIGKILL):
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
        self.process.wait()


def last_error(words: str) -> str:
    """The last sentence that says why, or the last line."""
    lines = [line for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")


class Forwarder:
    """A port of the loopback that forwards to another one, or takes connections and is silent."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.open = threading.Event()
        self.open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                threading.Thread(target=self._connect, args=(here,), daemon=True).start()

    def _connect(self, here: socket.socket) -> None:
        self.open.wait()
        with suppress(OSError):
            there = socket.create_connection(("127.0.0.1", self.target))
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()
            return
        here.close()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := one.recv(1 << 16):
                self.open.wait()
                other.sendall(part)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()


class Testbed:
    """The running federation."""

    def __init__(self, path: Path, data: Path, forwarder: Forwarder, *, disks: bool) -> None:
        self.path, self.forwarder, self.disks = path, forwarder, disks
        logs = path.parent
        self.server = Service("server", logs / "server.log", "federation", "server", path)
        self.clients = {
            name: Service(
                name, logs / f"{name}.log", "federation", "client", path / "clients" / name,
                "--data", data / f"client-{i}.npz",
            )
            for i, name in enumerate(CLIENTS)
        }  # fmt: skip

    def service(self, side: str) -> Service:
        return self.server if side == "server" else self.clients[VICTIM]

    def disk(self, side: str) -> Path:
        return self.path / "server" if side == "server" else self.path / "clients" / VICTIM

    def wait_ready(self) -> None:
        self.server.wait_for("ready:")
        for client in self.clients.values():
            client.wait_for("SuperNode ID:")

    def begin(self, command: str, name: str) -> subprocess.Popen[bytes]:
        words = ["federation", command, str(self.path), "--name", name]
        with (self.path.parent / f"{command}-{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "corefed", *words], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, env=machine.polite(os.environ, threads=1),
            )  # fmt: skip

    def said(self, command: str, name: str) -> str:
        return (self.path.parent / f"{command}-{name}.log").read_text(errors="replace")

    def run_folder(self, name: str) -> Path:
        return self.path / "server" / "runs" / name

    def end(self) -> None:
        for service in (*self.clients.values(), self.server):
            service.end()


@contextmanager
def testbed(folder: Path) -> Iterator[Testbed]:
    """Everything started in a new folder; all of it is ended and unmounted afterwards."""
    path, data, port = folder / "federation", folder / "data", free_port()
    split = ["--show", "digits", "--partition", "iid", "--clients", str(len(CLIENTS))]
    command = [sys.executable, "-m", "corefed", "datasets", *split, "--write", str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    creating.create(path, CLIENTS, f"127.0.0.1:{port}", assignments=SETTINGS)
    _edit(path / "server" / "federation.toml", lambda name: RULES.get(name))
    forwarder = Forwarder(port)
    address = f'"127.0.0.1:{forwarder.port}"'
    _edit(path / "clients" / VICTIM / "client.toml", lambda name: {"address": address}.get(name))
    with ExitStack() as stack:
        stack.callback(forwarder.close)
        disks = all(
            stack.enter_context(small_disk(place))
            for place in (path / "server", path / "clients" / VICTIM)
        )
        bed = Testbed(path, data, forwarder, disks=disks)
        stack.callback(bed.end)
        yield bed


def _edit(file: Path, value: Callable[[str], object]) -> None:
    """Replace the values of some lines NAME = VALUE."""
    lines = []
    for line in file.read_text().splitlines():
        name, equals, _ = line.partition(" = ")
        new = value(name) if equals else None
        lines.append(line if new is None else f"{name} = {new}")
    file.write_text("\n".join(lines) + "\n")


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a disk of a few MiB with what is in a folder; False where that is not allowed."""
    aside = place.with_name(f"{place.name}.aside")
    size = f"size={DISK}m,mode=700"
    place.rename(aside)
    place.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], capture_output=True
    ).returncode
    shutil.copytree(aside, place, dirs_exist_ok=True)
    shutil.rmtree(aside)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
