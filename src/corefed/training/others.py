"""Personal models on the test points of other clients, for methods whose clients share nothing.

A model is tested on the points of the next NEIGHBOURS clients of its run, in the order of the
clients' numbers, the first after the last. Up to 100 clients, these are all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from corefed.base.types import Method, Tree

NEIGHBOURS = 99
"""Without a bound, the work grows with the square of the number of clients."""


def score(there: Callable[[list[int]], Tree], rows: Sequence[int], per_run: int) -> Tree:
    """The scores of the models of `rows` on their neighbours' points, [C, NEIGHBOURS n] each.

    `there` scores each of these models on the points of one other client.
    """
    parts = [there(neighbours(rows, shift, per_run)) for shift in shifts(per_run)]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def roll(values: Tensor, rows: Sequence[int], per_run: int) -> Tensor:
    """[C, NEIGHBOURS n]: the values, [n] per client, of the neighbours of `rows`."""
    return torch.cat([values[neighbours(rows, s, per_run)] for s in shifts(per_run)], 1)


def neighbours(rows: Sequence[int], shift: int, per_run: int) -> list[int]:
    """For each row, the client `shift` places further in the same run."""
    return [row - row % per_run + (row + shift) % per_run for row in rows]


def note(method: Method, clients: int) -> tuple[str, ...]:
    """For readers of the results, where not all other clients are tested on."""
    if method.traits.sent != () or clients <= NEIGHBOURS + 1:
        return ()
    return (
        f"Metrics of others are of each client's model on the test points of the next {NEIGHBOURS} "
        f"of the {clients - 1:,} other clients.",
    )


def shifts(per_run: int) -> range:
    """How many places further the clients are that a model is tested on."""
    return range(1, min(per_run, NEIGHBOURS + 1))
