"""How well classes are told apart: AUROC, AUPRC, sensitivity, specificity, F1, confusion matrix.

Each class is tested against all others. A point counts as positive for a class if its probability
reaches a threshold: the one with the largest sum of sensitivity and specificity on the run's
validation points, or 0.5 where it has none. With more than two classes and without validation
points, a point is positive for its most probable class.

Of several seeds, values are means over seeds. 95 % intervals allow for points that come from the
same client or seed (`clustered.py`): for proportions Wilson's, with as many points as would have
that standard error if they were independent; for areas and F1 on the scale of log-odds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.types import Tree
from corefed.training import clustered, fitted
from corefed.training.clustered import Estimate
from corefed.training.fitted import Fitted

Z = 1.959964
"""Standard errors of a normal 95 % interval."""
AREAS = {"auroc": clustered.auroc, "auprc": clustered.auprc}

Array = npt.NDArray[Any]
Thresholds = Sequence[float] | None
"""One per class; None: no points to choose them on."""


class Predicted(NamedTuple):
    """Held-out points of one or several clients, and of one seed."""

    y: Array  # [n] class indices
    p: Array  # [n, classes]
    client: Array  # [n]
    point: Array | None = None  # [n] the same number in all seeds; None: nothing is known

    def of(self, rows: Array) -> Predicted:
        point = None if self.point is None else self.point[rows]
        return Predicted(self.y[rows], self.p[rows], self.client[rows], point)


def read(model: Fitted, kind: str, g: int, file: str = fitted.HELD_OUT) -> Predicted | None:
    """Held-out (or validation) predictions of a seed; None where there are none."""
    if not (model.folder / file).exists():
        return None
    return take(fitted.read_tensors(model.folder, file), kind, g, len(model.names))


def take(tensors: Tree, kind: str, g: int, clients: int) -> Predicted | None:
    mine = tensors["row"] // clients == g
    if f"{kind}.mean" not in tensors or not bool(mine.any()):
        return None
    p = tensors[f"{kind}.mean"][mine].double().numpy()
    row = (tensors["row"][mine] % clients).numpy()
    point = tensors[fitted.SOURCE][mine].numpy() if fitted.SOURCE in tensors else None
    return Predicted(tensors["y"][mine].numpy(), p, row, point)


def thresholds(chosen_on: Predicted | None, classes: int) -> list[float] | None:
    """One per class; None where there are no points to choose them on."""
    if chosen_on is None:
        return None
    from sklearn.metrics import roc_curve  # takes two seconds: only where it is needed

    found = []
    for c in range(classes):
        positive = chosen_on.y == c
        if positive.all() or not positive.any():
            found.append(0.5)
            continue
        false, true, at = roc_curve(positive, chosen_on.p[:, c])
        best = int((true - false).argmax())
        found.append(float(min(at[best], 1.0)))
    return found


def measure(
    found: Predicted, labels: Sequence[str], at: Thresholds, *, intervals: bool = True
) -> dict[str, Any]:
    """All measures of one seed's points, by class and on average over classes."""
    return measure_seeds([found], labels, [at], intervals=intervals)


def measure_seeds(
    found: Sequence[Predicted],
    labels: Sequence[str],
    at: Sequence[Thresholds],
    *,
    intervals: bool = True,
) -> dict[str, Any]:
    """All measures by class and on average over the classes that have both kinds of points.

    `found` are the points of each seed and `at` its thresholds. Counts are those of all seeds.
    """
    value = _Valued(found, intervals)
    positive = [_positive(one.p, own) for one, own in zip(found, at, strict=True)]
    each: dict[str, dict[str, Any]] = {}
    for c, label in enumerate(labels):
        true = [one.y == c for one in found]
        said = [one[:, c] for one in positive]
        both = list(zip(true, said, strict=True))
        each[label] = {
            "points": sum(int(one.sum()) for one in true),
            "threshold": _threshold(at, c, len(labels)),
            **{
                name: value.area([of(y, one.p[:, c]) for y, one in zip(true, found, strict=True)])
                for name, of in AREAS.items()
            },
            "sensitivity": value.share(
                [clustered.share(p, y) for y, p in both], [int(y.sum()) for y in true]
            ),
            "specificity": value.share(
                [clustered.share(~p, ~y) for y, p in both], [int((~y).sum()) for y in true]
            ),
            "f1": value.area([clustered.f1(y, p) for y, p in both]),
        }
    right = [clustered.mean((one.p.argmax(1) == one.y).astype(float)) for one in found]
    areas = value.area([mean_auroc(one, len(labels)) for one in found])
    everyone = np.concatenate([one.client for one in found])
    n = len(labels)
    counts = [np.bincount(one.y * n + one.p.argmax(1), minlength=n * n) for one in found]
    return {
        "points": sum(len(one.y) for one in found),
        "clients": len(np.unique(everyone)),
        "seeds": len(found),
        "accuracy": value.share(right, [len(one.y) for one in found]),
        "auroc": areas["value"],
        "auroc_interval": areas["interval"],
        "chosen_on": "no points" if at[0] is None else "validation points",
        "intervals_over": value.over,
        "classes": each,
        "confusion": np.sum(counts, 0).reshape(n, n).tolist(),
    }


