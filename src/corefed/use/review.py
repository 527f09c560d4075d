"""Which predictions a person should review: the threshold for a client, and what it promises.

`selective.py` chooses a threshold on held-out points. Here these are the client's own, or those of
all clients of the run. Where the default target cannot be promised, the smallest round one that can
is taken instead; a target that the user names is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.preparation import Preparation
from corefed.training import fitted
from corefed.training.fitted import Fitted
from corefed.use import selective
from corefed.use.selective import Promise, Threshold

BY = ("total", "epistemic", "confidence")
NEAREST = 1e-6
"""Nearest to 0 and 1 for errors and confidences: beyond, millions of held-out points are needed."""
TARGET = 0.05
"""The error rate among unflagged predictions, if the user names none."""


@dataclass(frozen=True)
class PredictionSettings:
    """How to flag predictions, and which interval to give."""

    by: str = "total"
    """The uncertainty that decides on review; confidence means 1 - the largest probability."""
    target_error: float | None = None
    """Largest error rate among unflagged predictions; None: TARGET, or what can be promised."""
    confidence: float = 0.9
    """Confidence level of the target_error guarantee, over the draw of the held-out points."""
    tolerance: float | None = None
    """Regression: a prediction is wrong if the target is further than this from its mean."""
    level: float = 0.95
    """Coverage of the prediction interval (regression)."""

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UserError(f"--by is {self.by!r}; it must be {', '.join(BY[:-1])} or {BY[-1]}.")
        for flag in ("target_error", "confidence", "level"):
            value = getattr(self, flag)
            if value is not None and not NEAREST <= value <= 1 - NEAREST:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} is {value:g}; it must be above 0 and below 1.")
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise UserError(f"--tolerance is {self.tolerance:g}; it must be above 0 and finite.")


class Flag(NamedTuple):
    """A threshold and its source."""

    threshold: Threshold
    source: str  # "client", "run" (all its clients) or "none"
    notes: tuple[str, ...]
    target: float  # the error rate that is promised, or that was asked for
    reachable: tuple[Promise, ...]  # round targets that can be promised, smallest first


def kind_of(model: Fitted, wanted: str) -> str:
    """personal or global: as wanted, or by default the first that the run has."""
    if wanted and wanted not in model.kinds:
        has = " and ".join(model.kinds)
        raise UserError(f"The run in {model.folder} has no {wanted} model; it has {has}.")
    return wanted or model.kinds[0]


def check(settings: PredictionSettings, preparation: Preparation) -> None:
    """Refuse settings that do not fit the task."""
    if preparation.labels and settings.tolerance is not None:
        raise UserError("--tolerance is for regressions; this run predicts classes.")
    if not preparation.labels and settings.by == "confidence":
        raise UserError("--by confidence is for classes; a regression has total and epistemic.")


def score(mean: Tensor, total: Tensor, epistemic: Tensor, by: str) -> Tensor:
    """[n] the uncertainty that is compared with the threshold, in float32 as in the files.

    With several targets it is the largest standard deviation.
    """
    if by == "confidence":
        return 1 - mean.float().amax(-1)
    value = (epistemic if by == "epistemic" else total).float()
    return value if value.ndim == 1 else value.sqrt().amax(-1)


def flag_for(
    model: Fitted,
    client: str | None,
    settings: PredictionSettings,
    *,
    seed: int | None = None,
    kind: str = "",
) -> Flag:
    """The threshold for a client, from its own held-out points, or from those of all clients.

    These are two attempts, and without a named target the smallest one that can be promised is a
    third. Each that its number of points allows has an equal share of what may go wrong, so the
    promise that comes of them holds at the confidence that is asked for. The second is about the
    average over clients. Clients' numbers of points are fixed, which makes its tests conservative:
    a sum of errors at different rates varies less than a binomial (Hoeffding 1956). Without a
    client, it is the first.
    """
    kind, (g, i) = kind_of(model, kind), model.place(client or model.names[0], seed)
    u, wrong, row = held_out(model, settings, g, kind)
    target, confidence = settings.target_error or TARGET, settings.confidence
    named = settings.target_error is not None
    sets = _sets(row, None if client is None else i, len(model.names))
    enough = [s for s, mine in sets if int(mine.sum()) >= selective.fewest(target, confidence)]
    level = _shared(confidence, len(enough) + (not named))
    # Beside a named target they are a promise of their own.
    known = _reachable(u, wrong, sets, confidence if named else level)
    promises = tuple(promise for _, promise in known)
    promise = f"an error of {target:.3g} among the kept at confidence {confidence:.3g}"
    why = "no held-out points"
    for source, mine in sets:
        found = selective.threshold(u[mine], wrong[mine], target, level)
        if found.kept:
            note = (
                f"{client} has {why} to promise {promise}; the threshold is from the "
                f"{found.points} held-out points of all {len(model.names)} clients, and the "
                "promise is about their average."
            )
            notes = (note,) if source == "run" and client is not None else ()
            return Flag(found, source, notes, target, promises)
        why = _why(found.points, target, level)
    if not named and known:
        source, least = known[0]
        whose = "of all clients, and the promise is about their average" if source == "run" else ""
        note = (
            f"There are {why} to promise {promise}. The smallest round target that can be promised "
            f"is {least.target:g}, and review goes by it: {least.threshold.wrong} of "
            f"{least.threshold.kept} kept held-out points {whose or f'of {client}'} were wrong."
        )
        return Flag(least.threshold, source, (note,), least.target, promises)
    level = _shared(confidence, len(sets) + (not named))  # points would be enough for all attempts
    needed = selective.points_needed(u, wrong, target, level)
    advice = (
        f"it takes about {needed} held-out points"
        if needed is not None
        else "more points like these would not help; raise --target-error"
    )
    if promises:
        advice += f". The smallest round target that can be promised is {promises[0].target:g}"
    else:
        advice += f". No target up to {selective.TARGETS[-1]:g} can be promised"
    note = f"Everything is flagged: there are {why} to promise {promise}; {advice}."
    return Flag(Threshold(-math.inf, len(u), 0, 0), "none", (note,), target, promises)


def _sets(row: Tensor, i: int | None, clients: int) -> list[tuple[str, Tensor]]:
    """Which held-out points a threshold may come from: the client's, then those of all clients."""
    sets = [("client", row == i)] if i is not None and bool((row == i).any()) else []
    if i is None or clients > 1:
        sets.append(("run", torch.ones_like(row, dtype=torch.bool)))
    return sets


