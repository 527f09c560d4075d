"""Early stopping, as the lines of a run tell it: when each seed was best, and who has stopped.

The validation NLL of a seed's main model is compared with its best one so far, at every evaluation.
A seed that was not better in `patience` evaluations in a row has stopped, and what comes after does
not count: so its result does not depend on the seeds beside it. The run ends when all have stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from corefed.training.cost import Line
from corefed.training.kinds import main_model


class Course(NamedTuple):
    """One entry per seed."""

    patience: int
    best: list[int]  # round, from 1; 0 before the first evaluation
    nll: list[float]  # on validation points, at that round
    waited: list[int]  # evaluations since

    @property
    def over(self) -> bool:
        """Whether every seed has stopped."""
        return all(self.has_stopped(g) for g in range(len(self.best)))

    def has_stopped(self, g: int) -> bool:
        return self.waited[g] >= self.patience

    def after(self, line: Line) -> Course:
        """With one more round; a line without validation metrics changes nothing."""
        found: dict[str, list[float]] = line.get("validation", {})
        if not found:
            return self
        best, nll, waited = list(self.best), list(self.nll), list(self.waited)
        for g, value in enumerate(found[f"{main_model(found)}_nll"]):
            if self.has_stopped(g):
                continue
            if not best[g] or value < nll[g]:  # the first one counts whatever it is
                best[g], nll[g], waited[g] = line["round"], value, 0
            else:
                waited[g] += 1
        return Course(self.patience, best, nll, waited)


def follow(lines: Sequence[Line], patience: int, seeds: int) -> Course:
    """The course after these lines."""
    course = Course(patience, [0] * seeds, [math.inf] * seeds, [0] * seeds)
    for line in lines:
        course = course.after(line)
    return course


def is_over(values: Mapping[str, Any], lines: Sequence[Line]) -> bool:
    """Whether a run with these settings ended, at its last round or before."""
    if len(lines) >= values["rounds"]:
        return True
    patience = values.get("patience", 0)
    return bool(patience) and follow(lines, patience, len(values["seeds"])).over


def section(values: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """The part `stopping` of summary.json; empty of a run that does not stop early."""
    patience = values.get("patience", 0)
    if not patience:
        return {}
    course = follow(lines, patience, len(values["seeds"]))
    if not all(course.best):
        return {}
    return {
        "stopping": {
            "patience": patience,
            "best_round": course.best,
            "validation_nll": course.nll,
            "stopped": [course.has_stopped(g) for g in range(len(course.best))],
        }
    }


def final(lines: Sequence[Line]) -> Line:
    """The last evaluated line; of a run that ends early, with the models that it keeps in place.

    Empty where no round was evaluated.
    """
    last = next((line for line in reversed(lines) if "metrics" in line), {})
    return {**last, **last.get("kept", {})}
