"""What a client keeps when a run has ended: its model, ready to be used on its own machine.

    models/RUN/    experiment.toml, data.json, fitted.safetensors, held_out.safetensors,
                   summary.json: a folder like a simulation's, of one client

`corefed predict`, `export`, `report` and `personalize` read it. Nothing of it leaves the machine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from corefed.base.types import ClientData, Method, Tree
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed.settings.config import Experiment, to_dict
from corefed.training import evaluate, fitted, record
from corefed.training.setup import Trees


def keep(
    folder: Path,
    name: str,
    experiment: Experiment,
    preparation: Preparation,
    train: ClientData,
    test: ClientData,
    method: Method,
    broadcast: Tree,
    private: Tree,
) -> None:
    """Write the folder, over what an earlier end of the same run has left."""
    run = dataclasses.replace(experiment.run, clients=1, cohort=0, device=str(train.x.device))
    experiment = dataclasses.replace(experiment, run=run)
    classes, targets = len(preparation.labels), len(preparation.targets)
    data = FederatedData(
        train, test, classes, targets, [name], preparation.labels, (), (preparation,)
    )
    server = {each: value[0] for each, value in broadcast.items()}
    trees = Trees(run, data, method, [server], private)
    place = record.Folder(folder)
    place.create(experiment)
    place.keep(lambda path: fitted.keep_data(path, data))
    place.keep(lambda path: fitted.keep_models(path, trees))
    place.finish(_summary(folder, experiment))


def _summary(folder: Path, experiment: Experiment) -> dict[str, object]:
    """Of one client, from what its models say of its test points; training is the server's."""
    said = fitted.read_tensors(folder, fitted.HELD_OUT)
    summary = record.summarise(to_dict(experiment), [], record.environment("cpu"))
    summary["rounds"] = experiment.run.rounds
    summary["metrics"] = {
        name: record.over_seeds([value])
        for name, value in evaluate.named_metrics(_totals(said)).items()
    }
    return summary


def _totals(said: Tree) -> dict[str, Tree]:
    """By kind of model, over all held-out points; none without points."""
    y = said["y"]
    found = {}
    for kind in (each for each in fitted.KINDS if f"{each}.mean" in said):
        mean, total = said[f"{kind}.mean"], said[f"{kind}.total"]
        classes = mean.shape[-1] if y.dim() == 1 else 0
        each = (
            evaluate.score_classes(mean, y)
            if classes
            else evaluate.score_targets(torch.cat([mean, total], -1), y)
        )
        found[kind] = evaluate.totals(each, y, classes)
    return found
