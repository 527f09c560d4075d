"""Clients on this machine: the loop and the vmap runtime, which differ only in chunk size.

Both call `client_side.train` on stacked clients: the loop runtime one client at a time, the vmap
runtime as many as fit into memory. A client's random stream depends only on (seed, round, client),
so the two agree up to rounding (`test_runtimes.py` says how closely).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import threads
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.training import client_side, storing
from corefed.training.compiled import Steps
from corefed.training.devices import Devices
from corefed.training.store import OnDevice, Store
from corefed.training.storing import Choose
from corefed.training.variants import MethodAt, SettingsAt


class Compiled(NamedTuple):
    """Local steps as compiled programs, and the settings of their clients."""

    steps: Steps
    at: SettingsAt


RECORDED = 4
"""Chunks that all clients are in, up to which what they do beside their steps is recorded."""

_COST = "selection cost"  # beside the names of a report


class LocalClients:
    """All clients of one or several runs (seeds) on one device.

    Row g N + i is client `first` + i of run g. Their private state is in `store`, by default
    stacked on the device, so that a full cohort in one chunk is not copied.
    """

    def __init__(
        self,
        method: Method,
        data: ClientData,
        seeds: Sequence[int],
        servers: Sequence[Tree],
        work: Work,
        chunk: int,
        method_at: MethodAt | None = None,
        compiled: Compiled | None = None,
        choose: Choose = storing.on_device,
        first: int = 0,
        devices: Devices | None = None,
    ) -> None:
        self.method, self.data, self.work = method, data, work
        self.method_at, self.compiled, self.devices = method_at, compiled, devices
        self.per_run = len(data.weight) // len(seeds)
        self.who = [Who(seed, first + i) for seed in seeds for i in range(self.per_run)]
        self.chunk = max(1, chunk)
        self.sizes = data.size
        self.points: list[int] = self.sizes.tolist()
        initial, per_run = list(servers), self.per_run

        def start(rows: Sequence[int]) -> Tree:
            sent = client_side.broadcast(initial, rows, per_run)
            return client_side.start(method, sent, data.of(rows))

        self.store: Store = choose(start, len(self.who))
        self.examples = torch.zeros(0)  # of each client of the last round: gradient passes
        self._numbers: Tree | None = None  # of all clients, where their state is not in memory

    def train(
        self, round_: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]
    ) -> tuple[list[Update], Tensor, Tensor]:
        """One round of every run's cohort: updates, mean loss and examples, per run."""
        rows, work, device = self.rows_of(cohorts), self.work, self.data.weight.device

        def train(chunk: Sequence[int]) -> client_side.Trained:
            trained = client_side.train(
                self.method_of(chunk, round_),
                self.broadcast(servers, chunk),
                self.take(chunk),
                self.data.of(chunk),
                self.streams(chunk, round_),
                work if self.devices is None else self.devices.work(work, chunk, device),
                self._steps(chunk, round_),
                [self.points[row] for row in chunk],
            )
            self.put(chunk, trained.private)
            if self.compiled is None or len(chunks) == 1:
                return trained
            # The program's own tensors, which the next chunk overwrites.
            return trained._replace(message={k: v.clone() for k, v in trained.message.items()})

        if self.store.whole is None:
            self._all_numbers()  # threads only change their own rows of them
        size, at_once = self._split(len(rows), servers[0])
        order = rows if self.devices is None else self.devices.sorted(rows)
        chunks = [order[first : first + size] for first in range(0, len(rows), size)]
        if self.compiled is not None and len(rows) == len(self.who) and len(chunks) <= RECORDED:
            work = work._replace(replay=self.compiled.steps.replays)  # their data stay in place
        parts = list(threads.map_parts(train, chunks, min(at_once, len(chunks))))
        message = {k: torch.cat([p.message[k] for p in parts]) for k in parts[0].message}
        loss, examples = torch.cat([p.loss for p in parts]), torch.cat([p.examples for p in parts])
        if self.devices is not None:  # back into the order of the cohorts
            place = {row: i for i, row in enumerate(order)}
            back = [place[row] for row in rows]
            message = {k: v[back] for k, v in message.items()}
            loss, examples = loss[back], examples[back]
        self.examples = examples
        updates, start = [], 0
        means, totals = [], []
        for g, cohort in enumerate(cohorts):
            mine = slice(start, start + len(cohort))
            sizes = self.sizes[[g * self.per_run + i for i in cohort]]
            updates.append(Update(tuple(cohort), {k: v[mine] for k, v in message.items()}, sizes))
            means.append(loss[mine].mean())
            totals.append(examples[mine].sum())
            start = mine.stop
        return updates, torch.stack(means), torch.stack(totals)

    def _split(self, clients: int, server: Tree) -> tuple[int, int]:
        """Clients per chunk, and chunks at the same time."""
        if self.chunk == 1 or self.data.weight.device.type != "cpu":
            chunks = -(-clients // self.chunk)
            return -(-clients // chunks), 1  # of one size, as far as possible
        numbers = sum(value.numel() for value in server.values()) * min(clients, self.chunk)
        at_once = threads.threads_for(numbers)
        return -(-min(clients, self.chunk) // at_once), at_once

    def take(self, rows: Sequence[int]) -> Tree:
        """The private state of these clients, on the device; to be read, not written."""
        return self.store.take(rows)

    def put(self, rows: Sequence[int], tree: Tree) -> None:
        """Replace the private state of these clients."""
        if self.store.whole is None:
            numbers = self._all_numbers()  # before these change
            for name, value in self._numbers_of(tree).items():
                numbers[name][list(rows)] = value.cpu()
        self.store.put(rows, tree)

    @property
    def private(self) -> Tree:
        """The private state of all clients: a copy, unless it is stacked on the device."""
        whole = self.store.whole
        return self.take(range(len(self.who))) if whole is None else whole

    @private.setter
    def private(self, tree: Tree) -> None:
        if isinstance(self.store, OnDevice):
            self.store.whole = tree
        else:
            self.put(range(len(self.who)), tree)

    def report(self) -> Tree:
        """Numbers to record, [C] each, of all clients."""
        whole = self.store.whole
        if whole is not None:
            return client_side.report(self.method, whole)
        return {k: v for k, v in self._all_numbers().items() if k != _COST}

    def selection_cost(self) -> Tensor | None:
        """[C] forward passes spent on selection so far; None where they are not counted."""
        whole = self.store.whole
        if whole is not None:
            return client_side.selection_cost(self.method, whole)
        return self._all_numbers().get(_COST)

    def _all_numbers(self) -> Tree:
        """Report and cost of all clients, kept so that a round does not read every state."""
        if self._numbers is None:
            parts = [self._numbers_of(self.take([0]))]
            if parts[0]:
                parts = [self._numbers_of(self.take(rows)) for rows in self.chunks()]
            self._numbers = {k: torch.cat([p[k].cpu() for p in parts]) for k in parts[0]}
        return self._numbers

    def _numbers_of(self, private: Tree) -> Tree:
        numbers = client_side.report(self.method, private)
        cost = client_side.selection_cost(self.method, private)
        return numbers if cost is None else {**numbers, _COST: cost}

    def chunks(self) -> list[range]:
        """All rows, as many at once as are trained at once."""
        total = len(self.who)
        return [range(i, min(i + self.chunk, total)) for i in range(0, total, self.chunk)]

    def rows_of(self, cohorts: Sequence[Sequence[int]]) -> list[int]:
        """The rows of each run's cohort."""
        return [g * self.per_run + i for g, cohort in enumerate(cohorts) for i in cohort]

    def method_of(self, rows: Sequence[int], round_: int) -> Method:
        """The method of these clients in a round; it differs where settings follow a schedule."""
        if self.method_at is None:
            return self.method
        return self.method_at(round_, [row // self.per_run for row in rows])

    def _steps(self, rows: Sequence[int], round_: int) -> client_side.TakeSteps | None:
        """How these clients take their steps; None: one by one."""
        if self.compiled is None:
            return None
        runs = [row // self.per_run for row in rows]
        everyone = len(rows) == len(self.who)
        return self.compiled.steps.of(self.compiled.at(round_, runs), rows, everyone=everyone)

    def streams(self, rows: Sequence[int], round_: int) -> Streams:
        return Streams([self.who[r] for r in rows], round_, self.data.weight.device)

    def broadcast(self, servers: Sequence[Tree], rows: Sequence[int]) -> Tree:
        """Each run's server state, repeated over its clients among `rows`."""
        return client_side.broadcast(servers, rows, self.per_run)


def chunk_for(
    server: Tree, data: ClientData, memory_mb: int, activations: int = 0, copies: int = 1
) -> int:
    """How many clients, of `copies` of these, to train at once within the memory.

    A client in training needs about eight copies of what the server sends (posterior, localized
    model, two moments each, gradients, noise, scratch), its data, and the `activations` of its
    minibatch, with a quarter more for back-propagation. On a CPU, vectors above about 8 MiB for all
    clients together were measured slower, because they exceed the cache, so the chunk stops there.
    """
    state = sum(value.numel() * value.element_size() for value in server.values())
    per_client = 8 * state + 2 * 4 * data.x[0].numel() + 5 * activations
    bound = max(1, memory_mb * 2**20 // per_client)
    if data.weight.device.type == "cpu":
        bound = min(bound, max(1, (8 << 20) // max(1, state + 4 * activations)))
    return min(bound, copies * len(data.weight))
