"""Randomness is an argument, made from (seed, round, client, purpose).

Each client has its own stream for each purpose, so its draws do not depend on the other clients in
the call, their order, or the chunks. The loop and the vmap runtime consume the same numbers, and a
resumed run continues with the numbers of the interrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

SERVER = -1
"""The client number under which the server draws (initial weights, cohorts)."""


def key(seed: int, round_: int, client: int, purpose: str) -> int:
    """63 bits that differ whenever an argument does, and are the same on every machine."""
    text = f"{seed}/{round_}/{client}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def generator(
    seed: int, round_: int, client: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A fresh generator for one (seed, round, client, purpose)."""
    return torch.Generator(device=device).manual_seed(key(seed, round_, client, purpose))


WORTH_THREADS = 1 << 16
"""Numbers of normals from which threads save time."""


@cache
def _threads() -> ThreadPoolExecutor:
    """A CPU generator is serial, but each client has its own: threads draw for several at once."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="corefed-noise")


class Who(NamedTuple):
    """One simulated client: its seed, and its number."""

    seed: int
    client: int


class Streams:
    """The random streams of C clients in one round.

    Numbers are drawn on `source` and moved to `device`. The two are the same, except in tests where
    a GPU consumes the CPU's numbers.
    """

    def __init__(
        self,
        who: Sequence[Who],
        round_: int,
        device: torch.device | str = "cpu",
        source: torch.device | str | None = None,
    ) -> None:
        self.who = list(who)
        self.round = round_
        self.device = torch.device(device)
        self.source = torch.device(source) if source is not None else self.device
        self._open: dict[str, list[torch.Generator]] = {}
        self._parent: tuple[Streams, list[int]] | None = None

    @cached_property
    def _twins(self) -> tuple[Streams, Tensor] | None:
        """The streams of different clients, and which of them each has; None: all differ."""
        place = {who: number for number, who in enumerate(dict.fromkeys(self.who))}
        if len(place) == len(self.who):
            return None
        first = {who: row for row, who in reversed(list(enumerate(self.who)))}
        rows = torch.tensor([place[who] for who in self.who], device=self.device)
        return self.subset([first[who] for who in place]), rows

    def generators(self, purpose: str, *, host: bool = False) -> list[torch.Generator]:
        """One generator per client; a second call with the same purpose returns the same ones.

        `host` asks for CPU generators on any device, for indices drawn on the host.
        """
        if self._parent is not None:
            parent, rows = self._parent
            generators = parent.generators(purpose, host=host)
            return [generators[r] for r in rows]
        device = torch.device("cpu") if host else self.source
        name = f"{purpose}@{device.type}"
        if name not in self._open:
            self._open[name] = [
                generator(w.seed, self.round, w.client, purpose, device) for w in self.who
            ]
        return self._open[name]

    def normal(self, purpose: str, *shape: int, together: bool = False) -> Tensor:
        """[C, *shape] standard normals.

        `together` promises that all clients draw for this purpose in every call. Several settings
        of one run that train side by side have the same clients, whose numbers are then drawn once.
        """
        if together and self._twins is not None:
            firsts, rows = self._twins
            return firsts.normal(purpose, *shape)[rows]
        out = torch.empty(len(self.who), *shape, device=self.source)
        pairs = list(zip(out, self.generators(purpose), strict=True))
        if self.source.type == "cpu" and len(pairs) > 1 and out.numel() >= WORTH_THREADS:
            list(_threads().map(lambda pair: pair[0].normal_(generator=pair[1]), pairs))
        else:
            for row, g in pairs:
                row.normal_(generator=g)
        return out.to(self.device)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """[C, *shape] uniforms on [0, 1)."""
        out = torch.empty(len(self.who), *shape, device=self.source)
        for row, g in zip(out, self.generators(purpose), strict=True):
            row.uniform_(generator=g)
        return out.to(self.device)

    def restart(self) -> Streams:
        """The same streams from the start, for two branches that must draw the same numbers."""
        return Streams(self.who, self.round, self.device, self.source)

    def subset(self, rows: Sequence[int]) -> Streams:
        """The streams of some of these clients; both share the same generators."""
        child = Streams([self.who[r] for r in rows], self.round, self.device, self.source)
        child._parent = (self, list(rows))
        return child


def choose(seed: int, round_: int, clients: int, size: int) -> tuple[int, ...]:
    """The cohort of a round: `size` of `clients` without replacement, in ascending order."""
    if size >= clients:
        return tuple(range(clients))
    g = generator(seed, round_, SERVER, "cohort")
    return tuple(sorted(torch.randperm(clients, generator=g)[:size].tolist()))
