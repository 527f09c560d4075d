"""Selectors of a client's points, by name, all with one interface (`frame.Selector`).

`register` adds a selector from outside the package. The modules are imported on request, so names
and texts need no torch. May import coreset and the rooms below it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from corefed.base.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from corefed.selectors.frame import Selector


class Entry(NamedTuple):
    """Where a selector is, what it does, and what it promises; a test checks every promise."""

    module: str  # as import_module takes it
    function: str
    description: str
    passes: float | None = 1.0  # forward passes of each point; None: as the settings say
    random: bool = False  # another seed selects other points
    fewer: bool = False  # may select fewer than k points
    remembers: bool = False  # uses the memory of its last selection
    learns: bool = False  # its memory is written by the steps of training (`seen.py`)


HERE = "corefed.selectors"
SELECTORS: dict[str, Entry] = {
    "calibrated": Entry(
        f"{HERE}.calibrated",
        "select",
        "drawn by importance, each in its turn, weights calibrated",
        passes=None,
        random=True,
        remembers=True,
    ),
    "seen": Entry(
        f"{HERE}.seen",
        "select",
        "drawn by gradient norms that training has seen, without a pass of its own",
        passes=0.0,
        random=True,
        learns=True,
    ),
    "matching": Entry(
        f"{HERE}.matching",
        "select",
        "potentials matched by a solver, as in the paper (Eq. 4)",
        passes=None,
        random=True,
        fewer=True,
    ),
    "craig": Entry(
        f"{HERE}.craig",
        "select",
        "medoids of the last-layer gradients in each class (CRAIG, 2020)",
    ),
    "gradmatch": Entry(
        f"{HERE}.gradmatch",
        "select",
        "points whose weighted gradients add up to all (GradMatch, 2021)",
        fewer=True,
    ),
    "herding": Entry(
        f"{HERE}.herding",
        "select",
        "points whose features follow the mean of their class (iCaRL, 2017)",
    ),
    "k-centre": Entry(
        f"{HERE}.k_centre",
        "select",
        "centres that cover all features within the smallest radius (2018)",
    ),
    "loss": Entry(
        f"{HERE}.sampling",
        "loss",
        "a sample in proportion to the loss, weighted to be unbiased",
        random=True,
    ),
    "gradient-norm": Entry(
        f"{HERE}.sampling",
        "gradient_norm",
        "a sample in proportion to the last layer's gradient norms",
        random=True,
    ),
    "leverage": Entry(
        f"{HERE}.sampling",
        "leverage",
        "a sample in proportion to leverages of last-layer gradients",
        random=True,
    ),
    "random": Entry(
        f"{HERE}.sampling",
        "random",
        "a simple random sample with weights n/k",
        passes=0.0,
        random=True,
    ),
}


def register(name: str, entry: Entry) -> None:
    """Make a selector known that is not part of the package, for as long as this process runs.

    In the selector's own file, `register("mine", Entry(__name__, "select", "what it is"))` does it.
    """
    if SELECTORS.get(name, entry).module != entry.module:
        raise UserError(f"There is a selector {name!r} already; give yours another name.")
    SELECTORS[name] = entry


def look_up(name: str) -> Entry:
    """The entry of a selector; an unknown name is refused with the nearest one."""
    if name not in SELECTORS:
        hint = did_you_mean(name, SELECTORS)
        raise UserError(f"There is no selector {name!r}.{hint} There are {', '.join(SELECTORS)}.")
    return SELECTORS[name]


def unguarded(name: str) -> Selector:
    """The selector of that name as it is written, without the rules of `guard.py`."""
    entry = look_up(name)
    selector: Selector = getattr(import_module(entry.module), entry.function)
    return selector


def get(name: str) -> Selector:
    """The selector of that name, under the rules of `guard.py`."""
    guard = import_module("corefed.selectors.guard")
    guarded: Selector = guard.guarded(unguarded(name))
    return guarded
