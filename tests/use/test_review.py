"""The promise that a client's flag ends with holds, whichever points it comes from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import binom

from corefed.use import review

REPEATS = 2000
ALLOWED = binom.ppf(0.999, REPEATS, 0.1) / REPEATS
"""A promise that is broken with probability 0.1 exactly exceeds this once in a thousand tests."""


@pytest.mark.parametrize("rate", [0.0501, 0.0502])
def test_all_attempts_share_one_budget(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncertainties that know nothing, and an error just above a target: every attempt that passes
    breaks its promise. With the whole level for each attempt 13 to 15 % are broken."""
    clients, points = 6, 1000
    row = torch.arange(clients).repeat_interleave(points)
    model: Any = SimpleNamespace(
        names=[f"client {i}" for i in range(clients)],
        kinds=("personal",),
        place=lambda client, seed=None: (0, 0),
    )
    g = torch.Generator().manual_seed(0)
    settings = review.PredictionSettings()
    broken, sources = 0, set()
    for _ in range(REPEATS):
        u, draw = torch.rand(2, clients * points, generator=g)
        held = u, draw < rate, row
        monkeypatch.setattr(review, "held_out", lambda *_, held=held: held)
        found = review.flag_for(model, "client 0", settings)
        sources.add(found.source)
        broken += found.threshold.kept > 0 and rate > found.target
    assert broken / REPEATS <= ALLOWED
    assert {"client", "run"} <= sources
