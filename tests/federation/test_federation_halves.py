"""The two halves of a federation without Flower between them, which need no network either."""

from __future__ import annotations

import csv
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed
from federation_calls import Call
from federation_points import deal

from corefed.base.errors import UserError
from corefed.federation import events, server, task_context
from corefed.federation.rules import Rules
from corefed.settings import config
from corefed.training import fitted, interrupt, record, rounds, saving

FLAGS: dict[str, Any] = {
    "method": "coreset-pfedbayes", "data": "digits", "partition": "iid", "clients": 2,
    "keep": 0.3, "rounds": 2, "local_steps": 20, "fraction": 0.3, "hidden": "16",
}  # fmt: skip


def federate(folder: Path, device: str) -> dict[str, Any]:
    """The summary of a run whose clients have what a simulation would deal them."""
    if not (folder / "data").exists():  # or else the run is resumed
        deal(config.resolve(flags=FLAGS).run, folder / "data")
    places = {
        f"client-{i}": task_context.ClientSettings(
            f"client-{i}",
            folder / f"state-{i}",
            str(folder / "data" / f"client-{i}.npz"),
            device,
            models=folder / f"models-{i}",
        )
        for i in range(FLAGS["clients"])
    }
    run = folder / "run"
    record.Folder(run).create(config.resolve(flags={**FLAGS, "data": "local"}))
    return server.federate(run, list(places), Rules(join_wait=0.0), Call(places))


def test_they_train_by_themselves(tmp_path: Path) -> None:
    summary = federate(tmp_path, "cpu")
    flags = {**FLAGS, "runtime": "loop"}
    simulated = rounds.train(config.resolve(flags=flags)).summary["metrics"]
    for name, value in simulated.items():
        assert summary["metrics"][name]["mean"] == pytest.approx(value["mean"], abs=1e-6)


def test_stops_after_a_round_and_goes_on_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file `stop` in the run's folder, as the live page puts it there, is noticed once."""
    whole = federate(tmp_path / "whole", "cpu")["metrics"]
    folder, train = tmp_path / "stopped", server.RemoteClients.train

    def asked(self: server.RemoteClients, t: int, *more: Any) -> Any:
        if t == 0:
            interrupt.ask(folder / "run")
        return train(self, t, *more)

    with monkeypatch.context() as patch:
        patch.setattr(server.RemoteClients, "train", asked)
        with pytest.raises(UserError, match="stopped after round 1, as its operator asked"):
            federate(folder, "cpu")
    last = events.read(folder / "run" / record.EVENTS)[-1]
    assert last["event"] == "stopped" and not (folder / "run" / record.SUMMARY).exists()
    interrupt.ask(folder / "run")  # of a time when nobody was there to notice
    went_on = federate(folder, "cpu")
    assert went_on["metrics"] == whole and went_on["rounds"] == FLAGS["rounds"]


def test_each_client_keeps_its_model(tmp_path: Path) -> None:
    """On its own disk, the one that a simulation would give it, and ready for `predict`."""
    federate(tmp_path, "cpu")
    flags = {**FLAGS, "runtime": "loop"}
    rounds.train(config.resolve(flags=flags), tmp_path / "simulated")
    simulated = fitted.load(tmp_path / "simulated")
    for i in range(FLAGS["clients"]):
        place = tmp_path / f"models-{i}" / "run"
        own = fitted.load(place)
        assert own.names == [f"client-{i}"]
        assert torch.allclose(own.models["personal.v"][0], simulated.models["personal.v"][i])
        points = tmp_path / "data" / f"client-{i}.npz"
        out = tmp_path / f"said-{i}.csv"
        result = corefed(
            "predict", place, "--client", own.names[0], "--input", points, "--out", out
        )
        assert result.code == 0, result.err
        said = list(csv.DictReader(out.read_text().splitlines()))
        held_out = fitted.read_tensors(place, fitted.HELD_OUT)
        assert [int(row["predicted"]) for row in said] == held_out["personal.mean"].argmax(
            -1
        ).tolist()
        metrics = record.read(place)[0]["metrics"]
        right = (held_out["personal.mean"].argmax(-1) == held_out["y"]).double().mean()
        assert metrics["personal_accuracy"]["mean"] == pytest.approx(right.item())


def test_a_disk_without_room_for_the_model_does_not_spoil_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "keep_models", full)
    assert "personal_accuracy" in federate(tmp_path, "cpu")["metrics"]
    assert "The model of this run is not kept" in capfd.readouterr().err


def test_flower_is_not_imported_with_them() -> None:
    program = (
        "import sys, corefed.federation.client, corefed.federation.server\n"
        "sys.exit(any(name.split('.')[0] in ('flwr', 'cryptography') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with CUDA here")
def test_cuda_at_the_clients(tmp_path: Path) -> None:
    """A client's device is its own affair: what it sends is on no device, and as good."""
    on_cpu, on_gpu = (federate(tmp_path / device, device) for device in ("cpu", "cuda"))
    one, two = (each["metrics"]["personal_nll"]["mean"] for each in (on_cpu, on_gpu))
    assert abs(one - two) < 0.2 * one  # other random numbers, the same training
    state = next((tmp_path / "cuda").glob("state-0/*/round-2.safetensors"))
    assert state.stat().st_size > 0
