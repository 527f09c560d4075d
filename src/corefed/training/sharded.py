"""The clients of a run, shared out between workers, as the round loop sees them at each worker.

A worker trains and tests its own clients, with the engine of a run on one process. Server state is
the same everywhere: every worker aggregates the same numbers. Where a method needs only the mean of
the messages (`Traits.mean`), a worker sends the sum of its own ones, else each of them. Sums are
added in the order of ranks, so that a run with as many workers is bit-identical when repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.rng import SERVER
from corefed.base.types import ClientData, Tree, Update
from corefed.data.clients import FederatedData
from corefed.settings.run import Run
from corefed.training import calibration, client_side, cost, divergence, sampling, shard_scores
from corefed.training.evaluate import Evaluation
from corefed.training.loop import Answer, Line, size_of
from corefed.training.setup import Setup
from corefed.training.world import Shapes, World, blank, shapes_of

CLIENTS, POINTS, COLUMNS = 1, 4, 5
"""Columns of the numbers that workers send each other about a round."""


class _Trained(NamedTuple):
    """What this worker's part of the cohorts did."""

    updates: list[Update | None]  # one per run; None where nobody here takes part
    numbers: Tensor  # [G, 5] float64: sum of losses, clients, gradient passes, bytes, points


class _Gathering(NamedTuple):
    """How to put together what every worker has of some of its clients."""

    counts: list[int]  # clients of each worker
    order: Tensor  # from the order of workers to that of rows

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> _Gathering:
        every = torch.tensor([row for each in rows for row in each])
        return cls([len(each) for each in rows], every.argsort())


