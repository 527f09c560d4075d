"""How much of its own training a newcomer keeps: between the shared model and its own.

Few points can make a model worse than the shared one it started from. So the newcomer's model lies
between the two, parameter by parameter,

    theta_s = start + s (own - start),    0 <= s <= 1,

where `start` is the shared model, with the newcomer's class shares if these are known
(`class_shares.py`),

and its own points say how much: K models are trained as the newcomer is, each without one of K
parts of its points, and predict the part that they have not seen. With L_s the log-likelihood of
all points at share s, cross-fitted in this way, the share is its posterior mean,

    s = sum_s' s' w_s' / sum_s' w_s',    w_s' = prior(s') exp(L_s').

With few points, or none that tell, it stays near that of the prior; with many it is what fits best.
Of a calibrated run, log T lies between those of the two models too. docs/newcomers-study.md has the
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams, Who, generator
from corefed.base.types import ClientData, Method, Tree
from corefed.bayes import uncertainty
from corefed.training import client_side, scoring
from corefed.training.class_shares import START
from corefed.training.fitted import tempered

PRIOR = {0.0: 0.5, 0.25: 0.125, 0.5: 0.125, 0.75: 0.125, 1.0: 0.125}
"""Share -> its weight before any point is seen: half of it on the shared model."""
FOLDS = 5
"""Parts that the points are divided into."""

Adapt = Callable[[ClientData, Sequence[Who]], Iterable[client_side.Trained]]
"""Rounds of C newcomers."""


class Fit(NamedTuple):
    """What the newcomer's points say."""

    share: float
    log_likelihood: dict[float, float]  # share -> of all points, cross-fitted


def between(models: dict[str, Tree], share: float) -> dict[str, Tree]:
    """The models, with the personal one at this share of its way from where it started.

    Networks of different sizes (bnfed) have no way between: it is the nearer of the two.
    """
    shared, own = models.get(START, models.get("global")), models["personal"]
    if START in models:
        models = {kind: tree for kind, tree in models.items() if kind != START}
    if share == 1 or shared is None:
        return models
    if any(shared[name].shape != value.shape for name, value in own.items()):
        return models if share >= 0.5 else {**models, "personal": shared}
    found = {name: torch.lerp(shared[name], value, share) for name, value in own.items()}
    return {**models, "personal": found}


def shrunk(method: Method, share: float) -> Method:
    """The method, whose personal models are at this share."""

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return between(method.models(broadcast, private, data), share)

    return method._replace(models=models)


def temperature(shared: float, own: float, share: float) -> float:
    return math.exp((1 - share) * math.log(shared) + share * math.log(own))


def fit(
    method: Method,
    server: Tree,
    train: ClientData,
    who: Who,
    adapt: Adapt,
    draws: int,
    classes: int,
    temperatures: tuple[float, float] = (1.0, 1.0),
) -> Fit:
    """The share for the one client of `train`; `temperatures` are those of shared and own model."""
    n = int(train.size.sum())
    folds = min(FOLDS, n)
    order = torch.randperm(n, generator=generator(who.seed, 0, who.client, "newcomer folds"))
    parts = [order[k::folds].sort().values for k in range(folds)]
    rest = [torch.cat(parts[:k] + parts[k + 1 :]).sort().values for k in range(folds)]
    given, held = _stacked(train, rest), _stacked(train, parts)
    everyone = [Who(who.seed, who.client + 1 + k) for k in range(folds)]
    private: Tree = {}
    for trained in adapt(given, everyone):
        private = trained.private
    broadcast = {name: value.expand(folds, *value.shape) for name, value in server.items()}
    models = client_side.models(method, broadcast, private, given)
    noise = uncertainty.draws_for(method, Streams(everyone, 0, train.x.device), draws)
    found = {}
    for share in PRIOR:
        own = between(models, share)["personal"]
        said = uncertainty.predict(method, own, held.x, noise, classes)
        said = tempered(said, temperature(*temperatures, share), classes)
        if classes:
            nll = scoring.score_classes(said.mean, held.y)["nll"]
        else:
            nll = scoring.score_targets(torch.cat([said.mean, said.total], -1), held.y)["nll"]
        found[share] = -float(nll[held.weight > 0].sum())
    return Fit(posterior_mean(found), found)


def posterior_mean(log_likelihood: dict[float, float]) -> float:
    """The share; a log-likelihood that is not finite has no weight."""
    shares = torch.tensor(list(log_likelihood), dtype=torch.float64)
    prior = torch.tensor([PRIOR[share] for share in log_likelihood], dtype=torch.float64)
    fits = torch.tensor(list(log_likelihood.values()), dtype=torch.float64)
    fits = fits.masked_fill(~fits.isfinite(), -math.inf)
    if not bool(fits.isfinite().any()):
        return 0.0
    return float((shares * torch.softmax(prior.log() + fits, 0)).sum())


def _stacked(data: ClientData, rows: Sequence[Tensor]) -> ClientData:
    """Some points of the one client after the other, as clients of their own."""
    length = max(map(len, rows))
    weight = torch.stack([(torch.arange(length) < len(each)).float() for each in rows])
    at = torch.stack([torch.nn.functional.pad(each, (0, length - len(each))) for each in rows])
    at, real = at.to(data.x.device), weight.to(data.x.device)

    def of(values: Tensor) -> Tensor:
        taken = values[0][at]
        return taken * real.view(*real.shape, *[1] * (taken.dim() - 2)).to(taken.dtype)

    return ClientData(of(data.x), of(data.y), real)
