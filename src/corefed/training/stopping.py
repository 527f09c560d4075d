"""Clients of a run that stops early, as the round loop sees them (`early.py` has the rule).

They train and are evaluated as others are. After an evaluation at which a seed was better than
before, the state of its server and its clients is copied. At the last evaluation the copies are
evaluated once more, all seeds together, and get their temperatures; the run then ends with them.
The copies are part of a checkpoint: they have files of their own, which are written first, so that
a run that is killed has those that belong to its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from corefed.base.errors import UserError
from corefed.base.types import Tree, places
from corefed.training import checkpoint, early
from corefed.training.loop import Answer, Line
from corefed.training.scoring import means_of

if TYPE_CHECKING:
    from corefed.training.setup import Setup

PART = "best"
"""Of the checkpoint, with the copies."""


class Assessed(Protocol):
    """The clients beneath."""

    def train(
        self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]
    ) -> Answer: ...

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line: ...

    def assess(self, t: int, servers: Sequence[Tree], *, calibrate: bool) -> Line: ...


class Stopping:
    """The clients of a run, and the best state of each seed so far."""

    def __init__(self, setup: Setup, clients: Assessed, lines: Sequence[Line]) -> None:
        """`lines` are those of the rounds before, in a run that is resumed."""
        run, store = setup.experiment.run, setup.clients.store
        if store.whole is None:
            raise UserError(
                "patience keeps a second copy of all clients' state, and this run has that in a "
                "file or only of those that took part; use --set client_state=device, or leave "
                "out patience."
            )
        self.setup, self.clients, self.run = setup, clients, run
        self.course = early.follow(lines, run.patience, len(run.seeds))
        self.servers = [_copy(server) for server in setup.servers]
        self.private = _copy(store.whole)
        self._changed: set[int] = set()  # rows of the copies since they were last saved

    @property
    def over(self) -> bool:
        return self.course.over

    # --- as the round loop sees them ------------------------------------------------------------

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        return self.clients.train(t, servers, cohorts)

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        line = self.clients.evaluate(t, servers)
        self.course = self.course.after({"round": t + 1, **line})
        for g, best in enumerate(self.course.best):
            if best == t + 1:
                self._keep(g, servers[g])
        if self.over or t + 1 == self.run.rounds:
            line["kept"] = self._assess(t)
        return line

    def _keep(self, g: int, server: Tree) -> None:
        rows = self._rows(g)
        self.servers[g] = _copy(server)
        for name, value in self.setup.clients.take(rows).items():
            self.private[name][rows.start : rows.stop] = value
        self._changed.update(rows)

    def _assess(self, t: int) -> Line:
        """Metrics of the copies; the clients have their own state back when it returns."""
        local = self.setup.clients
        last, touched = _copy(local.private), local.store.touched.clone()
        self._put(self.private)
        line = self.clients.assess(t, self.servers, calibrate=self.run.calibrate == "auto")
        line["coreset"] = means_of(local.report(), len(self.run.seeds))
        self._put(last)
        local.store.touched = touched
        return {"rounds": self.course.best, **line}

    def restore(self) -> list[Tree]:
        """Give the clients the state of the copies; the servers' are returned."""
        self._put(self.private)
        return self.servers

    def _put(self, private: Tree) -> None:
        for g in range(len(self.run.seeds)):
            part = places(self._rows(g))
            self.setup.clients.put(self._rows(g), {k: v[part] for k, v in private.items()})

    def _rows(self, g: int) -> range:
        n = self.setup.clients.per_run
        return range(g * n, (g + 1) * n)

    # --- the copies in checkpoints --------------------------------------------------------------

    def take(self, rows: Sequence[int]) -> Tree:
        return {name: value[list(rows)] for name, value in self.private.items()}

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        for name, value in tree.items():
            self.private[name][list(rows)] = value.to(self.private[name])

    def save(self, folder: Path, values: Mapping[str, object], round_: int) -> None:
        """Write the copies as they are after `round_` rounds, if they have changed."""
        if not self._changed:
            return
        saves = checkpoint.Checkpoints(folder, values, 1, 1.0, 1.0, part=PART)
        saves.mark(sorted(self._changed))
        saves.save(round_, self.servers, self.take)
        saves.close()
        self._changed.clear()

    def load(self, folder: Path, values: Mapping[str, object], done: int) -> None:
        """Read the copies that a run had after `done` rounds."""
        if not any(self.course.best):
            return
        found = checkpoint.load(folder, values, PART, upto=done)
        if found is None:
            raise UserError(
                f"The checkpoint in {folder} lacks the state of the best rounds; the folder is "
                "damaged, start a new run."
            )
        self.servers = checkpoint.restore(found, self.servers, self)
        checkpoint.forget(folder, values, PART, after=done)


def _copy(tree: Tree) -> Tree:
    return {name: value.clone() for name, value in tree.items()}
