"""Devices of different speeds, and a deadline per round: the settings, read and checked.

In a simulation a deadline is in simulated seconds. In a federation of machines it is in seconds,
and each client measures its own speed.

`speeds` is written in one of four ways; a speed is in passes per simulated second (`base/passes.py`
says what a pass is):

    500                     every client
    100,500,500             one number per client
    uniform:100,900         drawn per client between the two
    lognormal:500,1         drawn per client: median, and standard deviation of the logarithm
"""

from __future__ import annotations

import math
from typing import NamedTuple

from corefed.base.errors import UserError
from corefed.settings.run import Run

KINDS = ("uniform", "lognormal")
WAYS = "500, uniform:100,900, lognormal:500,1 or one number per client such as 100,500,500"


class Speeds(NamedTuple):
    """How fast clients are."""

    kind: str  # "": given
    numbers: tuple[float, ...]


def simulated(run: Run) -> list[str]:
    """The settings of this run that make its clients differ in their work."""
    return [name for name in ("local_epochs", "speeds", "deadline") if getattr(run, name)]


def refuse(run: Run, who: str) -> None:
    """Refuse them where clients are not simulated in one process, or not by one run."""
    given = simulated(run)
    if given:
        raise UserError(f"{who} cannot simulate devices yet; leave out {' and '.join(given)}.")


def refuse_on_machines(run: Run) -> None:
    """Refuse what has no meaning where every client has a machine of its own."""
    if run.speeds:
        raise UserError(
            f"speeds is {run.speeds}, but in a federation of machines each client measures its own "
            "speed; leave out speeds."
        )
    if run.deadline and run.late == "drop":
        raise UserError(
            "late=drop is for simulations; in a federation of machines use late=partial or fit. "
            "Who has not answered by the deadline of federation.toml is left out in any case."
        )


def check(run: Run) -> None:
    if run.speeds:
        parse(run.speeds)


def check_simulated(run: Run) -> None:
    """Refuse a deadline that has no meaning where clients are simulated."""
    if run.deadline and not run.speeds:
        raise UserError(
            f"deadline is {run.deadline:g}, in simulated seconds; these take speeds, such as "
            "speeds=lognormal:500,1."
        )


def parse(text: str) -> Speeds:
    """Refused unless every speed is, or will be drawn, above 0."""
    kind, colon, rest = text.rpartition(":")
    try:
        numbers = tuple(float(part) for part in rest.split(","))
    except ValueError:
        numbers = ()
    known = kind in KINDS and len(numbers) == 2 if colon else bool(numbers)
    if not known or not all(map(math.isfinite, numbers)):
        raise UserError(f"speeds is {text!r}; write {WAYS}.")
    positive = numbers[:1] if kind == "lognormal" else numbers
    if min(positive) <= 0 or (kind == "lognormal" and numbers[1] < 0):
        raise UserError(
            f"speeds is {text!r}; every speed must be above 0, or the device never finishes."
        )
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise UserError(f"speeds is {text!r}; the first number must be the smaller one.")
    return Speeds(kind, numbers)