class Sharded:
    """All clients of a run; those of this worker are in `setup`."""

    def __init__(
        self,
        world: World,
        setup: Setup,
        everyone: FederatedData,
        changed: Callable[[Sequence[int]], None] = lambda rows: None,
    ) -> None:
        """`changed` is told the rows of this worker, among all, that a round has changed."""
        self.world, self.setup, self.everyone, self.changed = world, setup, everyone, changed
        run = setup.experiment.run
        self.runs = len(run.seeds)
        self.shares = [share(run.clients, world.size, rank) for rank in range(world.size)]
        self.mine = self.shares[world.rank]
        self._shapes: Shapes | None = None  # of one client's message
        every = [rows_of(run, part) for part in self.shares]
        self.rows = every[world.rank]  # row g N + i is client i of the g-th seed
        self.who = sampling.evaluated(run, run.clients)
        sampled = every if self.who is None else _among(every, frozenset(self.who))
        places = {row: place for place, row in enumerate(self.rows)}
        # The places here of those that are evaluated; None: all
        self.here = None if self.who is None else [places[row] for row in sampled[world.rank]]
        self._all, self._sampled = _Gathering.of(every), _Gathering.of(sampled)

    # --- a round --------------------------------------------------------------------------------

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        method = self.setup.method
        before = self._spent()
        trained = self._train(t, servers, cohorts)
        names, report = self._report()
        spent = self._spent() - before
        troubled = torch.full((self.runs, 1), float(self.world.trouble is not None))
        mine = torch.cat([trained.numbers, report, spent, troubled.double()], 1)
        every = _added(self.world.gather(mine))
        self.world.settle(bool(every[:, -1].any()))
        loss = every[:, 0] / every[:, CLIENTS]
        divergence.refuse(self.setup, t, loss)
        updates = self._join(trained.updates, cohorts, servers, every)
        at = COLUMNS + 2 * len(names)
        sizes = [size_of(client_side.sent(method, server)) for server in servers]
        numbers: Line = {
            "loss": loss.tolist(),
            "examples": every[:, 2].long().tolist(),
            "bytes_up": every[:, 3].long().tolist(),
            "bytes_down": [size * len(who) for size, who in zip(sizes, cohorts, strict=True)],
            "coreset": _means(names, every[:, COLUMNS:at]),
        }
        looked = every[:, at].tolist() if spent.numel() else None
        if looked is not None:
            numbers["selection_examples"] = looked
        return Answer(updates, numbers | cost.of_round(method, numbers["examples"], looked))

    def _train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> _Trained:
        """This worker's clients of the cohorts; a UserError is kept for all to hear."""
        here = [[i - self.mine.start for i in who if i in self.mine] for who in cohorts]
        self.changed([self.rows[place] for place in self.setup.clients.rows_of(here)])
        numbers = torch.zeros(self.runs, COLUMNS, dtype=torch.float64)
        none = _Trained([None] * self.runs, numbers)
        if not any(here):
            return none
        try:
            updates, loss, examples = self.setup.clients.train(t, servers, here)
        except UserError as error:
            self.world.trouble = error
            return none
        for g, who in enumerate(here):
            if who:
                sent = float(size_of(updates[g].message))
                lost, points = loss[g].item() * len(who), updates[g].examples.sum().item()
                values = (lost, len(who), examples[g].item(), sent, points)
                numbers[g] = torch.tensor(values, dtype=torch.float64)
        pairs = zip(updates, here, strict=True)
        return _Trained([update if who else None for update, who in pairs], numbers)

    def _join(
        self,
        mine: Sequence[Update | None],
        cohorts: Sequence[Sequence[int]],
        servers: Sequence[Tree],
        numbers: Tensor,
    ) -> list[Update]:
        """The updates of the whole cohorts; one row with the mean where that is all it takes."""
        if self._shapes is None:
            about = [shapes_of(_row(update.message)) for update in mine if update is not None]
            self._shapes = next(each[0] for each in self.world.ask(about) if each)
        if self.setup.method.traits.mean:
            return self._mean(mine, servers, numbers)
        updates = []
        for update, cohort, server in zip(mine, cohorts, servers, strict=True):
            counts = [sum(i in part for i in cohort) for part in self.shares]
            device = next(iter(server.values())).device
            nobody = torch.zeros(0, dtype=torch.int64, device=device)
            none = {k: v.new_zeros(0, *v.shape) for k, v in blank(self._shapes, device).items()}
            own = update or Update((), none, nobody)
            message = {
                name: torch.cat(self.world.gather_rows(value, counts))
                for name, value in own.message.items()
            }
            examples = torch.cat(self.world.gather_rows(own.examples, counts))
            updates.append(Update(tuple(cohort), message, examples))
        return updates

    def _mean(
        self, mine: Sequence[Update | None], servers: Sequence[Tree], numbers: Tensor
    ) -> list[Update]:
        """Updates of one row, from the sums of all workers: one exchange per part of a message."""
        weighted = self.setup.method.traits.mean == "examples"
        device = next(iter(servers[0].values())).device
        whole = numbers[:, POINTS if weighted else CLIENTS].to(device)
        means: Tree = {}
        for name, zero in blank(self._shapes or {}, device).items():
            sums = []
            for update in mine:
                rows = zero.unsqueeze(0) if update is None else update.message[name]
                if weighted and update is not None:
                    n = update.examples.to(rows)
                    rows = rows * n.view(-1, *[1] * zero.ndim)
                sums.append(rows.sum(0, dtype=torch.float64).to(zero.dtype))
            every = _added(self.world.gather(torch.stack(sums)).double())
            means[name] = (every / whole.view(-1, *[1] * zero.ndim)).to(zero.dtype)
        points = numbers[:, POINTS].long().to(device)
        return [
            Update((SERVER,), {k: v[g : g + 1] for k, v in means.items()}, points[g : g + 1])
            for g in range(self.runs)
        ]

    def _report(self) -> tuple[list[str], Tensor]:
        """Names, and [G, 2 names]: sums of the numbers that clients have, and how many have one."""
        found = self.setup.clients.report()
        each = [value.double().cpu().view(self.runs, -1) for value in found.values()]
        pairs = [(value.nansum(-1), (~value.isnan()).sum(-1).double()) for value in each]
        columns = [column for pair in pairs for column in pair]
        blank = torch.zeros(self.runs, 0, dtype=torch.float64)
        return list(found), torch.stack(columns, 1) if columns else blank

    def _spent(self) -> Tensor:
        """[G, 1] forward passes spent on selection so far; [G, 0] where they are not counted."""
        spent = self.setup.clients.selection_cost()
        if spent is None:
            return torch.zeros(self.runs, 0, dtype=torch.float64)
        return spent.double().cpu().view(self.runs, -1).sum(-1, keepdim=True)

    # --- evaluation -----------------------------------------------------------------------------

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        data, everyone = self.setup.data, self.everyone
        fitted = everyone.validation is not None and calibration.is_wanted(
            self.setup.experiment.run, t
        )
        tested = self._test(t, servers, data.test, everyone.test, elsewhere=True, points=fitted)
        line = tested.line(data.labels)
        if everyone.validation is None or data.validation is None:
            return line
        found = self._test(t, servers, data.validation, everyone.validation)
        line["validation"] = found.line(data.labels)["metrics"]
        if fitted:
            line["calibration"] = self._calibrate(t, servers, tested)
        return line

    def _test(
        self,
        t: int,
        servers: Sequence[Tree],
        mine: ClientData,
        every: ClientData,
        temperature: Mapping[str, Tensor] | None = None,
        *,
        elsewhere: bool = False,
        points: bool = False,
    ) -> Evaluation:
        """Test the models; with `points`, the confidence of every point is gathered too."""
        setup, whole = self.setup, self.everyone if elsewhere else None
        scores = shard_scores.score_clients(
            setup, servers, mine, t, temperature or {}, whole, self.here
        )
        sums = {
            kind: {name: self._gather(value, self._sampled) for name, value in each.items()}
            for kind, each in scores.sums.items()
        }
        sure = scores.confidence if points else {}
        sure = {kind: self._gather(value, self._sampled) for kind, value in sure.items()}
        joined, real = shard_scores.Scores(sums, sure), (every.weight > 0).cpu()
        return shard_scores.summarise(joined, real, self.runs, setup.data.classes, self.who)

    def _calibrate(self, t: int, servers: Sequence[Tree], before: Evaluation) -> Line:
        """Fit temperatures on all validation points; `before` is of the test points."""
        setup, data, run = self.setup, self.setup.data, self.setup.experiment.run
        assert data.validation is not None and self.everyone.validation is not None
        slopes = calibration.slopes(
            setup.clients, setup.method, servers, data.validation, t, run.evaluate_draws,
            data.classes, data.unit, self.here or (None if self.here is None else [0]),
        )  # fmt: skip
        if self.here == []:  # one client was asked for the names and shapes
            slopes = {kind: torch.zeros_like(value) for kind, value in slopes.items()}
        found = calibration.fit({k: self.of_all(v.cpu()) for k, v in slopes.items()}, self.runs)
        own = {kind: self.of_mine(value) for kind, value in found.clients.items()}
        after = self._test(
            t, servers, data.test, self.everyone.test, own, elsewhere=True, points=True
        )
        validated = self._test(t, servers, data.validation, self.everyone.validation, own)
        return calibration.describe(found, run.seeds, before, after, validated)

    # --- rows of clients ------------------------------------------------------------------------

    def of_all(self, mine: Tensor) -> Tensor:
        """[G N, ...] from every worker's [G n, ...]."""
        return self._gather(mine, self._all)

    def _gather(self, mine: Tensor, how: _Gathering) -> Tensor:
        every = torch.cat(self.world.gather_rows(mine, how.counts))
        return every[how.order.to(every.device)]

    def of_mine(self, every: Tensor) -> Tensor:
        """[G n, ...] of this worker from [G N, ...]."""
        return every[self.rows]


def rows_of(run: Run, part: range) -> list[int]:
    """The rows of a worker's clients among all, in its own order."""
    return [g * run.clients + i for g in range(len(run.seeds)) for i in part]


def _among(every: Sequence[Sequence[int]], wanted: frozenset[int]) -> list[list[int]]:
    return [[row for row in rows if row in wanted] for rows in every]


def _row(message: Tree) -> Tree:
    """One client's message."""
    return {name: value[0] for name, value in message.items()}


def _added(every: Tensor) -> Tensor:
    """The sum over workers, in the order of ranks."""
    total = every[0]
    for each in every[1:]:
        total = total + each
    return total


def _means(names: Sequence[str], pairs: Tensor) -> dict[str, list[float | None]]:
    """Means over the clients that have a number, per run; None where none has."""
    means = {name: pairs[:, 2 * n] / pairs[:, 2 * n + 1] for n, name in enumerate(names)}
    return {
        name: [None if math.isnan(mean) else mean for mean in each.tolist()]
        for name, each in means.items()
    }
