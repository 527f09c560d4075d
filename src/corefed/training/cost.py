"""What a run cost in passes: the one definition behind every table, picture, page and tracker.

A pass is one point forward and backward through the network, at one draw of its weights. A forward
pass alone, which is what selecting points takes, counts a third of one:

    passes = examples x draws per step + selection_examples / 3

A method may train on a subset without counting what selecting it took, and a client of a federation
may keep its numbers to itself. Then the passes are a lower bound, and they are shown as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from corefed.base.passes import FORWARD

if TYPE_CHECKING:  # a record is read without torch
    from corefed.base.types import Method

Line = dict[str, Any]

LOWER_BOUND = "≥: a lower bound; what selecting the points took is not counted."


class Passes(NamedTuple):
    """The passes of a run, all seeds together."""

    total: float
    complete: bool  # False: not all work is counted, and the total is a lower bound

    def __str__(self) -> str:
        return f"{'' if self.complete else '≥ '}{self.total:,.0f}"

    @property
    def words(self) -> str:
        """In a sentence."""
        least = "" if self.complete else "at least "
        return f"{least}{self.total:,.0f} passes"


def of_round(
    method: Method,
    examples: Sequence[float],
    looked: Sequence[float] | None,
    *,
    complete: bool = True,
) -> Line:
    """For a round's line, per seed.

    `looked` are the forward passes of selection, where they are known; `complete` is false where
    some examples are missing.
    """
    subset = method.subset
    draws = math.prod(method.noise[:-1])
    spent = [0.0] * len(examples) if looked is None else looked
    line: Line = {"passes": [draws * e + FORWARD * s for e, s in zip(examples, spent, strict=True)]}
    unknown = looked is None and subset is not None and not subset.free
    if unknown or not complete:
        line["passes_complete"] = False
    return line


def completed(values: Mapping[str, Any], lines: Sequence[Line]) -> list[Line]:
    """The lines, each with its passes; those of older versions have none of their own."""
    return [line if "passes" in line else {**line, **_older(values, line)} for line in lines]


def _older(values: Mapping[str, Any], line: Line) -> Line:
    examples, draws = line["examples"], values.get("monte_carlo", 1)
    spent = line.get("selection_examples", [0.0] * len(examples))
    pairs = zip(examples, spent, strict=True)
    found: Line = {"passes": [draws * e + FORWARD * s for e, s in pairs]}
    if "selection_examples" not in line and values.get("fraction", 1.0) < 1:
        found["passes_complete"] = False
    return found


def of_lines(values: Mapping[str, Any], lines: Sequence[Line]) -> Line:
    """For the cost in summary.json; forward passes of selection where the method counts them."""
    whole = completed(values, lines)
    looked = [sum(line["selection_examples"]) for line in lines if "selection_examples" in line]
    return {
        **({"selection_examples": sum(looked)} if looked else {}),
        "passes": sum(sum(line["passes"]) for line in whole),
        "passes_complete": all(line.get("passes_complete", True) for line in whole),
    }


def of_summary(summary: Mapping[str, Any]) -> Passes:
    """The passes of a run; older summaries have only their parts."""
    cost, values = summary["cost"], summary["config"]
    if "passes" in cost:
        return Passes(cost["passes"], cost["passes_complete"])
    spent = cost.get("selection_examples", 0.0)
    total = values.get("monte_carlo", 1) * cost["examples_processed"] + FORWARD * spent
    counted = "selection_examples" in cost or values.get("fraction", 1.0) >= 1
    return Passes(total, counted)
