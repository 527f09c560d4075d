"""Arrays in memory as a federation: what `corefed.Federation` is fitted to.

Whole numbers, text and booleans in y are classes. Floating-point numbers are regression targets,
unless they are few different whole numbers (`class_names.py`), or `task` says otherwise. Without
given test points, each client holds out some of its own, as in a real federation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import class_names, clients, frames, held_out, hints
from corefed.data.clients import FederatedData
from corefed.data.columns import Layout
from corefed.data.dataset import Dataset
from corefed.data.partition import Split
from corefed.settings.run import MEMORY, Run, default_scale

Array = npt.NDArray[Any]
Clients = Mapping[Any, Sequence[Any]]
"""Name -> (X, y), or (X_train, y_train, X_test, y_test)."""


class GivenPoints(NamedTuple):
    """Points of all clients, before test points are drawn."""

    names: list[Any]  # as given: text or whole numbers
    dataset: Dataset
    classes: Array  # as given, in the order of the network's outputs; empty: regression
    trained: list[Tensor]  # rows of each client
    tested: list[Tensor] | None  # None: drawn from the rows above

    def splits(self, fraction: float, seed: int) -> list[Split]:
        if self.tested is not None:
            pairs = zip(self.trained, self.tested, strict=True)
            return [Split(train, test) for train, test in pairs]
        found = []
        for rows in self.trained:
            mine = self.dataset._replace(x=self.dataset.x[rows], y=self.dataset.y[rows])
            test = held_out.draw(mine, fraction, seed)
            found.append(Split(rows[~test], rows[test]))
        return found


def gather(
    given: Clients, test: Clients | None, task: str, client: str = "", target: str = "y"
) -> GivenPoints:
    """Check all clients' arrays and concatenate them.

    Of DataFrames, `client` names the column of clients, which is no feature, and `target` y.
    """
    names = _names(given)
    for name in test or ():
        if name not in given:
            raise UserError(f"There are test points for {name!r}, but clients has no such name.")
    parts = [_parts(name, given[name], test) for name in names]
    apart = [len(each) == 4 for each in parts]
    if any(apart) and not all(apart):
        lacking = names[apart.index(False)]
        raise UserError(
            f"Client {lacking!r} has no test points, but others have: give all, or none."
        )
    pairs = [(f"{end} of client {name!r}", x, y) for name, each in zip(names, parts, strict=True)
             for end, x, y in _pairs(each)]  # fmt: skip
    xs, layout = _points(pairs, client, target)
    ys = [_column(y, f"y{where}", len(xs[place])) for place, (where, _, y) in enumerate(pairs)]
    y, different, labels = _targets(ys, task)
    float_classes = bool(labels) and task == "auto" and all(each.dtype.kind == "f" for each in ys)
    ends = np.cumsum([0, *map(len, xs)]).tolist()
    rows = [torch.arange(start, end) for start, end in pairwise(ends)]
    dataset = Dataset(
        MEMORY,
        torch.cat(xs),
        y,
        len(labels),
        labels=labels,
        notes=(class_names.said("y", labels),) if float_classes else (),
        group_names=tuple(map(str, names)),
        layout=layout,
        standardise=True,
    )
    step = 2 if apart[0] else 1
    return GivenPoints(names, dataset, different, rows[::step], rows[1::2] if apart[0] else None)


def _points(
    pairs: list[tuple[str, Any, Any]], client: str, target: str
) -> tuple[list[Tensor], Layout | None]:
    """The points of every pair; DataFrames are encoded as tables are, and have a layout."""
    tables = [frames.is_frame(x) for _, x, _ in pairs]
    if not any(tables):
        shape = points(pairs[0][1], f"X{pairs[0][0]}").shape[1:]
        return [points(x, f"X{where}", tuple(shape)) for where, x, _ in pairs], None
    if not all(tables):
        where = pairs[tables.index(False)][0]
        raise UserError(f"X{where} is no DataFrame, but others are; give all alike.")
    wheres = [f"X{where}" for where, _, _ in pairs]
    read = [frames.read(x, [client]) for _, x, _ in pairs]
    found = frames.layout(read, wheres)
    xs = [frames.encode(found, each, where) for each, where in zip(read, wheres, strict=True)]
    return xs, Layout(found, target, client, (), ())


def federate(pool: GivenPoints, run: Run, fraction: float) -> FederatedData:
    """The clients of all seeds, stacked."""
    scale = run.scale
    if scale == "auto":
        scale = default_scale(run.model)
    bound = max(1, run.memory_mb // len(run.seeds))
    names = list(pool.dataset.group_names)
    many = []
    for seed in run.seeds:
        splits = pool.splits(fraction, seed)
        if fraction and not any(len(one.test) for one in splits):
            raise UserError("No client has points enough to test on; give some as test=.")
        splits = held_out.with_validation(pool.dataset, splits, run.validation, seed)
        data = clients.federate(pool.dataset, splits, scale=scale, memory_mb=bound, names=names)
        if seed == run.seeds[0]:
            said = held_out.validation_notes(splits, pool.dataset, names)
            said += hints.find(pool.dataset, splits)
            data = data._replace(notes=(*data.notes, *said))
        if pool.tested is None:
            note = f"{fraction:.0%} of each client's points are held out for testing"
            data = data._replace(notes=(*data.notes, note))
        many.append(data)
    return many[0] if len(many) == 1 else clients.stack(many)


def points(x: Any, where: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Points [n, ...] in float32, checked; flat points are reshaped to `shape`."""
    array = _numbers(x, where)
    if array.ndim < 2:
        raise UserError(
            f"{where} has shape {array.shape}; it must have one row per point: write one point as "
            "X.reshape(1, -1), one feature as X.reshape(-1, 1)."
        )
    if len(array) == 0:
        raise UserError(f"{where} has no points.")
    if shape is not None and array.shape[1:] != shape:
        if array[0].size != int(np.prod(shape)) or array.ndim > 2:
            raise UserError(
                f"{where} has points of shape {array.shape[1:]}, not {shape} as all others have."
            )
        array = array.reshape(len(array), *shape)
    return as_floats(array, where)


