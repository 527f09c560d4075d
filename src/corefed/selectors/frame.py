"""The interface of selectors: what they see and return.

A selector chooses, for each of C clients, at most k of its n points and their weights w, so that
training on sum_j w_j log p(D_j) stands in for training on all of them. It sees the client's points,
its posterior q, the global model z, and what it remembered of earlier selections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from corefed.base.types import ClientData
from corefed.models.network import Model
from corefed.selectors.settings import Selection

if TYPE_CHECKING:
    from corefed.base.rng import Streams


class Look(NamedTuple):
    """What a selector sees of C clients that choose together."""

    model: Model
    q: Tensor  # [C, 2, P] the clients' posteriors
    z: Tensor  # [C, 2, P] the global model as each client has it
    data: ClientData  # padding has weight 0 and comes last
    k: Tensor  # [C] points to keep, at most
    memory: Tensor  # [C, n] what the selector remembered last time; 0 at first
    streams: Streams
    settings: Selection = Selection()
    before: Tensor | None = None  # [C, 2, P] the posteriors at the last selection, where kept
    most: int = 0  # the largest k, where the host knows it and every client has a memory: then no
    # shape depends on values, and nothing is read back from a GPU
    unseen: Tensor | None = None  # [C, n] local steps since a point was last passed through the
    # network, -1: never; for a selector that learns
    room: Tensor | None = None  # [C] points that such a selector may pass through the network

    @property
    def mask(self) -> Tensor:
        """[C, n] which points are real."""
        return self.data.weight > 0

    @property
    def n(self) -> Tensor:
        """[C] number of real points."""
        return self.mask.sum(-1)


class Choice(NamedTuple):
    """What a selector returns."""

    weight: Tensor  # [C, n] >= 0, at most k_i of them above 0, none on padding
    memory: Tensor  # [C, n] for the next time


def trim(data: ClientData, rows: list[int]) -> ClientData:
    """Some clients, padded to the largest of them only, as points that are none cost as much as
    others; padding comes last."""
    here = data.of(rows)
    n = int(here.size.max())
    return ClientData(*(field[:, :n] for field in here))


Selector = Callable[[Look], Choice]
