"""MLflow: one MLflow run per run, by its client (mlflow-skinny is enough).

Where: MLFLOW_TRACKING_URI, else mlflow.db in the working directory if it exists (MLflow would take
mlruns/ beside it for a broken store), else the folder mlruns/. Several runs can write to a folder
at once. Newer versions of MLflow allow folders only with MLFLOW_ALLOW_FILE_STORE. The experiment
is MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME, or "corefed".

RUN/mlflow.json stores the address and the run's id. A resumed run continues the same MLflow run
with the round after the last one logged. MLflow's parameters cannot change, so a setting that a
resumed run changes (rounds) becomes a tag.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from corefed import __version__
from corefed.base import digests, files
from corefed.base.errors import UserError, install
from corefed.show.tracking import MARKS, LoggedRound, Outcome, public, reason
from corefed.training import record

EXPERIMENT = "corefed"
PAUSE = 2.0
"""Seconds between messages: short rounds are sent many at a time."""
IMPATIENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
"""An unreachable server must not stop training for minutes, as MLflow's defaults would."""
LAST = "cost/seconds_per_round"
"""The last metric that is sent for a round: if it is there, so are the others."""
MOST_PARAMETERS, MOST_METRICS = 100, 1000  # in one message, of MLflow's own
STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
ARTEFACTS = (record.EXPERIMENT, record.ROUNDS, record.SUMMARY, "report.html", "*.png", "*.svg")


def reach(folder: Path) -> MLflowRun:
    """A store that answers, or a UserError. A missing folder is not created yet."""
    if find_spec("mlflow") is None:
        raise UserError(f"--track mlflow needs MLflow: {install('mlflow')}.")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before it is imported
    for name, value in IMPATIENT.items():
        os.environ.setdefault(name, value)
    before = _remembered(folder)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or before.get("tracking_uri") or _default()
    try:
        local = _local(uri)
        if local is not None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = local.resolve().as_uri()
        same = before.get("tracking_uri") == public(uri)
        run = MLflowRun(uri, before.get("run_id") if same else None)
        if local is None or local.is_dir():
            run.look()
        elif local.exists() or not os.access(_existing(local), os.W_OK):
            raise OSError(f"no folder can be made at {local}")
    except Exception as error:
        raise UserError(
            f"--track mlflow cannot use {public(uri)}: {reason(error)}. Start the server or "
            "correct MLFLOW_TRACKING_URI; nothing was written."
        ) from error
    return run


class MLflowRun:
    """One run of MLflow."""

    def __init__(self, uri: str, run_id: str | None) -> None:
        self._uri = uri
        self._id = run_id  # to go on with, if it is still there
        self._began = _milliseconds()
        self._waiting: list[Any] = []
        self._sent = 0.0

    @cached_property
    def _client(self) -> Any:
        """Made when it is needed, since a file store creates its folder at once."""
        return import_module("mlflow").MlflowClient(tracking_uri=self._uri)

    def look(self) -> Any:
        """The experiment to log into, or None if it must be created."""
        chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if chosen:
            found = self._client.get_experiment(chosen)
        else:
            found = self._client.get_experiment_by_name(_experiment_name())
        if found is not None and found.lifecycle_stage == "deleted":
            raise ValueError(
                f"its experiment {found.name!r} was deleted; restore it, or name another by "
                "MLFLOW_EXPERIMENT_NAME"
            )
        return found

    def start(self, folder: Path, values: Mapping[str, Any], points: Sequence[LoggedRound]) -> None:
        self._folder = folder
        settings = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        known = self._go_on() or self._create(values)
        remembered = {"tracking_uri": public(self._uri), "run_id": self._id}
        files.replace(folder / MARKS["mlflow"], digests.to_json(remembered))
        self._settings(known.data.params, settings)
        self._skip = self._logged()
        for point in points:
            self._collect(point)
        self._send()

    def round(self, point: LoggedRound) -> None:
        self._collect(point)
        if time.monotonic() - self._sent >= PAUSE:
            self._send()

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None:
        self._send()
        for pattern in ARTEFACTS:
            for path in sorted(self._folder.glob(pattern)):
                self._client.log_artifact(self._id, str(path))
        with redirect_stdout(sys.stderr):  # it prints an address, and stdout is for results
            self._client.set_terminated(self._id, STATUS[outcome])

    def _go_on(self) -> Any:
        """The MLflow run of this run; None if there is none, or if it was deleted."""
        if self._id is None:
            return None
        try:
            run = self._client.get_run(self._id)
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage == "deleted":
            return None
        self._client.update_run(self._id, status="RUNNING")
        return run

    def _create(self, values: Mapping[str, Any]) -> Any:
        experiment = self.look()
        if experiment is None:
            number = self._client.create_experiment(_experiment_name())
        else:
            number = experiment.experiment_id
        tags = {
            "method": values["method"],
            "data": values["data"],
            "corefed": __version__,
            "folder": str(self._folder.resolve()),
            "mlflow.source.name": "corefed run",
            "mlflow.source.type": "LOCAL",
        }
        with suppress(OSError, KeyError):  # a user without a name, as in some containers
            tags["mlflow.user"] = getpass.getuser()
        name = self._folder.resolve().name
        run = self._client.create_run(number, self._began, tags, run_name=name)
        self._id = run.info.run_id
        return run

    def _settings(self, have: Mapping[str, str], settings: Mapping[str, str]) -> None:
        entities = import_module("mlflow.entities")
        new = [entities.Param(k, v) for k, v in settings.items() if k not in have]
        for i in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[i : i + MOST_PARAMETERS])
        for key in have.keys() & settings.keys():
            if have[key] != settings[key]:
                self._client.set_tag(self._id, f"resumed.{key}", settings[key])

    def _logged(self) -> int:
        """The last round that MLflow has."""
        history = self._client.get_metric_history(self._id, LAST)
        return max((metric.step for metric in history), default=0)

    def _collect(self, point: LoggedRound) -> None:
        """What MLflow does not have yet; a round trained again gives the same numbers."""
        if point.round <= self._skip:
            return
        metric, now = import_module("mlflow.entities").Metric, _milliseconds()
        for name, each in point.by_seed.items():
            for seed, value in each.items():
                self._waiting.append(metric(f"{name}.seed_{seed}", value, now, point.round))
        for name, mean in point.means.items():  # LAST is the last of them
            self._waiting.append(metric(name, mean, now, point.round))

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:MOST_METRICS])
            del self._waiting[:MOST_METRICS]
        self._sent = time.monotonic()


def _default() -> str:
    """Where `mlflow ui` looks in this working directory."""
    if Path("mlflow.db").exists() and find_spec("sqlalchemy") is not None:
        return f"sqlite:///{Path('mlflow.db').resolve()}"
    return "mlruns"


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _experiment_name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def _remembered(folder: Path) -> dict[str, str]:
    """mlflow.json of a run that was tracked before; empty if there is none."""
    file = folder / MARKS["mlflow"]
    try:
        content = digests.read_json(file)
        return {key: str(content[key]) for key in ("tracking_uri", "run_id")}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{file} is damaged ({error}); remove it to log the run to MLflow as a new one."
        ) from error


def _local(uri: str) -> Path | None:
    """The folder of a file store; None for a server or a database."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(uri) if not parts.scheme and uri not in ("databricks", "uc") else None


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())
