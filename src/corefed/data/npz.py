"""Points in an .npz file: arrays X and y, or X_train, y_train, X_test and y_test.

X may be written x. Points are along the first axis and are not rescaled (bytes of an image are not
divided by 255). Whole numbers or text in y are classes, floating-point numbers are regression
targets, unless they are few different whole numbers (`class_names.py`). Another array, such as
client or groups (with _train and _test where X has them), may name the client of each point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from corefed.base import arrays
from corefed.base.arrays import Array, Header
from corefed.base.errors import UserError
from corefed.data import class_names, file_rows, streaming
from corefed.data.dataset import Dataset

CLIENTS = ("client", "clients", "group", "groups")
"""Arrays of clients that are recognised by their names."""

MEANT = "X and y, or X_train and y_train, and with these X_test and y_test where there are any"


class Outline(NamedTuple):
    """The contents of a file, from its headers."""

    shape: tuple[int, ...]  # of a point
    client: str  # the array that names the clients; empty: none


def look(path: Path) -> Outline:
    """The outline of a file; no array is read."""
    headers = arrays.headers(path)
    x = _pairs(path, headers)[0][0]
    known = {name.lower().removesuffix("_train"): name for name in headers}
    client = next((known[name].removesuffix("_train") for name in CLIENTS if name in known), "")
    return Outline(headers[x].shape[1:] or (1,), client)


def read(
    path: Path, memory_mb: int, client: str = "", task: str = "auto", *, streamed: bool = False
) -> Dataset:
    """All points of the file; those of its test arrays are held out.

    `client` is the array that names the clients; `task` may make whole numbers a regression.
    `streamed` points stay in the file.
    """
    headers = arrays.headers(path)
    pairs = _pairs(path, headers)
    for x, y in pairs:
        _check(path, x, y, headers)
    _check_alike(path, pairs, headers)
    owners = _owners(path, client, pairs, headers) if client else []
    sizes = [headers[x].shape[0] for x, _ in pairs]
    point = headers[pairs[0][0]].shape[1:] or (1,)
    kind, width = _family(headers[pairs[0][1]])
    # Beside the stored arrays, the points in float32 twice: whole, and split.
    working = 0 if streamed else 8 * sum(math.prod(headers[x].shape) for x, _ in pairs)
    wanted = [*(y for _, y in pairs), *owners, *(() if streamed else (x for x, _ in pairs))]
    stored = arrays.load(path, wanted, memory_mb, working=working)
    if streamed:
        points = _streamed(path, [x for x, _ in pairs], headers, point)
    else:
        whole = np.empty((sum(sizes), *point), np.float32)
        for (x, _), end, size in zip(pairs, np.cumsum(sizes), sizes, strict=True):
            with np.errstate(
                over="ignore"
            ):  # numbers that are too large become infinite, and are refused
                whole[end - size : end] = stored[x].reshape(size, *point)
        points = torch.from_numpy(whole)
    parts = [stored[y].reshape(-1, width) for _, y in pairs]
    whose = [stored[name].reshape(-1) for name in owners]
    targets, labels = _targets(path, kind, np.concatenate(parts), task)
    float_classes = [class_names.said(f"y in {path}", labels)] if kind == "f" and labels else []
    groups, names = _groups(np.concatenate(whose)) if whose else (None, ())
    return Dataset(
        str(path),
        points,
        targets,
        len(labels),
        groups,
        held_out=torch.arange(len(points)) >= sizes[0] if len(pairs) > 1 else None,
        labels=labels,
        keep_split=True,
        notes=(*float_classes, *_notes(path, pairs, owners, headers, points)),
        group_names=names,
    )


def _streamed(
    path: Path, names: list[str], headers: dict[str, Header], point: tuple[int, ...]
) -> Tensor:
    """Points that stay in the file; packed ones are unpacked to a scratch file."""
    parts = []
    for name in names:
        start = arrays.stored_at(path, name)
        if start is None:
            raise UserError(
                f"{name} in {path} is compressed or stored by columns, and cannot be read in "
                "parts; save it by numpy.savez, in the order of rows, or use --set resident=all."
            )
        if headers[name].dtype.hasobject:
            raise UserError(f"{name} in {path} holds Python objects, which are never loaded.")
        parts.append(file_rows.stored(path, start, headers[name].dtype, point, torch.float32))
    sizes = [headers[name].shape[0] for name in names]
    return streaming.of_rows(file_rows.JoinedRows(parts, sizes), sum(sizes))


def _owners(
    path: Path, client: str, pairs: list[tuple[str, str]], headers: dict[str, Header]
) -> list[str]:
    """The names of the arrays of clients, one per pair."""
    found = []
    for x, _ in pairs:
        name = client + x[1:]  # client, client_train, client_test
        if name not in headers:
            there = ", ".join(headers)
            raise UserError(f"{path} has no array {name!r} to make clients of; it has {there}.")
        shape, dtype = headers[name]
        if dtype.kind not in "iubU":
            raise UserError(f"{name} in {path} is {dtype}; clients are whole numbers or names.")
        if math.prod(shape) != headers[x].shape[0]:
            raise UserError(
                f"{path} has {headers[x].shape[0]} points in {x} but {math.prod(shape)} in {name}."
            )
        found.append(name)
    return found


def _groups(whose: Array) -> tuple[Tensor, tuple[str, ...]]:
    names = [str(each) for each in whose.tolist()]
    different = class_names.sort_names(names)
    places = {name: place for place, name in enumerate(different)}
    return torch.tensor([places[name] for name in names]), different


def _pairs(path: Path, headers: dict[str, Header]) -> list[tuple[str, str]]:
    """The names of (X, y) for training, and for testing where there are any."""
    known: dict[str, str] = {}
    for name in headers:
        if name.lower() in known:
            raise UserError(f"{path} has both {known[name.lower()]} and {name}; leave one.")
        known[name.lower()] = name
    whole, train, test = (("x" + end, "y" + end) for end in ("", "_train", "_test"))
    if all(name in known for name in (*whole, *train)):
        raise UserError(f"{path} has {known['x']} beside {known['x_train']}; leave one.")
    pairs = [pair for pair in (whole, train) if all(name in known for name in pair)]
    if not pairs:
        found = ", ".join(headers) or "nothing"
        raise UserError(f"{path} must hold arrays {MEANT}; it holds {found}.")
    there = [name in known for name in test]
    if any(there) and not all(there):
        raise UserError(
            f"{path} has {known[test[there.index(True)]]} alone; X_test and y_test go together."
        )
    if all(there):
        pairs.append(test)
    return [(known[x], known[y]) for x, y in pairs]


def _family(y: Header) -> tuple[str, int]:
    """Targets (f), class names (U) or class numbers (i), and how many per point."""
    kind = y.dtype.kind
    return kind if kind in "fU" else "i", math.prod(y.shape[1:])


def _check(path: Path, x: str, y: str, headers: dict[str, Header]) -> None:
    for name, kinds in ((x, "fiub"), (y, "fiubU")):
        shape, dtype = headers[name]
        if dtype.kind not in kinds and not dtype.hasobject:  # those are refused when read
            raise UserError(f"{name} in {path} is {dtype}, not numbers.")
        if not shape:
            raise UserError(f"{name} in {path} is a single value; it must have an axis of points.")
        if 0 in shape[1:]:
            raise UserError(f"{name} in {path} has shape {shape}: no numbers in a point.")
    if headers[x].shape[0] != headers[y].shape[0]:
        raise UserError(
            f"{path} has {headers[x].shape[0]} points in {x} but {headers[y].shape[0]} in {y}."
        )
    if headers[y].dtype.kind != "f" and math.prod(headers[y].shape[1:]) > 1:
        raise UserError(
            f"{y} in {path} has shape {headers[y].shape}; it must be one class per point."
        )


def _check_alike(path: Path, pairs: list[tuple[str, str]], headers: dict[str, Header]) -> None:
    if headers[pairs[0][0]].shape[0] == 0:
        raise UserError(f"{pairs[0][0]} in {path} is empty; a client needs at least one point.")
    (x, y), (x_test, y_test) = pairs[0], pairs[-1]
    if headers[x].shape[1:] != headers[x_test].shape[1:]:
        _refuse_unlike(path, x, x_test, headers)
    if _family(headers[y]) != _family(headers[y_test]):
        _refuse_unlike(path, y, y_test, headers)


def _refuse_unlike(path: Path, train: str, test: str, headers: dict[str, Header]) -> NoReturn:
    one, two = headers[train], headers[test]
    raise UserError(
        f"{test} in {path} is {two.dtype} of shape {two.shape} but {train} is {one.dtype} of shape "
        f"{one.shape}; test points must be like training points."
    )


def _targets(path: Path, kind: str, y: Array, task: str) -> tuple[Tensor, tuple[str, ...]]:
    """Targets of y [n, d], and the names of the classes."""
    where = f"y in {path}"
    if task == "regression" and kind == "U":
        raise UserError(f"{where} is text; a regression needs numbers.")
    if task == "classification" and kind == "f" and (y.shape[1] > 1 or (y != np.floor(y)).any()):
        raise UserError(
            f"{where} has floating-point numbers that are not whole, or several per point; classes "
            "are whole numbers or text, one per point."
        )
    floats = kind == "f" and task == "auto"
    classed = floats and y.shape[1] == 1 and class_names.are_classes(y[:, 0])
    if task == "regression" or (floats and not classed):
        if floats:
            class_names.refuse_one_hot(y, where)
        with np.errstate(over="ignore"):
            return torch.from_numpy(y.astype(np.float32)), ()
    if kind == "f":
        kind, y = "U", np.array([class_names.name_of(each) for each in y[:, 0].tolist()])
    if kind == "U":
        return class_names.index_names(y.reshape(-1).tolist(), where)
    return class_names.index_numbers(y.reshape(-1), where)


def _notes(
    path: Path,
    pairs: list[tuple[str, str]],
    owners: list[str],
    headers: dict[str, Header],
    points: Tensor,
) -> Iterator[str]:
    used = {name for pair in pairs for name in pair} | set(owners)
    others = [name for name in headers if name not in used]
    if others:
        yield f"{path} also holds {', '.join(others)}, which are not read."
    x = pairs[0][0]
    if headers[x].dtype.kind not in "iu":
        return
    largest = max(float(some.max()) for some in streaming.blocks(points))
    if largest > 1:
        yield (
            f"{x} in {path} holds whole numbers up to {largest:.0f}, which are taken as they "
            'are; scale = "standard" brings them to about 1.'
        )
