"""What a client keeps at the end of a run: its model, ready for use on its own machine.

    models/RUN/            experiment.toml, data.json, fitted.safetensors, held_out.safetensors,
                           summary.json: a folder like a simulation's, of one client
    models/RUN.refused/    the same, where the model in use was of RUN and the new one is worse
    models/current         a link to the model in use, which only the gate moves (`replacing.py`)

`corefed predict`, `export`, `report` and `personalize` read them. Nothing leaves the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.data.clients import FederatedData
from corefed.federation import replacing
from corefed.federation.protocol import CURRENT
from corefed.settings.config import to_dict
from corefed.settings.run import Experiment
from corefed.training import calibration, fitted, record, saving, scoring, summaries
from corefed.training.calibration import Temperatures
from corefed.training.setup import Trees

if TYPE_CHECKING:
    from corefed.federation.evaluating import Models
    from corefed.federation.task_context import TaskContext

REFUSED = ".refused"
"""Ending of a folder; names of runs have no dot."""


def keep(
    folder: Path,
    run: str,
    context: TaskContext,
    models: Models,
    temperatures: Temperatures | None,
) -> list[str]:
    """Write the model of a run, and let it be the one in use if the gate lets it pass; notes."""
    name, train = context.settings.name, context.train
    settings = dataclasses.replace(
        context.experiment.run, clients=1, cohort=0, device=str(train.x.device)
    )
    experiment = dataclasses.replace(context.experiment, run=settings)
    ready = context.preparation
    sizes = len(ready.labels), len(ready.targets)
    data = FederatedData(train, context.test, *sizes, [name], ready.labels, (), (ready,))
    trees = Trees(
        settings,
        data,
        models.method,
        [{each: value[0] for each, value in models.broadcast.items()}],
        lambda rows: models.private,
        temperature=None if temperatures is None else calibration.stored(temperatures),
    )
    clients, tensors = saving.describe(data)["clients"], saving.models_of(trees)
    new = fitted.Fitted(folder / run, experiment, (ready,), clients, models.method, tensors)
    verdict = replacing.judge(folder, new, context.data, name, context.settings.model)
    if verdict.passes:
        _write(folder / run, experiment, data, trees)
        with _linking(folder):
            replacing.use(folder, run)
        return [verdict.note] if verdict.note else []
    place = folder / (f"{run}{REFUSED}" if replacing.in_use(folder, run) else run)
    _write(place, experiment, data, trees)
    link = folder / CURRENT
    return [
        f"{verdict.note.rstrip('.')}. The new one is kept in {place}, and {link} is as it was; to "
        f"use the new one, type: ln -sfn {place.name} {link}"
    ]


def _write(folder: Path, experiment: Experiment, data: FederatedData, trees: Trees) -> None:
    """Write the folder, over that of an earlier, shorter version of the run."""
    place = record.Folder(folder)
    place.create(experiment)
    place.keep(lambda path: saving.keep_data(path, data))
    place.keep(lambda path: saving.keep_models(path, trees))
    place.finish(_summary(folder, experiment))


@contextmanager
def _linking(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {folder / CURRENT}: {error.strerror}.") from error


def _summary(folder: Path, experiment: Experiment) -> dict[str, object]:
    """Of one client, from its models' predictions on its test points."""
    held_out = fitted.read_tensors(folder, fitted.HELD_OUT)
    summary = summaries.summarise(to_dict(experiment), [], summaries.environment("cpu"))
    summary["rounds"] = experiment.run.rounds
    summary["metrics"] = {
        name: summaries.over_seeds([value])
        for name, value in scoring.named_metrics(_totals(held_out)).items()
    }
    return summary


def _totals(held_out: Tree) -> dict[str, Tree]:
    """By kind of model, over all held-out points; none without points."""
    y = held_out["y"]
    found = {}
    for kind in (each for each in fitted.KINDS if f"{each}.mean" in held_out):
        mean = held_out[f"{kind}.mean"]
        if y.dim() == 1:
            each, classes = scoring.score_classes(mean, y), mean.shape[-1]
        else:
            outputs = torch.cat([mean, held_out[f"{kind}.total"]], -1)
            each, classes = scoring.score_targets(outputs, y), 0
        found[kind] = scoring.totals(each, y, classes)
    return found
