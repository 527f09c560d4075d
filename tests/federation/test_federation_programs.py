"""The programs around Flower, each by itself: sandbox, nursery, SuperNode's waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corefed.federation.engine import node, patches, sandbox, signals, warm
from corefed.federation.engine.sandbox import Order


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return tmp_path


# The bell


def rung(waiting: signals.Bell) -> bool:
    """Whether it was rung before; far below Flower's second between questions, if so."""
    began = time.monotonic()
    waiting.wait(0.2)
    return time.monotonic() - began < 0.15


def test_a_bell_is_heard_once_however_often_it_was_rung(home: Path) -> None:
    waiting = signals.Bell()
    assert not rung(waiting)
    signals.ring()
    signals.ring()
    assert rung(waiting)
    assert not rung(waiting)
    assert not rung(signals.Bell())  # of a process that is started later
    threading.Timer(0.1, signals.ring).start()
    began = time.monotonic()
    waiting.wait(30)
    assert time.monotonic() - began < 15


def test_without_a_bell_there_is_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "missing"))
    waiting = signals.Bell()
    signals.ring()
    assert not rung(waiting)


# Fail closed


@pytest.mark.parametrize("table", [patches.SECURITY, patches.COMFORT])
def test_every_name_that_is_replaced_is_in_this_flower(table: patches.Table) -> None:
    for program, modules in table.items():
        patches.check(program)
        assert patches._missing(modules) == ""
        assert all(why for names in modules.values() for why in names.values())


def test_what_must_hold_needs_six_names_at_most() -> None:
    names = [
        (module, name)
        for modules in patches.SECURITY.values()
        for module, names in modules.items()
        for name in names
    ]
    assert len(names) == len(set(names)) <= 6


def test_a_flower_without_a_name_that_must_be_replaced_stops_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = import_module("flwr.supernode.runtime.run_clientapp")
    before = runner.get_load_client_app_fn
    with monkeypatch.context() as without:
        without.delattr(runner, "install_from_fab")
        with pytest.raises(SystemExit, match=r"it has no flwr.*run_clientapp.install_from_fab"):
            sandbox.prepare(sandbox.CLIENT)
        assert runner.get_load_client_app_fn is before  # nothing was replaced
    monkeypatch.setitem(patches.SECURITY, "superexec", {"some.module": {"name": "why"}})
    with pytest.raises(SystemExit, match=r"it has no flwr.some.module"):
        patches.check("superexec")


def test_only_what_the_table_lists_can_be_replaced() -> None:
    with pytest.raises(KeyError, match="not in the table"):
        patches.replace("supernode.runtime.run_clientapp", run_clientapp=None)


def test_another_flower_stops_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr

    patches.check("client task")
    for version in ("1.39.0", "1.43.0", "1.4.0", "2.0.0"):
        monkeypatch.setattr(flwr, "__version__", version)
        with pytest.raises(SystemExit, match=rf"flwr 1.40 to 1.42, and this is {version}"):
            sandbox.prepare(sandbox.CLIENT)


def test_without_its_quicker_names_a_program_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flwr import __version__

    patches.is_quick.cache_clear()
    monkeypatch.setattr(patches, "QUICK", ("1.39",))
    assert not patches.is_quick("supernode")
    assert not patches.is_quick("supernode")
    said = capsys.readouterr().err
    assert said == f"corefed: supernode runs at Flower's own pace on flwr {__version__}\n"
    monkeypatch.setattr(patches, "QUICK", patches.VERSIONS)
    monkeypatch.setitem(patches.COMFORT, "superexec", {"some.module": {"name": "why"}})
    assert not patches.is_quick("superexec")
    assert "a flwr without flwr.some.module" in capsys.readouterr().err
    patches.is_quick.cache_clear()


def in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_a_task_would_install_and_load_is_replaced() -> None:
    """Every name by which Flower's runners reach a bundle leads elsewhere."""
    code = """
from importlib import import_module
from corefed.federation.engine import sandbox
sandbox.prepare(sandbox.CLIENT)
client = import_module("flwr.supernode.runtime.run_clientapp")
import corefed.federation.flower.app as ours
load = client.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
assert load("evil/app", "1.0", "hash") is ours.client_app
assert client.install_from_fab(b"evil", skip_prompt=True) is None
sandbox.prepare(sandbox.SERVER)
server = import_module("flwr.superlink.runtime.run_serverapp")
assert server.install_from_fab(b"evil", skip_prompt=True) is None
folder = server.get_project_dir("evil/app", "1.0", "hash")
assert [each.name for each in folder.iterdir()] == ["pyproject.toml"]
app = server.get_project_config(str(folder))["tool"]["flwr"]["app"]
assert server.get_fused_config_from_dir(folder, {"run": "x"}) == {"run": "x"}
called = []
ours.server_app._main = lambda grid, context: called.append((grid, context))
named = app["components"]["serverapp"]
server.run_(grid=1, context=2, server_app_dir=str(folder), server_app_attr=named)
assert called == [(1, 2)]
print("ok")
"""
    assert in_a_process(code) == "ok"


