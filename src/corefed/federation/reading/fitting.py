"""A client's points in the terms of the agreement: its features, its classes, its scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data import columns, scaling
from corefed.data.columns import Column, Layout
from corefed.data.preparation import Preparation
from corefed.federation.protocol import Agreement
from corefed.federation.reading.local_data import LocalData


def _preparation(data: LocalData, agreement: Agreement, client: str) -> Preparation:
    """How points of this client are prepared, later ones too; refused where they do not fit."""
    _check_fit(data, agreement)
    layout = data.layout
    targets = tuple(f"y{number}" for number in range(agreement.targets))
    found = Preparation(
        agreement.shape,
        agreement.classes,
        (layout.target,) if layout and targets else targets,
        agreement.mean,
        agreement.std,
        embedding=data.embedding or "none",
        kind="images" if data.embedding else "table" if layout else "array",
        levels=data.levels,
        columns=agreement.columns,
        target=layout.target if layout else "",
        ignored=layout.ignored if layout else (),
        fill=agreement.fill,
        target_mean=agreement.target_mean,
        target_std=agreement.target_std,
    )
    if not agreement.own_scale:
        return found
    numbers = torch.tensor(columns.numbers(agreement.columns))
    own = scaling.fit_features(_arrange(data, data.x_train, agreement.columns), numbers)
    return replace(found, clients={client: own})


def fit(
    data: LocalData, agreement: Agreement, client: str = ""
) -> tuple[ClientData, ClientData, Preparation]:
    """Training and test points of one client, [1, n, ...], in the terms of the agreement.

    Standardised regression targets are so for training only; test targets keep their own unit.
    """
    ready = _preparation(data, agreement, client)
    learnt = data.y_train if data.labels else ready.standardise(data.y_train)
    train, test = (
        _fitted(data, ready, client, x, y)
        for x, y in ((data.x_train, learnt), (data.x_test, data.y_test))
    )
    return train, test, ready


def fit_validation(data: LocalData, ready: Preparation, client: str) -> ClientData | None:
    """The validation points as `fit` gives the test points; None where there are none."""
    if data.x_validation is None or data.y_validation is None:
        return None
    return _fitted(data, ready, client, data.x_validation, data.y_validation)


def _fitted(data: LocalData, ready: Preparation, client: str, x: Tensor, y: Tensor) -> ClientData:
    scaled, y = _placed(data, ready, client, x, y)
    return ClientData(scaled.unsqueeze(0), y.unsqueeze(0), torch.ones(1, len(x)))


def fit_points(
    data: LocalData, ready: Preparation, client: str, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Some of the client's points in the terms of a model that it has; refused if they do not fit.

    Targets of a regression keep their own unit.
    """
    targets = len(ready.targets)
    terms = (ready.shape, ready.labels, targets, ready.mean, ready.std, ready.columns)
    _check_fit(data, Agreement(*terms))
    return _placed(data, ready, client, x, y)


def _placed(
    data: LocalData, ready: Preparation, client: str, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    places = torch.tensor([ready.labels.index(name) for name in data.labels])
    return ready.scale(_arrange(data, x, ready.columns), client), places[y] if data.labels else y


def _arrange(data: LocalData, x: Tensor, wanted: Sequence[Column]) -> Tensor:
    return columns.change_layout(x, data.layout.columns, wanted) if data.layout else x


def _check_fit(data: LocalData, agreement: Agreement) -> None:
    if bool(data.layout) != bool(agreement.columns):
        here, there = ("a table", "arrays") if data.layout else ("arrays", "tables")
        raise UserError(f"The data are {here} here, but {there} in this run.")
    if data.layout:
        _check_columns(data.layout, agreement.columns)
    elif data.shape != agreement.shape:
        raise UserError(
            f"A point has shape {list(data.shape)} here, but {list(agreement.shape)} in this run; "
            "prepare the data as the other clients do."
        )
    wrong = next((std for std in agreement.std if not 0 < std < float("inf")), None)
    if wrong is not None:
        raise UserError(f"The standard deviation of this run's values is {wrong}.")
    if bool(data.labels) != bool(agreement.classes):
        here, there = ("classes", "numbers") if data.labels else ("numbers", "classes")
        raise UserError(f"The target is {here} here, but {there} in this run.")
    foreign = [name for name in data.labels if name not in agreement.classes]
    if foreign:
        raise UserError(
            f"Class {foreign[0]!r} of this client is none of this run's: "
            f"{', '.join(agreement.classes)}. Name all classes in the experiment, or start a "
            "new run."
        )
    if not data.labels and data.y_train.shape[1] != agreement.targets:
        raise UserError(
            f"A point has {data.y_train.shape[1]} targets here, but {agreement.targets} in this "
            "run."
        )


def _check_columns(layout: Layout, wanted: Sequence[Column]) -> None:
    """The table must have this run's columns, each of its kind; an empty column fits any kind."""
    own = {column.name: column for column in layout.columns}
    alone = min(own.keys() ^ {column.name for column in wanted}, default=None)
    if alone is not None:
        here = "has" if alone in own else "lacks"
        raise UserError(
            f"The table of this client {here} the column {alone!r}, unlike those of this run; give "
            "it the columns that the other clients have."
        )
    filled = {one.name for one in layout.profiles if one.present}
    for column in wanted:
        if column.name in filled and bool(column.categories) != bool(own[column.name].categories):
            here, there = ("numbers", "text") if column.categories else ("text", "numbers")
            raise UserError(
                f"Column {column.name!r} has {here} here, but {there} in this run; mend its cells."
            )
