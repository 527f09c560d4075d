"""SuperExec with tasks that start at once, forked from a process that has imported everything.

Flower's SuperExec starts a Python process per message, which imports flwr and torch for seconds,
with the task's token on its command line, where every user of the machine could see it and answer
in the client's name. Here `python -m corefed.federation.engine.warm` runs Flower's SuperExec with
another executor. It has two processes:

    SuperExec     asks for tasks when the bell (`signals.py`) rings, and passes each by a socket to
    the nursery   which imported everything once, has one thread, and forks a child per task

The nursery starts no thread and does not touch a GPU, so its children behave like new processes.
Only one kind of task is taken: a client's on a client, the server's on the server. SuperNode and
SuperLink give tasks only to who knows the secret that `processes.py` made for this start.

When SuperExec is gone, the nursery ends its children and itself. When the nursery is gone, each
task gets a new process, which is slower.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from corefed.federation.engine import patches, sandbox, signals
from corefed.federation.engine.sandbox import Order

if TYPE_CHECKING:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.types import ExecutionSpec

READY = b"."
GRACE = 2.0
"""Seconds that children have to end before they are killed."""
POLL = "0.2"
"""Seconds between Flower's questions for a task, where no bell can be heard."""


class Launched(NamedTuple):
    """Flower's LaunchResult, as SuperExec reads it."""

    status: str  # accepted or failed
    message: str | None = None


class Executor:
    """Flower's executor: what SuperExec asks whether a task can be run, and to run it."""

    def __init__(self, nursery: socket.socket) -> None:
        self.nursery = nursery
        self.ready = False
        self.slow: list[subprocess.Popen[str]] = []

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], **more: object
    ) -> tuple[set[TaskType], set[str]]:
        """What tasks to ask for. Waits until the nursery is ready: a task must start soon."""
        if not self.ready:
            self.nursery.recv(1)  # all is imported, or the nursery ended
            self.ready = True
        kind = sandbox.allowed_kind()
        return {each for each in supported_task_types if each == kind}, set()

    def wait_for_capacity(self, *arguments: object, **more: object) -> None:
        """There is always room."""

    def launch(self, spec: ExecutionSpec) -> Launched:
        if spec.task_type != sandbox.allowed_kind():
            return Launched("failed", f"A task of kind {spec.task_type} is not done here.")
        order = Order(
            str(spec.task_type),
            spec.runtime_api_address,
            spec.token,
            spec.insecure,
            spec.root_certificates_path,
            os.getpid(),
        )
        try:
            self.nursery.sendall(order.to_json().encode() + b"\n")
        except OSError:
            self._launch_slowly(order)
        return Launched("accepted")

    def _launch_slowly(self, order: Order) -> None:
        command = [sys.executable, "-m", "corefed.federation.engine.sandbox"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(order.to_json() + "\n")
        self.slow.append(process)

    def reconcile(self) -> None:
        self.slow = [process for process in self.slow if process.poll() is None]

    def close(self) -> None:
        self.nursery.close()


def serve(orders: socket.socket) -> NoReturn:
    """The nursery: a child for every line, until SuperExec closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends with SuperExec, after its children
    sandbox.prepare(sandbox.allowed_kind())
    _import_all()
    import torch

    threads = torch.get_num_threads()
    orders.sendall(READY)
    children: set[int] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([orders], [], [], 0.5)
        _reap(children)
        if not readable:
            continue
        received = orders.recv(1 << 16)
        if not received:
            _end(children)
            os._exit(0)
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            child = os.fork()
            if child == 0:
                orders.close()
                torch.set_num_threads(
                    threads
                )  # nothing was computed here: OpenMP has no threads yet
                _run_child(line.decode())
            children.add(child)


def _import_all() -> None:
    """Import what a task would import later."""
    import_module(sandbox.APP)
    half = "client" if sandbox.allowed_kind() == sandbox.CLIENT else "server"
    import_module(f"corefed.federation.{half}")


def _run_child(text: str) -> NoReturn:
    """Do the task in the child, as in a new process."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        import torch

        torch.seed()  # otherwise every child without a seed would draw the same numbers
        sandbox.run_task(Order.from_json(text))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int]) -> None:
    """Reap ended children, and print which were killed."""
    for child in list(children):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            children.discard(child)
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                print(f"corefed: a task was ended by {name}{hint}", file=sys.stderr, flush=True)


def _end(children: set[int]) -> None:
    until = time.monotonic() + GRACE
    for child in children:
        os.kill(child, signal.SIGTERM)
    while children and time.monotonic() < until:
        _reap(children)
        time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)


def main() -> None:
    # Before the fork, for both: importing Flower takes a second and starts no thread.
    patches.check("superexec")
    program = patches.flower_program("flower-superexec")

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    signals.end_with_parent()

    def executor(*arguments: Any, **more: Any) -> Executor:
        return Executor(ours)

    patches.replace("supercore.superexec.run_superexec", get_executor=executor)
    if patches.is_quick("superexec"):
        waiting = SimpleNamespace(sleep=signals.Bell().wait)  # the loop's, which only sleeps
        patches.replace("supercore.superexec.run_superexec", time=waiting)
    else:
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", POLL)
    program()


if __name__ == "__main__":
    main()
