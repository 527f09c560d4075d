"""Clients with random data for benchmarks, and how their rounds are timed.

Machines are noisy. What is compared takes turns, and ratios are within one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed.settings.config import resolve
from corefed.settings.run import MEMORY
from corefed.training.local import LocalClients
from corefed.training.setup import Setup, prepare

WIDTHS = (784, 100, 10)
"""The paper's network for MNIST."""

MEMORY_MB = 4096
"""What `corefed run` allows by default; a GPU gets ten times that."""


Timed = Callable[[], object]


class TimedClients:
    """Clients of one or several runs, and the states of their servers."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.clients, self.servers = setup, setup.clients, setup.servers

    def train(self, clients: int | None = None, round_: int = 0) -> None:
        """A round of the first clients of each run, by default of all; the servers aggregate."""
        cohorts = [range(clients or self.clients.per_run)] * len(self.servers)
        updates, _, _ = self.clients.train(round_, self.servers, cohorts)
        pairs = zip(self.servers, updates, strict=True)
        self.servers = [self.setup.method.aggregate(*pair) for pair in pairs]

    def many(self, rounds: int) -> None:
        """Several rounds of all clients, to be timed together."""
        for t in range(rounds):
            self.train(round_=t)


def make_clients(
    data: FederatedData, device: torch.device, widths: Sequence[int] = WIDTHS, **flags: object
) -> TimedClients:
    """Clients with these data, prepared as `corefed run` prepares them; compiled only if asked."""
    return TimedClients(make_setup(data, device, widths, **flags))


def make_setup(
    data: FederatedData, device: torch.device, widths: Sequence[int] = WIDTHS, **flags: object
) -> Setup:
    given = {
        "data": MEMORY, "clients": len(data.names), "hidden": tuple(widths[1:-1]),
        "device": str(device), "compile": "off", "client_state": "device",
        "memory_mb": MEMORY_MB * (10 if device.type == "cuda" else 1),
    } | flags  # fmt: skip
    return prepare(resolve(None, given), data)


def random_data(
    clients: int, points: int, widths: Sequence[int] = WIDTHS, tested: int = 1, runs: int = 1
) -> FederatedData:
    """Points that a network can learn: labels from a random linear map.

    The clients of all runs (seeds) together are so many.
    """
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(widths[0], widths[-1], generator=g)

    def draw(number: int) -> ClientData:
        x = torch.rand(clients, number, widths[0], generator=g)
        return ClientData(x, (x @ truth).argmax(-1), torch.ones(clients, number))

    labels = tuple(str(label) for label in range(widths[-1]))
    return FederatedData(
        train=draw(points),
        test=draw(tested),
        classes=len(labels),
        targets=0,
        names=[f"client {client}" for client in range(clients)],
        labels=labels,
        preparations=(Preparation((widths[0],), labels),) * runs,
    )


def seconds_of(work: Timed, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def in_turn(
    works: Mapping[str, Timed],
    device: torch.device,
    repeats: int,
    enough: float = float("inf"),
) -> dict[str, list[float]]:
    """Seconds of each work in each turn; no turn begins after `enough` seconds."""
    found: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(seconds_of(work, device))
        if time.perf_counter() - began > enough:
            break
    return found


def refuse_given_up(clients: LocalClients) -> None:
    """Steps that could not be compiled were taken one by one: their time is not what was asked."""
    if clients.compiled is not None and clients.compiled.steps.given_up:
        raise RuntimeError("local steps could not be compiled")


def compiled_as(setup: Setup) -> str:
    """The value of `compile` that a run ended with."""
    compiled = setup.clients.compiled
    given_up = compiled is not None and compiled.steps.given_up
    return "off" if given_up else setup.experiment.run.compile


def reason(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
