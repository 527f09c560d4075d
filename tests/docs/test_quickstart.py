"""`make run`: what it compares is what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from corefed.settings.config import resolve
from corefed.training.setup import prepare

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def test_the_random_subset_is_redrawn_as_often_as_coresets_are_reselected() -> None:
    """So that only the choice of points differs between the two."""
    (redrawn,) = map(int, re.findall(r"redraw_every=(\d+)", MAKEFILE))
    assert "--data digits --clients 10" in MAKEFILE
    flags = {"method": "coreset-pfedbayes", "data": "digits", "clients": 10, "fraction": 0.2}
    setup = prepare(resolve(flags=flags))
    run, clients = setup.experiment.run, setup.clients
    rounds = 1 + 2 * redrawn // run.local_steps
    for t in range(rounds):
        clients.train(t, setup.servers, [range(run.clients)])
    expected = -(-rounds * run.local_steps // redrawn)
    found = clients.private["subset.refreshes"]
    assert torch.equal(found, torch.full_like(found, expected)), found
