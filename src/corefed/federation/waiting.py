"""How long a question waits for answers, and for whom.

A round ends when everybody has answered that it waits for, or some time after the quorum (`grace`),
or at the deadline. That time is a multiple of what the quorum needed, and never less than
`grace_seconds`: with the defaults a client may take four times as long as the quorum, and 30
seconds longer in any case.

A client that was silent several times in a row (`strikes`) is asked without being waited for. It is
waited for again once it answers, late or not. Questions to such a client have growing pauses
between them. Otherwise a client that was frozen would find one question for each round it missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from corefed.federation.rules import Rules


def waiting_rules(rules: Rules, local: float) -> Rules:
    """The rules where each client may work for so many seconds: as much longer is waited.

    Otherwise a round whose quorum is quick would leave out a client that keeps its deadline.
    """
    return replace(rules, grace_seconds=rules.grace_seconds + local)


class Waiting(NamedTuple):
    """Of one question to several clients, in seconds since it was asked."""

    deadline: float
    enough: int = 0  # answers that are a quorum; 0: the grace never begins
    grace: float = 0.0
    grace_seconds: float = 0.0
    unawaited: frozenset[str] = frozenset()  # asked, but nobody waits for them

    def end(self, answered: Sequence[float], pending: Collection[str]) -> float:
        """When the waiting ends, as far as that is known: after `answered` came at those times."""
        if not pending:
            return 0.0
        if len(answered) < self.enough:
            return self.deadline
        if self.unawaited.issuperset(pending):
            return 0.0
        if not self.enough or not self.grace:
            return self.deadline
        quorum = sorted(answered)[self.enough - 1]
        return min(self.deadline, quorum + max(self.grace_seconds, self.grace * quorum))


class Strikes:
    """Which clients have been silent in a row, in this process of the server."""

    def __init__(self, rules: Rules, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules, self.clock = rules, clock
        self.silent: dict[str, int] = {}  # questions in a row without an answer
        self.paused: dict[str, float] = {}  # when the next question is due

    def unawaited(self) -> frozenset[str]:
        most = self.rules.strikes
        return frozenset(name for name, number in self.silent.items() if 0 < most <= number)

    def due(self, names: Iterable[str]) -> list[str]:
        """Those that are to be asked now."""
        now, struck = self.clock(), self.unawaited()
        return [name for name in names if name not in struck or now >= self.paused[name]]

    def heard(self, name: str) -> None:
        """An answer came, whatever it says."""
        self.silent.pop(name, None)

    def missed(self, name: str) -> None:
        """No answer came in time."""
        number = self.silent[name] = self.silent.get(name, 0) + 1
        pause = self.rules.grace_seconds * 2.0 ** min(50, number - max(1, self.rules.strikes))
        self.paused[name] = self.clock() + min(self.rules.deadline, pause)

    def waiting(self, quorum: int, *, whole: bool = False) -> Waiting:
        """For a question of which `quorum` answers are enough; `whole`: until the deadline."""
        rules = self.rules
        if whole:
            return Waiting(rules.deadline)
        struck = self.unawaited()
        return Waiting(rules.deadline, quorum, rules.grace, rules.grace_seconds, struck)
