"""`corefed run --workers N`: start the workers of a run on this machine, and watch over them.

These are plain processes, not torchrun's launcher: that one starts a group again after any failure,
a wrong setting included, and ends with exit code 1 whatever happened. Here exit codes mean what
they mean everywhere (2: a mistake, 130: Ctrl-C), and only a group with a worker that was killed is
started again. Workers end when this process does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import click

from corefed.base import machine
from corefed.base.errors import INTERRUPTED, LOST, UserError
from corefed.base.shown import say

RESTARTS = 3
"""Times that a group is started again; a worker that is killed every time has a reason."""
GRACE = 5.0
"""Seconds that workers have to end after one of them has."""
PARENT = "COREFED_PARENT"
"""Variable with the number of a pipe that closes when the starting process ends."""


def launch(workers: int, context: click.Context, *more: str) -> int:
    """Run the command of a context, with more arguments, on so many workers; its exit code."""
    arguments = [*rebuild(context, without=("workers",)), *more]
    for attempt in range(RESTARTS + 1):
        codes = _attempt(workers, arguments, attempt)
        killed = [rank for rank, code in enumerate(codes) if code < 0]
        if 2 in codes or INTERRUPTED in codes:
            return 2 if 2 in codes else INTERRUPTED
        wrong = [code for code in codes if code > 0 and code != LOST]
        if not killed and (wrong or LOST not in codes):
            return max(wrong, default=0)  # a mistake in the program would only come again
        who = f"worker {killed[0]} of {workers} was killed" if killed else "a worker was lost"
        if attempt < RESTARTS:
            again = f"starting again from the last checkpoint ({attempt + 1} of {RESTARTS})"
            say(f"note: {who}; {again}", file=sys.stderr)
    raise UserError(
        f"{who[0].upper()}{who[1:]} for the {RESTARTS + 1}th time, perhaps for lack of memory; use "
        "fewer workers, and go on with --resume."
    )


def _attempt(workers: int, arguments: Sequence[str], attempt: int) -> list[int]:
    """Exit codes of all workers; below 0 is the signal that killed one."""
    alive, end = os.pipe()
    common = {
        **machine.polite(os.environ, threads=max(1, machine.usable_cores() // workers)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        PARENT: str(alive),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _forward_interrupts(processes):
            for rank in range(workers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "corefed", *arguments],
                        env=common | own,
                        stdin=subprocess.DEVNULL,
                        pass_fds=(alive,),
                        process_group=0,  # a terminal's Ctrl-C goes to this process alone
                    )
                )
            return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.close(alive)
        os.close(end)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all; after the first failure the others have a few seconds."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.poll() for process in processes):
            deadline = time.monotonic() + GRACE
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    return [code if code is not None else LOST for code in codes]  # who is left is killed


@contextmanager
def _forward_interrupts(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C goes to the first worker, which tells the others."""

    def forward(number: int, frame: FrameType | None) -> None:
        if not processes:
            raise KeyboardInterrupt
        processes[0].send_signal(number)

    before = signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def follow_parent() -> None:
    """End this worker when the process that started it has ended, whatever it is doing."""
    pipe = os.environ.get(PARENT)
    if pipe is None:
        return

    def wait() -> None:
        with suppress(OSError):
            os.read(int(pipe), 1)
            os._exit(LOST)

    threading.Thread(target=wait, daemon=True).start()


def rebuild(context: click.Context, without: Sequence[str]) -> list[str]:
    """The command of a context as arguments again, without some options."""
    arguments = [context.info_name or ""]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in without or value is None or value is False:
            continue
        if value is True:
            arguments.append(option.opts[0])
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            arguments.append(f"{option.opts[0]}={each}")
    return arguments


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
