"""Watch the programs of a server or a client; start again what ends, freezes or stops answering.

    ended      the program, or a process that it needs (the nursery of SuperExec)
    stopped    a process of it was stopped, by SIGSTOP for instance, and not continued
    stuck      its main thread has neither run nor woken up; those of Flower's programs look around
               every few seconds. A SuperNode whose main thread ended lives on, and does nothing
    silent     it does not answer
    idle       SuperNode has a message, and no process does the task, for somebody has ended it;
               SuperNode would wait for the answer for ever. A lost executor loses tasks too
    broken     one of its threads ended by an error, and nothing else says so: SuperNode goes on
               without heartbeats, and the server counts it as gone

A program in trouble is killed with everything that it started, and started again after a pause that
doubles. One that fails soon after each of several starts ends the whole command with a sentence, so
that a service manager can act. A stopped process that does a task is killed alone; Flower reports
its task as failed.

Processes are looked at in /proc. Where there is none, only `ended`, `silent` and `broken` are seen.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from corefed.federation.operate.processes import Part
from corefed.federation.operate.program import Program, say

LOOK, LONG = 2.0, 4.0
"""Seconds between looks; how many times that a look counts at most. After a longer pause the whole
machine had slept, or this process was frozen itself."""
STOPPED, STUCK, SILENT = 15.0, 30.0, 30.0
"""Seconds after which a process counts as stopped, stuck or silent. A machine that is only busy
lets each of its processes run within them."""
PATIENT = {"executor": 45.0}
"""Who may be stuck for longer: SuperExec waits 30 s for an answer of SuperNode or SuperLink."""
IDLE = {"received": 20.0, "sending": 300.0}
"""Seconds without a process for a task: one begins within a few. Sending may take longer."""
SETTLED = 5.0
"""Seconds that a process has lived which the program needs; shorter ones come and go."""
START = 180.0
"""Seconds that a program has to give its first answer; importing Flower takes some."""
SOON, TRIES = 20.0, 6
"""A program that fails within this many seconds, so many times in a row, is given up."""
PAUSE, LONGEST = 1.0, 20.0
"""Seconds before a program is started again: the first time, and at most."""
EXECUTOR = "executor"
GENERATIONS = {EXECUTOR: 1}
"""How deep below a program are processes that it needs: of SuperExec, the nursery. What is deeper
does tasks."""
THREADS = ("supernode",)
"""Whose threads matter, and whose output is not that of tasks."""


class EndedError(Exception):
    """A program that cannot be kept running: a sentence for the operator."""


class Process(NamedTuple):
    """A line of /proc/PID/stat."""

    pid: int
    parent: int
    state: str  # R, S, D: alive; T, t: stopped; Z, X: gone
    began: int  # in ticks since the machine started; with the pid, it tells processes apart


class Pulse(NamedTuple):
    """What was seen of a process: how long ago it came, and since when it does nothing."""

    mark: tuple[str, ...]
    seen: float = 0.0
    stopped: float = 0.0
    still: float = 0.0


def read_processes() -> dict[int, Process]:
    """All processes of the machine, by number; none where there is no /proc."""
    found = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        with suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            found[pid] = Process(pid, int(words[1]), words[0], int(words[19]))
    return found


def generations(table: Mapping[int, Process], pid: int) -> Iterator[list[Process]]:
    """A process, its children, their children ..., without those that are gone."""
    now = [table[pid]] if pid in table else []
    while now:
        yield now
        parents = {each.pid for each in now}
        now = [p for p in table.values() if p.parent in parents and p.state not in "ZX"]


def mark_of(pid: int) -> tuple[str, ...]:
    """Changes whenever the main thread of a process works or wakes up, whatever the others do."""
    main = Path(f"/proc/{pid}/task/{pid}")
    with suppress(OSError):
        worked = (main / "stat").read_text().rpartition(")")[2].split()[11:13]
        lines = (main / "status").read_text().splitlines()
        return (*worked, *(line for line in lines if "ctxt_switches" in line))
    return ()


def kill(processes: Iterable[Process]) -> None:
    """Kill those that still are what they were."""
    table = read_processes()
    for one in processes:
        if one.pid in table and table[one.pid].began == one.began:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


class Watched:
    """One program, and what was seen of it since it was started."""

    def __init__(self, part: Part, answers: Callable[[], bool] | None = None) -> None:
        self.part = part
        self.answers = answers
        self.program: Program | None = None
        self.failures = 0
        self.again = 0.0  # when it is to be started

    def start(self) -> None:
        self.pulses: dict[tuple[int, int], Pulse] = {}
        self.needed: set[tuple[int, int]] = set()
        self.began, self.silent, self.patience = time.monotonic(), 0.0, START
        self.idle = 0.0
        self.program = Program(self.part.command, self.part.environment, self.part.log)

    def trouble(self, table: Mapping[int, Process], elapsed: float, works: bool = True) -> str:
        """What is wrong with it; nothing if all is well.

        `elapsed` are seconds since the last look; `works` says whether a task is being done.
        """
        assert self.program is not None
        if not self.program.running():
            return "ended"
        if self.program.broken and self.part.name in THREADS:
            return "has lost a thread by an error"
        self.idle = self.idle + elapsed if self.program.pending and not works else 0.0
        if self.program.pending and self.idle >= IDLE[self.program.pending]:
            return "waits for a task that nobody does"
        pid = self.program.process.pid
        levels = list(generations(table, pid)) if table else []
        depth = GENERATIONS.get(self.part.name, 0)
        trunk = [process for level in levels[: depth + 1] for process in level]
        tasks = [process for level in levels[depth + 1 :] for process in level]
        self._feel([*trunk, *tasks], elapsed)
        lost = self.needed - self.pulses.keys()
        if lost:
            return f"has lost a process that it needs ({min(lost)[0]})"
        for process in trunk:
            pulse = self.pulses[process.pid, process.began]
            if pulse.seen >= SETTLED:
                self.needed.add((process.pid, process.began))
            if pulse.stopped >= STOPPED:
                return f"has been stopped for {pulse.stopped:.0f} s (process {process.pid})"
            if pulse.still >= PATIENT.get(self.part.name, STUCK):
                return f"has done nothing for {pulse.still:.0f} s (process {process.pid})"
        frozen = [p for p in tasks if self.pulses[p.pid, p.began].stopped >= STOPPED]
        for process in frozen:
            say(f"a task has been stopped for {STOPPED:.0f} s; killing process {process.pid}")
        kill(frozen)
        return self._unanswered(elapsed)

    def _feel(self, processes: Iterable[Process], elapsed: float) -> None:
        before, self.pulses = self.pulses, {}
        for process in processes:
            mark, key = mark_of(process.pid), (process.pid, process.began)
            last = before.get(key, Pulse(mark, -elapsed))
            same = mark == last.mark
            self.pulses[key] = Pulse(
                mark,
                last.seen + elapsed,
                last.stopped + elapsed if process.state in "Tt" else 0.0,
                last.still + elapsed if same else 0.0,
            )

    def _unanswered(self, elapsed: float) -> str:
        if self.answers is None:
            return ""
        if self.answers():
            self.patience, self.silent = SILENT, 0.0
            return ""
        self.silent += elapsed
        return f"has not answered for {self.silent:.0f} s" if self.silent >= self.patience else ""

    def end(self, *, gently: bool) -> None:
        """End it with everything that it started, in whatever session."""
        if self.program is None:
            return
        pid = self.program.process.pid
        tree = [process for level in generations(read_processes(), pid) for process in level]
        if not gently:
            kill(tree)
        self.program.stop()
        kill(tree)
        self.program = None


class Supervisor:
    """Keeps programs running. `excuse` says why a program that ended is not to blame, if so: it is
    then started again as often as it takes."""

    def __init__(
        self,
        parts: Iterable[Part],
        answers: Mapping[str, Callable[[], bool]] | None = None,
        excuse: Callable[[str, Program], str] = lambda name, program: "",
    ) -> None:
        self.watched = [Watched(part, (answers or {}).get(part.name)) for part in parts]
        self.excuse = excuse
        self.looked = time.monotonic()

    def look(self) -> None:
        """To be called often; an EndedError where a program cannot be kept running."""
        now = time.monotonic()
        elapsed = now - self.looked
        if elapsed < LOOK:
            return
        self.looked = now
        table = read_processes()
        for watched in self.watched:
            if watched.program is None:
                if now >= watched.again:
                    watched.start()
                continue
            reason = watched.trouble(table, min(elapsed, LONG * LOOK), self._works(table))
            if reason:
                self._restart(watched, reason)
        notify("WATCHDOG=1")

    def _works(self, table: Mapping[int, Process]) -> bool:
        """Whether an executor has more processes than itself and its nursery."""
        pids = [
            watched.program.process.pid
            for watched in self.watched
            if watched.part.name == EXECUTOR and watched.program is not None
        ]
        trees = [[p for level in generations(table, pid) for p in level] for pid in pids]
        return not table or any(len(tree) > 2 for tree in trees)

    def _restart(self, watched: Watched, reason: str) -> None:
        assert watched.program is not None
        program, name = watched.program, watched.part.name
        watched.end(gently=reason == "ended")
        excuse = self.excuse(name, program) if reason == "ended" else ""
        if time.monotonic() - watched.began > SOON:
            watched.failures = 0
        pause = min(LONGEST, PAUSE * 2**watched.failures)
        watched.failures += 1
        if watched.failures >= TRIES and not excuse:
            last = program.last_lines()
            raise EndedError(
                f"{name} {reason}, again and again; {program.log} has its output: {last}"
            )
        say(f"{excuse or f'{name} {reason}.'} Starting it again in {pause:.0f} s.")
        watched.again = time.monotonic() + pause
        for other in self.watched if name == EXECUTOR else ():
            if other.program is not None and other.program.pending:  # its task is lost
                other.end(gently=False)
                other.again = time.monotonic() + pause

    def programs(self) -> list[Program]:
        return [each.program for each in self.watched if each.program is not None]

    def end(self) -> None:
        for watched in reversed(self.watched):
            watched.end(gently=True)


@contextmanager
def supervised(
    parts: Iterable[Part],
    answers: Mapping[str, Callable[[], bool]] | None = None,
    excuse: Callable[[str, Program], str] = lambda name, program: "",
) -> Iterator[Supervisor]:
    """All parts started; ended when the block ends."""
    supervisor = Supervisor(parts, answers, excuse)
    try:
        for watched in supervisor.watched:
            watched.start()
        yield supervisor
    finally:
        supervisor.end()


def notify(text: str) -> None:
    """Tell systemd, if it started us and wants to know: with WatchdogSec= it restarts a service
    that has not said WATCHDOG=1 for so long."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.connect("\0" + place[1:] if place.startswith("@") else place)
            one.send(text.encode())
