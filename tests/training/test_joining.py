"""The models that workers keep are, joined, those that one process keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.types import Tree
from corefed.settings.config import resolve
from corefed.training import joining, saving, setup
from corefed.training.sharded import rows_of

CLIENTS, SEEDS, WORKERS = 5, 2, 3
TRAINED = (1, 2, 5, 7)
"""Clients that took part, by their row among all. Of three workers, the last has none of them."""


def state(clients: Any, rows: list[int]) -> None:
    """Give the clients that trained a state of their own, by their row among all."""
    for place, row in enumerate(rows):
        if row in TRAINED:
            tree = clients.take([place])
            changed = {k: v + (0.01 * row if v.is_floating_point() else 0) for k, v in tree.items()}
            clients.put([place], changed)


def temperature() -> Tree:
    every = torch.linspace(0.5, 1.5, CLIENTS * SEEDS, dtype=torch.float64)
    return {"temperature.personal": every, "temperature.global": every[:SEEDS].clone()}


@pytest.mark.parametrize("touched", [False, True])
def test_joined_models_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, touched: bool
) -> None:
    monkeypatch.setattr(joining, "PIECE", 1000)  # a few rows at a time
    settings = {"clients": CLIENTS, "rounds": 2, "seeds": "0,1", "hidden": "4", "evaluate_draws": 3}
    experiment = resolve(None, settings, [])
    whole = setup.prepare(experiment)
    run = whole.experiment.run
    state(whole.clients, list(range(CLIENTS * SEEDS)))
    kept = whole.clients.store.touched if touched else None
    saving.keep_models(tmp_path, whole.trees(whole.servers, temperature())._replace(touched=kept))
    expected = [load_file(tmp_path / name) for name in (joining.MODELS, joining.HELD_OUT)]

    owned = {}
    for rank in range(WORKERS):
        here = share(CLIENTS, WORKERS, rank)
        mine, rows = setup.prepare(experiment, share=lambda n, here=here: here), rows_of(run, here)
        state(mine.clients, rows)
        own = temperature()
        own["temperature.personal"] = own["temperature.personal"][rows]
        part = mine.clients.store.touched if touched else None
        trees = mine.trees(mine.servers, own)._replace(touched=part)
        joining.keep_part(tmp_path, str(rank), trees)
        if part is None or part.any():
            owned[str(rank)] = rows
    assert len(owned) == (2 if touched else 3)
    joining.join(tmp_path, owned, CLIENTS, temperature())
    assert not (tmp_path / joining.FOLDER).exists()
    for name, before in zip((joining.MODELS, joining.HELD_OUT), expected, strict=True):
        found = load_file(tmp_path / name)
        assert found.keys() == before.keys()
        for key, one in before.items():
            torch.testing.assert_close(found[key], one, rtol=1e-5, atol=1e-6, msg=key)
    assert ("rows" in expected[0]) == touched


def test_a_part_on_another_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing; all workers need the folder of the run"):
        joining.join(tmp_path, {"0-of-2": [0], "1-of-2": [1]}, 2, None)
