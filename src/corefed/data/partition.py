"""Deal one pool of points to clients. A split is a pure function of labels (or groups) and a seed.

`shards-*` follows the fixed counts of the pFedBayes protocol; every other split divides all points
among the clients and sets a fifth of each client's points aside for testing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.data.datasets import Dataset
from corefed.errors import UserError

Indices = npt.NDArray[np.int64]

SPECS = {
    "shards-small": "shards-small",
    "shards-medium": "shards-medium",
    "shards-large": "shards-large",
    "labels": "labels:C or labels:C:CAP",
    "dirichlet": "dirichlet:A",
    "quantity": "quantity:A",
    "iid": "iid",
    "natural": "natural",
}
"""Name of a partition -> how to write it."""

_PROTOCOL = {"small": (50, 950), "medium": (200, 800), "large": (900, 300)}

# (train, test) points per client and label. MNIST, Fashion-MNIST and CIFAR-10: the pFedBayes
# protocol (Zhang et al. 2022), which has no medium CIFAR-10. Digits: ours, scaled so that five
# clients can share its rarest label (174 points, 34 each). Other sets use the MNIST counts.
SHARD_COUNTS = {
    "mnist": _PROTOCOL,
    "fashion-mnist": _PROTOCOL,
    "cifar10": {"small": (25, 450), "large": (475, 150)},
    "digits": {"small": (5, 29), "medium": (15, 19), "large": (25, 9)},
}

TEST_STRIDE = 5  # one point in five is for testing
MINIMUM_TRAIN, MINIMUM_TEST = 2, 1
MINIMUM = MINIMUM_TRAIN + MINIMUM_TEST
DRAWS = 100  # attempts at a random split that leaves every client its minimum
_PURPOSE = 0x5B117  # keeps these draws apart from other users of the same seed


class Split(NamedTuple):
    """One client's points, as ascending row numbers of the data set."""

    train: Tensor  # int64
    test: Tensor  # int64


def default_for(dataset_name: str) -> str:
    """The partition used when none is asked for: non-iid where a protocol defines it."""
    if dataset_name.startswith("synthetic-"):
        return "natural"
    counts = SHARD_COUNTS.get(dataset_name, {})
    return "shards-medium" if "medium" in counts else "shards-large" if counts else "iid"


def split(spec: str, dataset: Dataset, clients: int, seed: int) -> list[Split]:
    """Deal `dataset` to `clients` as `spec` says; the same arguments give the same split."""
    name, *arguments = spec.split(":")
    if name not in SPECS:
        nearest = get_close_matches(name, SPECS, n=1)
        hint = f" Did you mean {SPECS[nearest[0]]!r}?" if nearest else ""
        raise UserError(
            f"There is no partition {spec!r}.{hint} Known: {', '.join(SPECS.values())}."
        )
    if clients < 1:
        raise UserError(f"A federation needs at least 1 client, not {clients}.")
    if seed < 0:
        raise UserError(f"A seed is a whole number from 0 up, not {seed}.")
    if len(arguments) not in {"labels": (1, 2), "dirichlet": (1,), "quantity": (1,)}.get(
        name, (0,)
    ):
        raise UserError(f"Partition {spec!r} is not written like that; write {SPECS[name]}.")
    by_label = name.startswith("shards-") or name in ("labels", "dirichlet")
    if by_label and dataset.classes == 0:
        raise UserError(
            f"Partition {spec!r} deals by label, but {dataset.name} is a regression without "
            "labels; use iid, quantity:A or natural."
        )

    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_PURPOSE, seed])))
    labels = _labels(dataset)
    if name.startswith("shards-"):
        return _shards(name, dataset, labels, clients, rng)
    if clients * MINIMUM > len(labels):
        raise UserError(
            f"{dataset.name} has {len(labels)} points, too few for {clients} clients of at least "
            f"{MINIMUM}; use at most {len(labels) // MINIMUM} clients."
        )
    cap = None
    if name == "labels":
        per_client, *caps = (_whole(text, spec) for text in arguments)
        cap = caps[0] if caps else None
        pieces = _by_labels(spec, per_client, dataset, labels, clients, rng)
    elif name == "dirichlet":
        concentration = _concentration(arguments[0], spec)
        pieces = _redraw(spec, lambda: _dirichlet(labels, clients, concentration, rng))
    elif name == "quantity":
        concentration = _concentration(arguments[0], spec)
        pieces = _redraw(spec, lambda: _quantity(labels, clients, concentration, rng))
    elif name == "natural":
        pieces = _natural(dataset, clients)
    else:
        pieces = np.array_split(rng.permutation(len(labels)), clients)
    for client, piece in enumerate(pieces):
        if len(piece) < MINIMUM:
            raise UserError(
                f"Partition {spec!r} leaves client {client} with {len(piece)} points of "
                f"{dataset.name}; it needs {MINIMUM}. Use fewer clients."
            )
    return [_train_and_test(piece, labels, cap, rng) for piece in pieces]


