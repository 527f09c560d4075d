"""Cross-validation: every point is a test point once, by folds of rows or by whole sites.

Over rows each client's points are split into K folds, every class in its share. K trainings, each
tested on the fold that it did not see: personal models on their own clients' points.

Over sites each training leaves one client out, and its shared model is tested on all points of that
client: what a site can expect that takes no part. Scales are fitted without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


class Interval(NamedTuple):
    mean: float
    half: float  # NaN: too few folds


def over_rows(experiment: Experiment, folds: int) -> Iterator[Fold]:
    """One training per fold, with the first seed of the run."""
    experiment, dataset, spec, count = _begin(experiment)
    seed = experiment.run.seeds[0]
    names = partition.client_names(spec, dataset, count)
    for fold in range(folds):
        splits = partition.split(spec, dataset, count, seed, 1 / folds, fold)
        found, points = _trained(experiment, dataset, splits, names), _tested(splits)
        yield Fold(f"fold {fold + 1}", points, _of_kind(found, _main(found)))


def over_sites(experiment: Experiment) -> Iterator[Fold]:
    """One training per client, without it."""
    experiment, dataset, spec, count = _begin(experiment)
    if count < 3:
        raise UserError(f"To leave one site out takes at least 3 sites; there are {count}.")
    seed = experiment.run.seeds[0]
    names = partition.client_names(spec, dataset, count)
    whole = partition.split(spec, dataset, count, seed, 0.0)
    for out, name in enumerate(names):
        kept = [each for place, each in enumerate(whole) if place != out]
        others = [each for each in names if each != name]
        result = _result(experiment, dataset, kept, others)
        found = _shared_on(result, dataset, whole[out].train)
        yield Fold(name, len(whole[out].train), found)


def interval(values: Sequence[float]) -> Interval:
    """Mean and half of Student's 95 % interval over folds.

    Trainings share most of their points, so it is rather too narrow than too wide.
    """
    from scipy.stats import t  # takes a second

    mean, n = sum(values) / len(values), len(values)
    if n < 3:
        return Interval(mean, math.nan)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values) / (n - 1))
    return Interval(mean, float(t.ppf(0.5 + LEVEL / 2, n - 1)) * spread / math.sqrt(n))


def _begin(experiment: Experiment) -> tuple[Experiment, Dataset, str, int]:
    """One seed, evaluated in the last round alone, and the points."""
    run = experiment.run
    run = dataclasses.replace(run, seeds=run.seeds[:1], evaluate_every=run.rounds)
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


def _trained(
    experiment: Experiment, dataset: Dataset, splits: list[Split], names: Sequence[str]
) -> dict[str, float]:
    summary = _result(experiment, dataset, splits, names).summary
    return {name: each["mean"] for name, each in summary["metrics"].items()}


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
