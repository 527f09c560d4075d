"""`corefed bench runtime`, `coreset` and `optimizers`: seconds per round, as ratios within one run.

Machines are noisy, ratios within one run are less so.

    runtime   the vmap runtime on the same work as two loops over clients: our own loop runtime,
              which has the same closed-form gradients and fused updates, and the textbook's
              (autograd, torch.optim)
    coreset   a round of coreset-pfedbayes, with its share of the selections, against full data
    optimizers  a posterior's steps by IVON against those by Adam or SGD, and with some layers only
    own       FedAvg of one client with an own CNN of 582,026 weights, 10 images a step, against
              plain torch with the same memory format, on one thread
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from corefed.base.errors import UserError
from corefed.base.types import ClientData, Work
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches, noises
from corefed.data.clients import FederatedData
from corefed.methods import pfedbayes
from corefed.models import network
from corefed.models.likelihood import Categorical
from corefed.settings.config import resolve
from corefed.settings.run import MEMORY
from corefed.training.loop import peak_memory_mb
from corefed.training.setup import prepare
from corefed_studies.bench import timed
from corefed_studies.bench.neighbours import ratio
from corefed_studies.bench.timed import TimedClients, make_clients, random_data

WORK = Work(steps=20, batch=100)
CLIENTS = (10, 100, 1000)
WIDTHS = timed.WIDTHS
LOOP_SAMPLE = 10
"""Clients of a loop that are timed; its time is proportional to their number."""
REPEATS = 3


def runtime(device: torch.device) -> list[dict[str, Any]]:
    """Seconds per round of PFedBayes, loop and vmap in turn, at 10, 100 and 1000 clients."""
    rows = []
    for number in CLIENTS:
        sample = min(number, LOOP_SAMPLE)
        data = random_data(number, 200, WIDTHS)
        stacked, loop = (
            make_clients(data, device, WIDTHS, method="pfedbayes", runtime=name)
            for name in ("vmap", "loop")
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        works: dict[str, timed.Timed] = {
            "textbook": partial(textbook, stacked, sample),
            "loop": partial(loop.train, sample),
            "vmap": stacked.train,
        }
        timed.in_turn(works, device, 1)  # warm up
        found = timed.in_turn(works, device, REPEATS)
        share = number / sample
        for name in ("textbook", "loop"):
            found[name] = [share * seconds for seconds in found[name]]
        rows.append(
            {
                "clients": number,
                "chunk": stacked.clients.chunk,
                **{f"{k} s/round": statistics.median(v) for k, v in found.items()},
                **{f"{k} / vmap": ratio(found[k], found["vmap"]) for k in ("textbook", "loop")},
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
        z = group.servers[0]["v"].clone().unsqueeze(0).requires_grad_()
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
    data = random_data(10, 1000, WIDTHS)
    return [
        {
            "fraction": fraction,
            **beside_full(data, device, fraction, 10, REPEATS, WIDTHS, compile="auto"),
        }
        for fraction in (0.1, 0.5)
    ]


POSTERIORS: dict[str, dict[str, dict[str, object]]] = {
    "pfedbayes": {
        "adam": {},
        "ivon": {"optimizer": "ivon", "eta_1": 0.02},
        "adam, last layer": {"bayesian": "last"},
    },
    "shared-start": {
        "sgd": {},
        "ivon": {"optimizer": "ivon", "learning_rate": 0.005},
        "sgd, last layer": {"bayesian": "last"},
    },
}
"""Method -> ways to train its posterior; the first is the default."""


def optimizers(device: torch.device) -> list[dict[str, Any]]:
    """Seconds per round of 10 clients of 1000 points, each way beside the method's default."""
    data, rows = random_data(10, 1000, WIDTHS), []
    for method, ways in POSTERIORS.items():
        groups = {
            name: make_clients(data, device, WIDTHS, method=method, compile="auto", **flags)
            for name, flags in ways.items()
        }
        works: dict[str, timed.Timed] = {
            name: partial(group.many, 5) for name, group in groups.items()
        }
        timed.in_turn(works, device, 1)  # warm up
        found = timed.in_turn(works, device, REPEATS)
        default = next(iter(ways))
        rows += [
            {
                "method": method,
                "posterior": name,
                "s/round": statistics.median(each) / 5,
                "ratio": ratio(each, found[default]),
            }
            for name, each in found.items()
        ]
    return rows


STEPS, OWN_TURNS, OWN_RATE = 30, 20, 0.01


def own_cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 28, 28)), nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, outputs),
    )  # fmt: skip


def own(device: torch.device) -> list[dict[str, Any]]:
    """Seconds per step, and the median over turns of their ratio; threads are set back."""
    if device.type != "cpu":
        raise UserError("bench own compares steps on a CPU; leave --device out.")
    data, threads = random_data(1, 200), torch.get_num_threads()
    flags = {
        "data": MEMORY, "clients": 1, "device": "cpu", "method": "fedavg", "local_steps": STEPS,
        "batch_size": 10, "learning_rate": OWN_RATE, "model": "bench:own_cnn",
    }  # fmt: skip
    ours = TimedClients(prepare(resolve(None, flags), data, factory=own_cnn))
    x, y = data.train.x[0], data.train.y[0]
    module = own_cnn(10)
    for p in module.parameters():
        p.data = p.data.to(memory_format=torch.channels_last) if p.dim() == 4 else p.data
    optimizer = torch.optim.SGD(module.parameters(), lr=OWN_RATE)

    def plain() -> None:
        for _ in range(STEPS):
            at = torch.randint(len(x), (10,))
            optimizer.zero_grad()
            F.cross_entropy(module(x[at]), y[at]).backward()
            optimizer.step()

    torch.set_num_threads(1)
    try:
        works: dict[str, timed.Timed] = {"corefed": ours.train, "plain torch": plain}
        timed.in_turn(works, device, 1)  # warm up
        found = timed.in_turn(works, device, OWN_TURNS)
    finally:
        torch.set_num_threads(threads)
    each = {f"{name} ms/step": 1e3 * statistics.median(v) / STEPS for name, v in found.items()}
    return [{"weights": 582_026, **each, "ratio": ratio(found["corefed"], found["plain torch"])}]


def beside_full(
    data: FederatedData,
    device: torch.device,
    fraction: float,
    rounds: int,
    repeats: int,
    widths: Sequence[int],
    **flags: object,
) -> dict[str, Any]:
    """A round of coreset-pfedbayes beside one of pfedbayes, with its share of the selections."""
    full = make_clients(data, device, widths, method="pfedbayes", **flags)
    small = make_clients(
        data, device, widths, method="coreset-pfedbayes", fraction=fraction, **flags
    )
    works = {"full": lambda: full.many(rounds), "coreset": lambda: small.many(rounds)}
    full.train()
    small.train()
    found = timed.in_turn(works, device, repeats)
    for group in (full, small):
        timed.refuse_given_up(group.clients)
    return {
        "full data s/round": statistics.median(found["full"]) / rounds,
        "coreset s/round": statistics.median(found["coreset"]) / rounds,
        "ratio": ratio(found["coreset"], found["full"]),
        "refreshes per client": float(small.clients.report()["refreshes"].mean()),
        "rounds": rounds * repeats + 1,
    }