@pytest.mark.parametrize(
    ("variable", "kind"),
    [
        ("COREFED_CLIENT", "flwr-serverapp"),
        ("COREFED_CLIENT", "flwr-agentapp"),
        ("COREFED_CLIENT", "flwr-simulation"),
        ("COREFED_SERVER", "flwr-clientapp"),
        ("COREFED_SERVER", "flwr-model"),
    ],
)
def test_other_kinds_of_tasks_are_not_done(
    monkeypatch: pytest.MonkeyPatch, variable: str, kind: str
) -> None:
    for each in ("COREFED_CLIENT", "COREFED_SERVER"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, "/somewhere")
    with pytest.raises(SystemExit, match="is not done here"):
        sandbox.run_task(Order(kind, "127.0.0.1:1", "token", True, None, os.getpid()))
    ours, theirs = socket.socketpair()
    executor = warm.Executor(ours)
    theirs.send(warm.READY)
    kinds: Any = {"flwr-clientapp", "flwr-serverapp", "flwr-agentapp", "flwr-simulation"}
    assert executor.get_eligible_capacity(kinds) == ({sandbox.allowed_kind()}, set())
    spec: Any = SimpleNamespace(task_type=kind)
    assert executor.launch(spec).status == "failed"
    executor.close()
    theirs.close()


def test_orders_travel_whole() -> None:
    order = Order("flwr-clientapp", "127.0.0.1:1", "to\nken", True, None, 7)
    text = order.to_json()
    assert "\n" not in text
    assert Order.from_json(text) == order


# The nursery, with tasks of our own

NURSERY = """
import os, socket, sys, time
from corefed.federation.engine import sandbox, warm
os.environ["COREFED_CLIENT"] = "/nowhere"
sandbox.prepare = lambda kind: None
warm._import_all = lambda: None

def do(order):
    import random, torch
    drawn = torch.rand(1).item(), random.random()
    os.write(1, "{} {} {} {} {}\\n".format(order.token, os.getpid(), os.getppid(), *drawn).encode())
    if order.token == "hangs":
        time.sleep(600)
    if order.token == "fails":
        raise ValueError("of the task")
    sys.exit(3)

sandbox.run_task = do
ours = socket.socket(fileno=int(sys.argv[1]))
warm.serve(ours)
"""


def test_the_nursery_forks_tasks_and_ends_with_them() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    assert ours.recv(1) == warm.READY
    tokens = ("one", "two", "fails", "hangs", "hangs")
    orders = [Order("flwr-clientapp", "x", token, True, None, 1) for token in tokens]
    text = "".join(order.to_json() + "\n" for order in orders).encode()
    ours.sendall(text[:50])  # in pieces, as a stream may bring them
    ours.sendall(text[50:])
    assert process.stdout is not None
    assert process.stderr is not None
    rows = [process.stdout.readline().split() for _ in orders]
    assert sorted(row[0] for row in rows) == ["fails", "hangs", "hangs", "one", "two"], rows
    assert {int(row[2]) for row in rows} == {process.pid}
    assert len({row[1] for row in rows}) == len({row[3] for row in rows}) == len(orders)
    assert len({row[4] for row in rows}) == len(orders)  # no two draw the same numbers
    hanging = [int(row[1]) for row in rows if row[0] == "hangs"]
    os.kill(hanging[0], signal.SIGKILL)
    os.kill(process.pid, signal.SIGTERM)  # which is not for it to follow
    time.sleep(1.0)
    assert process.poll() is None
    ours.close()
    assert process.wait(10) == 0
    words = process.stderr.read()
    assert "ValueError: of the task" in words
    assert "a task was ended by SIGKILL (out of memory?)" in words
    with pytest.raises(ProcessLookupError):
        os.kill(hanging[1], 0)
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("variable", ["COREFED_CLIENT", "COREFED_SERVER"])
def test_what_a_nursery_imports_starts_nothing(variable: str) -> None:
    """A fork has one thread, and no GPU that was in use before it."""
    code = """
import threading
from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec import run_superexec
from corefed.federation.engine import sandbox, warm
sandbox.prepare(sandbox.allowed_kind())
warm._import_all()
import torch
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
print("ok")
"""
    assert in_a_process(code, **{variable: "/nowhere"}) == "ok"


