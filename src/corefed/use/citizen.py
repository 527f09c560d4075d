"""What scikit-learn expects of an estimator, for `Federation`; X and y of all clients in one.

`groups` says whose points they are. A point of a client goes to its personal model, and one of
another client to the shared model. Without groups there must be one model that can be meant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import class_names, frames
from corefed.data.memory import Array, Clients
from corefed.data.preparation import Preparation
from corefed.data.raw import Raw, indices
from corefed.settings.config import to_dict
from corefed.settings.run import Experiment
from corefed.training import fitted, newcomers
from corefed.training.newcomers import Newcomer
from corefed.use import arguments, newcomer, notebook
from corefed.use.predictor import Predictor, raw_points

if TYPE_CHECKING:
    from corefed.use.predictor import Personal

OWN = ("method", "model", "seed", "test_fraction", "tune", "groups")
"""Arguments of `Federation` that are no settings of a run."""
ALL = "all"
"""The client of points without groups."""


Points = ParamSpec("Points")
Found = TypeVar("Found")


class InputError(UserError, ValueError):
    """A mistake in what an estimator is given, which scikit-learn expects to be a ValueError."""


def value_errors(function: Callable[Points, Found]) -> Callable[Points, Found]:
    """The function, whose mistakes are ValueErrors too."""

    @functools.wraps(function)
    def wrapped(*given: Points.args, **named: Points.kwargs) -> Found:
        try:
            return function(*given, **named)
        except UserError as error:
            if isinstance(error, ValueError):
                raise
            raise InputError(str(error)) from error

    return wrapped


def not_fitted(words: str) -> UserError:
    """As scikit-learn knows it; the class is made here, since its import takes a second."""
    from sklearn.exceptions import NotFittedError

    made: type[UserError] = type("NotFitted", (InputError, NotFittedError), {})
    return made(words)


class ScikitLearn:
    """Parameters, predictions and scores as scikit-learn calls them."""

    method: str
    groups: str | None
    classes_: Array
    _settings: dict[str, Any]
    _names: list[Any]
    _joined: dict[str, Newcomer | None]

    if TYPE_CHECKING:

        @property
        def personal(self) -> Personal: ...
        @property
        def global_(self) -> Predictor: ...
        def _ready(self, kind: str = "") -> Any: ...
        def _experiment(self) -> Experiment: ...
        def evaluate(self) -> dict[str, Any]: ...

    @value_errors
    def predict(self, X: Any, groups: Any = None) -> Array:
        """[n] the most probable class, or the mean of the target, each by its client's model."""
        return self._each("predict", X, groups)

    @value_errors
    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """[n, classes] probabilities in the order of `classes_`, each by its client's model."""
        return self._each("predict_proba", X, groups)

    @value_errors
    def score(self, X: Any, y: Any = None, groups: Any = None) -> float:
        """Accuracy, or R^2 of a regression, over all points; X may be name -> (X, y)."""
        from sklearn.metrics import accuracy_score, r2_score  # takes a second

        measure = accuracy_score if len(self.classes_) else r2_score
        if isinstance(X, Mapping):
            parts = [(_array(y), self.personal[name].predict(x)) for name, (x, y) in X.items()]
            truth, said = (np.concatenate(each) for each in zip(*parts, strict=True))
        else:
            truth, said = _array(y), self.predict(X, groups)
        if truth.ndim == 0 or len(truth) != len(said):
            raise UserError(f"y has {truth.size} targets for {len(said)} points.")
        return float(measure(truth, said))

    def personalize(
        self,
        name: str,
        X: Any,
        y: Any,
        *,
        steps: int | None = None,
        fraction: float | None = None,
        test_fraction: float = 0.2,
    ) -> dict[str, Any]:
        """Give a client that took no part a model of its own, `personal[name]`.

        Nobody else's model changes. Without test points (`test_fraction=0`) all are trained on.

        Returns:
            Metrics on its test points: personal_, of the shared model global_, and alone_.
        """
        ready = self._ready()
        if name in [*self._names, *self._joined]:
            raise UserError(f"There is a client {name!r} already; give the new one another name.")
        raw = raw_pairs(X, y, ready.preparations[0], self.classes_)
        memory_mb = ready.experiment.run.memory_mb
        data = newcomer.read(Path("X"), ready, 0, name, test_fraction, memory_mb, raw=raw)
        joined = newcomers.join(ready, data, steps=steps, fraction=fraction)
        self._joined[name] = joined
        return {key: value["mean"] for key, value in joined.summary["metrics"].items()}

    def _keep_joined(self, path: Path) -> Path:
        for name, joined in self._joined.items():
            if joined is not None:
                newcomer.keep(path / fitted.PERSONALIZED / name, joined)
        return path

    def _each(self, name: str, X: Any, groups: Any) -> Array:
        self._ready()
        groups = self.groups if groups is None else groups
        whose, X, _ = _divided(X, groups)
        if whose is None:
            model = self._only_model(name)
            return np.asarray(getattr(model, name)(X))
        personal = self.personal
        rows: dict[Any, list[int]] = {}
        for row, client in enumerate(whose):
            rows.setdefault(client, []).append(row)
        parts = []
        for client, mine in rows.items():
            known = client in personal  # else the shared model, which a run may lack
            model = personal[client] if known else self.global_
            parts.append(np.asarray(getattr(model, name)(_rows(X, mine))))
        order = np.argsort(np.concatenate(list(rows.values())), kind="stable")
        return np.asarray(np.concatenate(parts)[order])

    def _only_model(self, name: str) -> Predictor:
        """The model of points that nobody is named for: of the only client, or shared by all."""
        kinds = self._ready().kinds
        if "personal" not in kinds:
            return self.global_
        personal = self.personal
        if len(personal) == 1:
            return personal[next(iter(personal))]
        shared = f", or ask the shared model by federation.global_.{name}(X)."
        raise UserError(
            f"Nothing says whose points these are, and {len(personal)} clients have models of "
            f"their own: name the client of each point by {name}(X, groups=...)"
            + (shared if "global" in kinds else ".")
        )

    # --- what scikit-learn asks for ---------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The given settings, and the named arguments."""
        return {**{name: getattr(self, name) for name in OWN}, **self._settings}

    def set_params(self, **settings: Any) -> Self:
        """Change settings, all or none; fitted models stay as they are."""
        checked = type(self)(**{**self.get_params(), **settings})
        for name in OWN:
            setattr(self, name, getattr(checked, name))
        self._settings = checked._settings
        return self

    def __repr__(self) -> str:
        given = {k: v for k, v in self.get_params().items() if k != "groups" or v is not None}
        return f"Federation({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    def _repr_html_(self) -> str:
        """In a notebook: settings that are not the defaults or, once fitted, how good it is."""
        if not self.__sklearn_is_fitted__():
            return notebook.before({"method": self.method, **self._changed()})
        method = self._ready().experiment.run.method
        return notebook.after(method, self._names, self.evaluate(), len(self._joined))

    def _changed(self) -> dict[str, Any]:
        """The given parameters that are not the defaults."""
        defaults = signature(type(self).__init__).parameters
        experiment = self._experiment()
        known = to_dict(experiment)
        other = arguments.parameters(experiment, None, 0)
        own = {k: getattr(self, k) for k in OWN if getattr(self, k) != defaults[k].default}
        given = {k: v for k, v in self._settings.items() if v is not None}
        return own | {k: v for k, v in given.items() if k in other or k not in known}

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "_fitted", None) is not None

    def __sklearn_tags__(self) -> Any:
        from sklearn import utils  # takes a second

        targets = self._settings.get("task") == "regression"
        if self.__sklearn_is_fitted__():
            targets = not len(self.classes_)
        return utils.Tags(
            estimator_type="regressor" if targets else "classifier",
            target_tags=utils.TargetTags(required=True),
            classifier_tags=None if targets else utils.ClassifierTags(),
            regressor_tags=utils.RegressorTags() if targets else None,
            non_deterministic=False,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Settings are pickled, as several processes of a search need them; models are not."""
        if self.__sklearn_is_fitted__():
            raise UserError(
                "A fitted Federation is not pickled: keep it by save(folder), and read it by "
                "Federation.load(folder)."
            )
        return self.__dict__.copy()


# --- points of all clients ------------------------------------------------------------------------


def by_client(clients: Any, y: Any, groups: Any) -> tuple[Clients, str, str]:
    """Name -> (X, y) for what `fit` is given, the column of clients, and the name of y."""
    if y is None:
        return clients, groups if isinstance(groups, str) else "", "y"
    whose, X, column = _divided(clients, groups)
    truth = _array(y)
    count = _length(X)
    if truth.ndim == 0 or len(truth) != count:
        raise UserError(f"y has {truth.size} targets for {count} points.")
    rows: dict[Any, list[int]] = {}
    for row, client in enumerate([ALL] * count if whose is None else whose):
        rows.setdefault(client, []).append(row)
    found = {client: (_rows(X, mine), truth[mine]) for client, mine in rows.items()}
    return found, column, str(getattr(y, "name", None) or "y")


def _divided(X: Any, groups: Any) -> tuple[list[Any] | None, Any, str]:
    """The client of each point (None: nobody is named), the points, and the column of clients."""
    column = groups if isinstance(groups, str) else ""
    if frames.is_frame(X):
        if column and column not in map(str, X.columns):
            frames.check_names(list(map(str, X.columns)), [column], "X")
        points: Any = frames.read(X, [column])
        whose = np.asarray(X[column]).tolist() if column else groups
    elif column:
        raise UserError(f"groups is {column!r}, the name of a column, but X is no DataFrame.")
    else:
        points, whose = _array(X), groups
    if whose is None:
        return None, points, column
    whose = _array(whose).tolist()
    count = _length(points)
    if len(whose) != count:
        raise UserError(f"groups names the clients of {len(whose)} points; X has {count}.")
    if any(each is None or each != each or not str(each).strip() for each in whose):
        raise UserError("groups has points without a client; name it, or leave them out.")
    return [class_names.name_of(e) if isinstance(e, float) else e for e in whose], points, column


def _rows(X: Any, rows: list[int]) -> Any:
    return X.of(rows) if isinstance(X, frames.Frame) else X[rows]


def _length(X: Any) -> int:
    if isinstance(X, frames.Frame):
        return X.rows
    return len(X) if X.ndim else 0


def _array(values: Any) -> Array:
    if hasattr(values, "toarray"):
        raise UserError("Sparse data are not supported; give X.toarray().")
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def raw_pairs(X: Any, y: Any, preparation: Preparation, classes: Array) -> Raw:
    """Points of a newcomer, as those of a file."""
    import torch

    x, truth = raw_points(X, preparation), _array(y)
    if truth.ndim == 0 or len(truth) != len(x):
        raise UserError(f"y has {truth.size} targets for {len(x)} points.")
    if len(classes):
        names = [class_names.name_of(each) for each in truth.reshape(-1).tolist()]
        targets = indices("y", names, preparation)
    else:
        targets = torch.from_numpy(truth.astype(np.float32).reshape(len(truth), -1))
    return Raw(x, targets, [str(row) for row in range(len(x))], [])
