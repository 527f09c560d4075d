"""`Federation`: train on arrays, predict, save and load, with an API like scikit-learn's.

The data are one pair (X, y) per client. Settings and training are those of `corefed run`, and
`save` writes the folder that every command reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.base.shown import say_note
from corefed.data import memory
from corefed.data.class_names import are_numbers
from corefed.data.clients import FederatedData
from corefed.data.memory import Array, Clients
from corefed.models.own import Factory, named
from corefed.settings.config import resolve, to_dict
from corefed.settings.run import MEMORY, Experiment, Run
from corefed.training import (
    checkpoint,
    early,
    fitted,
    measured,
    reach_fitting,
    record,
    rounds,
    saving,
)
from corefed.training.fitted import Fitted
from corefed.training.newcomers import Newcomer
from corefed.training.progress import progress
from corefed.use import arguments, newcomer, tuned
from corefed.use.citizen import ScikitLearn, by_client, not_fitted, value_errors
from corefed.use.predictor import Personal, Predictor
from corefed.use.tuned import Tune


class Federation(ScikitLearn):
    """Personalised Bayesian federated learning on arrays in memory.

    Settings are given by name; `corefed methods NAME --all` lists them: those of every run (rounds,
    local_steps, hidden, ...) and those of the method (fraction, zeta, ...). None means the default.

    In a notebook it shows the settings that are not the defaults and, once fitted, its clients,
    accuracy, NLL, calibration error and weakest site.

    Args:
        method: The method to train; `corefed methods` lists them.
        model: The network: None for a fully connected one (convolutional for points of three axes),
            "mlp", "cnn", "package.module:factory", or the factory itself: a function that makes an
            nn.Module, or its class. It gets those of `inputs` (features per point), `shape` (of a
            point) and `outputs` (classes, or targets) that it takes.
        seed: Of the initial weights, the noise and the held-out points. Several seeds train several
            repetitions; the first one predicts.
        test_fraction: Share of each client's points, per class, that is held out where `fit` gets
            no test points; 0 trains on all points, once settings are chosen, and tests nothing.
        tune: Search settings before training, as `corefed tune` does: True, or a dictionary with
            any of `candidates` (16), `space` (setting -> "0.001..0.1", (low, high), or a list of
            values) and `validation` (0.2, the share of training points to choose by). Then all
            training points are trained on with what was found. Test points take no part.
        groups: Name of the column of a DataFrame that says whose rows they are, for `fit(X, y)`.
        settings: Any other setting.

    Attributes:
        classes_: The classes in the order of predicted probabilities; empty for a regression.
        history_: One dictionary per round, as a line of rounds.jsonl.
        summary_: The content of summary.json: settings, metrics over seeds, cost, environment; once
            saved, also measures of classes.
        n_features_in_: Number of features per point; of a DataFrame, of columns.
        feature_names_in_: Of a DataFrame, the names of its columns.
        tuning_: Where settings were searched, the content of tune.json: "candidates" has a row per
            candidate, best first, "chosen" the settings that were trained with.
    """

    classes_: Array
    history_: list[dict[str, Any]]
    summary_: dict[str, Any]
    n_features_in_: int
    feature_names_in_: Array
    tuning_: dict[str, Any]

    def __init__(
        self,
        *,
        method: str = "coreset-pfedbayes",
        model: str | Factory | None = None,
        seed: int | Sequence[int] = 0,
        test_fraction: float = 0.2,
        tune: Tune = False,
        groups: str | None = None,
        **settings: Any,
    ) -> None:
        self.method, self.model, self.seed = method, model, seed
        self.test_fraction, self.tune, self.groups = test_fraction, tune, groups
        self._settings = settings
        self._fitted: Fitted | None = None
        self._trained: rounds.Result | None = None  # None after `load`, whose run is in a folder
        self._names: list[Any] = []
        self._joined: dict[str, Newcomer | None] = {}  # None: in the folder that was loaded
        tuned.wanted(self._experiment(), tune)  # refuses misspelt settings at once

    @value_errors
    def fit(
        self,
        clients: Clients | Any,
        y: Any = None,
        test: Clients | None = None,
        *,
        groups: Any = None,
        progress: bool = False,
    ) -> Federation:
        """Train all clients' models.

        Args:
            clients: Name -> (X, y), or (X_train, y_train, X_test, y_test). X has one row per point:
                a numpy array, tensor or list, or a DataFrame, whose categories and gaps are handled
                as those of a table. Whole numbers and text in y are classes, and a client need not
                have all of them; floating-point numbers are regression targets. Or X of all
                clients, with `y`.
            y: The targets of X.
            test: Name -> (X, y) of test points, where `clients` has none.
            groups: With X and y: the client of each point, or the name of the column of X that
                says it. Without groups there is one client, "all".
            progress: Show rounds, numbers and notes on stderr.

        Returns:
            The federation itself.
        """
        groups = self.groups if groups is None else groups
        if isinstance(clients, Mapping):
            test, y = (y, None) if isinstance(y, Mapping) else (test, y)  # fit(clients, test)
        given, column, target = by_client(clients, y, groups)
        task = str(self._settings.get("task") or "auto")
        pool = memory.gather(given, test, task, column, target)
        experiment = self._experiment(
            arguments.settings_from_data(pool, self.model, self._settings)
        )
        factory = named(self.model) if isinstance(self.model, str) else self.model

        def federate(run: Run) -> FederatedData:
            return memory.federate(pool, run, self.test_fraction)

        experiment, tuning = tuned.search_first(
            experiment, self.tune, federate, factory, progress=progress
        )
        data = federate(experiment.run)
        lines: list[dict[str, Any]] = []
        with _shown(data.notes, experiment.run.rounds) if progress else nullcontext() as show:

            def on_round(line: dict[str, Any]) -> None:
                lines.append(line)
                if show is not None:
                    show(line)

            trained = rounds.train(experiment, data=data, factory=factory, on_round=on_round)
        setup = trained.setup
        known = reach_fitting.measure(setup.data)
        self._fitted = newcomer.in_memory(setup, trained.trees, known, factory)
        self._trained, self._names, self._joined = trained, pool.names, {}
        self._found(pool.classes, trained.summary, lines, tuning)
        return self

    @property
    def personal(self) -> Personal:
        """Client -> its personal model: `federation.personal["north"].predict_proba(X)`."""
        ready = self._ready("personal")
        joined = {
            name: fitted.load(ready.folder, client=name) if one is None else newcomer.ready(one)
            for name, one in self._joined.items()
        }
        return Personal(self._names, ready, self.classes_, joined)

    @property
    def global_(self) -> Predictor:
        """The global model, where the method has one."""
        ready = self._ready("global")
        return Predictor(ready, ready.names[0], "global", self.classes_)

    def evaluate(self) -> dict[str, Any]:
        """Metrics on the clients' test points, after the last round.

        Returns:
            "metrics": personal_accuracy, personal_nll, global_accuracy, ... (rmse for regressions)
                over all clients' points, as means over seeds; `summary_` has them per seed. Those
                of a calibrated run are at its temperatures, as predictions are.
            "clients": name -> accuracy (or RMSE) of its personal model; None without test points.
        """
        self._ready()
        last = early.final(self.history_)
        each = zip(*last["clients"], strict=True)
        means = [_mean([value for value in values if value is not None]) for values in each]
        return {
            "metrics": {name: value["mean"] for name, value in self.summary_["metrics"].items()},
            "clients": dict(zip(self._names, means, strict=True)),
        }

    def save(self, folder: str | Path) -> Path:
        """Write the folder of a run, for `load` and all commands; it must not have one already."""
        if not str(folder).strip():
            raise UserError("save is given an empty name; name a folder.")
        ready, path = self._ready(), Path(folder)
        record.Folder(path).refuse_existing("save into another folder")
        if self._trained is None:
            try:
                shutil.copytree(ready.folder, path, dirs_exist_ok=True)
            except OSError as error:  # shutil.Error too
                raise UserError(f"Cannot copy {ready.folder} to {path}: {error}.") from error
            return self._keep_joined(path)
        checkpoint.require_library()
        setup, servers = self._trained.setup, self._trained.servers
        target = record.Folder(path)
        target.create(setup.experiment)
        target.keep(lambda here: saving.keep_data(here, setup.data, ready.reach))
        for line in self.history_:
            target.append(line)
        values = to_dict(setup.experiment)
        rows = range(len(setup.clients.who))
        target.checkpoint(values, len(self.history_), servers, rows, setup.clients.take)
        trees = self._trained.trees
        target.keep(lambda here: saving.keep_models(here, trees))
        about = {
            "clients": self._names,
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.str,
            "test_fraction": self.test_fraction,
        }
        target.keep(lambda here: files.replace(here / arguments.FILE, digests.to_json(about)))
        if hasattr(self, "tuning_"):
            target.keep(lambda here: tuned.keep(here, self.tuning_))
        self.summary_ = self.summary_ | measured.section(path, self.summary_)
        target.finish(self.summary_)
        return self._keep_joined(path)

    @classmethod
    def load(cls, folder: str | Path, *, model: str | Factory | None = None) -> Federation:
        """A fitted federation from the folder of a run, also one of `corefed run`.

        Args:
            folder: The folder.
            model: The factory of the network, or its name "package.module:factory", where the run
                has one of your own. Code that only the folder names is not imported.
        """
        path = Path(folder)
        ready = fitted.load(path, named(model) if isinstance(model, str) else model)
        about = arguments.read_about(path)
        labels = ready.preparations[0].labels
        if about:
            classes: Array = np.array(about["classes"], dtype=about["dtype"])
        else:
            classes = np.array([int(x) for x in labels] if are_numbers(labels) else labels)
        found = cls(
            **arguments.parameters(ready.experiment, model, about.get("test_fraction", 0.2)),
            groups=ready.preparations[0].client or None,
        )
        found._fitted, found._names = ready, about.get("clients", ready.names)
        found._joined = dict.fromkeys(fitted.newcomers(path))
        summary, lines = record.read(path)
        found._found(classes if labels else np.empty(0), summary, lines, tuned.read(path))
        return found

    def _experiment(self, given: Mapping[str, Any] | None = None) -> Experiment:
        """The settings, checked."""
        for name in self._settings.keys() & {*arguments.FROM_FIT, "seeds"}:
            hint = "write seed" if name == "seeds" else "it follows from what fit is given"
            raise UserError(f"Federation takes no {name}; {hint}.")
        if isinstance(self.model, nn.Module) or not (
            self.model is None or isinstance(self.model, str) or callable(self.model)
        ):
            raise UserError(
                f"model is of type {type(self.model).__name__}; give a function that makes an "
                "nn.Module, its class, or its name."
            )
        if not 0 <= self.test_fraction < 1:
            raise UserError(
                f"test_fraction is {self.test_fraction}; it must be at least 0 and below 1."
            )
        flags: dict[str, Any] = {"data": MEMORY, "method": self.method, "seeds": self.seed}
        flags |= {"model": arguments.model_name(self.model), **self._settings}
        flags |= given or {"clients": self._settings.get("cohort") or 1}  # not known yet
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in flags.items()}
        return resolve(flags={k: v for k, v in plain.items() if v is not None}, where="Federation")

    def _found(
        self,
        classes: Array,
        summary: dict[str, Any],
        lines: list[dict[str, Any]],
        tuning: dict[str, Any] | None,
    ) -> None:
        self.classes_, self.summary_, self.history_ = classes, summary, lines
        if tuning is not None:
            self.tuning_ = tuning
        elif hasattr(self, "tuning_"):  # of an earlier fit
            del self.tuning_
        first = self._ready().preparations[0]
        self.n_features_in_ = len(first.columns) or int(np.prod(first.shape))
        if first.columns:
            self.feature_names_in_ = np.array([each.name for each in first.columns], dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _ready(self, kind: str = "") -> Fitted:
        if self._fitted is None:
            raise not_fitted("This federation is not fitted yet: call fit(clients) first.")
        if kind and kind not in self._fitted.kinds:
            has = " and ".join(self._fitted.kinds)
            raise UserError(
                f"{self._fitted.experiment.run.method} has no {kind} model, only {has}."
            )
        return self._fitted


@contextmanager
def _shown(notes: Sequence[str], total: int) -> Iterator[Any]:
    """Show what `corefed run` shows."""
    for note in notes:
        say_note(note)
    with progress(total) as show:
        yield show


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
