"""`corefed bench runtime` and `corefed bench coreset`: seconds per round, as ratios within one run.

Machines are noisy, ratios within one run are less so.

    runtime   the vmap runtime on the same work as two loops over clients: our own loop runtime,
              which has the same closed-form gradients and fused updates, and the textbook's
              (autograd, torch.optim)
    coreset   a round of coreset-pfedbayes, with its share of the selections, against full data
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree, Work
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches, noises
from corefed.methods import coreset_pfedbayes, pfedbayes
from corefed.models import network
from corefed.models.likelihood import Categorical
from corefed.training import local
from corefed.training.loop import peak_memory_mb

WORK = Work(steps=20, batch=100)
CLIENTS = (10, 100, 1000)
WIDTHS = (784, 100, 10)  # the paper's network for MNIST
MEMORY_MB = 4096  # what `corefed run` allows by default; a GPU gets ten times that
LOOP_SAMPLE = 10  # clients of the loop that are timed; its time is proportional to their number
REPEATS = 3


class TimedClients(NamedTuple):
    """Clients with random data, and the server's state that they train from."""

    clients: local.LocalClients
    server: Tree

    def train(self, clients: int, round_: int = 0) -> None:
        self.clients.train(round_, [self.server], [range(clients)])

    def many(self, rounds: int) -> Callable[[], None]:
        """Several rounds of all clients, to be timed together."""
        everyone = len(self.clients.who)

        def run() -> None:
            for t in range(rounds):
                self.train(everyone, t)

        return run


def runtime(device: torch.device) -> list[dict[str, Any]]:
    """Seconds per round of PFedBayes, loop and vmap in turn, at 10, 100 and 1000 clients."""
    rows = []
    for number in CLIENTS:
        sample = min(number, LOOP_SAMPLE)
        method = pfedbayes.build(pfedbayes.Config(), network.mlp(WIDTHS, Categorical(WIDTHS[-1])))
        stacked = make_clients(method, number, 200, device)
        chunk = stacked.clients.chunk
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

        def round_of(clients: int, size: int, group: TimedClients = stacked) -> float:
            group.clients.chunk = size
            return _seconds(lambda: group.train(clients), device)

        def plain_round(group: TimedClients = stacked, clients: int = sample) -> float:
            return _seconds(lambda: textbook(group, clients), device)

        round_of(number, chunk)  # warm up all three
        round_of(sample, 1)
        plain_round()
        share = number / sample
        timed = [
            (plain_round() * share, round_of(sample, 1) * share, round_of(number, chunk))
            for _ in range(REPEATS)
        ]
        rows.append(
            {
                "clients": number,
                "chunk": chunk,
                "textbook s/round": statistics.median(a for a, _, _ in timed),
                "loop s/round": statistics.median(b for _, b, _ in timed),
                "vmap s/round": statistics.median(c for _, _, c in timed),
                "textbook / vmap": statistics.median(a / c for a, _, c in timed),
                "loop / vmap": statistics.median(b / c for _, b, c in timed),
                "peak MB": peak_memory_mb(str(device)),
            }
        )
    return rows


def textbook(group: TimedClients, clients: int) -> None:
    """PFedBayes as one would first write it: client by client, autograd, torch.optim."""
    config, model = pfedbayes.Config(), network.mlp(WIDTHS, Categorical(WIDTHS[-1]))
    for i in range(clients):
        data = ClientData(*(field[i : i + 1] for field in group.clients.data))
        streams = group.clients.streams([i], 0)
        q = group.clients.private["q"][i : i + 1].clone().requires_grad_()
        z = group.server["v"].clone().unsqueeze(0).requires_grad_()
        optimizers = [torch.optim.Adam([v], lr=config.eta_1) for v in (q, z)]
        prior = config.zeta / data.size
        noise = noises(streams, (config.monte_carlo, model.size), WORK.steps)
        for batch in batches(data, data.weight, streams, WORK.steps, WORK.batch):
            optimizers[0].zero_grad()
            elbo.objective(model, q, z.detach(), prior, batch, next(noise)).sum().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (prior * gaussian.kl(q.detach(), z)).sum().backward()
            optimizers[1].step()


def coreset(device: torch.device) -> list[dict[str, Any]]:
    """Seconds per round over ten rounds (two refreshes by age) of 10 clients of 1000 points."""
    rounds, rows = 10, []
    model = network.mlp(WIDTHS, Categorical(WIDTHS[-1]))
    full = make_clients(pfedbayes.build(pfedbayes.Config(), model), 10, 1000, device)
    for fraction in (0.1, 0.5):
        config = coreset_pfedbayes.Config(fraction=fraction)
        small = make_clients(coreset_pfedbayes.build(config, model), 10, 1000, device)
        full.train(10)
        small.train(10)
        pairs = [
            (
                _seconds(full.many(rounds), device) / rounds,
                _seconds(small.many(rounds), device) / rounds,
            )
            for _ in range(REPEATS)
        ]
        rows.append(
            {
                "fraction": fraction,
                "full data s/round": statistics.median(a for a, _ in pairs),
                "coreset s/round": statistics.median(b for _, b in pairs),
                "ratio": statistics.median(b / a for a, b in pairs),
                "refreshes a client": float(small.clients.private["refreshes"].mean()),
                "rounds": rounds * REPEATS + 1,
            }
        )
    return rows


def make_clients(method: Method, clients: int, points: int, device: torch.device) -> TimedClients:
    """Clients with random data that a network can learn: labels from a random linear map."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(clients, points, WIDTHS[0], generator=g)
    y = (x @ torch.randn(WIDTHS[0], WIDTHS[-1], generator=g)).argmax(-1)
    data = ClientData(*(t.to(device) for t in (x, y, torch.ones(clients, points))))
    server = {k: v.to(device) for k, v in method.init_server(Streams([Who(0, SERVER)], 0)).items()}
    memory = MEMORY_MB * (10 if device.type == "cuda" else 1)
    chunk = local.chunk_for(server, data, memory)
    return TimedClients(local.LocalClients(method, data, [0], [server], WORK, chunk), server)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