def table(splits: list[Split], dataset: Dataset) -> list[list[int]]:
    """Training points: one row a client, one column a class (one column for regression)."""
    labels = _labels(dataset)
    return [
        np.bincount(labels[one.train.numpy()], minlength=dataset.classes or 1).tolist()
        for one in splits
    ]


def _labels(dataset: Dataset) -> Indices:
    """The class of each point; a regression is one class, so that both are dealt alike."""
    if dataset.classes == 0:
        return np.zeros(len(dataset.y), dtype=np.int64)
    labels: Indices = dataset.y.numpy()
    return labels


def _whole(text: str, spec: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"Partition {spec!r}: {text!r} should be a whole number from 1 up.")
    return number


def _concentration(text: str, spec: str) -> float:
    """Shares spread by 1 / sqrt(A): even to 0.1 % at 1e6; below 1e-3 one client takes it all."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1e-3 <= number <= 1e6:
        raise UserError(f"Partition {spec!r}: {text!r} should be a number from 0.001 to 1000000.")
    return number


def _points(labels: Indices, label: int, rng: np.random.Generator) -> Indices:
    """All points of a label in random order."""
    return rng.permutation(np.flatnonzero(labels == label))


def _shards(
    name: str, dataset: Dataset, labels: Indices, clients: int, rng: np.random.Generator
) -> list[Split]:
    """pFedBayes: even clients have the first half of the labels, odd ones the second half."""
    counts = SHARD_COUNTS.get(dataset.name, _PROTOCOL)
    size = name.removeprefix("shards-")
    if size not in counts:
        known = ", ".join(f"shards-{one}" for one in counts)
        raise UserError(f"The protocol has no {name} for {dataset.name}, only {known}.")
    train_count, test_count = counts[size]
    each = train_count + test_count
    if dataset.classes < 2:
        raise UserError(f"Partition {name} needs two labels to alternate; {dataset.name} has one.")
    first_half = (dataset.classes + 1) // 2
    train: list[list[Indices]] = [[] for _ in range(clients)]
    test: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(dataset.classes):
        points = _points(labels, label, rng)
        sharers = range(0 if label < first_half else 1, clients, 2)
        if len(points) < each * len(sharers):
            raise UserError(
                f"Partition {name}: label {label} of {dataset.name} has {len(points)} points, but "
                f"{len(sharers)} clients x ({train_count} to train + {test_count} to test) need "
                f"{each * len(sharers)}. Use at most {2 * (len(points) // each)} clients, or "
                "labels:C, dirichlet:A or iid, which take what there is."
            )
        for place, client in enumerate(sharers):
            mine = points[place * each : (place + 1) * each]
            train[client].append(mine[:train_count])
            test[client].append(mine[train_count:])
    return [
        _as_split(np.concatenate(train[client]), np.concatenate(test[client]))
        for client in range(clients)
    ]


def _by_labels(
    spec: str,
    per_client: int,
    dataset: Dataset,
    labels: Indices,
    clients: int,
    rng: np.random.Generator,
) -> list[Indices]:
    if per_client > dataset.classes:
        raise UserError(
            f"Partition {spec!r} asks for {per_client} labels a client; {dataset.name} has only "
            f"{dataset.classes}."
        )
    # Each client takes the labels used least so far, ties broken at random: the numbers of
    # clients of any two labels then never differ by more than one.
    used = np.zeros(dataset.classes, dtype=np.int64)
    owners: list[list[int]] = [[] for _ in range(dataset.classes)]
    for client in range(clients):
        for label in np.lexsort((rng.random(dataset.classes), used))[:per_client]:
            owners[label].append(client)
            used[label] += 1
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for label, sharers in enumerate(owners):
        points = _points(labels, label, rng)
        if len(points) < len(sharers):
            raise UserError(
                f"Partition {spec!r}: label {label} of {dataset.name} has {len(points)} points "
                f"for the {len(sharers)} clients that share it. Use fewer clients."
            )
        if sharers:
            for client, part in zip(sharers, np.array_split(points, len(sharers)), strict=True):
                pieces[client].append(part)
    return [np.concatenate(parts) for parts in pieces]


def _redraw(spec: str, draw: Callable[[], list[Indices]]) -> list[Indices]:
    """A draw that leaves every client its minimum; skew must not make an empty client."""
    for _ in range(DRAWS):
        pieces = draw()
        if min(len(piece) for piece in pieces) >= MINIMUM:
            return pieces
    raise UserError(
        f"Partition {spec!r} left a client with fewer than {MINIMUM_TRAIN} training points and "
        f"{MINIMUM_TEST} test point in each of {DRAWS} draws. Use a larger A or fewer clients."
    )


def _cut(points: Indices, proportions: npt.NDArray[np.float64]) -> list[Indices]:
    ends = (np.cumsum(proportions)[:-1] * len(points)).astype(np.int64)
    return np.split(points, ends)


def _dirichlet(
    labels: Indices, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Label skew: each label is cut in proportions of its own."""
    parts = [
        _cut(_points(labels, label, rng), rng.dirichlet(np.full(clients, concentration)))
        for label in np.unique(labels)
    ]
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _quantity(
    labels: Indices, clients: int, concentration: float, rng: np.random.Generator
) -> list[Indices]:
    """Quantity skew: the same mixture of labels everywhere, different sizes."""
    return _cut(rng.permutation(len(labels)), rng.dirichlet(np.full(clients, concentration)))


