"""Candidates of a search, in groups that are trained side by side.

Candidates of a group differ only in numbers that can be stacked (`together.py`). Groups take turns
on the device: one trains, the others are parked in the machine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.types import ClientData
from corefed.methods import registry
from corefed.settings.fields import list_settings, to_flat
from corefed.settings.run import Experiment
from corefed.training import checkpoint, halving
from corefed.training.loop import size_of
from corefed.training.setup import Setup
from corefed.training.together import Together


class Score(NamedTuple):
    """A candidate on the validation points, by its main model."""

    points: Tensor  # [M] NLL of the points of all seeds, then of an imagined error
    metrics: dict[str, float]  # NLL, and accuracy or RMSE, over the points of all seeds

    @property
    def value(self) -> float:
        """What candidates are compared by; not finite where one diverged."""
        return self.points.mean().item()


class Group:
    """Candidates that are trained together, from their first round on."""

    def __init__(self, setup: Setup, members: Mapping[int, Experiment]) -> None:
        """`setup` gives data and network; `members` are the candidates by number."""
        first = next(iter(members.values()))
        method = registry.build(first.run.method, first.settings, setup.model)
        self.setup = setup._replace(experiment=first, method=method)
        self.members = dict(members)
        self.round = 0
        self.spent = dict.fromkeys(members, 0.0)  # passes so far, also of candidates that have left
        self._together: Together | None = None  # made when it is first needed
        self._parked = False

    @property
    def numbers(self) -> list[int]:
        return list(self.members)

    @property
    def together(self) -> Together:
        if self._together is None:
            settings = [each.settings for each in self.members.values()]
            self._together = Together(self.setup, settings)
        if self._parked:
            self._together.wake()
            self._parked = False
        return self._together

    def park(self) -> None:
        if self._together is not None and not self._parked:
            self._together.park()
            self._parked = True

    def train(self) -> list[int]:
        """One round; returns the candidates that diverged in it, which have left the group."""
        loss = self.together.train(self.round)
        self.round += 1
        self.spent |= zip(self.numbers, self.together.passes(), strict=True)
        fine = loss.isfinite().all(-1).tolist()
        lost = [n for n, healthy in zip(self.numbers, fine, strict=True) if not healthy]
        if lost:
            self.keep([n for n in self.numbers if n not in lost])
        return lost

    def evaluate(self, points: ClientData) -> dict[int, Score]:
        """Every candidate on these points, after the last round."""
        found = self.together.evaluation(self.round - 1, points).points
        real = (points.weight > 0).cpu()
        scores = {}
        for place, number in enumerate(self.numbers):
            mine = {k: v.chunk(len(self.members))[place][real] for k, v in found.items()}
            metrics, each = {"nll": mine["nll"].mean().item()}, mine["nll"]
            if "confidence" in mine:
                metrics["accuracy"] = mine["correct"].mean().item()
                each = halving.with_imagined_error(each, mine["confidence"])
            else:
                metrics["rmse"] = math.sqrt(mine["squared_error"].mean().item())
            scores[number] = Score(each, metrics)
        return scores

    def keep(self, numbers: Sequence[int]) -> None:
        """Go on with some of the candidates."""
        if list(numbers) == self.numbers:
            return
        if numbers:
            self.together.keep([self.numbers.index(n) for n in numbers])
        else:
            self._together = None
        self.members = {n: self.members[n] for n in numbers}

    def encode(self, values: Mapping[str, object]) -> bytes:
        """The content of a checkpoint of the search whose settings are `values`."""
        now = self.together
        return checkpoint.encode(values, self.round, now.servers, now.clients.private)

    def decode(
        self, content: bytes, values: Mapping[str, object], where: str, examples: Sequence[int]
    ) -> None:
        """Go on from a checkpoint; `examples` are the gradient passes of each candidate so far."""
        now = self.together
        state = checkpoint.decode(content, values, where)
        now.servers, now.clients.private = checkpoint.unpack(
            state, now.servers, now.clients.private
        )
        now.examples = torch.tensor(list(examples))
        self.round = state.round
        self.spent |= zip(self.numbers, now.passes(), strict=True)


def split(setup: Setup, experiments: Mapping[int, Experiment]) -> list[Group]:
    """As few groups as settings that cannot be stacked, and memory, allow."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, each in experiments.items():
        alike.setdefault(_shared(each, setup.method.traits.stackable), []).append(number)
    most = capacity(setup)
    return [
        Group(setup, {number: experiments[number] for number in numbers[first : first + most]})
        for numbers in alike.values()
        for first in range(0, len(numbers), most)
    ]


def capacity(setup: Setup) -> int:
    """Candidates whose state and copies of the data fit into the memory."""
    data = size_of(setup.data.train._asdict())
    if setup.data.validation is not None:
        data += size_of(setup.data.validation._asdict())
    state = size_of(setup.clients.private) + sum(map(size_of, setup.servers))
    bound = setup.experiment.run.memory_mb * 2**20
    return max(1, bound // (data + 2 * state))  # dropping candidates copies the state


def _shared(experiment: Experiment, stackable: bool) -> tuple[object, ...]:
    """What all candidates of a group have in common."""
    own = {each.name for each in list_settings(type(experiment.settings)) if each.per_run}
    values = to_flat(experiment.settings)
    kept = [value for name, value in values.items() if not (stackable and name in own)]
    return (experiment.run, *kept)