def _shared(confidence: float, attempts: int) -> float:
    """The confidence of each of so many attempts, one of which will be picked."""
    return 1 - (1 - confidence) / max(1, attempts)


def _reachable(
    u: Tensor, wrong: Tensor, sets: Sequence[tuple[str, Tensor]], confidence: float
) -> list[tuple[str, Promise]]:
    """Round targets and their source: each from the points that can promise it, own points first.

    All sets of points are looked at, so each has its share of what may go wrong.
    """
    level = _shared(confidence, len(sets))
    found: dict[float, tuple[str, Promise]] = {}
    for source, mine in sets:
        for promise in selective.rounded(selective.reachable(u[mine], wrong[mine], level)):
            found.setdefault(promise.target, (source, promise))
    return [found[target] for target in sorted(found)]


def _why(points: int, target: float, confidence: float) -> str:
    if not points:
        return "no held-out points"
    few = points < selective.fewest(target, confidence)
    words = "too few held-out points" if few else "too many errors in the held-out points"
    return f"{words} ({points})"


def held_out(
    model: Fitted, settings: PredictionSettings, g: int, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Uncertainty, wrong or not, and client of the held-out points of a seed."""
    tensors = fitted.read_tensors(model.folder, fitted.HELD_OUT)
    per_run, preparation = len(model.names), model.preparations[g]
    mine = (tensors["row"] // per_run) == g
    y, row = tensors["y"][mine], tensors["row"][mine] % per_run
    if not len(row):  # such as those of a newcomer that trained on all its points
        return torch.zeros(0), torch.zeros(0, dtype=torch.bool), row
    mean, total, epistemic = (
        tensors[f"{kind}.{name}"][mine] for name in ("mean", "total", "epistemic")
    )
    if preparation.labels:
        return score(mean, total, epistemic, settings.by), mean.argmax(-1) != y, row
    off = (y.double() - mean.double()).abs()
    far = (off > (settings.tolerance or math.inf)).any(-1)
    return score(mean, total, epistemic, settings.by), far, row
