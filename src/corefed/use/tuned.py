"""`Federation(tune=...)`: settings are searched before the federation is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from corefed.base import digests, files
from corefed.base.errors import UserError, did_you_mean
from corefed.data.clients import FederatedData
from corefed.models.own import Factory
from corefed.settings import space
from corefed.settings.config import check
from corefed.settings.run import Experiment, Run
from corefed.training.candidates import VALIDATION, Plan, plan
from corefed.training.search import search
from corefed.training.search_folder import RESULT
from corefed.training.search_progress import search_progress

Tune = bool | Mapping[str, Any]
"""Whether to search settings; a mapping may have `candidates`, `space` and `validation`."""

KEYS = ("candidates", "space", "validation")


def wanted(experiment: Experiment, tune: Tune) -> Plan | None:
    """The search before `fit`; None where there is none. A mistake in `tune` is a UserError."""
    if isinstance(tune, Mapping):
        for key in tune:
            if key not in KEYS:
                hint = did_you_mean(str(key), KEYS, otherwise=f"it may have {', '.join(KEYS)}")
                raise UserError(f"tune has {key!r}{hint}")
    elif not isinstance(tune, bool):
        raise UserError(f"tune is {tune!r}; it must be True, False or a dictionary.")
    if tune is False:
        return None
    options = dict(tune) if isinstance(tune, Mapping) else {}
    share = options.pop("validation", experiment.run.validation or VALIDATION)
    run = dataclasses.replace(experiment.run, validation=share)
    searched = dataclasses.replace(experiment, run=run)
    check(searched)
    return plan(searched, **options)


def search_first(
    experiment: Experiment,
    tune: Tune,
    federate: Callable[[Run], FederatedData],
    factory: Factory | None,
    *,
    progress: bool,
) -> tuple[Experiment, dict[str, Any] | None]:
    """The experiment with the settings that a search finds, and the content of tune.json.

    `federate` gives the clients' points. Without a search, the experiment as it is.
    """
    planned = wanted(experiment, tune)
    if planned is None:
        return experiment, None
    data = federate(planned.experiment.run)
    with search_progress(silent=not progress) as show:
        report = search(planned, data=data, factory=factory, on_round=show).report
    return space.changed(experiment, report["chosen"]["settings"]), report


def keep(folder: Path, report: Mapping[str, Any]) -> None:
    files.replace(folder / RESULT, digests.to_json(report))


def read(folder: Path) -> dict[str, Any] | None:
    """tune.json of a folder; None where it has none."""
    try:
        return digests.read_json(folder / RESULT)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RESULT} cannot be read: {error}.") from error
