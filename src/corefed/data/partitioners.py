"""One function per partition: split the rows of a pool between clients.

The points of a label are put in random order and cut into contiguous parts. Where the data have
test points of their own, the order mixes both kinds evenly, so that every part has its share.
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
    """The points as a partition sees them."""

    name: str  # of the data, for messages
    labels: Indices  # [N] class of each point; a regression is one class
    classes: int
    names: tuple[str, ...]  # of the classes
    held_out: npt.NDArray[np.bool_] | None  # [N] the test points; None: none are marked


def mix(points: Indices, pool: Pool) -> Indices:
    """Reorder points so that every stretch has its share of training and test points.

    The r-th of m points of a kind gets position (r + 1/2) / m. A stretch of length p then has p m
    of them, within one. The order within a kind is kept.
    """
    if pool.held_out is None:
        return points
    held = pool.held_out[points]
    place = np.empty(len(points))
    for kind in (held, ~held):
        count = int(kind.sum())
        place[kind] = (np.arange(count) + 0.5) / max(1, count)
    return points[np.argsort(place, kind="stable")]


def points_of(pool: Pool, label: int, rng: np.random.Generator) -> Indices:
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

    Returns training and test points per client; `counts` of them per client and label.
    """
    if pool.classes < 2:
        raise UserError(f"Partition {name} needs two labels to alternate; {pool.name} has one.")
    first_half = (pool.classes + 1) // 2
    train: list[list[Indices]] = [[] for _ in range(clients)]
    test: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(pool.classes):
        points = points_of(pool, label, rng)
        sharers = range(0 if label < first_half else 1, clients, 2)
        if pool.held_out is None:
            mine = _equal(name, label, pool, points, "points", sum(counts), len(sharers))
            trained, tested = (
                [own[: counts[0]] for own in mine],
                [own[counts[0] :] for own in mine],
            )
        else:
            held = pool.held_out[points]
            kinds = ("training points", ~held), ("test points", held)
            trained, tested = (
                _equal(name, label, pool, points[kind], what, count, len(sharers))
                for (what, kind), count in zip(kinds, counts, strict=True)
            )
        for client, to_train, to_test in zip(sharers, trained, tested, strict=True):
            train[client].append(to_train)
            test[client].append(to_test)
    return [np.concatenate(own) for own in train], [np.concatenate(own) for own in test]


def _equal(
    name: str, label: int, pool: Pool, points: Indices, what: str, each: int, sharers: int
) -> list[Indices]:
    """The first `each` points, the next, ..., for the clients that share a label."""
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
            f"Partition {spec!r} asks for {per_client} labels per client; {pool.name} has only "
            f"{pool.classes}."
        )
    # Each client takes the least used labels, ties broken at random. The numbers of clients of
    # any two labels then differ by at most one.
    used = np.zeros(pool.classes, dtype=np.int64)
    owners: list[list[int]] = [[] for _ in range(pool.classes)]
    for client in range(clients):
        for label in np.lexsort((rng.random(pool.classes), used))[:per_client]:
            owners[label].append(client)
            used[label] += 1
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for label, sharers in enumerate(owners):
        points = points_of(pool, label, rng)
        if len(points) < len(sharers):
            raise UserError(
                f"Partition {spec!r}: label {label} of {pool.name} has {len(points)} points "
                f"for the {len(sharers)} clients that share it. Use fewer clients."
            )
        if sharers:
            for client, part in zip(sharers, np.array_split(points, len(sharers)), strict=True):
                pieces[client].append(part)
    return [np.concatenate(parts) for parts in pieces]


def cut(points: Indices, proportions: npt.NDArray[np.float64]) -> list[Indices]:
    ends = (np.cumsum(proportions)[:-1] * len(points)).astype(np.int64)
    return np.split(points, ends)


def dirichlet(
    pool: Pool, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Label skew: each label has its own proportions."""
    parts = [
        cut(points_of(pool, label, rng), rng.dirichlet(np.full(clients, concentration)))
        for label in np.unique(pool.labels)
    ]
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def quantity(
    pool: Pool, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Quantity skew: the same mixture of labels everywhere, different sizes."""
    return cut(_all(pool, rng), rng.dirichlet(np.full(clients, concentration)))


def shared_normal(pool: Pool, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Each of two clients has one class of disease and half of the normal points."""
    if pool.classes != 3:
        raise UserError(
            f"Partition shared-normal splits three classes, one of them normal; {pool.name} has "
            f"{pool.classes}. Choose three by --set classes=A,B,C, or use labels:C."
        )
    if clients != 2:
        raise UserError(
            f"Partition shared-normal is for 2 clients, not {clients}; use --clients 2, or "
            "labels:2 for more."
        )
    shared = normal_class(pool.names) or 0
    first, second = (label for label in range(3) if label != shared)
    halves = np.array_split(points_of(pool, shared, rng), 2)
    return [
        np.concatenate([points_of(pool, label, rng), half])
        for label, half in zip((first, second), halves, strict=True)
    ]


def normal_class(names: tuple[str, ...]) -> int | None:
    """The class whose name means normal; None where there is none."""
    found = [label for label, name in enumerate(names) if NORMAL.fullmatch(name)]
    if len(found) > 1:
        both = " and ".join(repr(names[label]) for label in found[:2])
        raise UserError(
            f"Partition shared-normal: {both} could both be the normal class; rename one of them."
        )
    return found[0] if found else None
