"""Whether the training of a run that somebody follows is still there, and what it waits for."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from typing import Any

from corefed.base.errors import UserError
from corefed.base.locks import is_locked
from corefed.federation.operate import processes, registering, run_state
from corefed.federation.operate.folder import ServerFolder
from corefed.federation.operate.processes import LINK
from corefed.federation.operate.program import say
from corefed.federation.operate.run_state import Facts

HUNG = 60.0
"""Seconds between questions to Flower while a training holds its folder; each is a process."""
LOOK = 0.3
"""Seconds between looks at a training that is to end."""
NOTICE = 15.0
"""Seconds that a training has to notice that it was stopped."""
GONE, TAKEN = 20.0, 180.0
"""Seconds without a training process: after which it counts as gone, and as never begun."""
ROOM = 1 << 20
"""Bytes that a disk has left which is not full."""
LOST = "lost"
"""The status of a run whose process is gone, beside those of Flower."""


class Vigil:
    """Whether the training of a run that is followed is still there; says so when it is quiet.

    The training process holds a lock on its folder. While it does, the run goes on, even where the
    server does not answer: it may be restarted, or frozen for a while.
    """

    def __init__(self, server: ServerFolder, name: str) -> None:
        self.server, self.name, self.folder = server, name, server.runs / name
        self.over: dict[str, Any] | None = None  # how it ended: status and details
        self.there = self.asked = time.monotonic()  # when the training was last seen, Flower asked
        self.news()

    def news(self) -> None:
        self.quiet, self.tell = time.monotonic(), run_state.QUIET

    def look(self) -> None:
        now = time.monotonic()
        trains = is_locked(self.folder)
        answers = processes.is_answering(self.server, 10.0)
        self.there = now if trains else self.there
        run = None
        if answers and (not trains or now - self.asked > HUNG):
            with suppress(UserError):  # it answers, but not this
                run = run_state.list_submitted(self.server)[self.name]
                self.asked = time.monotonic()
        begun = run_state.has_begun(self.folder)
        if run is not None and run["ended"]:
            self._end_after_notice(run)
        elif not trains and now - self.there > (GONE if begun or not self._served() else TAKEN):
            self._give_up(answers, begun)
        elif now - self.quiet > self.tell:
            self.tell *= 2
            silent = run_state.read_silent(self.folder)
            facts = Facts(trains, begun, answers, True, silent)
            waits = run_state.waits_for(facts, self._absent() if answers else [])
            say(f"nothing new for {now - self.quiet:.0f} s: {waits}")

    def _served(self) -> bool:
        """Whether `corefed federation server` runs, whose programs may just be starting."""
        return is_locked(self.server.path)

    def _absent(self) -> list[str]:
        with suppress(UserError):
            states = registering.client_states(self.server)
            return [each for each, state in states.items() if state != "online"]
        return []

    def _end_after_notice(self, run: dict[str, Any]) -> None:
        """Flower has ended it. A training that is about to complete, or to say why, may do so."""
        until = time.monotonic() + NOTICE
        while is_locked(self.folder) and time.monotonic() < until:
            time.sleep(LOOK)
        self.over = run

    def _give_up(self, answers: bool, begun: bool) -> None:
        what = "The training process is gone" if begun else "No process of the server began the run"
        log = self.server.path / "flower" / "executor.log"
        why = f"{what}; {log} may say why." if answers else f"{what}, and the server is not there."
        if shutil.disk_usage(self.server.path).free < ROOM:
            why = f"{what}: the disk of {self.server.path} is full."
        self.over = {"status": LOST, "details": why}
        if answers:  # or Flower would take it for running for another minute
            with suppress(UserError):
                number = run_state.submission(self.folder).get("id", "")
                processes.run_flwr(self.server, "stop", number, LINK, quiet=True)
