"""The candidates of a search: what is planned, how far each one is, and their order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.settings import devices
from corefed.settings import space as spaces
from corefed.settings.run import Experiment
from corefed.settings.space import Axis, Space
from corefed.training import halving
from corefed.training.setup import concrete

CANDIDATES = 16
VALIDATION = 0.2
"""Defaults of a search: how many, and the share of training points that they are compared by."""

FEWEST = 2
"""The given settings, and one that differs."""


class Plan(NamedTuple):
    """A search before anything is loaded."""

    experiment: Experiment
    space: list[Axis]
    candidates: list[Experiment]  # the given settings first


def plan(
    experiment: Experiment,
    space: Space | Sequence[str] | None = None,
    candidates: int = CANDIDATES,
) -> Plan:
    """What to search; mistakes are refused before data are loaded."""
    if experiment.run.validation == 0:
        raise UserError(
            "validation is 0: a search needs validation points to choose by. Give a share of the "
            f"training points, {VALIDATION} for example."
        )
    if experiment.run.patience:
        raise UserError(
            "A search ends candidates by its own rule, by halves; leave out patience, and use it "
            "in the run after the search."
        )
    devices.refuse(experiment.run, "A search")
    if candidates < FEWEST:
        raise UserError(f"candidates is {candidates}; it must be at least {FEWEST}.")
    experiment = dataclasses.replace(experiment, settings=concrete(experiment).settings)
    axes = spaces.axes(experiment, space)
    return Plan(experiment, axes, spaces.candidates(experiment, axes, candidates))


def resumed(experiment: Experiment, there: Mapping[str, Any]) -> Plan:
    """The plan of a search whose tune.json has `there` as its "config"."""
    axes = [Axis.from_json(each) for each in there["space"]]
    return Plan(experiment, axes, [spaces.changed(experiment, v) for v in there["candidates"]])


@dataclasses.dataclass
class Candidate:
    """One candidate's way through a search."""

    number: int
    settings: dict[str, Any]  # the searched ones
    outcome: str = "training"  # then dropped, diverged or finished
    round: int = 0
    passes: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # at each rung

    @property
    def nll(self) -> float:
        """At its last rung."""
        return float(self.history[-1]["nll"]) if self.history else math.inf

    def to_json(self) -> dict[str, Any]:
        scores = {} if self.outcome == "diverged" or not self.history else self.history[-1]
        return {**dataclasses.asdict(self), **{k: v for k, v in scores.items() if k != "round"}}


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first: by where they dropped out, then by NLL; those that diverged last."""

    def key(each: Candidate) -> tuple[bool, int, float, int]:
        return each.outcome == "diverged", -each.round, each.nll, each.number

    return sorted(candidates, key=key)


class Standing(NamedTuple):
    """How far a search is."""

    done: int  # rounds of all candidates together
    total: int
    rung: int  # from 1
    rungs: list[int]
    left: int  # candidates
    leader: dict[str, Any]  # settings of the best at the last rung; empty before the first
    nll: float  # its validation NLL
    compared: bool  # whether a rung has just been reached


def standing(
    candidates: Sequence[Candidate], over: int, ends: list[int], *, compared: bool
) -> Standing:
    """`over` rungs of those that end after rounds `ends` are over."""
    left = [each for each in candidates if each.outcome in ("training", "finished")]
    start = ends[over - 1] if over else 0
    done = sum(each.round for each in candidates)
    begun = sum(each.round - start for each in left)
    total = done - begun + halving.planned(len(left), ends[over:], start)
    best = min(left, key=lambda each: (each.nll, each.number))
    leader = best.settings if best.history else {}
    rung = over if compared else over + 1
    return Standing(done, total, rung, ends, len(left), leader, best.nll, compared)
