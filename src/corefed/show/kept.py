"""The predictions that runs keep: their scores, and how far a difference of two may be off.

A run keeps the predictions of its test points (`training/fitted.py`), and their scores in
`measures` of summary.json. A score of a seed's predictions is taken apart into influences of its
points (`training/clustered.py`), so is the difference of two runs' scores, and its standard error
allows for points of the same client and seed.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corefed.base.errors import UserError

if TYPE_CHECKING:  # torch and numpy take a second
    from collections.abc import Mapping, Sequence

    from corefed.base.types import Tree
    from corefed.training.clustered import Estimate, Spread

HELD_OUT = "held_out.safetensors"


def scores(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with the scores of the predictions that the run keeps, where it has them.

    They average over other draws of the weights than the last evaluation. Tests, charts and
    predictions come from what is kept, so that all that is shown is of one set of predictions.
    """
    found = summary.get("measures", {})
    return {
        **summary,
        **{key: summary[key] | found[key] for key in ("metrics", "overconfidence") if key in found},
    }


def shown(
    summary: dict[str, Any], lines: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Curves end with these scores as well, as far as the last line is of the same models."""
    found, last = summary.get("measures", {}).get("metrics", {}), lines[-1] if lines else {}
    if not found or "metrics" not in last or "kept" in last:
        return scores(summary), lines
    same = [  # temperatures change the others, and curves are without
        name for name in found if "calibration" not in last or name.endswith(("_accuracy", "_rmse"))
    ]
    metrics = last["metrics"] | {name: found[name]["per_seed"] for name in same}
    return scores(summary), [*lines[:-1], {**last, "metrics": metrics}]


def spread(
    one: tuple[Path, Mapping[str, Any]],
    two: tuple[Path, Mapping[str, Any]],
    metric: str,
    seeds: Sequence[int],
) -> Spread | str:
    """Of the difference in a metric, over seeds that both have; or why there is none.

    A run is its folder and its summary.
    """
    import numpy as np

    from corefed.training import clustered

    differences, clients, points = [], [], []
    for seed in seeds:
        mine, theirs = (_of_seed(*run, seed) for run in (one, two))
        if isinstance(mine, str):
            return mine
        if isinstance(theirs, str):
            return theirs
        if not _same_points(mine, theirs):
            return "the test points are not the same"
        a, b = _estimate(mine, metric), _estimate(theirs, metric)
        if a is None or b is None:
            return f"the test points of seed {seed} have no {metric}"
        differences.append(clustered.Estimate(a.value - b.value, a.influence - b.influence))
        clients.append(mine["row"].numpy())
        points += [mine["source"].numpy()] if "source" in mine else []
    found = clustered.over_seeds(differences, [len(each) for each in clients])
    assert found is not None
    seed_of = np.repeat(np.arange(len(seeds)), [len(each) for each in clients])
    point = np.concatenate(points) if len(points) == len(seeds) else None
    return clustered.spread(found.influence, np.concatenate(clients), seed_of, point)


def _of_seed(path: Path, summary: Mapping[str, Any], seed: int) -> Tree | str:
    """Predictions of the main model for a seed's test points."""
    found = _read(path)
    if isinstance(found, str):
        return found
    kind = next((each for each in ("personal", "global") if f"{each}.mean" in found), "")
    if not kind or not len(found["y"]):
        return f"{path} has no predictions of test points"
    g, clients = summary["seeds"].index(seed), summary["clients"]
    mine = found["row"] // clients == g
    names = {"point": "point", "y": "y", "mean": f"{kind}.mean", "total": f"{kind}.total"}
    names |= {"source": "source"} if "source" in found else {}
    own = {name: found[key][mine] for name, key in names.items()}
    return {**own, "row": found["row"][mine] - g * clients}


def _read(path: Path) -> Tree | str:
    try:
        return _read_at(path, (path / HELD_OUT).stat().st_mtime_ns)
    except OSError:
        return f"{path} has no {HELD_OUT}"
    except UserError as error:
        return str(error)


@lru_cache(maxsize=16)
def _read_at(path: Path, changed: int) -> Tree:
    """Read once per command, however many runs a run is compared with."""
    from corefed.training import fitted

    return fitted.read_tensors(path, fitted.HELD_OUT)


def _same_points(one: Tree, two: Tree) -> bool:
    return all(
        one[name].shape == two[name].shape and bool((one[name] == two[name]).all())
        for name in ("row", "point", "y")
    )


def _estimate(found: Tree, metric: str) -> Estimate | None:
    """A seed's score, as `training/scoring.py` has it."""
    import torch

    from corefed.training import classification, clustered, scoring

    y, mean = found["y"], found["mean"]
    if not len(y):
        return None
    if metric == "auroc":
        told = classification.Predicted(y.numpy(), mean.double().numpy(), found["row"].numpy())
        return classification.mean_auroc(told, mean.shape[-1])
    if y.is_floating_point():
        each = scoring.score_targets(torch.cat([mean, found["total"]], -1), y)
    else:
        each = scoring.score_classes(mean, y)
    names = {"accuracy": "correct", "rmse": "squared_error"}
    plain = clustered.mean(each[names.get(metric, metric)].numpy())
    if metric != "rmse" or plain.value == 0:
        return plain
    root = plain.value**0.5
    return clustered.Estimate(root, plain.influence / (2 * root))
