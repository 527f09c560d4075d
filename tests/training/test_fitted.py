"""A finished run's models, read back: the same predictions, for every method of the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, corefed

from corefed.base.errors import UserError
from corefed.methods.registry import METHODS
from corefed.settings.config import resolve
from corefed.training import fitted, record, rounds
from corefed.training.setup import load

SETTINGS = ["clients=3", "rounds=1", "local_steps=2", "hidden=8", "evaluate_draws=3", "seeds=0,4"]


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "run"
    rounds.train(resolve(None, {"method": request.param, "device": "cpu"}, SETTINGS), folder)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    assert corefed("run", *SMALL, "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_predictions_are_those_of_the_run(run: Path) -> None:
    """Bit for bit, from files alone, for each seed and client, of each kind of model."""
    found = fitted.load(run)
    held_out = fitted.read_tensors(run, fitted.HELD_OUT)
    data = load(found.experiment.run)
    assert found.names == ["client 0", "client 1", "client 2"]
    assert found.kinds
    for row, name in enumerate(found.names * 2):
        x = data.test.x[row][data.test.weight[row] > 0]
        mine = held_out["row"] == row
        assert held_out["y"][mine].tolist() == data.test.y[row][data.test.weight[row] > 0].tolist()
        assert held_out["point"][mine].tolist() == list(range(len(x)))
        for kind in found.kinds:
            said = found.predict(name, x, seed=(0, 4)[row // 3], kind=kind)
            for field in ("mean", "total", "aleatoric", "epistemic"):
                there = held_out[f"{kind}.{field}"][mine]
                assert torch.equal(getattr(said, field).float(), there), (kind, field)


def test_point_estimates_have_the_recorded_accuracy(run: Path) -> None:
    """Both are functions of the same numbers; with draws of the weights these are other draws."""
    found = fitted.load(run)
    held_out = fitted.read_tensors(run, fitted.HELD_OUT)
    if found.method.noise[-1]:
        assert (held_out["personal.epistemic"] > 0).double().mean() > 0.99
        return
    metrics = record.read(run)[0]["metrics"]
    for kind in found.kinds:
        right = held_out[f"{kind}.mean"].argmax(-1) == held_out["y"]
        for g, accuracy in enumerate(metrics[f"{kind}_accuracy"]["per_seed"]):
            assert right[held_out["row"] // 3 == g].double().mean().item() == pytest.approx(
                accuracy
            )
        assert held_out[f"{kind}.epistemic"].abs().max() == 0


def test_what_each_client_has(run: Path) -> None:
    found = fitted.load(run)
    data = load(found.experiment.run)
    for row in range(6):
        about = found.clients[row // 3][row % 3]
        real = data.train.weight[row] > 0
        assert about["train"] == int(real.sum()) == sum(about["classes"])
        assert about["test"] == int((data.test.weight[row] > 0).sum())
        assert about["classes"][int(data.train.y[row][0])] > 0


def test_a_resumed_run_keeps_the_same_models(tmp_path: Path) -> None:
    plan = ("--set", "planned_rounds=2")
    corefed("run", *SMALL, "--rounds", 1, *plan, "--out", tmp_path / "grown")
    assert corefed("run", "--resume", tmp_path / "grown", "--rounds", 2, "-q").code == 0
    corefed("run", *SMALL, "--rounds", 2, "--out", tmp_path / "whole")
    for name in (fitted.MODELS, fitted.HELD_OUT, fitted.DATA):
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with CUDA here")
def test_cuda_predictions_are_made_again_on_the_host(tmp_path: Path) -> None:
    """The same draws on another device: float32 rounding, some 1e-6 of a probability."""
    flags = {"method": "coreset-pfedbayes", "device": "cuda"}
    rounds.train(resolve(None, flags, SETTINGS), tmp_path / "run")
    found = fitted.load(tmp_path / "run")
    held_out = fitted.read_tensors(tmp_path / "run", fitted.HELD_OUT)
    data = load(found.experiment.run)
    for row, name in enumerate(found.names * 2):
        x = data.test.x[row][data.test.weight[row] > 0]
        said = found.predict(name, x, seed=(0, 4)[row // 3])
        there = held_out["personal.mean"][held_out["row"] == row]
        torch.testing.assert_close(said.mean.float(), there, rtol=1e-3, atol=1e-4)


def test_unknown_clients_and_seeds(small: Path) -> None:
    found = fitted.load(small)
    x = torch.zeros(1, 64)
    with pytest.raises(UserError, match="no client 'cilent 1'; did you mean 'client 1'"):
        found.predict("cilent 1", x)
    with pytest.raises(UserError, match="no seed 7, only 0"):
        found.predict("client 1", x, seed=7)


def test_an_unfinished_run_says_how_to_go_on(small: Path) -> None:
    (small / record.SUMMARY).unlink()
    (small / fitted.MODELS).unlink()
    with pytest.raises(UserError, match="is not finished, so it has no fitted"):
        fitted.load(small)


def test_a_run_without_checkpoints_has_no_models(tmp_path: Path) -> None:
    corefed("run", *SMALL, "--set=checkpoint_every=0", "--out", tmp_path / "run")
    assert not (tmp_path / "run" / fitted.MODELS).exists()
    with pytest.raises(UserError, match="it was made without"):
        fitted.load(tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b'{"schema": 99}', b"\xff"])
def test_a_damaged_description(small: Path, content: bytes) -> None:
    (small / fitted.DATA).write_bytes(content)
    with pytest.raises(UserError, match=r"data\.json is (damaged|not of schema)"):
        fitted.load(small)


@pytest.mark.parametrize("name", [fitted.MODELS, fitted.HELD_OUT])
@pytest.mark.parametrize("length", [0, 4, 100])
def test_truncated_tensors(small: Path, name: str, length: int) -> None:
    (small / name).write_bytes((small / name).read_bytes()[:length])
    with pytest.raises(UserError, match="truncated or damaged"):
        fitted.read_tensors(small, name)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run of corefed"):
        fitted.load(tmp_path)


def test_the_description_is_plain_json(small: Path) -> None:
    about = json.loads((small / fitted.DATA).read_text())
    assert about.keys() == {"sha256", "schema", "preparations", "clients", "notes"}
    assert [each["name"] for each in about["clients"][0]] == [f"client {i}" for i in range(4)]
