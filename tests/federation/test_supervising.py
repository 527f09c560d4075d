"""The supervisor of Flower's programs, with small programs in their place; and the clocks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corefed.base.errors import UserError
from corefed.federation.operate import clock, creating, supervising
from corefed.federation.operate.folder import ClientFolder
from corefed.federation.operate.processes import Part
from corefed.federation.operate.program import Program
from corefed.federation.operate.serving import Excuses
from corefed.federation.operate.supervising import EndedError, Supervisor, supervised

TICK = "import time, os, sys, subprocess\nwhile True: time.sleep(0.02)"
"""A program that does nothing, and wakes up often."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LOOK": 0.04, "STOPPED": 0.2, "STUCK": 60.0, "SILENT": 0.2, "START": 0.4, "SETTLED": 0.1,
        "IDLE": {"received": 0.2, "sending": 60.0}, "PAUSE": 0.05, "LONGEST": 0.1,
    }.items():  # fmt: skip
        monkeypatch.setattr(supervising, name, value)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Start one program of this code under a supervisor."""
    ends = []

    def start(code: str, name: str = "executor", **more: object) -> Supervisor:
        command = [sys.executable, "-S", "-c", code]
        context = supervised([Part(name, command, dict(os.environ), tmp_path / "log")], **more)  # type: ignore[arg-type]
        supervisor = context.__enter__()
        ends.append(context)
        return supervisor

    yield start
    for context in ends:
        context.__exit__(None, None, None)


def pid(supervisor: Supervisor) -> int:
    return supervisor.programs()[0].process.pid


def look(supervisor: Supervisor, until: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not happen"
        supervisor.look()
        time.sleep(0.01)


def look_for(supervisor: Supervisor, seconds: float) -> None:
    end = time.monotonic() + seconds
    look(supervisor, lambda: time.monotonic() > end)


def restarted(supervisor: Supervisor) -> Callable[[], bool]:
    first = pid(supervisor)
    return lambda: bool(supervisor.programs()) and pid(supervisor) != first


def test_a_program_that_is_killed_is_started_again(
    watch: Callable[..., Supervisor], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = watch(TICK)
    again = restarted(supervisor)
    look_for(supervisor, 0.3)
    assert not again()
    os.kill(pid(supervisor), signal.SIGKILL)
    look(supervisor, again)
    assert "executor ended. Starting it again in" in capfd.readouterr().err


def test_a_program_that_is_stopped_is_killed_and_started_again(
    watch: Callable[..., Supervisor], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = watch(TICK)
    again, first = restarted(supervisor), pid(supervisor)
    os.kill(first, signal.SIGSTOP)
    look(supervisor, again)
    assert f"has been stopped for 0 s (process {first})" in capfd.readouterr().err
    assert not Path(f"/proc/{first}").exists()


def test_a_short_stop_is_no_trouble(watch: Callable[..., Supervisor]) -> None:
    supervisor = watch(TICK)
    again = restarted(supervisor)
    for _ in range(4):
        os.kill(pid(supervisor), signal.SIGSTOP)
        look_for(supervisor, 0.1)
        os.kill(pid(supervisor), signal.SIGCONT)
        look_for(supervisor, 0.1)
    assert not again()


def test_a_program_whose_main_thread_waits_for_ever_is_stuck(
    watch: Callable[..., Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Other threads of it may work; SuperNode's serve its executor."""
    monkeypatch.setattr(supervising, "STUCK", 0.5)
    code = (
        "import threading, time\ndef tick():\n while True: time.sleep(0.02)\n"
        "threading.Thread(target=tick).start()"
    )
    supervisor = watch(code, "supernode")
    look(supervisor, restarted(supervisor))
    assert "has done nothing for" in capfd.readouterr().err


CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {{code!r}}])
print("child", child.pid, flush=True)
{TICK}
"""


def child_of(supervisor: Supervisor) -> int:
    (program,) = supervisor.programs()
    look(supervisor, lambda: any("child" in line for line in program.last))
    return int(next(line.split()[1] for line in program.last if "child" in line))


def test_a_program_that_loses_a_process_it_needs_is_started_again(
    watch: Callable[..., Supervisor], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = watch(CHILD.format(code=TICK))
    again, child = restarted(supervisor), child_of(supervisor)
    look_for(supervisor, 0.4)
    os.kill(child, signal.SIGKILL)  # nobody reaps it
    look(supervisor, again)
    assert f"has lost a process that it needs ({child})" in capfd.readouterr().err


def test_a_stopped_task_is_killed_alone(
    watch: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(supervising.GENERATIONS, "executor", 0)
    supervisor = watch(CHILD.format(code=TICK))
    again, child = restarted(supervisor), child_of(supervisor)
    os.kill(child, signal.SIGSTOP)
    look(supervisor, lambda: "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2])
    assert not again()


def test_a_program_that_does_not_answer_is_started_again(
    watch: Callable[..., Supervisor],
) -> None:
    answers = [False, True]
    supervisor = watch(TICK, answers={"executor": lambda: answers[-1]})
    again = restarted(supervisor)
    look_for(supervisor, 0.4)
    answers.append(False)
    look(supervisor, again)
    answers.append(True)


@pytest.mark.parametrize(("name", "matters"), [("supernode", True), ("executor", False)])
def test_a_lost_thread_of_a_supernode(
    watch: Callable[..., Supervisor], name: str, matters: bool
) -> None:
    """Its heartbeats may have ended. Elsewhere the words may be those of a task."""
    code = f"import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n{TICK}"
    supervisor = watch(code, name)
    again, (program,) = restarted(supervisor), supervisor.programs()
    if matters:
        look(supervisor, again)
    else:
        look(supervisor, lambda: program.broken)
        look_for(supervisor, 0.2)
        assert not again()


@pytest.mark.parametrize("then", ["", "Sending: train message", "Sent successfully"])
def test_a_supernode_whose_task_nobody_does(watch: Callable[..., Supervisor], then: str) -> None:
    supervisor = watch(
        f"print('INFO : Receiving: train message\\n{then}', flush=True)\n{TICK}", "supernode"
    )
    again, (program,) = restarted(supervisor), supervisor.programs()
    if then:
        look_for(supervisor, 0.6)
        assert not again()
    else:
        look(supervisor, again)
    assert program.last[0] == "INFO : Receiving: train message"


@pytest.mark.parametrize("waits", [True, False])
def test_a_lost_executor_takes_a_supernode_with_a_message_along(
    tmp_path: Path, waits: bool
) -> None:
    words = "Sending: a message" if waits else "Sent successfully"
    codes = {"supernode": f"print('{words}', flush=True)\n{TICK}", "executor": TICK}
    parts = [
        Part(name, [sys.executable, "-S", "-c", code], dict(os.environ), tmp_path / "log")
        for name, code in codes.items()
    ]
    with supervised(parts) as supervisor:
        again, (node, executor) = restarted(supervisor), supervisor.programs()
        look(supervisor, lambda: bool(node.last))
        os.kill(executor.process.pid, signal.SIGKILL)
        look(supervisor, lambda: executor not in supervisor.programs())
        look(supervisor, lambda: len(supervisor.programs()) == 2)
        assert again() == waits


def test_a_program_that_fails_again_and_again_is_given_up(
    watch: Callable[..., Supervisor],
) -> None:
    supervisor = watch("import sys\nsys.exit('no space left')")
    with pytest.raises(EndedError, match=r"executor ended, again and again; .* no space left"):
        look_for(supervisor, 20.0)


def test_a_program_with_an_excuse_is_not_given_up(watch: Callable[..., Supervisor]) -> None:
    seen: list[str] = []

    def excuse(name: str, program: Program) -> str:
        seen.append(name)
        return "It rains."

    supervisor = watch("", excuse=excuse)
    look(supervisor, lambda: len(seen) > supervising.TRIES + 2)


def test_a_service_manager_that_wants_to_know_hears_of_every_look(
    watch: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        look_for(watch(TICK), 0.2)
        assert manager.recv(100) == b"WATCHDOG=1"


# Why the server ended a client's connection


class Ended:
    """A program that ended with these words."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def has_logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def last_lines(self) -> str:
        return " / ".join(self.lines)


