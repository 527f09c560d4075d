"""How each partition deals the rows of a pool to clients.

Points of a label are dealt in random order, in contiguous cuts. Where the data come divided into
training and test points, that order mixes the two evenly, so that every cut has its share of both.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.errors import UserError

Indices = npt.NDArray[np.int64]

NORMAL = re.compile(r"normal|healthy|no[_ -].*", re.IGNORECASE)
"""Names of the class that both clients of shared-normal have: NORMAL, healthy, No_DR, ..."""


class Pool(NamedTuple):
    """What a partition may look at."""

    name: str  # of the data, for messages
    labels: Indices  # [N] class of each point; a regression is one class
    classes: int
    names: tuple[str, ...]  # of the classes
    held_out: npt.NDArray[np.bool_] | None  # [N] the test points; None: not divided yet


def mix(points: Indices, pool: Pool) -> Indices:
    """The same points in an order whose every stretch has its share of training and test points.

    The r-th of m points of a kind stands at (r + 1/2) / m; a stretch that spans a part p of the
    whole then has p m of them, give or take one. The order within a kind stays.
    """
    if pool.held_out is None:
        return points
    held = pool.held_out[points]
    place = np.empty(len(points))
    for kind in (held, ~held):
        count = int(kind.sum())
        place[kind] = (np.arange(count) + 0.5) / max(1, count)
    return points[np.argsort(place, kind="stable")]


def _points(pool: Pool, label: int, rng: np.random.Generator) -> Indices:
    """All points of a label in random order."""
    return mix(rng.permutation(np.flatnonzero(pool.labels == label)), pool)


def _all(pool: Pool, rng: np.random.Generator) -> Indices:
    return mix(rng.permutation(len(pool.labels)), pool)


def iid(pool: Pool, clients: int, rng: np.random.Generator) -> list[Indices]:
    return np.array_split(_all(pool, rng), clients)


def shards(
    name: str, counts: tuple[int, int], pool: Pool, clients: int, rng: np.random.Generator
) -> tuple[list[Indices], list[Indices]]:
    """pFedBayes: even clients have the first half of the labels, odd ones the second half.

    Training and test points of each client; `counts` of them a client and label.
    """
    if pool.classes < 2:
        raise UserError(f"Partition {name} needs two labels to alternate; {pool.name} has one.")
    first_half = (pool.classes + 1) // 2
    train: list[list[Indices]] = [[] for _ in range(clients)]
    test: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(pool.classes):
        points = _points(pool, label, rng)
        sharers = range(0 if label < first_half else 1, clients, 2)
        if pool.held_out is None:
            mine = _equal(name, label, pool, points, "points", sum(counts), len(sharers))
            pairs = [(own[: counts[0]], own[counts[0] :]) for own in mine]
        else:
            held = pool.held_out[points]
            pairs = list(
                zip(
                    _equal(
                        name, label, pool, points[~held], "training points", counts[0], len(sharers)
                    ),
                    _equal(name, label, pool, points[held], "test points", counts[1], len(sharers)),
                    strict=True,
                )
            )
        for client, (to_train, to_test) in zip(sharers, pairs, strict=True):
            train[client].append(to_train)
            test[client].append(to_test)
    return [np.concatenate(own) for own in train], [np.concatenate(own) for own in test]


def _equal(
    name: str, label: int, pool: Pool, points: Indices, what: str, each: int, sharers: int
) -> list[Indices]:
    """The first `each` points, the next, ... for every client that shares a label."""
    if len(points) < each * sharers:
        clients = f"{sharers} client{'s' if sharers > 1 else ''}"
        raise UserError(
            f"Partition {name}: label {label} of {pool.name} has {len(points)} {what}, but "
            f"{clients} x {each} need {each * sharers}. Use at most {2 * (len(points) // each)} "
            "clients, or labels:C, dirichlet:A or iid, which take what there is."
        )
    return [points[place * each : (place + 1) * each] for place in range(sharers)]


def by_labels(
    spec: str, per_client: int, pool: Pool, clients: int, rng: np.random.Generator
) -> list[Indices]:
    if per_client > pool.classes:
        raise UserError(
            f"Partition {spec!r} asks for {per_client} labels a client; {pool.name} has only "
            f"{pool.classes}."
        )
    # Each client takes the labels used least so far, ties broken at random: the numbers of
    # clients of any two labels then never differ by more than one.
    used = np.zeros(pool.classes, dtype=np.int64)
    owners: list[list[int]] = [[] for _ in range(pool.classes)]
    for client in range(clients):
        for label in np.lexsort((rng.random(pool.classes), used))[:per_client]:
            owners[label].append(client)
            used[label] += 1
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for label, sharers in enumerate(owners):
        points = _points(pool, label, rng)
        if len(points) < len(sharers):
            raise UserError(
                f"Partition {spec!r}: label {label} of {pool.name} has {len(points)} points "
                f"for the {len(sharers)} clients that share it. Use fewer clients."
            )
        if sharers:
            for client, part in zip(sharers, np.array_split(points, len(sharers)), strict=True):
                pieces[client].append(part)
    return [np.concatenate(parts) for parts in pieces]


def _cut(points: Indices, proportions: npt.NDArray[np.float64]) -> list[Indices]:
    ends = (np.cumsum(proportions)[:-1] * len(points)).astype(np.int64)
    return np.split(points, ends)


def dirichlet(
    pool: Pool, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Label skew: each label is cut in proportions of its own."""
    parts = [
        _cut(_points(pool, label, rng), rng.dirichlet(np.full(clients, concentration)))
        for label in np.unique(pool.labels)
    ]
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def quantity(
    pool: Pool, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Quantity skew: the same mixture of labels everywhere, different sizes."""
    return _cut(_all(pool, rng), rng.dirichlet(np.full(clients, concentration)))


def shared_normal(pool: Pool, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Two clients have a class each, in the order of the classes, and half of the normal ones."""
    if pool.classes != 3:
        raise UserError(
            f"Partition shared-normal deals three classes, one of them normal; {pool.name} has "
            f"{pool.classes}. Choose three by --set classes=A,B,C, or use labels:C."
        )
    if clients != 2:
        raise UserError(
            f"Partition shared-normal is for 2 clients, not {clients}; use --clients 2, or "
            "labels:2 for more."
        )
    shared = normal_class(pool.names) or 0
    first, second = (label for label in range(3) if label != shared)
    halves = np.array_split(_points(pool, shared, rng), 2)
    return [
        np.concatenate([_points(pool, label, rng), half])
        for label, half in zip((first, second), halves, strict=True)
    ]


def normal_class(names: tuple[str, ...]) -> int | None:
    """The class whose name says that it is the normal one; None where no name does."""
    found = [label for label, name in enumerate(names) if NORMAL.fullmatch(name)]
    if len(found) > 1:
        both = " and ".join(repr(names[label]) for label in found[:2])
        raise UserError(
            f"Partition shared-normal: {both} could both be the normal class; rename one of them."
        )
    return found[0] if found else None
