"""`corefed federation demo`: a whole federation on one machine, in which a client is killed.

One SuperLink and three SuperNodes with TLS and keys, digits split into three files, five rounds. In
the second round one client is killed by kill -9 and started again. The rules ask for all clients
(quorum 1), so that round is asked again. Every draw is a function of (seed, round, client), and the
rules trust every client as a simulation does, so the result is that of a simulation of the same
experiment. Everything is done by the commands that an
operator types, and each is printed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from corefed.base import files, machine
from corefed.base.shown import say
from corefed.federation.operate.processes import free_port, process_tree
from corefed.show import report
from corefed.training import record

CLIENTS = ("alice", "bob", "carol")
VICTIM = "bob"
SETTINGS = ("rounds=5", "local_steps=100", "evaluate_every=1", "refresh_every=50", "fraction=0.2")
RULES = (
    "quorum=1.0", "deadline=30", "attempts=8", "join_wait=120",
    "aggregation=plain", "join=pooled", "class_quorum=1", "max_weight=0",
)  # fmt: skip
SPLIT = ("--partition", "iid", "--clients", str(len(CLIENTS)))
FIRST_ROUND = 180.0
"""Seconds to wait for the first round."""
SAME = 1e-9
"""Metrics are sums in float64 over the same predictions, added client by client."""


def main(out: Path) -> int:
    """Run the demonstration in a new folder; 0 if both ended alike."""
    files.refuse_existing(out, "name a new folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    federation, data, simulation = out / "federation", out / "data", out / "simulation"
    _corefed("datasets", "--show", "digits", *SPLIT, "--write", data, quiet=True)
    settings = [word for text in SETTINGS for word in ("--set", text)]
    rules = [word for text in RULES for word in ("--rule", text)]
    address = f"127.0.0.1:{free_port()}"
    _corefed(
        "federation", "init", federation, "--clients", *CLIENTS, "--address", address,
        *settings, *rules,
    )  # fmt: skip
    with _programs() as start:
        start("server", "federation", "server", federation, log=out / "server.log")

        def client(name: str) -> subprocess.Popen[bytes]:
            place = federation / "clients" / name
            points = data / f"client-{CLIENTS.index(name)}.npz"
            log = out / f"{name}.log"
            return start(name, "federation", "client", place, "--data", points, log=log)

        victim = {name: client(name) for name in CLIENTS}[VICTIM]
        run = start("run", "federation", "run", federation, "--name", "demo", log=None)
        rounds = federation / "server" / "runs" / "demo" / record.ROUNDS
        until = time.monotonic() + FIRST_ROUND
        while not record.read_lines(rounds)[0] and run.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        if run.poll() is None:
            _say(f"kill -9 of {VICTIM}, in the middle of round 2")
            _kill(victim)
            _say(f"and {VICTIM} again, as its service manager would start it")
            client(VICTIM)
        if run.wait() != 0:
            _say(f"the federation failed; its logs are in {out}")
            return 1
    _corefed(
        "run", "--data", "digits", *SPLIT, *settings, "--set", "runtime=loop", "--out", simulation,
        "--quiet",
    )  # fmt: skip
    return _compare(federation / "server" / "runs" / "demo", simulation, time.monotonic() - began)


def _compare(federated: Path, simulated: Path, seconds: float) -> int:
    """Both tables, and whether they are the same."""
    results = report.load([federated, simulated])
    report.console().print(report.comparison_table(results))
    # As recorded: tables show the kept predictions, which a federation's server does not have.
    here, there = (record.read(path)[0]["metrics"] for path in (federated, simulated))
    gap = max(abs(here[name]["mean"] - there[name]["mean"]) for name in there)
    alike = here.keys() == there.keys() and gap <= SAME
    words = "the same" if alike else "NOT the same"
    lines = results[0].lines
    overhead = sum(line["federation"]["overhead_seconds"] for line in lines) / len(lines)
    work = sum(max(line["federation"]["train_seconds"].values()) for line in lines) / len(lines)
    asked = sum(line["federation"]["attempts"] > 1 for line in lines)
    _say(f"federation and simulation are {words}: the largest difference of a metric is {gap:.2g}")
    _say(f"a round: {work:.2f} s of training at the slowest client, {overhead:.2f} s beside it")
    _say(f"rounds asked more than once: {asked}; all of it took {seconds:.0f} s")
    return 0 if alike else 1


def _say(text: str) -> None:
    say(f"==> {text}")


def _command(words: Sequence[object]) -> list[str]:
    say(f"$ corefed {shlex.join(map(str, words))}")
    return [sys.executable, "-m", "corefed", *map(str, words)]


def _one_thread() -> dict[str, str]:
    """For all programs: they share the machine, and with equal threads they round equally."""
    return machine.polite(os.environ, threads=1)


def _corefed(*words: object, quiet: bool = False) -> None:
    """A command that ends, in the foreground."""
    shown = subprocess.DEVNULL if quiet else None
    done = subprocess.run(_command(words), stdout=shown, env=_one_thread())
    if done.returncode != 0:
        sys.exit(done.returncode)


Start = Callable[..., "subprocess.Popen[bytes]"]


@contextmanager
def _programs() -> Iterator[Start]:
    """Start programs in the background; all of them are ended afterwards."""
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *words: object, log: Path | None) -> subprocess.Popen[bytes]:
        command = _command(words)
        handle = None if log is None else log.open("ab")
        try:
            started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=_one_thread(),
                start_new_session=log is not None,
            )
        finally:
            if handle is not None:
                handle.close()
        return started[name]

    try:
        yield start
    finally:
        for program in reversed(started.values()):
            program.terminate()
        for program in started.values():
            with suppress(subprocess.TimeoutExpired):
                program.wait(20)
            _kill(program)


def _kill(program: subprocess.Popen[bytes]) -> None:
    """Kill a program and all that it started."""
    for pid in process_tree(program.pid) if program.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.wait()
