"""Clients on this machine: the loop and the vmap runtime, which differ only in chunk size.

Both call `client_side.train` on stacked clients: the loop runtime one client at a time, the vmap
runtime as many as fit into memory. A client's random stream depends only on (seed, round, client),
so the two agree up to rounding (`test_runtimes.py` says how closely).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.training import client_side, threads
from corefed.training.variants import MethodAt


class LocalClients:
    """All clients of one or several runs (seeds) on one device.

    Row g N + i is client `first` + i of run g. State is stacked, so that a full cohort in one chunk
    is not copied.
    """

    def __init__(
        self,
        method: Method,
        data: ClientData,
        seeds: Sequence[int],
        servers: Sequence[Tree],
        work: Work,
        chunk: int,
        source: torch.device | str | None = None,
        method_at: MethodAt | None = None,
        first: int = 0,
    ) -> None:
        self.method, self.data, self.work, self.source = method, data, work, source
        self.method_at = method_at
        self.per_run = len(data.weight) // len(seeds)
        self.who = [Who(seed, first + i) for seed in seeds for i in range(self.per_run)]
        self.chunk = max(1, chunk)
        self.sizes = data.size
        rows = list(range(len(self.who)))
        self.private = client_side.start(method, self.broadcast(servers, rows), data)

    def train(
        self, round_: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]
    ) -> tuple[list[Update], Tensor, Tensor]:
        """One round of every run's cohort: updates, mean loss and examples, per run."""
        rows = [g * self.per_run + i for g, cohort in enumerate(cohorts) for i in cohort]

        def train(chunk: Sequence[int]) -> client_side.Trained:
            trained = client_side.train(
                self.method_of(chunk, round_),
                self.broadcast(servers, chunk),
                _take(self.private, chunk),
                ClientData(*_take(self.data._asdict(), chunk).values()),
                self.streams(chunk, round_),
                self.work,
            )
            _put(self.private, chunk, trained.private)
            return trained

        size, at_once = self._split(len(rows), servers[0])
        chunks = [rows[first : first + size] for first in range(0, len(rows), size)]
        parts = list(threads.map_parts(train, chunks, at_once))
        message = {k: torch.cat([p.message[k] for p in parts]) for k in parts[0].message}
        loss, examples = torch.cat([p.loss for p in parts]), torch.cat([p.examples for p in parts])
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
            return self.chunk, 1
        numbers = sum(value.numel() for value in server.values()) * min(clients, self.chunk)
        at_once = threads.threads_for(numbers)
        return -(-min(clients, self.chunk) // at_once), at_once

    def method_of(self, rows: Sequence[int], round_: int) -> Method:
        """The method of these clients in a round; it differs where settings follow a schedule."""
        if self.method_at is None:
            return self.method
        return self.method_at(round_, [row // self.per_run for row in rows])

    def streams(self, rows: Sequence[int], round_: int) -> Streams:
        return Streams([self.who[r] for r in rows], round_, self.data.weight.device, self.source)

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


def _take(tree: Tree, rows: Sequence[int]) -> Tree:
    """Rows of every tensor: a view where they are contiguous, else a copy."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return {k: v[rows[0] : rows[-1] + 1] for k, v in tree.items()}
    return {k: v[torch.tensor(rows, device=v.device)] for k, v in tree.items()}


def _put(tree: Tree, rows: Sequence[int], values: Tree) -> None:
    for k, v in tree.items():
        v[torch.tensor(rows, device=v.device)] = values[k]
