"""Rules for every selector: clients that keep all points, unusable choices, clients per call.

With k >= n all points are kept with weight 1, and the selector is not called. If a selector gives a
client no point, or a weight that is not finite (all gradients are 0, the posterior has diverged),
that client gets a simple random sample with weights n / k.

A call of the selector has as many clients as have `CACHE` points together on a CPU, so that its
numbers stay in the cache, and `POINTS` points on other devices.
"""

from __future__ import annotations

import torch

from corefed.base.types import ClientData, places
from corefed.selectors import sampling
from corefed.selectors.frame import Choice, Look, Selector, trim

CACHE = 1 << 11
"""Points of all clients together, on a CPU."""
POINTS = 1 << 17
"""Points of all clients together, so that 4096 numbers each take 2 GiB."""


def guarded(selector: Selector) -> Selector:
    """The selector under the rules above."""

    def select(look: Look) -> Choice:
        whole = look.k >= look.n
        weight = torch.where(whole.unsqueeze(-1), look.mask.to(look.data.weight.dtype), 0.0)
        memory = look.memory.clone()
        due = (~whole).nonzero().squeeze(-1).tolist()
        each = max(1, _room(look.q.device) // look.mask.shape[1])
        for start in range(0, len(due), each):
            rows = due[start : start + each]
            own = take_clients(look, rows)
            choice = _or_random(own, selector(own))
            n = own.mask.shape[1]
            weight[rows, :n] = choice.weight
            memory[rows, :n] = choice.memory
        return Choice(weight, memory)

    return select


def fits_at_once(data: ClientData) -> bool:
    """Whether a call of the selector may have all of these clients."""
    return data.weight.numel() <= _room(data.weight.device)


def _room(device: torch.device) -> int:
    return CACHE if device.type == "cpu" else POINTS


def take_clients(look: Look, rows: list[int]) -> Look:
    """Some of the clients, padded to the largest of them only."""
    data, here = trim(look.data, rows), places(rows)
    return look._replace(
        q=look.q[here],
        z=look.z[here],
        data=data,
        k=look.k[here],
        memory=look.memory[here][:, : data.weight.shape[1]],
        streams=look.streams.subset(rows),
        before=None if look.before is None else look.before[here],
        unseen=None if look.unseen is None else look.unseen[here][:, : data.weight.shape[1]],
        room=None if look.room is None else look.room[here],
    )


def _or_random(look: Look, choice: Choice) -> Choice:
    usable = choice.weight.isfinite().all(-1) & (choice.weight > 0).any(-1)
    rows = (~usable).nonzero().squeeze(-1).tolist()
    if not rows:
        return choice
    own = take_clients(look, rows)
    weight = choice.weight.clone()
    weight[rows] = 0.0
    weight[rows, : own.mask.shape[1]] = sampling.random(own).weight
    return choice._replace(weight=weight)
