"""Cross-validation: every point is a test point once, by folds of rows or by whole sites.

Over rows each client's points are split into K folds, every class in its share. K trainings, each
tested on the fold that it did not see: personal models on their own clients' points.

Over sites each training leaves one client out, and its shared model is tested on all points of that
client: what a site can expect that takes no part. Scales are fitted without it.

Both can be repeated. Folds are then drawn anew, by the next seed; a site is left out again, and
trained for by the next seed. Trainings on folds share most of their points, so their scores are
correlated, and more repeats do not make more sites. The intervals allow for both, see `interval`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.bayes import uncertainty
from corefed.data import held_out, partition
from corefed.data.clients import federate
from corefed.data.dataset import Dataset
from corefed.data.partition import Split
from corefed.settings.run import Experiment, Run
from corefed.training import rounds, scoring
from corefed.training.setup import concrete, pool

LEVEL = 0.95


class Fold(NamedTuple):
    """The scores of one training on the points that it did not see."""

    name: str
    points: int
    metrics: dict[str, float]
    repeat: int = 1
    best_round: int = 0  # where early stopping was asked for


class Interval(NamedTuple):
    mean: float
    half: float  # NaN: too few folds


def over_rows(experiment: Experiment, folds: int, repeats: int = 1) -> Iterator[Fold]:
    """One training per fold and repeat; the repeats have the first seed of the run and the next."""
    experiment, dataset, spec, count = _begin(experiment)
    names = partition.client_names(spec, dataset, count)
    for repeat in range(repeats):
        one = _seeded(experiment, repeat)
        seed = one.run.seeds[0]
        for fold in range(folds):
            splits = partition.split(spec, dataset, count, seed, 1 / folds, fold)
            summary, points = _result(one, dataset, splits, names).summary, _tested(splits)
            found = {name: each["mean"] for name, each in summary["metrics"].items()}
            words = f"fold {fold + 1}" if repeats == 1 else f"repeat {repeat + 1}, fold {fold + 1}"
            yield Fold(words, points, _of_kind(found, _main(found)), repeat + 1, _best(summary))


def over_sites(experiment: Experiment, repeats: int = 1) -> Iterator[Fold]:
    """One training per client and repeat, without the client."""
    experiment, dataset, spec, count = _begin(experiment)
    if count < 3:
        raise UserError(f"To leave one site out takes at least 3 sites; there are {count}.")
    names = partition.client_names(spec, dataset, count)
    whole = partition.split(spec, dataset, count, experiment.run.seeds[0], 0.0)
    for repeat in range(repeats):
        one = _seeded(experiment, repeat)
        for out, name in enumerate(names):
            kept = [each for place, each in enumerate(whole) if place != out]
            others = [each for each in names if each != name]
            result = _result(one, dataset, kept, others)
            found = _shared_on(result, dataset, whole[out].train)
            yield Fold(name, len(whole[out].train), found, repeat + 1, _best(result.summary))


def interval(found: Sequence[Fold], metric: str, *, sites: bool) -> Interval:
    """Mean and half of the 95 % interval.

    Of sites: Student's over the sites' means over repeats. Of R repeats of K folds: the corrected
    interval of Nadeau and Bengio (2003), with the variance s^2 of all K R scores,

        mean +- t_{KR-1} s sqrt(1 / (K R) + 1 / (K - 1)),

    where 1 / (K - 1), test points over training points, stands for what trainings have in common.
    Without it repeats would make the interval as narrow as one likes, on the same rows.
    """
    from scipy.stats import t  # takes a second

    repeats, shared = max(each.repeat for each in found), 0.0
    values = [each.metrics[metric] for each in found]
    if sites:
        n = len(values) // repeats
        values = [sum(values[i::n]) / repeats for i in range(n)]
    else:
        shared = 1 / (len(values) / repeats - 1)
    mean, n = sum(values) / len(values), len(values)
    if n < 3:
        return Interval(mean, math.nan)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values) / (n - 1))
    reach = float(t.ppf(0.5 + LEVEL / 2, n - 1))
    return Interval(mean, reach * spread * math.sqrt(1 / n + shared))


def _begin(experiment: Experiment) -> tuple[Experiment, Dataset, str, int]:
    """One seed, evaluated in the last round alone unless it may stop early, and the points."""
    run = experiment.run
    every = run.evaluate_every if run.patience else run.rounds
    run = dataclasses.replace(run, seeds=run.seeds[:1], evaluate_every=every)
    experiment = concrete(dataclasses.replace(experiment, run=run))
    run = experiment.run
    dataset = pool(run, run.partition, run.seeds[0])
    return experiment, dataset, run.partition, _count(run, dataset)


def _count(run: Run, dataset: Dataset) -> int:
    return partition.client_count(run.partition, dataset, run.clients)


def _result(
    experiment: Experiment, dataset: Dataset, splits: list[Split], names: Sequence[str]
) -> rounds.Result:
    run = experiment.run
    splits = held_out.with_validation(dataset, splits, run.validation, run.seeds[0])
    data = federate(dataset, splits, scale=run.scale, memory_mb=run.memory_mb, names=names)
    return rounds.train(experiment, None, data=data)


def _seeded(experiment: Experiment, repeat: int) -> Experiment:
    run = dataclasses.replace(experiment.run, seeds=(experiment.run.seeds[0] + repeat,))
    return dataclasses.replace(experiment, run=run)


def _best(summary: dict[str, Any]) -> int:
    """The round whose models a run that stops early keeps; 0 of others."""
    return int(summary["stopping"]["best_round"][0]) if "stopping" in summary else 0


def _main(metrics: dict[str, float]) -> str:
    kinds = [name.partition("_")[0] for name in metrics]
    return next(kind for kind in ("personal", "global", "localized") if kind in kinds)


def _of_kind(metrics: dict[str, float], kind: str) -> dict[str, float]:
    start = f"{kind}_"
    return {k.removeprefix(start): v for k, v in metrics.items() if k.startswith(start)}


def _tested(splits: Sequence[Split]) -> int:
    return sum(len(one.test) for one in splits)


def _shared_on(result: rounds.Result, dataset: Dataset, rows: torch.Tensor) -> dict[str, float]:
    """The shared model's scores on points of a client that took no part."""
    setup, method = result.setup, result.setup.method
    run, preparation = setup.experiment.run, setup.data.preparations[0]
    broadcast = {name: value.unsqueeze(0) for name, value in result.servers[0].items()}
    first = setup.data.train.of([0])
    models = method.models(broadcast, setup.clients.take([0]), first)
    if "global" not in models:
        raise UserError(
            f"{run.method} has no shared model to test on a site that is left out; use --folds."
        )
    device = first.x.device
    x = preparation.scale(dataset.values(rows)).unsqueeze(0).to(device)
    streams = Streams([Who(run.seeds[0], 0)], run.rounds, device)
    noise = uncertainty.draws_for(method, streams, run.evaluate_draws)
    found = uncertainty.predict(method, models["global"], x, noise, setup.data.classes).client(0)
    y = dataset.y[rows]
    if setup.data.classes:
        each = scoring.score_classes(found.mean.cpu(), y)
    else:
        found = found.in_unit(*preparation.unit)
        each = scoring.score_targets(torch.cat([found.mean, found.total], -1).cpu(), y)
    return scoring.metrics_of(scoring.totals(each, y, setup.data.classes))
