"""Randomness is an argument, made from (seed, round, client, purpose).

Each client has its own stream for each purpose, so its draws do not depend on the other clients in
the call, their order, or the chunks. The loop and the vmap runtime consume the same numbers, and a
resumed run continues with the numbers of the interrupted one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import philox
from corefed.base.philox import Places

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


class Who(NamedTuple):
    """One simulated client: its seed, and its number."""

    seed: int
    client: int


class Streams:
    """The random streams of C clients in one round.

    A client's numbers depend on (seed, round, client, purpose), on how many times the client has
    drawn for that purpose, and on nothing else. They are drawn for all clients at once
    (`philox.py`), and are the same on every device up to rounding.
    """

    def __init__(self, who: Sequence[Who], round_: int, device: torch.device | str = "cpu") -> None:
        self.who = list(who)
        self.round = round_
        self.device = torch.device(device)
        self._calls: dict[str, Tensor] = {}  # by purpose: [C] calls so far
        self._open: dict[str, list[torch.Generator]] = {}
        self._parent: tuple[Streams, list[int]] | None = None  # all clients, and which are these

    @cached_property
    def _twins(self) -> tuple[Streams, Tensor] | None:
        """The streams of different clients, and which of them each has; None: all differ."""
        place = {who: number for number, who in enumerate(dict.fromkeys(self.who))}
        if len(place) == len(self.who):
            return None
        first = {who: row for row, who in reversed(list(enumerate(self.who)))}
        rows = torch.tensor([place[who] for who in self.who], device=self.device)
        return self.subset([first[who] for who in place]), rows

    @cached_property
    def _place(self) -> Tensor:
        clients = torch.tensor([who.client for who in self.who], dtype=torch.int64)
        return (self.round << 32) | (clients & 0xFFFFFFFF)

    @cached_property
    def _runs(self) -> tuple[list[int], Tensor]:
        """The different seeds, and which of them each client has."""
        seeds = list(dict.fromkeys(who.seed for who in self.who))
        index = {seed: number for number, seed in enumerate(seeds)}
        return seeds, torch.tensor([index[who.seed] for who in self.who])

    def places(self, purpose: str, calls: int) -> Places:
        """Where the next `calls` calls of each client stand; they count as drawn."""
        seeds, runs = self._runs
        keys = torch.tensor([_key(seed, purpose) for seed in seeds], dtype=torch.int64)
        return Places(keys[runs], self._place, self._advance(purpose, calls))

    def _advance(self, purpose: str, calls: int) -> Tensor:
        """The number of each client's first new call."""
        whole, rows = (self, slice(None)) if self._parent is None else self._parent
        none = torch.zeros(len(whole.who), dtype=torch.int64)
        known = whole._calls.setdefault(purpose, none)
        first = known[rows].clone()
        known[rows] += calls
        return first

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """[C, *shape] standard normals."""
        at, size = self.places(purpose, 1), math.prod(shape)
        return philox.normals(at, 1, size, self.device).view(len(self.who), *shape)

    def stretches(self, purpose: str, *shape: int) -> Callable[[int, int], Tensor]:
        """Standard normals that are drawn little by little, by all clients in step.

        The result is a function (first, count) -> [C, count, *shape]. Clients that are the same,
        as several settings of one run side by side have them, are drawn for once.
        """
        streams, rows = (self, None) if self._twins is None else self._twins
        at, size = streams.places(purpose, 1), math.prod(shape)

        def draw(first: int, count: int) -> Tensor:
            found = philox.normals(at, count, size, self.device, first)
            found = found if rows is None else found[rows]
            return found.view(len(self.who), count, *shape)

        return draw

    def words(self, purpose: str, size: int, calls: int = 1, counted: int | None = None) -> Tensor:
        """[C, calls, size] int64 of random bits, each row from a call of its own.

        The numbers of a row do not depend on `size`: the first ones are the same in a longer row.
        `counted` calls count as drawn, where `calls` depends on other clients.
        """
        at = self.places(purpose, calls if counted is None else counted)
        return philox.words(at, calls, -(-size // 4), self.device)[..., :size]

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """[C, *shape] uniforms on [0, 1), multiples of 2^-24."""
        found = self.words(purpose, math.prod(shape))
        found = (found >> 40) & 0xFFFFFF
        return found.to(torch.get_default_dtype()).mul_(2.0**-24).view(len(self.who), *shape)

    def generators(self, purpose: str, *, host: bool = False) -> list[torch.Generator]:
        """One generator per client; a second call with the same purpose returns the same ones.

        For what has to be drawn client by client. `host` asks for CPU generators on any device.
        """
        if self._parent is not None:
            parent, rows = self._parent
            generators = parent.generators(purpose, host=host)
            return [generators[r] for r in rows]
        device = torch.device("cpu") if host else self.device
        name = f"{purpose}@{device.type}"
        if name not in self._open:
            self._open[name] = [
                generator(w.seed, self.round, w.client, purpose, device) for w in self.who
            ]
        return self._open[name]

    def restart(self) -> Streams:
        """The same streams from the start, for two branches that must draw the same numbers."""
        return Streams(self.who, self.round, self.device)

    def subset(self, rows: Sequence[int]) -> Streams:
        """The streams of some of these clients; what one of both draws is drawn for the other."""
        child = Streams([self.who[r] for r in rows], self.round, self.device)
        whole, own = (self, range(len(self.who))) if self._parent is None else self._parent
        child._parent = (whole, [own[r] for r in rows])
        return child


@lru_cache(4096)
def _key(seed: int, purpose: str) -> int:
    """64 bits of (seed, purpose), as int64 has them."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def choose(seed: int, round_: int, clients: int, size: int) -> tuple[int, ...]:
    """The cohort of a round: `size` of `clients` without replacement, in ascending order."""
    if size >= clients:
        return tuple(range(clients))
    g = generator(seed, round_, SERVER, "cohort")
    return tuple(sorted(torch.randperm(clients, generator=g)[:size].tolist()))