def mean_auroc(found: Predicted, classes: int) -> Estimate | None:
    """AUROC of the second of two classes; of more, the mean over those that have both kinds."""
    shown = range(classes) if classes > 2 else (classes - 1,)
    areas = [clustered.auroc(found.y == c, found.p[:, c]) for c in shown]
    known = [one for one in areas if one is not None]
    if not known:
        return None
    value = math.fsum(one.value for one in known) / len(known)
    return Estimate(value, np.mean([one.influence for one in known], 0))


def of_run(
    model: Fitted, kind: str, g: int, client: str | None = None, *, intervals: bool = True
) -> dict[str, Any] | None:
    """Measures over all clients and per client, or of one client; None without held-out points."""
    labels = model.preparations[g].labels
    found = read(model, kind, g)
    if found is None or not labels:
        return None
    at = thresholds(read(model, kind, g, fitted.VALIDATION), len(labels))
    if client is not None:
        mine = found.of(found.client == model.names.index(client))
        return measure(mine, labels, at, intervals=intervals) if len(mine.y) else None
    by_client = {
        model.names[i]: measure(found.of(found.client == i), labels, at, intervals=intervals)
        for i in np.unique(found.client).tolist()
    }
    return {**measure(found, labels, at, intervals=intervals), "by_client": by_client}


def how(found: dict[str, Any], classes: int) -> str:
    """A sentence about the thresholds."""
    if found["chosen_on"] == "validation points":
        return "Thresholds were chosen on validation points (largest sensitivity + specificity)."
    rule = "a probability of 0.5" if classes == 2 else "the most probable class"
    return f"There were no validation points to choose thresholds on; positive means {rule}."


def _positive(p: Array, at: Sequence[float] | None) -> Array:
    """[n, classes] bool."""
    if at is None and p.shape[1] > 2:
        return np.asarray(np.arange(p.shape[1]) == p.argmax(1)[:, None])
    return np.asarray(p >= np.array(at if at is not None else [0.5] * p.shape[1]))


def _threshold(at: Sequence[Thresholds], c: int, classes: int) -> float | None:
    """That of a class, in the mean over seeds; None where the most probable class counts."""
    if at[0] is None:
        return None if classes > 2 else 0.5
    return math.fsum(own[c] for own in at if own is not None) / len(at)


# --- values with intervals ------------------------------------------------------------------------


class _Valued:
    """Values of estimates of the same points, with intervals."""

    def __init__(self, found: Sequence[Predicted], intervals: bool) -> None:
        self.intervals, self.sizes = intervals, [len(one.y) for one in found]
        self.client = np.concatenate([one.client for one in found])
        self.seed = np.repeat(np.arange(len(found)), self.sizes)
        points = [one.point for one in found if one.point is not None]
        self.point = np.concatenate(points) if len(points) == len(found) else None
        self.over = ""  # what was a sample

    def area(self, each: Sequence[Estimate | None]) -> dict[str, Any]:
        """On the scale of log-odds; without interval at 0 and 1, where nothing says how wide."""
        found, spread = self._estimate(each)
        interval = None
        if found is not None and spread is not None and 0 < found.value < 1 and spread.error > 0:
            v = found.value
            middle, reach = math.log(v / (1 - v)), spread.reach / (v * (1 - v))
            interval = [_from_log_odds(middle + way * reach) for way in (-1, 1)]
        return {"value": None if found is None else found.value, "interval": interval}

    def share(self, each: Sequence[Estimate | None], counts: Sequence[int]) -> dict[str, Any]:
        """Wilson's interval; `counts` are the points of each seed that the share is of."""
        found, spread = self._estimate(each)
        if found is None or spread is None:
            return {"value": None if found is None else found.value, "interval": None}
        v, n, k = found.value, sum(counts) / len(counts), Z
        if spread.over != "points":
            k = clustered.quantile(spread.freedom)
            alike = v * (1 - v) / spread.error**2 if spread.error > 0 else n
            n = min(n, alike)
        middle = (v + k**2 / (2 * n)) / (1 + k**2 / n)
        half = k / (1 + k**2 / n) * math.sqrt(v * (1 - v) / n + k**2 / (4 * n**2))
        return {"value": v, "interval": [max(0.0, middle - half), min(1.0, middle + half)]}

    def _estimate(
        self, each: Sequence[Estimate | None]
    ) -> tuple[Estimate | None, clustered.Spread | None]:
        found = clustered.over_seeds(each, self.sizes)
        if found is None or not self.intervals:
            return found, None
        spread = clustered.spread(found.influence, self.client, self.seed, self.point)
        self.over = spread.over
        return found, spread


def _from_log_odds(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
