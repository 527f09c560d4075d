"""Runs of very many clients: a sample is evaluated, and only who took part is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.settings.config import resolve
from corefed.settings.run import Run
from corefed.training import fitted, others, rounds, sampling, setup
from corefed.training.loop import Line

SMALL = ["local_steps=2", "hidden=6", "evaluate_draws=3", "device=cpu"]


def train(*words: str, out: Path | None = None) -> tuple[rounds.Result, list[Line]]:
    lines: list[Line] = []
    experiment = resolve(None, {}, [*SMALL, *words])
    return rounds.train(experiment, out, on_round=lines.append), lines


# --- evaluation -----------------------------------------------------------------------------------


def test_a_sample_of_clients_is_evaluated_as_if_all_were() -> None:
    words = ["clients=7", "rounds=2", "seeds=0,4", "validation=0.2", "evaluate_every=1"]
    (_, every), (found, some) = train(*words), train(*words, "evaluate_clients=3")
    size = found.setup.data.test.size.view(2, -1).tolist()
    for whole, line in zip(every, some, strict=True):
        assert line["evaluated_clients"] == 3
        for g, mine in enumerate(line["clients"]):
            who = [i for i, value in enumerate(mine) if value is not None]
            assert len(who) == 3
            assert who == [i for i, value in enumerate(some[0]["clients"][g]) if value is not None]
            assert [mine[i] for i in who] == [whole["clients"][g][i] for i in who]
            right = sum(size[g][i] * mine[i] for i in who)
            pooled = line["metrics"]["personal_accuracy"][g]
            assert pooled == pytest.approx(right / sum(size[g][i] for i in who))
    assert found.summary["evaluated_clients"] == 3
    told = some[-1]["calibration"]
    for g, temperatures in enumerate(told["temperature"]["personal"]):
        own = [some[-1]["clients"][g][i] is not None for i in range(7)]
        rest = [T for T, mine in zip(temperatures, own, strict=True) if not mine]
        assert rest == [pytest.approx(told["pooled"]["personal"][g])] * 4


def test_the_sample_depends_on_the_seed_alone() -> None:
    def draw(**changed: Any) -> list[int] | None:
        return sampling.evaluated(Run(**{"evaluate_clients": 20, "seeds": (0, 1), **changed}), 1000)

    first = draw()
    assert first is not None
    assert first == draw(rounds=7)
    assert first == sorted(set(first))
    assert [row // 1000 for row in first] == [0] * 20 + [1] * 20
    assert first[:20] == draw(seeds=(0,))
    assert first[:20] != [row - 1000 for row in first[20:]]
    assert draw(evaluate_clients=0) is None
    assert draw(evaluate_clients=1000) is None


def test_tables_say_that_a_sample_was_evaluated(tmp_path: Path) -> None:
    told = corefed(
        "run", "--clients", 7, "--rounds", 1, "--set", "evaluate_clients=3",
        "--set", "local_steps=1", "--set", "hidden=4", "--out", tmp_path / "run",
    )  # fmt: skip
    assert told.code == 0
    assert "evaluated on 3 of 7 clients" in " ".join(told.out.split())
    compared = corefed("compare", tmp_path / "run")
    assert "evaluated on 3 of 7 clients" in " ".join(compared.out.split())


def test_others_are_a_bounded_number_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "NEIGHBOURS", 2)
    visited = []

    def there(rows: list[int]) -> dict[str, torch.Tensor]:
        visited.append(rows)
        return {"nll": torch.zeros(len(rows), 1)}

    others.score(there, [0, 3, 8], per_run=5)
    assert visited == [[1, 4, 9], [2, 0, 5]]
    assert others.roll(torch.arange(10).view(-1, 1), [3, 8], 5).tolist() == [[4, 0], [9, 5]]
    found, lines = train("method=independent", "clients=5", "rounds=1")
    assert any("the next 2 of the 4 other clients" in note for note in found.setup.data.notes)
    assert 0 < lines[-1]["metrics"]["others_accuracy"][0] < 1


# --- what is saved --------------------------------------------------------------------------------

FEW = ["clients=5", "cohort=2", "rounds=2", "seeds=0,4", "validation=0.2"]


@pytest.mark.parametrize("method", ["coreset-pfedbayes", "per-fedavg", "fedavg"])
def test_a_large_run_saves_the_clients_that_took_part(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*FEW, f"method={method}"]
    train(*words, out=tmp_path / "whole")
    monkeypatch.setattr(setup, "WHOLE", 0)
    found, _ = train(*words, "client_state=file", out=tmp_path / "part")
    took_part = found.setup.clients.store.touched.nonzero().flatten()
    assert 0 < len(took_part) < 10
    whole, part = (fitted.load(tmp_path / name) for name in ("whole", "part"))
    assert torch.equal(part.models["rows"], took_part)
    for name, value in whole.models.items():
        of_clients = name.startswith("personal.") or name == "weight"
        assert torch.equal(part.models[name], value[took_part] if of_clients else value), name
    before, after = (fitted.read_tensors(f.folder, fitted.HELD_OUT) for f in (whole, part))
    kept = torch.isin(before["row"], took_part)
    for name, value in before.items():
        assert torch.equal(after[name], value[kept]), name
    x = torch.rand(4, 64)
    for row in range(10):
        seed, client = (0, 4)[row // 5], f"client {row % 5}"
        kind = whole.kinds[0] if row in took_part else "global"
        expected = whole.predict(client, x, seed=seed, kind=kind)
        assert torch.equal(part.predict(client, x, seed=seed).mean, expected.mean)


def test_a_client_without_any_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "WHOLE", 0)
    found, _ = train("method=independent", *FEW[:3], out=tmp_path / "run")
    took_part = found.setup.clients.store.touched.tolist()
    kept = fitted.load(tmp_path / "run")
    out = took_part.index(False)
    with pytest.raises(UserError, match=rf"'client {out}' took part in no round of the run in"):
        kept.predict(f"client {out}", torch.rand(2, 64))
    assert len(kept.predict(f"client {took_part.index(True)}", torch.rand(2, 64)).mean) == 2


def test_the_report_of_a_large_run_shows_those_who_took_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "WHOLE", 0)
    train(*FEW, out=tmp_path / "run")
    told = corefed("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert told.code == 0, told.err
    models = fitted.read_tensors(tmp_path / "run", fitted.MODELS)
    weight = fitted.weights(models, 5)
    mine = [row for row in models["rows"].tolist() if row < 5]
    assert (weight > 0).any(1).nonzero().flatten().tolist() == mine


def test_data_json_counts_as_the_data_are(tmp_path: Path) -> None:
    found, _ = train("clients=3", "rounds=1", "seeds=0,4", out=tmp_path / "run")
    data, about = found.setup.data, json.loads((tmp_path / "run" / "data.json").read_text())
    rows = [client for seed in about["clients"] for client in seed]
    for row, client in enumerate(rows):
        real = data.train.weight[row] > 0
        assert client["train"] == int(real.sum())
        assert client["test"] == int((data.test.weight[row] > 0).sum())
        assert client["classes"] == [int((data.train.y[row][real] == c).sum()) for c in range(10)]


def test_some_clients_of_the_data_are_a_view_where_they_can_be() -> None:
    data = ClientData(torch.rand(5, 2, 3), torch.rand(5, 2), torch.rand(5, 2))
    assert data.of(range(1, 4)).x.data_ptr() == data.x[1].data_ptr()
    assert torch.equal(data.of([4, 0]).y, data.y[[4, 0]])
