"""Points by class: the groups within which CRAIG and herding choose, and how k is split.

A client's k is split between its classes in proportion to their sizes, by largest remainders, with
at least one point for each class. If k is below the number of classes, and in a regression,
all points of a client are one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corefed.models.likelihood import Categorical
from corefed.selectors.frame import Look


class Part(NamedTuple):
    """Points that are chosen from together."""

    client: int  # row in the call
    at: Tensor  # [m] which of the client's points; on the host
    k: int  # how many to keep, from 1 to m


class Groups(NamedTuple):
    """G parts side by side, padded to the largest."""

    at: Tensor  # [G, m] positions in all clients' points, concatenated; 0 where not real
    real: Tensor  # [G, m] bool
    k: Tensor  # [G]
    most: int  # the largest k

    def place(self, weight: Tensor, w: Tensor) -> None:
        """Put the groups' weights w [G, m], 0 where not real, into weight [C, n]."""
        weight.view(-1).scatter_add_(0, self.at.flatten(), w.to(weight.dtype).flatten())


def parts(look: Look) -> list[Part]:
    """The classes of every client with their k."""
    found = []
    mask, k = look.mask.cpu(), look.k.tolist()
    by_class = isinstance(look.model.likelihood, Categorical)
    y = look.data.y.cpu() if by_class else torch.zeros(mask.shape, dtype=torch.int64)
    for client, (real, labels, keep) in enumerate(zip(mask, y, k, strict=True)):
        own = real.nonzero().squeeze(-1)
        labels = labels[own]
        members = [own[labels == label] for label in labels.unique()]
        if keep < len(members):
            members = [own]
        shares = apportion([len(at) for at in members], keep)
        found += [Part(client, at, share) for at, share in zip(members, shares, strict=True)]
    return found


def apportion(sizes: Sequence[int], k: int) -> list[int]:
    """k <= sum(sizes) places in proportion to the sizes, by largest remainders, ties to the first.

    Each class gets at least one if k allows it, and at most its size.
    """
    least = int(k >= len(sizes))
    shares = [least] * len(sizes)
    shared = set(range(len(sizes)))
    while True:  # those whose quota is below the least get the least
        total, left = sum(sizes[c] for c in shared), k - least * (len(sizes) - len(shared))
        small = {c for c in shared if sizes[c] * left < least * total}
        if not small:
            break
        shared -= small
    quotas = {c: divmod(sizes[c] * left, total) for c in sorted(shared)}
    order = sorted(quotas, key=lambda c: -quotas[c][1])
    for c, (whole, _) in quotas.items():
        shares[c] = whole
    for c in order[: k - sum(shares)]:
        shares[c] += 1
    return shares


def stacks(look: Look, found: list[Part], room: int, width: int = 0) -> list[Groups]:
    """Parts of similar size side by side: a stack holds at most `room` numbers, or a single part.

    A point takes `width` numbers, or as many as its part has points where that is 0.
    """
    n, device = look.mask.shape[1], look.q.device
    order = sorted(found, key=lambda part: -len(part.at))
    groups = []
    while order:
        largest = len(order[0].at)
        each = max(1, room // (largest * (width or largest)))
        groups.append(_stacked(order[:each], n, device))
        order = order[each:]
    return groups


def _stacked(found: list[Part], n: int, device: torch.device) -> Groups:
    at = pad_sequence([part.at + part.client * n for part in found], batch_first=True)
    sizes = torch.tensor([len(part.at) for part in found])
    k = torch.tensor([part.k for part in found])
    real = torch.arange(at.shape[1]) < sizes.unsqueeze(-1)
    return Groups(at.to(device), real.to(device), k.to(device), int(k.max()))
