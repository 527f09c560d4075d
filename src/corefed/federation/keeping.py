"""What a client keeps at the end of a run: its model, ready for use on its own machine.

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
from corefed.settings.config import to_dict
from corefed.settings.run import Experiment
from corefed.training import fitted, record, saving, scoring, summaries
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
    temperature: Tree | None = None,
) -> None:
    """Write the folder, over that of an earlier, shorter version of the run."""
    run = dataclasses.replace(experiment.run, clients=1, cohort=0, device=str(train.x.device))
    experiment = dataclasses.replace(experiment, run=run)
    classes, targets = len(preparation.labels), len(preparation.targets)
    data = FederatedData(
        train, test, classes, targets, [name], preparation.labels, (), (preparation,)
    )
    server = {each: value[0] for each, value in broadcast.items()}
    trees = Trees(run, data, method, [server], lambda rows: private, temperature=temperature)
    place = record.Folder(folder)
    place.create(experiment)
    place.keep(lambda path: saving.keep_data(path, data))
    place.keep(lambda path: saving.keep_models(path, trees))
    place.finish(_summary(folder, experiment))


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
