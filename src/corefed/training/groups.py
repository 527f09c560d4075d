"""Candidates of a search, in groups that are trained side by side.

Candidates of a group differ only in numbers that can be stacked (`together.py`). Groups take turns
on the device: one trains, the others are parked in the machine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from corefed.base.types import ClientData
from corefed.methods import registry
from corefed.settings.fields import list_settings, to_flat
from corefed.settings.run import Experiment
from corefed.training import state_file
from corefed.training.halving import Score, surprise
from corefed.training.loop import size_of
from corefed.training.setup import Setup
from corefed.training.together import Together


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
        """Its runs, on the device."""
        found = self._runs
        if self._parked:
            found.wake()
            self._parked = False
        return found

    @property
    def _runs(self) -> Together:
        """Its runs, parked or not."""
        if self._together is None:
            settings = [each.settings for each in self.members.values()]
            self._together = Together(self.setup, settings)
        return self._together

    @property
    def examples(self) -> list[int]:
        """Gradient passes of each candidate so far."""
        counts: list[int] = self._runs.examples.tolist()
        return counts

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

    def evaluate(self, points: ClientData) -> dict[int, tuple[Score, dict[str, float]]]:
        """Every candidate on these points after the last round: score, and accuracy or RMSE."""
        found = self.together.evaluation(self.round - 1, points).points
        real = (points.weight > 0).cpu()
        scores = {}
        for place, number in enumerate(self.numbers):
            mine = {k: v.chunk(len(self.members))[place][real] for k, v in found.items()}
            if "confidence" in mine:
                score = Score(mine["nll"], surprise(mine["confidence"]))
                scores[number] = score, {"accuracy": mine["correct"].mean().item()}
            else:
                rmse = math.sqrt(mine["squared_error"].mean().item())
                scores[number] = Score(mine["nll"]), {"rmse": rmse}
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
        now = self._runs
        return state_file.encode(values, self.round, now.servers, now.clients.private)

    def decode(
        self, content: bytes, values: Mapping[str, object], where: str, examples: Sequence[int]
    ) -> None:
        """Go on from a checkpoint, and from `examples` as they were then."""
        now = self.together
        state = state_file.decode(content, values, where)
        now.servers, now.clients.private = state_file.unpack(
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
    state = setup.clients.store.layout.content * len(setup.clients.who) + sum(
        map(size_of, setup.servers)
    )
    bound = setup.experiment.run.memory_mb * 2**20
    return max(1, bound // (data + 2 * state))  # dropping candidates copies the state


def _shared(experiment: Experiment, stackable: bool) -> tuple[object, ...]:
    """What all candidates of a group have in common."""
    own = {each.name for each in list_settings(type(experiment.settings)) if each.per_run}
    values = to_flat(experiment.settings)
    kept = [value for name, value in values.items() if not (stackable and name in own)]
    return (experiment.run, *kept)
