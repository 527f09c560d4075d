"""Split one pool of points between clients: a pure function of labels (or groups) and a seed.

`shards-*` has the fixed counts of the pFedBayes protocol, `pfllib` and `niid-*` split as those
benchmarks do (`published.py`). Every other partition splits all points, and holds out a fifth of
each client's points for testing, unless the data have test points of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from corefed.base.errors import UserError, did_you_mean
from corefed.data import partitioners, published
from corefed.data.client_points import (
    MINIMUM_TEST,
    MINIMUM_TRAIN,
    TEST_STRIDE,
    as_split,
    train_and_test,
)
from corefed.data.client_points import Split as Split
from corefed.data.dataset import Dataset
from corefed.data.partitioners import Indices, Pool

SPECS = {
    "shards-small": "shards-small",
    "shards-medium": "shards-medium",
    "shards-large": "shards-large",
    "labels": "labels:C or labels:C:CAP",
    "dirichlet": "dirichlet:A",
    "quantity": "quantity:A",
    "iid": "iid",
    "natural": "natural",
    "shared-normal": "shared-normal",
    **{name: name for name in published.BENCHMARKS},
}
"""Partition -> how to write it."""

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

MINIMUM = MINIMUM_TRAIN + MINIMUM_TEST
DRAWS = 100  # attempts at a random split in which every client has the minimum
_PURPOSE = 0x5B117  # makes these draws independent of others of the same seed
_THINNING = 0x7B1A5


def default_for(dataset_name: str) -> str:
    """The default partition: non-iid where a protocol defines it."""
    if dataset_name.startswith("synthetic-"):
        return "natural"
    counts = SHARD_COUNTS.get(dataset_name, {})
    return "shards-medium" if "medium" in counts else "shards-large" if counts else "iid"


def client_count(spec: str, dataset: Dataset, clients: int) -> int:
    """The number of clients: all natural clients where they have names."""
    return len(dataset.group_names) if _named(spec, dataset) else clients


def client_names(spec: str, dataset: Dataset, clients: int) -> list[str]:
    if _named(spec, dataset):
        return list(dataset.group_names)
    return [f"client {client}" for client in range(clients)]


def _named(spec: str, dataset: Dataset) -> bool:
    return spec == "natural" and bool(dataset.group_names)


def split(
    spec: str,
    dataset: Dataset,
    clients: int,
    seed: int,
    test: float = 1 / TEST_STRIDE,
    fold: int | None = None,
) -> list[Split]:
    """Split `dataset` between `clients`; the same arguments give the same split.

    `test` is the share of each client's points that are held out, where none are marked. With a
    `fold` it is 1 / K, and the K folds of the same seed share out all points.
    """
    name, *arguments = spec.split(":")
    if name not in SPECS:
        hint = did_you_mean(name, SPECS, written=SPECS)
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
    benchmark = published.BENCHMARKS.get(name)
    by_label = name.startswith("shards-") or name in ("labels", "dirichlet", "shared-normal")
    by_label = by_label or benchmark is not None
    if by_label and dataset.classes == 0:
        raise UserError(
            f"Partition {spec!r} splits by label, but {dataset.name} is a regression without "
            "labels; use iid, quantity:A or natural."
        )

    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_PURPOSE, seed])))
    pool = _pool(dataset, name)
    if (test != 1 / TEST_STRIDE or fold is not None) and brings_test_points(spec, dataset):
        whose = f"partition {name}" if _tests_itself(name) else dataset.name
        raise UserError(
            f"test_fraction is {test:g}, but {whose} has test points of its own; leave it out."
        )
    if name.startswith("shards-"):
        parts = partitioners.shards(name, _shard_counts(name, dataset.name), pool, clients, rng)
        return [as_split(train, test) for train, test in zip(*parts, strict=True)]
    if name != "shared-normal" and clients * MINIMUM > len(pool.labels):
        raise UserError(
            f"{dataset.name} has {len(pool.labels)} points, too few for {clients} clients of at "
            f"least {MINIMUM}; use at most {len(pool.labels) // MINIMUM} clients."
        )
    cap = None
    if benchmark is not None:
        draw = benchmark.draw
        pieces = _redraw(spec, pool, lambda: draw(pool, clients, rng), benchmark.minimum)
    elif name == "labels":
        per_client, *caps = (_whole(text, spec) for text in arguments)
        cap = caps[0] if caps else None
        pieces = partitioners.by_labels(spec, per_client, pool, clients, rng)
    elif name in ("dirichlet", "quantity"):
        cut = partitioners.dirichlet if name == "dirichlet" else partitioners.quantity
        concentration = _concentration(arguments[0], spec)
        pieces = _redraw(spec, pool, lambda: cut(pool, clients, concentration, rng))
    elif name == "natural":
        pieces = _natural(dataset, clients)
    elif name == "shared-normal":
        pieces = partitioners.shared_normal(pool, clients, rng)
    else:
        pieces = partitioners.iid(pool, clients, rng)
    for client, piece in enumerate(pieces):
        if not _enough(piece, pool):
            whose = client_names(spec, dataset, clients)[client]
            raise UserError(
                f"Partition {spec!r} leaves {whose} with {len(piece)} points of "
                f"{dataset.name}; it needs {MINIMUM_TRAIN} to train on and {MINIMUM_TEST} to test. "
                "Use fewer clients."
            )
    if benchmark is not None and benchmark.test and pool.held_out is None:
        parted = (published.test_apart(piece, benchmark.test, rng) for piece in pieces)
        return [as_split(*each) for each in parted]
    return [train_and_test(piece, pool, cap, rng, test, fold) for piece in pieces]


def notes(spec: str, splits: list[Split], dataset: Dataset) -> list[str]:
    """Notes about a split for readers of the results."""
    found = published.note(spec, len(splits))
    names = _pool(dataset, spec).names
    if spec == "shared-normal" and partitioners.normal_class(names) is None:
        found.append(f"No class is named normal; shared-normal shares the first, {names[0]!r}.")
    untrained = [
        (client, label)
        for client, one in enumerate(splits)
        if dataset.classes
        for label in sorted(set(dataset.y[one.test].tolist()) - set(dataset.y[one.train].tolist()))
    ]
    if untrained:
        client, label = untrained[0]
        whose = client_names(spec, dataset, len(splits))[client]
        count = len({client for client, _ in untrained})
        found.append(
            f"{count} of {len(splits)} clients have test points of a class that they have no "
            f"training points of; the first is {whose}, class {names[label]!r}."
        )
    return found


def thin(splits: list[Split], keep: float, seed: int) -> list[Split]:
    """Keep a random ceil(keep n) of each client's n training points, and all test points."""
    if keep >= 1:
        return splits
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_THINNING, seed])))
    found = []
    for one in splits:
        count = max(1, math.ceil(keep * len(one.train) - 1e-9))
        chosen = np.sort(rng.permutation(len(one.train))[:count])
        found.append(one._replace(train=one.train[torch.from_numpy(chosen)]))
    return found


