"""The points of a setting, kept for the next cell of the same process: reading takes seconds."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from corefed.data.clients import FederatedData
from corefed.settings.run import Experiment, Run
from corefed.training import setup

KEPT = 2
"""Per process: a setting's points for its searches, and those of all seeds, gigabytes each."""


def points_of(experiment: Experiment) -> FederatedData:
    """What `prepare` would load for the experiment."""
    run = setup.concrete(experiment).run
    # What differs between the cells of a setting, and does not matter here.
    return _load(dataclasses.replace(run, method=Run.method, rounds=1, planned_rounds=1))


@lru_cache(KEPT)
def _load(run: Run) -> FederatedData:
    return setup.load(run)
