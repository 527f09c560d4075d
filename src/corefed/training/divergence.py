"""A run whose loss is no number ends with a sentence, and keeps what was recorded before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import Update
from corefed.settings import fields
from corefed.settings.run import Experiment
from corefed.training.setup import Setup


def refuse(setup: Setup, t: int, loss: Tensor, updates: Sequence[Update] = ()) -> None:
    """The losses [G] of round t + 1, and what clients sent in it, where that is here."""
    for g, (seed, value) in enumerate(zip(setup.experiment.run.seeds, loss.tolist(), strict=True)):
        sent = updates[g] if updates else None
        if isfinite(value) and (sent is None or _finite(sent.message.values())):
            continue
        what = f"the loss of seed {seed} is {value}"
        if isfinite(value):
            what = f"a model of seed {seed} is no numbers"
        client = "" if sent is None else _first_lost(setup, g, sent)
        raise UserError(
            f"Training diverged: in round {t + 1} {what}"
            f"{f', first at {client}' if client else ''}. Lower {rates(setup.experiment)}; what "
            "was recorded up to the round before is kept."
        )


def _finite(values: Iterable[Tensor]) -> bool:
    """Whether all are numbers, by their sums: a pass without another tensor."""
    return all(isfinite(float(value.sum())) for value in values)


def _first_lost(setup: Setup, g: int, update: Update) -> str:
    """The first client whose model is no numbers after its steps; empty: none is found."""
    for place, client in enumerate(update.clients):
        row = g * setup.clients.per_run + client
        own = [value[place] for value in update.message.values()]
        if not _finite(own or setup.clients.take([row]).values()):  # or it shares nothing
            return setup.data.names[row]
    return ""


def rates(experiment: Experiment) -> str:
    """What to lower: the learning rates of the method, and their values."""
    settings = experiment.settings
    found = [
        f"{each.name} ({getattr(settings, each.name):.3g} now)"
        for each in fields.list_settings(type(settings))
        if each.rate and not each.group
    ]
    return " or ".join(found) or "the learning rates"
