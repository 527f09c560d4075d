"""Which clients are evaluated: all, or a random sample that is the same in every round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corefed.base import rng
from corefed.settings.run import Run


def evaluated(run: Run, clients: int) -> list[int] | None:
    """Rows of the evaluated clients, ascending, for `clients` per seed; None: all of them."""
    if not 0 < run.evaluate_clients < clients:
        return None
    return [
        g * clients + i
        for g, seed in enumerate(run.seeds)
        for i in _draw(seed, clients, run.evaluate_clients)
    ]


def _draw(seed: int, clients: int, size: int) -> Sequence[int]:
    generator = rng.generator(seed, 0, rng.SERVER, "evaluated clients")
    chosen: list[int] = torch.randperm(clients, generator=generator)[:size].sort().values.tolist()
    return chosen
