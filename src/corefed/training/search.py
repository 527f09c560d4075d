"""A search of settings by validation NLL: successive halving over candidates that train together.

All candidates have the same seeds, splits, minibatches and noise. Test points are not used: they
are taken out before the first round. `halving.py` says who goes on, `groups.py` who trains with
whom, `search_folder.py` what is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.models.own import Factory
from corefed.settings import space as spaces
from corefed.settings.config import to_dict
from corefed.settings.run import Experiment
from corefed.training import checkpoint, halving, summaries
from corefed.training.candidates import Candidate, Plan, Standing, in_order, standing
from corefed.training.groups import Group, split
from corefed.training.halving import GIVEN, Choice, Difference, Score
from corefed.training.search_folder import SCHEMA, SearchFolder, refuse_another
from corefed.training.setup import Setup, prepare


class Found(NamedTuple):
    """The end of a search, or where it was stopped."""

    report: dict[str, Any]  # the content of tune.json
    experiment: Experiment  # with the settings that were found, and without validation points
    finished: bool


def search(
    wanted: Plan,
    out: Path | None = None,
    *,
    data: FederatedData | None = None,
    factory: Factory | None = None,
    resume: bool = False,
    on_round: Callable[[Standing], None] = lambda standing: None,
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """Find settings, and record the search in the folder `out`, if given.

    `stop` is called after each round. A search that it ends can be resumed in its folder, to a
    bit-identical end. `data` and `factory` replace those that the experiment names.
    """
    folder = None if out is None else SearchFolder(out)
    if folder is not None and not resume:
        folder.refuse_existing()
    if folder is not None:
        checkpoint.require_library()
    began = time.perf_counter()
    setup = _without_test(prepare(wanted.experiment, data, factory))
    _refuse_one_class(setup.data)
    running = Search(setup, wanted, folder, began)
    if folder is not None and resume:
        running.resume(folder)
    elif folder is not None:
        folder.begin(wanted.experiment, running.status())
    finished = running.run(on_round, stop)
    return Found(running.report(), running.found(), finished)


class Search:
    """A search in progress."""

    def __init__(
        self, setup: Setup, wanted: Plan, folder: SearchFolder | None, began: float
    ) -> None:
        assert setup.data.validation is not None
        self.setup, self.folder = setup, folder
        self.points: ClientData = setup.data.validation
        values = [spaces.searched(each, wanted.space) for each in wanted.candidates]
        self.candidates = [Candidate(number, each) for number, each in enumerate(values)]
        # As `setup` has them: with the settings that depend on machine and data filled in.
        self.experiments = [spaces.changed(setup.experiment, each) for each in values]
        self.groups = split(setup, dict(enumerate(self.experiments)))
        self.rungs = halving.rungs(setup.experiment.run.rounds)
        self.values = {
            **to_dict(setup.experiment),
            "space": [axis.to_json() for axis in wanted.space],
            "candidates": values,
            "rungs": self.rungs,
            "points": _digest(setup.data.train, self.points),
        }
        plain = spaces.are_defaults(setup.experiment, wanted.space)
        self.given = "the defaults" if plain else "the given settings"
        self.over = 0  # rungs
        self.choice: Choice | None = None
        self._earlier, self._began = 0.0, began  # seconds
        self._saved: set[str] = set()  # checkpoints in the folder

    # The way to the end

    def run(self, on_round: Callable[[Standing], None], stop: Callable[[], bool]) -> bool:
        """Go on to the end, or until `stop`: True at the end."""
        while self.choice is None:
            for group in list(self.groups):
                trained = group.round < self.rungs[self.over]
                while group.members and group.round < self.rungs[self.over]:
                    self._train(group)
                    on_round(self.standing())
                    if stop():
                        self.save()
                        return False
                if trained and len(self.groups) > 1:
                    self.save()
                self._rest(group)
            self._compare()
            self.save()
            on_round(self.standing(compared=True))
        return True

    def _train(self, group: Group) -> None:
        members = group.numbers
        lost = group.train()
        for number in members:
            mine = self.candidates[number]
            mine.round, mine.passes = group.round, group.spent[number]
            mine.outcome = "diverged" if number in lost else mine.outcome
        self.groups = [each for each in self.groups if each.members]
        if not self.groups:
            self._refuse_all_diverged()

    def _compare(self) -> None:
        """At a rung: who goes on, or at the last one, what is chosen."""
        scores: dict[int, Score] = {}
        for group in self.groups:
            for number, (score, other) in group.evaluate(self.points).items():
                mine = self.candidates[number]
                if math.isfinite(score.nll):
                    scores[number] = score
                    entry = {"round": self.rungs[self.over], "nll": score.nll, **other}
                    mine.history.append(entry)
                else:
                    mine.outcome = "diverged"
            self._rest(group)
        if not scores:
            self._refuse_all_diverged()
        self.over += 1
        if self.over == len(self.rungs):
            self._earlier = self._seconds()
            self.choice = halving.choose(scores)
            for number in scores:
                self.candidates[number].outcome = "finished"
            return
        left = halving.survivors({number: score.nll for number, score in scores.items()})
        for number in scores.keys() - set(left):
            self.candidates[number].outcome = "dropped"
        for group in self.groups:
            group.keep([number for number in group.numbers if number in left])
            self._rest(group)
        self.groups = [group for group in self.groups if group.members]

    def _rest(self, group: Group) -> None:
        """Leave the device to the next group."""
        if len(self.groups) > 1:
            group.park()

    def _refuse_all_diverged(self) -> None:
        if self.folder is not None:
            self.folder.commit(self.report(), {})
        raise UserError(
            f"All {len(self.candidates)} candidates diverged, {self.given} too; use smaller "
            "learning rates, or another space."
        )

    # What is said and written

    def standing(self, *, compared: bool = False) -> Standing:
        return standing(self.candidates, self.over, self.rungs, compared=compared)

    def report(self) -> dict[str, Any]:
        """The content of tune.json."""
        run, choice = self.setup.experiment.run, self.choice
        spent = sum(each.passes for each in self.candidates)
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "finished": choice is not None,
            **{key: self.values[key] for key in ("method", "data", "rounds", "seeds")},
            "validation_points": int((self.points.weight > 0).sum()),
            "given": self.given,
            "space": self.values["space"],
            "rungs": self.rungs,
            "candidates": [each.to_json() for each in in_order(self.candidates)],
            "cost": {"seconds": self._seconds(), "passes": spent},
            "config": self.values,
            "environment": summaries.environment(run.device),
        }
        if choice is not None:
            ends = [each for each in self.candidates if each.outcome == "finished"]
            report["cost"]["runs"] = spent / ends[0].passes  # of the given settings, unless lost
            found = choice.difference
            report["chosen"] = {
                "number": choice.chosen,
                "settings": self.candidates[choice.chosen].settings,
                "compared": choice.compared,
                "difference": None if found is None else found._asdict(),
            }
        return report

    def _seconds(self) -> float:
        """Up to now, or up to the choice."""
        now = 0.0 if self.choice is not None else time.perf_counter() - self._began
        return self._earlier + now

    def found(self) -> Experiment:
        """The chosen settings, or the given ones as long as there is no choice."""
        chosen = self.experiments[GIVEN if self.choice is None else self.choice.chosen]
        return dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, validation=0.0))

    def save(self) -> None:
        """Write where the search stands, or its end."""
        if self.folder is None:
            return
        if self.choice is not None:
            self.folder.end(self.report(), self.found())
            return
        states = {
            _file(group): None if _file(group) in self._saved else group.encode(self.values)
            for group in self.groups
            if group.round
        }
        self.folder.commit(self.status(), states)
        self._saved = set(states)

    def status(self) -> dict[str, Any]:
        """tune.json of a search that goes on: the report, and what to resume from."""
        groups = [
            {
                "candidates": group.numbers,
                "file": _file(group) if group.round else "",
                "examples": group.examples if group.round else [],
            }
            for group in self.groups
        ]
        return {**self.report(), "progress": {"over": self.over, "groups": groups}}

    def resume(self, folder: SearchFolder) -> None:
        """Go on where the search in the folder stands."""
        there = folder.read()
        refuse_another(there["config"], self.values, folder.path)
        names = {field.name for field in dataclasses.fields(Candidate)}
        for entry in there["candidates"]:
            known = {name: value for name, value in entry.items() if name in names}
            self.candidates[entry["number"]] = Candidate(**known)
        self._earlier = there["cost"]["seconds"]
        if there["finished"]:
            chosen = there["chosen"]
            found = chosen["difference"] and Difference(**chosen["difference"])
            self.choice = Choice(chosen["number"], chosen["compared"], found)
            return
        self.over = there["progress"]["over"]
        self.groups = []
        waiting = there["progress"]["groups"]
        for about in waiting:
            group = Group(self.setup, {n: self.experiments[n] for n in about["candidates"]})
            if name := about["file"]:
                where = str(folder.path / name)
                group.decode(folder.state(name), self.values, where, about["examples"])
                self._saved.add(name)
            self.groups.append(group)
            if len(waiting) > 1:
                group.park()


def _file(group: Group) -> str:
    """Another name for every content: candidates only leave, and rounds only grow."""
    return f"{group.numbers[0]}-{group.round}-{len(group.members)}.safetensors"


def _without_test(setup: Setup) -> Setup:
    """Nothing in a search can look at test points: validation points stand in their place."""
    if setup.data.validation is None:
        raise UserError("The data have no validation points; a search needs some to choose by.")
    return setup._replace(data=setup.data._replace(test=setup.data.validation))


def _refuse_one_class(data: FederatedData) -> None:
    assert data.validation is not None
    present = data.validation.y[data.validation.weight > 0].unique()
    if data.classes and len(present) == 1:
        label = data.labels[int(present)] if data.labels else str(int(present))
        raise UserError(
            f"All validation points are of class {label!r}: they cannot tell settings apart. Use a "
            "larger share for validation, or another split of the data."
        )


def _digest(*parts: ClientData) -> str:
    """A hash of the points, so that a search is not resumed on others."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        for field in part:
            found.update(field.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
