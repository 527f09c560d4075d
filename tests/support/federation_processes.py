"""A real federation for tests: `corefed federation ...` as processes, killed and started at will.

    with federation(tmp_path / "fed", {"alice": data, "bob": data}) as fed:
        fed.wait_connected()
        done = fed.run("--name", "first")
        fed.clients["bob"].kill9()

Whatever was started is gone when the block ends.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from corefed.federation.operate import creating
from corefed.federation.operate.processes import free_port, process_tree

PATIENCE = 200.0
"""Seconds for a program to start; machines that run tests are busy."""


class Process:
    """A command of corefed with its words in a file; it can be started again."""

    def __init__(self, name: str, arguments: Sequence[object], log: Path) -> None:
        self.name = name
        self.command = [sys.executable, "-m", "corefed", *map(str, arguments)]
        self.environment = {"OMP_NUM_THREADS": "1"}  # beside that of the tests
        self.log = log
        self.began = 0  # where in the log the present process begins
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        assert self.process is None
        # A shell has what it runs in the background ignore Ctrl-C, and so all that this starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with self.log.open("ab") as log:
                self.began = log.tell()
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def said(self) -> str:
        """What the present process and those before it said since the last start."""
        return self.log.read_bytes()[self.began :].decode(errors="replace")

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Until it says so."""
        until = time.monotonic() + seconds
        while text not in self.said():
            over = time.monotonic() > until
            ended = self.process is None or self.process.poll() is not None
            if over or (ended and text not in self.said()):
                what = "ended" if ended else f"had {seconds:g} s"
                raise AssertionError(f"{self.name} {what} and did not say {text!r}:\n{self.said()}")
            time.sleep(0.1)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self.process = None
        return code

    def kill9(self) -> None:
        """Kill it and all that it started, at one moment and without a word."""
        assert self.process is not None
        for _ in range(3):  # what was started while we looked
            for pid in process_tree(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """Ask it to end, as a service manager does."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def restart(self) -> Process:
        if self.process is not None:
            self.stop()
        return self.start()

    def gone(self) -> None:
        if self.process is not None:
            self.kill9()


class Federation:
    """A federation's folder and its processes."""

    def __init__(self, path: Path, data: Mapping[str, object]) -> None:
        self.path = path
        self.server = Process("server", ["federation", "server", path], path / "server.log")
        self.clients = {
            name: self.client(path / "clients" / name, spec) for name, spec in data.items()
        }
        self.others: list[Process] = []

    def client(self, folder: Path, data: object) -> Process:
        """A client's process, not yet started; of one that has its folder elsewhere, too."""
        arguments = ["federation", "client", folder, "--data", data]
        return Process(folder.name, arguments, self.path / f"{folder.name}.log")

    def start(self) -> None:
        self.server.start()
        for client in self.clients.values():
            client.start()

    def wait_ready(self) -> None:
        """Until the server has registered the clients' keys."""
        self.server.wait_for("ready:")

    def wait_connected(self, *names: str) -> None:
        """Until these clients, or all, have connected since they were started."""
        self.wait_ready()
        for name in names or self.clients:
            self.clients[name].wait_for("SuperNode ID:")

    def begin(self, *arguments: object) -> Process:
        """Another command of `corefed federation`, on the folder of this one, as a process."""
        command, *more = arguments
        process = Process(
            str(command),
            ["federation", command, self.path, *more],
            self.path / f"{command}-{len(self.others)}.log",
        )
        self.others.append(process)
        return process.start()

    def run(self, *arguments: object, seconds: float = 120.0) -> tuple[int, str]:
        """Exit code and words of `corefed federation run`."""
        return self.command("run", *arguments, seconds=seconds)

    def command(self, *arguments: object, seconds: float = 120.0) -> tuple[int, str]:
        process = self.begin(*arguments)
        return process.wait(seconds), process.said()

    def gone(self) -> None:
        for process in (*self.others, *self.clients.values(), self.server):
            process.gone()


@contextmanager
def federation(
    path: Path,
    data: Mapping[str, object],
    settings: Sequence[str] = (),
    rules: Mapping[str, object] | None = None,
    *,
    absent: Sequence[str] = (),
    host: str = "127.0.0.1",
    started: bool = True,
) -> Iterator[Federation]:
    """A federation of the clients that `data` names; settings as for --set, rules by name.

    Those `absent` are registered and have no process.
    """
    address = f"{host}:{free_port()}"
    creating.create(path, [*data, *absent], address, assignments=settings)
    toml = path / "server" / "federation.toml"
    text = toml.read_text()
    for name, value in (rules or {}).items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        written = f'"{value}"' if isinstance(value, str) else str(value).lower()
        text = text.replace(f"\n{line}\n", f"\n{name} = {written}\n")
    toml.write_text(text)
    running = Federation(path, data)
    try:
        if started:
            running.start()
        yield running
    finally:
        running.gone()


@contextmanager
def shared(folder: Path) -> Iterator[Federation]:
    """The federation that tests share: two small clients that learn a sign, and one absent."""
    generator = np.random.default_rng(0)
    data = {}
    for name in ("alice", "bob"):
        x = generator.normal(size=(60, 3)).astype("float32")
        data[name] = folder / f"{name}.npz"
        np.savez(data[name], X=x, y=(x.sum(1) > 0).astype("int64"))
    settings = [
        "method=fedavg", "rounds=2", "local_steps=2", "hidden=4", "evaluate_every=1",
    ]  # fmt: skip
    rules = {"quorum": 0.5, "join_wait": 0.0, "deadline": 60.0}
    with federation(
        folder / "fed", data, settings, rules, absent=["carol"], host=interface() or "127.0.0.1"
    ) as running:
        running.wait_connected()
        yield running


def interface() -> str:
    """An address of this machine that is not the loopback, if it has one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if ipaddress.ip_address(address).is_loopback else address