def as_floats(array: Array, where: str) -> Tensor:
    """A copy in float32; NaN and infinite numbers are refused."""
    with np.errstate(over="ignore"):  # numbers that are too large become infinite
        found = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    bad = ~found.isfinite().flatten(1).all(1)
    if bool(bad.any()):
        raise UserError(
            f"{where} has NaN or infinite numbers in {int(bad.sum())} points, the first in row "
            f"{int(bad.nonzero()[0])}; fill them in, or leave those points out."
        )
    return found


def _names(given: object) -> list[Any]:
    if not isinstance(given, Mapping) or not given:
        raise UserError("Give clients as a mapping, {name: (X, y), ...}, one at least; or X and y.")
    for name in given:
        if not isinstance(name, str | int | np.integer) or not str(name).strip():
            raise UserError(f"{name!r} is no name for a client; use text or a whole number.")
    names = [int(name) if isinstance(name, np.integer) else name for name in given]
    if len({str(name) for name in names}) < len(names):
        raise UserError("Two clients have the same name, once as text and once as a number.")
    return names


def _parts(name: Any, given: Any, test: Clients | None) -> Sequence[Any]:
    """X, y, and X_test, y_test where there are any."""
    if not isinstance(given, tuple | list) or len(given) not in (2, 4):
        raise UserError(
            f"Client {name!r} must have a tuple (X, y), or (X_train, y_train, X_test, y_test)."
        )
    if test is None or name not in test:
        return given
    if len(given) == 4 or not isinstance(test[name], tuple | list) or len(test[name]) != 2:
        raise UserError(f"Give the test points of client {name!r} once: test={{name: (X, y)}}.")
    return (*given, *test[name])


