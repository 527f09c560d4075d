"""Several settings side by side are each setting alone.

Tolerances are those of `test_runtimes.py` in float32: stacked clients add in another order, and
settings that differ are tensors, which take another path through Adam.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from method_rows import SINGLE, assert_same_tree

from corefed.settings import space
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.training import rounds
from corefed.training.setup import Setup, prepare
from corefed.training.together import Together

TINY: dict[str, Any] = {
    "data": "digits", "clients": 3, "keep": 0.3, "local_steps": 3, "batch_size": 16, "hidden": "6",
    "rounds": 3, "seeds": "0,2", "evaluate_draws": 2, "validation": 0.2, "device": "cpu",
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "pfedbayes": (
        {"method": "pfedbayes"},
        [{}, {"eta_1": 0.03, "eta_2": 0.001}, {"zeta": 0.05, "initial_rho": -3.0, "anneal": 0.5}],
    ),
    "coreset-pfedbayes": (
        {"method": "coreset-pfedbayes", "fraction": 0.3, "rounds": 1},
        [{}, {"eta_1": 0.03, "zeta": 0.05}, {"initial_rho": -3.0}],
    ),
    "fedavg": ({"method": "fedavg"}, [{}, {"learning_rate": 0.05}, {"initial_std": 0.2}]),
    "independent": ({"method": "independent"}, [{}, {"learning_rate": 0.2}]),
    "pfedme": (
        {"method": "pfedme"},
        [{}, {"penalty": 10.0}, {"personal_rate": 0.005, "learning_rate": 0.01}],
    ),
    "per-fedavg": ({"method": "per-fedavg"}, [{}, {"alpha": 0.1}, {"beta": 0.03}]),
    "per-fedavg hf": ({"method": "per-fedavg", "variant": "hf"}, [{}, {"alpha": 0.1}]),
    "bnfed": ({"method": "bnfed"}, [{}, {"learning_rate": 0.003}, {"learning_rate": 0.03}]),
    "random-subset": ({"method": "random-subset", "fraction": 0.5}, [{}, {"eta_1": 0.03}]),
    "a schedule": (
        {"method": "pfedbayes", "schedule": "cosine", "warmup": 1},
        [{}, {"eta_1": 0.03}, {"anneal": 0.0}],
    ),
    "a cohort": ({"method": "pfedbayes", "cohort": 2}, [{}, {"eta_1": 0.03}]),
}


def prepared(
    given: dict[str, Any], changes: list[dict[str, Any]]
) -> tuple[Setup, list[Experiment]]:
    setup = prepare(resolve(flags={**TINY, **given}))
    return setup, [space.changed(setup.experiment, each) for each in changes]


@pytest.mark.parametrize("case", CASES)
def test_stacked_settings_are_each_setting_alone(case: str) -> None:
    setup, experiments = prepared(*CASES[case])
    together = Together(setup, [each.settings for each in experiments])
    for t in range(setup.experiment.run.rounds):
        losses = together.train(t)
    assert setup.data.validation is not None
    metrics = together.evaluate(setup.experiment.run.rounds - 1, setup.data.validation)
    for k, each in enumerate(experiments):
        lines: list[dict[str, Any]] = []
        alone = rounds.train(each, data=setup.data, on_round=lines.append)
        for g, server in enumerate(alone.servers):
            assert_same_tree(together.servers[2 * k + g], server, **SINGLE)
            for name, values in lines[-1]["validation"].items():
                assert metrics[k][g][name] == pytest.approx(values[g], rel=1e-3, abs=1e-4)
        rows = slice(6 * k, 6 * (k + 1))
        private = {name: value[rows] for name, value in together.clients.private.items()}
        assert_same_tree(private, alone.setup.clients.private, **SINGLE)
        torch.testing.assert_close(losses[k].tolist(), lines[-1]["loss"], rtol=1e-4, atol=1e-5)
        assert together.passes()[k] == pytest.approx(alone.summary["cost"]["passes"])


def test_those_that_are_kept_go_on_as_they_were() -> None:
    changes = [{}, {"eta_1": 0.03}, {"zeta": 0.1}, {"eta_1": 0.001}]
    setup, experiments = prepared({"method": "pfedbayes"}, changes)
    settings = [each.settings for each in experiments]
    whole, part = Together(setup, settings), Together(setup, settings)
    for t in range(3):
        whole.train(t)
        part.train(t)
        if t == 0:
            part.keep([3, 1])
            part.park()
            part.wake()
    for k, kept in enumerate([3, 1]):
        for g in range(2):
            assert_same_tree(part.servers[2 * k + g], whole.servers[2 * kept + g], **SINGLE)
        assert part.passes()[k] == whole.passes()[kept]


@pytest.mark.parametrize("method", ["fedavg", "coreset-pfedbayes", "bnfed", "pfedme"])
def test_a_run_that_diverges_leaves_the_others_alone(method: str) -> None:
    rate = "eta_1" if method == "coreset-pfedbayes" else "learning_rate"
    given = {"method": method, "seeds": "0"}
    extra = {"optimizer": "sgd"} if method == "coreset-pfedbayes" else {}
    setup, experiments = prepared({**given, **extra}, [{}, {rate: 1e30}])
    together = Together(setup, [each.settings for each in experiments])
    for t in range(2):
        losses = together.train(t)
        if losses.isnan().any():
            break
    assert losses[0].isfinite().all() and losses[1].isnan().all()
    assert all(value.isnan().all() for value in together.servers[1].values())
    together.keep([0])
    assert together.train(t + 1).isfinite().all()
    assert setup.data.validation is not None
    ((left,),) = together.evaluate(t + 1, setup.data.validation)
    assert all(map(math.isfinite, left.values()))