def test_without_a_nursery_a_task_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COREFED_CLIENT", str(tmp_path))
    monkeypatch.delenv("COREFED_SERVER", raising=False)
    ours, theirs = socket.socketpair()
    theirs.close()
    executor = warm.Executor(ours)
    assert executor.get_eligible_capacity(set()) == (set(), set())  # does not wait for the dead
    given: list[Order] = []
    monkeypatch.setattr(executor, "_launch_slowly", given.append)
    spec: Any = SimpleNamespace(
        task_type="flwr-clientapp",
        runtime_api_address="127.0.0.1:1",
        token="t",
        insecure=True,
        root_certificates_path=None,
    )
    assert executor.launch(spec).status == "accepted"
    assert given == [Order("flwr-clientapp", "127.0.0.1:1", "t", True, None, os.getpid())]
    executor.close()


# SuperNode


def test_supernode_polls_quickly_in_a_round_and_slowly_between_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(node, "time", clock)
    waiting = node.PollInterval()
    waiting.sleep(3)
    assert slept == [node.QUICK]
    now = 10.0
    waiting.sleep(3)
    assert slept[-1] == pytest.approx(1.0)  # a tenth of the time without a message
    now = 1000.0
    waiting.sleep(3)
    assert slept[-1] == node.SLOW
    waiting.sleep(0.5)  # while a task is done
    assert slept[-1] == pytest.approx(0.1)
    waiting.sleep(3)
    assert slept[-1] == node.QUICK


def test_a_session_is_signed_off_by_the_machine_that_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(node, "UNSEEN", 0.0)
    module = SimpleNamespace(
        httpx=SimpleNamespace(HTTPError=ConnectionError),
        DeactivateNodeRequest=lambda node_id: node_id,
    )
    client = SimpleNamespace(DeactivateNode=calls.append)
    session = tmp_path / "session.json"
    node._sign_off(module, client, session)  # the first time there is none
    session.write_text("{damaged")
    node._sign_off(module, client, session)
    session.write_text(json.dumps({"node": 7, "machine": "another"}))
    node._sign_off(module, client, session)
    assert calls == []
    session.write_text(json.dumps({"node": 7, "machine": os.uname().nodename}))
    node._sign_off(module, client, session)
    assert calls == [7]

    def refuses(request: int) -> None:
        raise ConnectionError

    node._sign_off(module, SimpleNamespace(DeactivateNode=refuses), session)  # Flower knows better


@pytest.mark.parametrize(
    ("codes", "entered", "asked"),
    [([412, 412], True, 3), ([401], False, 1), ([412] * 99, False, 11)],
)
def test_a_client_that_is_refused_asks_again_for_a_while(
    codes: list[int], entered: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key may be about to be registered; 5 s of questions every half second are eleven."""
    now, tried = 0.0, 0
    left = iter(codes)

    class RefusalError(Exception):
        def __init__(self, code: int) -> None:
            self.response = SimpleNamespace(status_code=code)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    @contextmanager
    def connect() -> Iterator[str]:
        nonlocal tried
        tried += 1
        for code in left:
            raise RefusalError(code)
        yield "connected"

    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    module = SimpleNamespace(httpx=SimpleNamespace(HTTPStatusError=RefusalError))
    with ExitStack() as stack:
        if entered:
            assert node._enter(module, stack, connect) == "connected"
        else:
            with pytest.raises(RefusalError):
                node._enter(module, stack, connect)
    assert tried == asked


def test_a_process_follows_its_parent() -> None:
    code = """
import os, sys, time
from corefed.federation.engine import signals
if os.fork() == 0:
    signals.end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(1)
os._exit(0)
"""
    pid = int(in_a_process(code))
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it goes on without its parent")


def test_programs_and_commands_start_without_torch() -> None:
    """It takes seconds, and a federation starts a dozen processes."""
    names = ["engine.gate", "engine.stock", "engine.node", "engine.warm", "operate.control",
             "operate.following", "operate.registering", "operate.serving",
             "operate.status"]  # fmt: skip
    imports = ", ".join(f"corefed.federation.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
