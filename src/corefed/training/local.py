"""Clients on this machine: the plain loop and the vmap runtime, which differ in chunk size alone.

Both call `client_side.train` on stacked clients: the loop runtime with one client at a time, the
vmap runtime with as many as the memory bound allows. Since a client's random stream depends on
nothing but (seed, round, client), the two agree to rounding (`test_runtimes.py` states how
closely).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.training import client_side


class LocalClients:
    """All clients of one or several runs (seeds) on one device.

    Row g N + i is client i of run g. State is kept stacked, so that a full cohort in one chunk
    moves nothing.
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
    ) -> None:
        self.method, self.data, self.work, self.source = method, data, work, source
        self.per_run = len(data.weight) // len(seeds)
        self.who = [Who(seed, i) for seed in seeds for i in range(self.per_run)]
        self.chunk = max(1, chunk)
        self.sizes = data.size
        rows = list(range(len(self.who)))
        self.private = client_side.start(method, self.broadcast(servers, rows), data)

    def train(
        self, round_: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]
    ) -> tuple[list[Update], Tensor, Tensor]:
        """One round of every run's cohort: their updates, and mean loss and examples per run."""
        rows = [g * self.per_run + i for g, cohort in enumerate(cohorts) for i in cohort]
        parts = []
        for chunk in _chunks(rows, self.chunk):
            streams = self.streams(chunk, round_)
            trained = client_side.train(
                self.method,
                self.broadcast(servers, chunk),
                _take(self.private, chunk),
                ClientData(*_take(self.data._asdict(), chunk).values()),
                streams,
                self.work,
            )
            _put(self.private, chunk, trained.private)
            parts.append(trained)
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

    def streams(self, rows: Sequence[int], round_: int) -> Streams:
        return Streams([self.who[r] for r in rows], round_, self.data.weight.device, self.source)

    def broadcast(self, servers: Sequence[Tree], rows: Sequence[int]) -> Tree:
        """Each run's server state, repeated over its clients among `rows`."""
        return client_side.broadcast(servers, rows, self.per_run)


def chunk_for(server: Tree, data: ClientData, memory_mb: int, activations: int = 0) -> int:
    """How many clients to train at once within a memory bound.

    A client in training holds about eight copies of what the server sends (posterior, localised
    model, two moments each, gradients, noise and scratch) beside its data, and the `activations`
    numbers that its minibatch leaves for back-propagation, with a quarter more on the way back. On
    a CPU, vectors of more than about 8 MiB for all clients together fall out of the cache and into
    fresh pages of the allocator: measured slower, so the chunk stops there.
    """
    state = sum(value.numel() * value.element_size() for value in server.values())
    per_client = 8 * state + 2 * 4 * data.x[0].numel() + 5 * activations
    bound = max(1, memory_mb * 2**20 // per_client)
    if data.weight.device.type == "cpu":
        bound = min(bound, max(1, (8 << 20) // max(1, state + 4 * activations)))
    return min(bound, len(data.weight))


def _chunks(rows: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _contiguous(rows: Sequence[int]) -> bool:
    return list(rows) == list(range(rows[0], rows[0] + len(rows)))


def _take(tree: Tree, rows: Sequence[int]) -> Tree:
    """Rows of every tensor: a view where they lie side by side, else a copy."""
    if _contiguous(rows):
        return {k: v[rows[0] : rows[-1] + 1] for k, v in tree.items()}
    return {k: v[torch.tensor(rows, device=v.device)] for k, v in tree.items()}


def _put(tree: Tree, rows: Sequence[int], values: Tree) -> None:
    for k, v in tree.items():
        v[torch.tensor(rows, device=v.device)] = values[k]