def _natural(dataset: Dataset, clients: int) -> list[Indices]:
    if dataset.groups is None:
        raise UserError(
            f"{dataset.name} has no natural clients; use shards-medium, labels:C, dirichlet:A, "
            "quantity:A or iid."
        )
    groups = dataset.groups.numpy()
    available = int(groups.max()) + 1
    if clients > available:
        raise UserError(f"{dataset.name} has {available} natural clients, {clients} are asked for.")
    return [np.flatnonzero(groups == client) for client in range(clients)]


def _train_and_test(
    points: Indices, labels: Indices, cap: int | None, rng: np.random.Generator
) -> Split:
    """Every fifth point of the label-sorted, shuffled points tests: stratified without rounding.

    The random offset keeps labels with fewer than five points from always training.
    """
    points = rng.permutation(points)
    points = points[np.argsort(labels[points], kind="stable")]
    is_test = np.zeros(len(points), dtype=bool)
    is_test[rng.integers(min(TEST_STRIDE, len(points))) :: TEST_STRIDE] = True
    train = points[~is_test]
    if cap is not None:
        own = labels[train]
        train = np.concatenate([train[own == label][:cap] for label in np.unique(own)])
    return _as_split(train, points[is_test])


def _as_split(train: Indices, test: Indices) -> Split:
    return Split(torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(test)))
