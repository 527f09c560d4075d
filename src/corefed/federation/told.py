"""What clients told at the join that later answers are compared with: their numbers of points.

A client cannot train on more points than it told, nor test on more. What it told may be a lie
itself, so from three clients on no client counts for more than `max_weight` times the median.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Literal, NamedTuple

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.federation.reading.agreement import FEWEST
from corefed.federation.rules import Rules

JOINED = "joined.json"
SCHEMA = 1

Part = Literal["train", "test"]


class Told(NamedTuple):
    """By client, of those whose descriptions counted."""

    train: dict[str, int]
    test: dict[str, int]
    classes_left_out: tuple[str, ...] = ()  # by the run, since too few clients name them

    def _of(self, part: Part) -> dict[str, int]:
        return self.train if part == "train" else self.test

    def most(self, name: str, part: Part, rules: Rules) -> int:
        """Points that a client may claim. One that was not there at the join told nothing."""
        return min(rules.max_examples, self._of(part).get(name, rules.max_examples))

    def weight(self, part: Part, rules: Rules) -> float:
        """Points that a client counts for at most."""
        numbers = self._of(part).values()
        if len(numbers) < FEWEST or not rules.max_weight:
            return math.inf
        return rules.max_weight * max(1, statistics.median_low(numbers))


def save(path: Path, told: Told) -> None:
    files.replace(path / JOINED, digests.to_json({"schema": SCHEMA, **told._asdict()}))


def load(path: Path) -> Told:
    """Of a run's folder; nothing where the run is of an earlier version."""
    file = path / JOINED
    if not file.exists():
        return Told({}, {})
    try:
        content = digests.read_json(file)
        if content.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        found = Told(**content)
        counts = [*found.train.values(), *found.test.values()]
        if not all(type(each) is int for each in counts):
            raise ValueError("numbers of points that are none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}); start a new run.") from error
    return found._replace(classes_left_out=tuple(found.classes_left_out))
