"""The part `measures` of summary.json: what the predictions say that a run keeps.

    metrics             of personal and global models, as in `metrics` of the summary, but of the
                        predictions in held_out.safetensors, which average over other draws of the
                        weights than the last evaluation. Tables and pages show these
    overconfidence      likewise
    model               the kind of model that the rest is about
    accuracy, auroc     of all clients' points; auroc is the mean over classes, of two that of the
                        second
    classes             by class: points, threshold, auroc, auprc, sensitivity, specificity, f1
    confusion           rows are true classes, columns predicted ones; of all seeds
    clients             by client: points, accuracy, auroc; of two classes all measures of the
                        second. Left out where there are more than MOST_CLIENTS

A measure has a `value`, the mean over seeds, and an `interval` (`clustered.py`). A regression has
`metrics` alone. Runs of very many points or classes have no classes and clients, to cost nothing;
`corefed measures` computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corefed.base.types import Tree
from corefed.data.preparation import Preparation
from corefed.training import classification, fitted, scoring, summaries
from corefed.training.classification import Predicted, Thresholds

MOST_CLIENTS = 100
MOST_NUMBERS = 1_000_000
"""Points times classes: about a second."""
BINARY = ("auroc", "auprc", "sensitivity", "specificity", "f1")


def section(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """`measures` of the run in this folder; empty where it keeps no predictions."""
    if not (folder / fitted.HELD_OUT).exists():
        return {}
    about = fitted.read_data(folder)
    found = fitted.read_tensors(folder, fitted.HELD_OUT)
    clients, seeds = len(about["clients"][0]), len(about["clients"])
    labels = Preparation.from_dict(about["preparations"][0]).labels
    kinds = [kind for kind in fitted.KINDS if f"{kind}.mean" in found]
    if not kinds or not len(found["y"]):
        return {}
    told: dict[str, Any] = {}
    expected = sum(row["test"] for rows in about["clients"] for row in rows)
    if len(found["y"]) == expected and "evaluated_clients" not in summary:
        told |= _metrics(found, kinds, clients, seeds, len(labels))
    if labels and found[f"{kinds[0]}.mean"].numel() <= MOST_NUMBERS:
        names = [row["name"] for row in about["clients"][0]]
        told |= _of_classes(folder, found, kinds[0], names, seeds, labels)
    return {"measures": told} if told else {}


def _metrics(
    found: Tree, kinds: Sequence[str], clients: int, seeds: int, classes: int
) -> dict[str, Any]:
    by_seed, bold = [], []
    for g in range(seeds):
        mine = found["row"] // clients == g
        y, sums = found["y"][mine], {}
        for kind in kinds:
            mean = found[f"{kind}.mean"][mine]
            if classes:
                each = scoring.score_classes(mean, y)
            else:
                outputs = torch.cat([mean, found[f"{kind}.total"][mine]], -1)
                each = scoring.score_targets(outputs, y)
            sums[kind] = scoring.totals(each, y, classes)
        by_seed.append(scoring.named_metrics(sums))
        if classes:
            bold.append({kind: scoring.overconfidence(each) for kind, each in sums.items()})
    told = {"metrics": _over_seeds(by_seed)}
    return {**told, "overconfidence": _over_seeds(bold)} if bold else told


def _over_seeds(each: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {name: summaries.over_seeds([one[name] for one in each]) for name in each[0]}


def _of_classes(
    folder: Path,
    found: Tree,
    kind: str,
    names: Sequence[str],
    seeds: int,
    labels: tuple[str, ...],
) -> dict[str, Any]:
    validated = (
        fitted.read_tensors(folder, fitted.VALIDATION)
        if (folder / fitted.VALIDATION).exists()
        else None
    )
    each: list[Predicted] = []
    at: list[Thresholds] = []
    for g in range(seeds):
        mine = classification.take(found, kind, g, len(names))
        if mine is not None:
            each.append(mine)
            chosen = (
                None if validated is None else classification.take(validated, kind, g, len(names))
            )
            at.append(classification.thresholds(chosen, len(labels)))
    if len(each) < seeds:
        return {}  # a seed without test points
    at = at if None not in at else [None] * len(at)
    whole = classification.measure_seeds(each, labels, at)
    areas = [classification.mean_auroc(one, len(labels)) for one in each]
    told = {
        "model": kind,
        **{key: whole[key] for key in ("points", "seeds", "chosen_on", "intervals_over")},
        "accuracy": whole["accuracy"],
        "auroc": {
            "value": whole["auroc"],
            "interval": whole["auroc_interval"],
            "per_seed": [one.value if one is not None else None for one in areas],
        },
        "classes": whole["classes"],
        "confusion": whole["confusion"],
    }
    if len(names) <= MOST_CLIENTS:
        told["clients"] = {
            name: _of_client([one.of(one.client == i) for one in each], labels, at)
            for i, name in enumerate(names)
            if any((one.client == i).any() for one in each)
        }
    return told


def _of_client(
    found: Sequence[Predicted], labels: tuple[str, ...], at: Sequence[Thresholds]
) -> dict[str, Any]:
    pairs = [(one, own) for one, own in zip(found, at, strict=True) if len(one.y)]
    ones, thresholds = [one for one, _ in pairs], [own for _, own in pairs]
    if len(labels) > 2:
        right = np.concatenate([one.p.argmax(1) == one.y for one in ones])
        areas = [classification.mean_auroc(one, len(labels)) for one in ones]
        known = [one.value for one in areas if one is not None]
        auroc = {"value": float(np.mean(known)) if known else None, "interval": None}
        accuracy = {"value": float(right.mean()), "interval": None}
        return {"points": len(right), "accuracy": accuracy, "auroc": auroc}
    whole = classification.measure_seeds(ones, labels, thresholds)
    own = {name: whole["classes"][labels[1]][name] for name in BINARY}
    return {"points": whole["points"], "accuracy": whole["accuracy"], **own}
