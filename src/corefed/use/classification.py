"""How well classes are told apart: AUROC, AUPRC, sensitivity, specificity, F1, confusion matrix.

Each class is tested against all others, by scikit-learn. A point counts as positive for a class if
its probability reaches a threshold: the one with the largest sum of sensitivity and specificity on
the run's validation points, or 0.5 where it has none. With more than two classes and without
validation points, a point is positive for its most probable class.

95 % intervals: Wilson's for proportions; for the areas AUROC and AUPRC the bootstrap, which draws
whole clients where all clients' points are pooled and there are at least CLUSTERS of them, since
points of a client are alike, and else draws points. F1 has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.types import Tree
from corefed.training import fitted
from corefed.training.fitted import Fitted

DRAWS = 200
"""Bootstrap samples; the ends of an interval vary by about a tenth of its width."""
CLUSTERS = 5
"""Fewest clients that are drawn whole."""
MOST_POINTS = 5000
"""Points above which the bootstrap draws this many, and widens its interval accordingly."""

Array = npt.NDArray[Any]


class Predicted(NamedTuple):
    """Held-out points of one or several clients."""

    y: Array  # [n] class indices
    p: Array  # [n, classes]
    client: Array  # [n]

    def of(self, rows: Array) -> Predicted:
        return Predicted(*(field[rows] for field in self))


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
    return Predicted(tensors["y"][mine].numpy(), p, row)


def thresholds(chosen_on: Predicted | None, classes: int) -> list[float] | None:
    """One per class; None where there are no points to choose them on."""
    from sklearn.metrics import roc_curve  # takes a second

    if chosen_on is None:
        return None
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
    found: Predicted, labels: Sequence[str], at: Sequence[float] | None, *, intervals: bool = True
) -> dict[str, Any]:
    """All measures of these points, by class and on average over classes that have both kinds."""
    from sklearn.metrics import confusion_matrix

    every = list(range(len(labels)))
    said = found.p.argmax(1)
    positive = _positive(found.p, at)
    each: dict[str, dict[str, Any]] = {}
    for c, label in enumerate(labels):
        truth = found.y == c
        right, alarms = truth & positive[:, c], ~truth & positive[:, c]
        each[label] = {
            "points": int(truth.sum()),
            "threshold": None if at is None and len(labels) > 2 else (at[c] if at else 0.5),
            "auroc": _curve("auroc", found, c, intervals),
            "auprc": _curve("auprc", found, c, intervals),
            "sensitivity": _share(int(right.sum()), int(truth.sum())),
            "specificity": _share(int((~truth & ~alarms).sum()), int((~truth).sum())),
            "f1": {"value": _f1(found, c, at), "interval": None},
        }
    shown = labels if len(labels) > 2 else labels[1:]  # of two classes both have the same curves
    known = [each[label]["auroc"]["value"] for label in shown]
    known = [value for value in known if value is not None]
    return {
        "points": len(found.y),
        "clients": len(np.unique(found.client)),
        "accuracy": _share(int((said == found.y).sum()), len(found.y)),
        "auroc": float(np.mean(known)) if known else None,
        "chosen_on": "validation points" if at is not None else "no points",
        "classes": each,
        "confusion": confusion_matrix(found.y, said, labels=every).tolist(),
    }


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
    by_client = {}
    for i in np.unique(found.client).tolist():
        mine = found.of(found.client == i)
        by_client[model.names[i]] = measure(mine, labels, at, intervals=intervals and _few(found))
    return {**measure(found, labels, at, intervals=intervals), "by_client": by_client}


def how(found: dict[str, Any], classes: int) -> str:
    """A sentence about the thresholds."""
    if found["chosen_on"] == "validation points":
        return "Thresholds were chosen on validation points (largest sensitivity + specificity)."
    rule = "a probability of 0.5" if classes == 2 else "the most probable class"
    return f"There were no validation points to choose thresholds on; positive means {rule}."


def _few(found: Predicted) -> bool:
    """Whether the areas of every client have intervals: with many they would take minutes."""
    return len(np.unique(found.client)) <= 20 and found.p.shape[1] == 2


def _positive(p: Array, at: Sequence[float] | None) -> Array:
    """[n, classes] bool."""
    if at is None and p.shape[1] > 2:
        return np.asarray(np.arange(p.shape[1]) == p.argmax(1)[:, None])
    return np.asarray(p >= np.array(at if at is not None else [0.5] * p.shape[1]))


# --- values with intervals ------------------------------------------------------------------------


def _curve(name: str, found: Predicted, c: int, intervals: bool) -> dict[str, Any]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    score = roc_auc_score if name == "auroc" else average_precision_score

    def of(one: Predicted) -> float | None:
        truth = one.y == c
        if truth.all() or not truth.any():
            return None
        return float(score(truth, one.p[:, c]))

    return _value(of, found, intervals)


def _f1(found: Predicted, c: int, at: Sequence[float] | None) -> float | None:
    from sklearn.metrics import f1_score

    truth = found.y == c
    if not truth.any():
        return None
    return float(f1_score(truth, _positive(found.p, at)[:, c], zero_division=0.0))


def _share(right: int, count: int) -> dict[str, Any]:
    """A proportion with Wilson's interval."""
    from scipy.stats import binomtest

    if not count:
        return {"value": None, "interval": None}
    ends = binomtest(right, count).proportion_ci(0.95, method="wilson")
    return {"value": right / count, "interval": [float(ends.low), float(ends.high)]}


def _value(
    of: Callable[[Predicted], float | None], found: Predicted, intervals: bool
) -> dict[str, Any]:
    """A measure and the percentiles of its bootstrap."""
    value = of(found)
    if value is None or not intervals:
        return {"value": value, "interval": None}
    rng = np.random.default_rng(0)
    n = len(found.y)
    size = min(n, MOST_POINTS)
    clients, place = np.unique(found.client, return_inverse=True)
    groups = [np.flatnonzero(place == i) for i in range(len(clients))]
    whole = len(clients) >= CLUSTERS
    drawn = []
    for _ in range(DRAWS):
        if whole:
            rows = np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
            rows = rows if len(rows) <= MOST_POINTS else rng.choice(rows, MOST_POINTS, False)
        else:
            rows = rng.integers(n, size=size)
        again = of(found.of(rows))
        if again is not None:
            drawn.append(again)
    if len(drawn) < DRAWS // 2:  # a class so rare that most samples lack it
        return {"value": value, "interval": None}
    low, high = np.quantile(drawn, [0.025, 0.975])
    narrow = 1.0 if whole else np.sqrt(size / n)  # fewer points than there are vary more
    return {
        "value": value,
        "interval": [float(value + (low - value) * narrow), float(value + (high - value) * narrow)],
    }
