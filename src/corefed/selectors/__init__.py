"""Ways to choose a client's points, by name: one interface (`frame.Selector`) for all.

May import coreset and the rooms below it. The modules are imported when asked for, so names and
texts need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from corefed.base.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from corefed.selectors.frame import Selector


class Entry(NamedTuple):
    module: str
    function: str
    description: str
    passes: float | None = 1.0  # forward passes of each point; None: as the settings say


SELECTORS: dict[str, Entry] = {
    "calibrated": Entry(
        "calibrated", "select", "drawn by importance, each in its turn, weights calibrated", None
    ),
    "matching": Entry(
        "matching", "select", "potentials matched by a solver, as in the paper (Eq. 4)", None
    ),
    "craig": Entry(
        "craig", "select", "medoids of the last-layer gradients in each class (CRAIG, 2020)"
    ),
    "gradmatch": Entry(
        "gradmatch", "select", "points whose weighted gradients add up to all (GradMatch, 2021)"
    ),
    "herding": Entry(
        "herding", "select", "points whose features follow the mean of their class (iCaRL, 2017)"
    ),
    "k-centre": Entry(
        "k_centre", "select", "centres that cover all features within the smallest radius (2018)"
    ),
    "loss": Entry(
        "sampling", "loss", "a sample in proportion to the loss, weighted to be unbiased"
    ),
    "gradient-norm": Entry(
        "sampling", "gradient_norm", "a sample in proportion to the last layer's gradient norms"
    ),
    "leverage": Entry(
        "sampling", "leverage", "a sample in proportion to leverages of last-layer gradients"
    ),
    "random": Entry("sampling", "random", "a simple random sample with weights n/k", 0.0),
}


def named(name: str) -> Entry:
    """What is known of a selector; an unknown one is a sentence with the nearest."""
    if name not in SELECTORS:
        hint = did_you_mean(name, SELECTORS)
        raise UserError(f"There is no selector {name!r}.{hint} There are {', '.join(SELECTORS)}.")
    return SELECTORS[name]


def get(name: str) -> Selector:
    """The selector of that name, under the rules of `guard.py`."""
    entry = named(name)
    selector: Selector = getattr(import_module(f"corefed.selectors.{entry.module}"), entry.function)
    guard = import_module("corefed.selectors.guard")
    guarded: Selector = guard.guarded(selector)
    return guarded