def _pairs(each: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    ends = ("",) if len(each) == 2 else ("_train", "_test")
    return [(end, each[2 * place], each[2 * place + 1]) for place, end in enumerate(ends)]


def _array(values: Any, where: str) -> Array:
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu().numpy())
    try:
        return np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{where} is no array: {error}.") from error


def _numbers(values: Any, where: str) -> Array:
    array = _array(values, where)
    if array.dtype == object:  # such as a table with columns of several types
        with suppress(TypeError, ValueError):
            array = array.astype(np.float64)
    if array.dtype.kind not in "fiub":
        raise UserError(f"{where} is {array.dtype}, not numbers; encode categories as numbers.")
    return array


def _column(values: Any, where: str, count: int) -> Array:
    array = _array(values, where)
    if array.ndim == 0 or len(array) != count:
        have = "no" if array.ndim == 0 else len(array)
        raise UserError(f"{where} has {have} targets for {count} points.")
    return array


def _targets(ys: list[Array], task: str) -> tuple[Tensor, Array, tuple[str, ...]]:
    """y as a network learns it; the classes and their names, both empty for a regression."""
    kinds = {"U" if y.dtype.kind in "OUS" else "f" if y.dtype.kind == "f" else "i" for y in ys}
    floats = task == "auto" and kinds == {"f"}
    if task == "regression" or (floats and not _few_whole(ys)):
        targets = _regression(ys)
        if floats:
            class_names.refuse_one_hot(targets.numpy(), "y")
        return targets, np.empty(0), ()
    if "U" in kinds and len(kinds) > 1:
        raise UserError("y has text at some clients and numbers at others; give all alike.")
    if kinds > {"f"} and task == "auto":
        raise UserError(
            "y has whole numbers at some clients and floating-point numbers at others; "
            "give all alike, or say task='classification' or 'regression'."
        )
    flat = [y.reshape(len(y), -1) for y in ys]
    if any(each.shape[1] != 1 for each in flat):
        raise UserError("y must have one class per point.")
    pooled = np.concatenate([each[:, 0] for each in flat])
    try:
        missing = bool((pooled != pooled).any()) or any(each is None for each in pooled.tolist())
        different, places = np.unique(pooled, return_inverse=True)
    except TypeError as error:
        raise UserError(
            "Classes in y must be all text or all numbers, so that they have an order."
        ) from error
    if missing:
        raise UserError("y has points without a class (None or NaN); leave them out.")
    if different.dtype == object:
        different = different.astype(str)
    labels = tuple(class_names.name_of(value) for value in different.tolist())
    if len(labels) < 2:
        raise UserError(
            f"All points are of class {labels[0]!r}; there must be two classes at least."
        )
    if len(labels) > class_names.MOST:
        raise UserError(
            f"y has {len(labels)} classes, more than {class_names.MOST}; for a regression give "
            "floating-point numbers."
        )
    return torch.from_numpy(places.reshape(-1)).long(), different, labels


def _few_whole(ys: list[Array]) -> bool:
    flat = [y.reshape(len(y), -1) for y in ys]
    if any(each.shape[1] != 1 for each in flat):
        return False
    return class_names.are_classes(np.concatenate([each[:, 0] for each in flat]))


def _regression(ys: list[Array]) -> Tensor:
    try:
        flat = [y.astype(np.float64).reshape(len(y), -1) for y in ys]
    except (TypeError, ValueError) as error:
        raise UserError("y has text; a regression needs numbers.") from error
    if len({each.shape[1] for each in flat}) > 1:
        raise UserError("y has another number of targets at some clients than at others.")
    pooled = np.concatenate(flat)
    if not np.isfinite(pooled).all():
        raise UserError("y has NaN or infinite targets; leave those points out.")
    return torch.from_numpy(pooled.astype(np.float32))