def count_classes(splits: list[Split], dataset: Dataset) -> list[list[int]]:
    """Training points: one row per client, one column per class (one for regression)."""
    labels = _labels(dataset)
    return [
        np.bincount(labels[one.train.numpy()], minlength=dataset.classes or 1).tolist()
        for one in splits
    ]


def _labels(dataset: Dataset) -> Indices:
    """The class of each point; a regression is one class."""
    if dataset.classes == 0:
        return np.zeros(len(dataset.y), dtype=np.int64)
    labels: Indices = dataset.y.numpy()
    return labels


def brings_test_points(spec: str, dataset: Dataset) -> bool:
    """Whether the data or the partition say which points are tested on."""
    name = spec.partition(":")[0]
    return _tests_itself(name) or _pool(dataset, name).held_out is not None


def _tests_itself(name: str) -> bool:
    """Whether the protocol says how many points of each client are tested on."""
    benchmark = published.BENCHMARKS.get(name)
    return name.startswith("shards-") or (benchmark is not None and benchmark.test > 0)


def _pool(dataset: Dataset, name: str) -> Pool:
    """Test points are marked where the data or the protocol keep them apart."""
    protocol = name == "shared-normal" or name.startswith("niid-")
    apart = dataset.held_out is not None and (dataset.keep_split or protocol)
    return Pool(
        dataset.name,
        _labels(dataset),
        dataset.classes,
        dataset.labels or tuple(map(str, range(dataset.classes))),
        dataset.held_out.numpy() if apart and dataset.held_out is not None else None,
    )


def _shard_counts(name: str, data: str) -> tuple[int, int]:
    counts = SHARD_COUNTS.get(data, _PROTOCOL)
    size = name.removeprefix("shards-")
    if size not in counts:
        known = ", ".join(f"shards-{one}" for one in counts)
        raise UserError(f"The protocol has no {name} for {data}, only {known}.")
    return counts[size]


def _enough(piece: Indices, pool: Pool) -> bool:
    if pool.held_out is None:
        return len(piece) >= MINIMUM
    tested = int(pool.held_out[piece].sum())
    return tested >= MINIMUM_TEST and len(piece) - tested >= MINIMUM_TRAIN


def _whole(text: str, spec: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"Partition {spec!r}: {text!r} should be a whole number from 1 up.")
    return number


def _concentration(text: str, spec: str) -> float:
    """Shares vary by 1 / sqrt(A): 0.1 % at 1e6; below 1e-3 one client gets nearly everything."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1e-3 <= number <= 1e6:
        raise UserError(f"Partition {spec!r}: {text!r} should be a number from 0.001 to 1000000.")
    return number


def _redraw(
    spec: str, pool: Pool, draw: Callable[[], list[Indices]], minimum: int = 0
) -> list[Indices]:
    """Draw until every client has the minimum."""
    for _ in range(DRAWS):
        pieces = draw()
        if all(_enough(piece, pool) and len(piece) >= minimum for piece in pieces):
            return pieces
    if minimum:
        raise UserError(
            f"Partition {spec!r} left a client with fewer than {minimum} points of {pool.name} in "
            f"each of {DRAWS} draws. Use fewer clients, or dirichlet:A or labels:C, which ask for "
            "less."
        )
    raise UserError(
        f"Partition {spec!r} left a client with fewer than {MINIMUM_TRAIN} training points and "
        f"{MINIMUM_TEST} test point in each of {DRAWS} draws. Use a larger A or fewer clients."
    )


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
    order = np.argsort(groups, kind="stable")  # the points of client 0, then of 1, ...
    ends = np.searchsorted(groups[order], np.arange(clients), side="right")
    return np.split(order, ends)[:clients]
