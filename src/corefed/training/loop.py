"""The round loop, one for every runtime: cohort, local training, aggregation, evaluation.

    for t in rounds:
        cohort  = choose(seed, t)
        updates = clients.train(t, server, cohort)
        server  = method.aggregate(server, updates)
        record(t, server, clients.evaluate(t, server))

What the clients are is behind the protocol `Clients`: simulated on this machine (`rounds.py`), a
newcomer beside a finished run (`newcomers.py`), or other machines (`federation/server.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from corefed.base import rng
from corefed.base.types import Method, Tree, Update
from corefed.settings.run import Run

Line = dict[str, Any]
"""One round as `rounds.jsonl` has it."""


class Answer(NamedTuple):
    """The result of a round's cohorts."""

    updates: list[Update]  # one per run (seed)
    numbers: Line  # about training, for the round's line: loss, examples, bytes, coreset


class Clients(Protocol):
    """All clients of one or several runs (seeds), on this machine or others.

    The loop never sees their private state.
    """

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        """Round t (from 0) of each run's cohort, from its server's state."""

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        """About the models, for the round's line: metrics, clients, classes."""


def run_rounds(
    method: Method,
    clients: Clients,
    servers: list[Tree],
    run: Run,
    lines: list[Line],
    *,
    evaluated: Callable[[int], bool] | None = None,
    on_round: Callable[[Line, list[Tree], bool], None] = lambda line, servers, last: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Tree]:
    """Run rounds from len(lines) to the last; each adds a line. Returns the servers.

    `evaluated` says whether to evaluate round t; by default the last one and about ten before.
    `on_round` is called after each round, with whether it is the last; `stop` may end the run.
    """
    for t in range(len(lines), run.rounds):
        began = time.perf_counter()
        size = run.cohort or run.clients
        cohorts = [rng.choose(seed, t, run.clients, size) for seed in run.seeds]
        answer = clients.train(t, servers, cohorts)
        pairs = zip(servers, answer.updates, strict=True)
        servers = [method.aggregate(server, update) for server, update in pairs]
        line: Line = {"round": t + 1, **answer.numbers, "seconds": _since(began, run.device)}
        if evaluated(t) if evaluated is not None else is_evaluated(run, t):
            began = time.perf_counter()
            line |= clients.evaluate(t, servers)
            line["evaluate_seconds"] = _since(began, run.device)
        line["peak_memory_mb"] = peak_memory_mb(run.device)
        lines.append(line)
        last = t + 1 == run.rounds or stop()
        on_round(line, servers, last)
        if last:
            break
    return servers


def is_evaluated(run: Run, t: int) -> bool:
    """Whether round t (from 0) is evaluated: the last one, and some before."""
    every = run.evaluate_every or max(1, run.rounds // 10)
    return t + 1 == run.rounds or (t + 1) % every == 0


def peak_memory_mb(device: str) -> float:
    """The largest memory of this process so far, on the GPU or else on the machine."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # not on Windows

    kilo = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo / 2**20


def size_of(tree: Tree) -> int:
    """Bytes of a tree."""
    return sum(value.numel() * value.element_size() for value in tree.values())


def _since(began: float, device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
