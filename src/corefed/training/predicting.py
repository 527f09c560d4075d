"""Go through the models of all simulated clients, as many at once as fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Method, Tree
from corefed.training import client_side
from corefed.training.local import LocalClients

AT_ONCE = 1 << 23
"""Weights of all draws of all clients, so many of which a GPU takes at once in any case: with fewer
it waits for launches."""


class Chunk(NamedTuple):
    """Some clients, ready to predict."""

    rows: Sequence[int]
    method: Method
    models: dict[str, Tree]  # by kind
    noise: Tensor  # [C, K, P], the same for all models of a client


def chunks(
    clients: LocalClients,
    method: Method,
    servers: Sequence[Tree],
    round_: int,
    draws: int,
    who: Sequence[int] | None = None,
) -> Iterator[Chunk]:
    """All clients of all runs, or the rows `who` of them, after a round.

    `draws` samples need `draws` times the memory, so chunks are smaller than in training.
    """
    who = range(len(servers) * clients.per_run) if who is None else who
    size = clients_at_once(clients.chunk, method, draws, clients.data.weight.device)
    for start in range(0, len(who), size):
        rows = who[start : start + size]
        noise = posterior_noise(method, clients.streams(rows, round_), draws)
        private = clients.take(rows)
        broadcast = clients.broadcast(servers, rows)
        train = clients.data.of(rows)
        if clients.method_at is not None:
            method = clients.method_of(rows, round_)
        yield Chunk(rows, method, client_side.models(method, broadcast, private, train), noise)


def clients_at_once(chunk: int, method: Method, draws: int, device: torch.device) -> int:
    """Clients that predict together, where `chunk` train together."""
    numbers = method.noise[-1]
    size = max(1, chunk // (draws if numbers else 1))
    return max(size, AT_ONCE // (draws * numbers)) if numbers and device.type == "cuda" else size


def posterior_noise(method: Method, streams: Streams, draws: int) -> Tensor:
    """[C, K, P] noise of K posterior samples; a point estimate needs one empty sample."""
    size = method.noise[-1] if method.noise else 0
    return streams.normal("evaluate", draws if size else 1, size)
