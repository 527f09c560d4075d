"""The points of a setting, kept for the next cell of the same process: reading takes seconds."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from corefed.data.clients import FederatedData
from corefed.settings.run import Experiment, Run
from corefed.training import setup

KEPT = 2
"""Settings per process: their searches' points, and those of all seeds. CIFAR-10 takes gigabytes."""


def points_of(experiment: Experiment) -> FederatedData:
    """What `prepare` would load for the experiment."""
    run = setup.concrete(experiment).run
    alike = {"method": Run.method, "rounds": 1, "planned_rounds": 1, "cohort": 0}
    return _load(dataclasses.replace(run, **alike))


@lru_cache(KEPT)
def _load(run: Run) -> FederatedData:
    return setup.load(run)
