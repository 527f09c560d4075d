"""How far the personal posteriors of a run are from the truth f, where f is known.

By seed, the mean over its clients of

    error         int ||f_theta - f||^2 dq       in L2 of the inputs: what Theorem 2 bounds
    mean          ||int f_theta dq - f||^2       of the mean prediction
    hellinger     int d^2(P_theta, P) dq         Definition 1
    bound         the certificate of `theory/certificate.py`: it holds for all clients' d^2 of 95 %
                  of data sets, each on its own
    f 50 .. 95    how often the posterior's interval of that level holds f(x)
    y 50 .. 95    how often the predictive's holds a new y

Intervals are central intervals of the draws. Points are the run's test points, redrawn from the
name of its data.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.device import device_for
from corefed.base.rng import SERVER, Streams, Who
from corefed.bayes import gaussian
from corefed.data import hoelder
from corefed.models.network import Model
from corefed.training import fitted
from corefed.training.setup import network
from corefed_studies.theory.certificate import error_certificate, log_likelihood_ratio
from corefed_studies.theory.hellinger import posterior_hellinger

DRAWS, BLOCK = 400, 50
"""Draws of the weights per client, and how many of them go through the network at once."""
LEVELS = (50, 80, 95)
ALPHA = 0.05
PRIORS = tuple(2.0**power for power in range(-5, 4))
"""Standard deviations of the priors that a bound may choose from, around the means that training
started at. None of them has seen data; choosing the best of J costs a factor J in alpha."""


class KnownPoints(NamedTuple):
    """Of the clients of one seed, C of them."""

    x: Tensor  # [C, m, ambient]
    y: Tensor  # [C, m]
    signal: Tensor  # [C, m]


def measure(place: Path) -> dict[str, list[float]]:
    """The numbers above for a finished run on Hoelder data, each by seed."""
    run = fitted.load(place)
    settings, data = run.experiment.run, hoelder.parse(run.experiment.run.data)
    model = network(settings, run.preparations[0].shape, 0, 1)
    device, per_run = device_for("auto"), settings.clients
    found: dict[str, list[float]] = {}
    for g, seed in enumerate(settings.seeds):
        train, test = _points(data, per_run, seed, device)
        q = run.models["personal.v"][g * per_run : (g + 1) * per_run].to(device)
        who = [Who(seed, client) for client in range(per_run)]
        noise = Streams(who, settings.rounds, device).normal("errors", DRAWS, model.size)
        start = run.method.init_server(Streams([Who(seed, SERVER)], 0))["v"].to(device)
        theta = gaussian.sample(q, noise)
        kl = torch.stack([gaussian.kl(q, _prior(start, std).expand_as(q)) for std in PRIORS])
        for name, value in _measure_seed(model, theta, kl.amin(0), train, test, data.noise).items():
            found.setdefault(name, []).append(value)
    return found


def _measure_seed(
    model: Model, theta: Tensor, kl: Tensor, train: KnownPoints, test: KnownPoints, noise: float
) -> dict[str, float]:
    outputs = outputs_of(model, theta, test.x)  # [C, draws, m]
    off = outputs - test.signal.unsqueeze(1)
    ratio = log_likelihood_ratio(
        outputs_of(model, theta, train.x), train.signal, train.y, noise
    ).mean(-1)
    n = train.x.shape[1]
    bounds = [
        float(error_certificate(r, k, n, ALPHA / len(PRIORS)))
        for r, k in zip(ratio.tolist(), kl.tolist(), strict=True)
    ]
    # A new y is f_theta(x) plus noise: the noise of the test points' own y is another one.
    fresh = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))
    predicted = outputs + noise * fresh.to(outputs)
    return {
        "error": off.square().mean().item(),
        "mean": off.mean(1).square().mean().item(),
        "hellinger": posterior_hellinger(outputs, test.signal, noise).value.mean().item(),
        "bound": sum(bounds) / len(bounds),
        **{f"f {level}": covered(outputs, test.signal, level) for level in LEVELS},
        **{f"y {level}": covered(predicted, test.y, level) for level in LEVELS},
    }


def _prior(start: Tensor, std: float) -> Tensor:
    return torch.stack([start[0], gaussian.rho_of(torch.full_like(start[0], std))])


def outputs_of(model: Model, theta: Tensor, x: Tensor) -> Tensor:
    """f_theta(x) [C, draws, m] of theta [C, draws, P], some draws at a time."""
    parts = [model.forward(part, x).squeeze(-1) for part in theta.split(BLOCK, 1)]
    return torch.cat(parts, 1)


def covered(draws: Tensor, truth: Tensor, level: int) -> float:
    """Part of points [C, m] whose truth lies in the central interval of draws [C, draws, m]."""
    tail = (1 - level / 100) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=draws.dtype, device=draws.device)
    low, high = torch.stack([torch.quantile(one, ends, dim=0) for one in draws], 1)
    inside = (low <= truth) & (truth <= high)
    return float(inside.double().mean())


def _points(
    data: hoelder.HoelderSetting, clients: int, seed: int, device: torch.device
) -> tuple[KnownPoints, KnownPoints]:
    drawn = hoelder.draw(data, clients, seed)

    def some(mask: Tensor) -> KnownPoints:
        fields = (drawn.x, drawn.y.squeeze(-1), drawn.signal.squeeze(-1))
        return KnownPoints(
            *(field[mask].unflatten(0, (clients, -1)).to(device) for field in fields)
        )

    return some(~drawn.held_out), some(drawn.held_out)