@pytest.fixture
def client(tmp_path: Path) -> ClientFolder:
    creating.create(tmp_path / "fed", ["alice"], "127.0.0.1:9")
    return ClientFolder.read(tmp_path / "fed")


def test_a_key_that_is_refused_for_long(
    client: ClientFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    excuse, refused = Excuses(client), Ended("Failed to activate the node")
    assert "refuses the key of alice" in excuse("supernode", refused)  # type: ignore[arg-type]
    now += 50
    assert "refuses the key of alice" in excuse("supernode", refused)  # type: ignore[arg-type]
    now += 50
    with pytest.raises(UserError, match="refuses the key of alice"):
        excuse("supernode", refused)  # type: ignore[arg-type]


def test_a_server_with_an_error_of_its_own_and_a_crash(client: ClientFolder) -> None:
    excuse = Excuses(client)
    failed = Ended("Failed to initialize the connection to the SuperLink.", "500 Internal Server")
    assert "an error of its own" in excuse("supernode", failed)  # type: ignore[arg-type]
    assert excuse("supernode", Ended("Traceback")) == ""  # type: ignore[arg-type]


# Clocks

DATE = "Tue, 15 Nov 1994 12:45:26 GMT"
THERE = 784903526.5  # in the middle of that second


@pytest.mark.parametrize(
    ("date", "here", "ahead"),
    [
        (DATE, THERE, 0.0),
        (DATE, THERE + 42, 42.0),
        (DATE, THERE - 3600, -3600.0),
        ("", THERE, None),
        ("yesterday", THERE, None),
    ],
)
def test_the_difference_of_clocks(date: str, here: float, ahead: float | None) -> None:
    assert clock.difference(date, here) == ahead


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (42.0, "42 s ahead of the server's, and the server refuses a client whose clock is more "),
        (-400.0, "400 s behind the server's"),
    ],
)
def test_a_clock_that_the_server_will_refuse(
    client: ClientFolder, monkeypatch: pytest.MonkeyPatch, ahead: float, words: str
) -> None:
    monkeypatch.setattr(clock, "measure", lambda client: ahead)
    with pytest.raises(UserError, match=words):
        clock.refuse_skew(client)
    with pytest.raises(UserError, match=words):  # SuperNode's only words about it
        Excuses(client)("supernode", Ended("SuperNode terminated gracefully."))  # type: ignore[arg-type]


def test_a_clock_that_is_nearly_refused_or_right(
    client: ClientFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for ahead in (0.3, None, -100.0):
        monkeypatch.setattr(clock, "measure", lambda client, ahead=ahead: ahead)
        clock.refuse_skew(client)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(clock, "measure", lambda client: 4.5)
    clock.refuse_skew(client)
    assert "note: This machine's clock is 4 s ahead" in capsys.readouterr().err


def test_flowers_own_bounds() -> None:
    constant = pytest.importorskip("flwr.common.constant")
    assert clock.AHEAD == constant.SYSTEM_TIME_TOLERANCE
    assert clock.BEHIND == constant.TIMESTAMP_TOLERANCE + constant.SYSTEM_TIME_TOLERANCE


def test_a_certificate_that_is_not_yet_valid_may_be_the_clocks_fault() -> None:
    assert "clock says" in clock.hint("certificate is not yet valid")
    assert clock.hint("self-signed certificate") == ""
