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
from corefed.settings.config import Run

Line = dict[str, Any]
"""One round as `rounds.jsonl` has it."""


class Answer(NamedTuple):
    """What the cohorts of a round give the server."""

    updates: list[Update]  # one per run (seed)
    numbers: Line  # what the round's line says about training: loss, examples, bytes, coreset


class Clients(Protocol):
    """All clients of one or several runs (seeds), wherever they are.

    Private state is theirs: the loop never sees it.
    """

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        """Round t (from 0) of each run's cohort, from its server's state."""

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        """What the round's line says about the models: metrics, clients, classes."""


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
    """Rounds from len(lines) to the last; each adds its line. Returns the servers after it.

    `evaluated` says whether round t is; by default the last one, and about ten on the way.
    `on_round` is called after each round and told whether it is the last; `stop` may end the run.
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
    """Whether round t (from 0) is evaluated: at the end, and every so often on the way."""
    every = run.evaluate_every or max(1, run.rounds // 10)
    return t + 1 == run.rounds or (t + 1) % every == 0


def peak_memory_mb(device: str) -> float:
    """The most memory this process has held so far: the GPU's, or the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # not on Windows

    kilo = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo / 2**20


def size_of(tree: Tree) -> int:
    """Bytes of a tree's tensors."""
    return sum(value.numel() * value.element_size() for value in tree.values())


def _since(began: float, device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
