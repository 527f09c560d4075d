"""Whether steps are compiled, what is said, and that a network that cannot be still trains."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from corefed.base.errors import UserError
from corefed.settings.config import resolve
from corefed.settings.run import Run
from corefed.training import compiling, rounds
from corefed.training.compiled import Steps

GPU = Run(device="cuda", clients=10, rounds=100, local_steps=20)
TINY = {"method": "pfedbayes", "rounds": 2, "local_steps": 2, "clients": 3, "hidden": (5,)}


@pytest.fixture
def tools(monkeypatch):
    """A machine with everything that the compiler needs."""
    monkeypatch.setattr(compiling, "missing_for", lambda device: "")


@pytest.mark.parametrize(
    ("changes", "weights", "expected"),
    [
        ({}, 80_000, "graph"),  # 1.2 s saved
        ({"rounds": 1000}, 80_000, "on"),
        ({"clients": 1000}, 80_000, "on"),
        ({"clients": 1000, "cohort": 10}, 80_000, "graph"),
        ({"seeds": (0, 1, 2), "rounds": 600}, 80_000, "on"),
        ({"compile": "off", "rounds": 10_000}, 80_000, "off"),
        ({"compile": "on"}, 10, "on"),
        ({"compile": "graph", "rounds": 10_000}, 80_000, "graph"),
        ({"runtime": "loop", "rounds": 10_000}, 80_000, "off"),
        ({"device": "cpu", "rounds": 10_000}, 80_000, "off"),
        ({"device": "cpu", "compile": "on"}, 10, "on"),
    ],
)
def test_long_runs_are_compiled(tools, changes, weights, expected):
    run = dataclasses.replace(GPU, **changes)
    assert compiling.decide(run, weights, stackable=True) == (expected, "")


def test_what_is_missing_is_said_once_it_matters(monkeypatch):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    long = dataclasses.replace(GPU, rounds=10_000)
    how, note = compiling.decide(long, 80_000, stackable=True)
    assert how == "graph" and "Triton" in note
    assert compiling.decide(GPU, 80_000, stackable=True) == ("graph", "")
    with pytest.raises(UserError, match="compile=on needs Triton"):
        compiling.decide(dataclasses.replace(GPU, compile="on"), 80_000, stackable=True)


def test_without_a_compiler_on_a_cpu(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    run = dataclasses.replace(GPU, device="cpu", compile="on")
    with pytest.raises(UserError, match="a C\\+\\+ compiler"):
        compiling.decide(run, 10, stackable=True)
    assert (
        compiling.decide(dataclasses.replace(run, compile="auto"), 10, stackable=True)[0] == "off"
    )


def test_graphs_are_for_a_gpu(tools):
    with pytest.raises(UserError, match="for a GPU"):
        compiling.decide(
            dataclasses.replace(GPU, device="cpu", compile="graph"), 10, stackable=True
        )


def test_settings_that_cannot_be_tensors(tools):
    assert compiling.decide(GPU, 80_000, stackable=False) == ("off", "")
    with pytest.raises(UserError, match="cannot be"):
        compiling.decide(dataclasses.replace(GPU, compile="on"), 80_000, stackable=False)


def test_a_step_that_cannot_be_compiled_is_taken_as_written(monkeypatch, capsys):
    """The compiler fails: one note, and the results of plain steps to the last bit."""

    def broken(self, settings, example):
        raise RuntimeError("no such operation\nand a long trace")

    expected = rounds.train(resolve(flags={**TINY, "compile": "off"}))
    monkeypatch.setattr(Steps, "_program", broken)
    monkeypatch.setattr(compiling, "missing_for", lambda device: "")
    found = rounds.train(resolve(flags={**TINY, "compile": "on"}))
    assert capsys.readouterr().err.count("could not be compiled") == 1
    assert found.summary["metrics"] == expected.summary["metrics"]


def test_memory_that_runs_out_is_not_taken_for_a_failed_compiler(monkeypatch):
    def full(self, settings, example):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Steps, "_program", full)
    monkeypatch.setattr(compiling, "missing_for", lambda device: "")
    with pytest.raises(torch.OutOfMemoryError):
        rounds.train(resolve(flags={**TINY, "compile": "on"}))


@pytest.mark.skipif(bool(compiling.missing_for(torch.device("cpu"))), reason="needs a C++ compiler")
def test_compiled_steps_are_the_steps_on_a_cpu():
    """Two threads, each with its own clients and state, and one compiled program.

    By SGD: Adam makes whole steps of gradients that are nearly 0, whose sign rounding decides.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        flags = {
            **TINY, "hidden": (500,), "clients": 4, "cohort": 3, "schedule": "linear",
            "optimizer": "sgd", "eta_1": 0.01, "eta_2": 0.01,
        }  # fmt: skip
        plain, fused = (
            rounds.train(resolve(flags={**flags, "compile": how})) for how in ("off", "on")
        )
        assert not fused.setup.clients.compiled.steps.given_up
        for name, value in plain.servers[0].items():
            torch.testing.assert_close(fused.servers[0][name], value, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)
