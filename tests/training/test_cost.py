"""The cost of a run in passes: by hand, for every method, and from records of older versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corefed import resolve, train
from corefed.base.passes import FORWARD, STEP
from corefed.methods import registry
from corefed.selectors import renewal
from corefed.settings.config import to_dict
from corefed.training import cost, record

TINY = {
    "clients": 3, "rounds": 2, "local_steps": 4, "hidden": "4", "evaluate_draws": 2, "seeds": "0,1",
    "device": "cpu",
}  # fmt: skip


def run(**flags: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    summary = train(resolve(flags={**TINY, **flags}), on_round=lines.append).summary
    return summary, lines


def test_a_forward_pass_counts_a_third() -> None:
    """The budget of reselection and the cost of a run are counted in the same unit."""
    assert FORWARD * STEP == 1 and renewal.STEP is STEP


@pytest.mark.parametrize("method", registry.METHODS)
def test_every_method(method: str) -> None:
    """Gradients and a third of selection's forward passes; a bound where those are unknown."""
    flags = {"fraction": 0.5} if "fraction" in to_dict(resolve(flags={"method": method})) else {}
    summary, lines = run(method=method, **flags)
    spent = summary["cost"]
    looked = spent.get("selection_examples", 0.0)
    assert spent["passes"] == pytest.approx(spent["examples_processed"] + looked / 3)
    assert spent["passes"] == pytest.approx(sum(sum(line["passes"]) for line in lines))
    assert spent["passes_complete"] == (not method.startswith("submodular"))
    assert (looked > 0) == method.startswith("coreset-")
    found = cost.of_summary(summary)
    assert found == (spent["passes"], spent["passes_complete"])
    assert str(found).startswith("≥ ") != found.complete
    assert ("at least" in found.words) != found.complete


def test_draws_of_the_weights_are_passes() -> None:
    """With K = 3 each step goes through the network three times; FedAvg has no draws."""
    one, three = (run(method="pfedbayes", monte_carlo=k)[0]["cost"] for k in (1, 3))
    assert three["examples_processed"] == one["examples_processed"]
    assert three["passes"] == 3 * one["passes"] == 3 * one["examples_processed"]
    subset = run(method="random-subset", base="fedavg")[0]["cost"]
    assert subset["passes"] == subset["examples_processed"]


def test_the_papers_selection_is_not_counted() -> None:
    """Algorithm 1 trains on all data to choose points; that must not look cheap."""
    summary, _ = run(preset="paper", rounds=1, seeds="0", draws=8, max_iterations=5)
    assert not cost.of_summary(summary).complete
    assert "selection_examples" not in summary["cost"]


def test_passes_over_the_data_and_the_whole_time(tmp_path: Path) -> None:
    experiment = resolve(flags={**TINY, "method": "pfedbayes"})
    summary = train(experiment, tmp_path / "run").summary
    about = json.loads((tmp_path / "run" / "data.json").read_text())
    points = sum(client["train"] for seed in about["clients"] for client in seed)
    spent = summary["cost"]
    assert spent["passes_over_data"] == pytest.approx(spent["passes"] / points)
    assert spent["wall_seconds"] > spent["seconds"] + spent["evaluate_seconds"]
    assert record.read(tmp_path / "run")[0]["cost"] == spent


def test_a_resumed_run_keeps_the_time_before(tmp_path: Path) -> None:
    experiment = resolve(flags={**TINY, "method": "pfedbayes"})
    train(experiment, tmp_path / "run", stop=lambda: True)
    lines, _ = record.read_lines(tmp_path / "run" / record.ROUNDS)
    (first,) = lines
    spent = train(experiment, tmp_path / "run", resume=True).summary["cost"]
    assert spent["wall_seconds"] > spent["seconds"] + spent["evaluate_seconds"] > first["seconds"]


OLD = {"round": 1, "examples": [30, 60], "metrics": {}}


@pytest.mark.parametrize(
    ("values", "line", "passes", "complete"),
    [
        ({}, {}, [30, 60], True),
        ({"monte_carlo": 2}, {}, [60, 120], True),
        ({"fraction": 0.1}, {"selection_examples": [3.0, 9.0]}, [31, 63], True),
        ({"fraction": 0.1}, {}, [30, 60], False),
        ({"fraction": 1.0}, {}, [30, 60], True),
    ],
)
def test_records_of_older_versions(
    values: dict[str, Any], line: dict[str, Any], passes: list[float], complete: bool
) -> None:
    (found,) = cost.completed(values, [{**OLD, **line}])
    assert found["passes"] == pytest.approx(passes)
    total = cost.of_lines(values, [{**OLD, **line}])
    assert (total["passes"], total["passes_complete"]) == (pytest.approx(sum(passes)), complete)
    parts = {"examples_processed": 90}
    if "selection_examples" in line:
        parts["selection_examples"] = sum(line["selection_examples"])
    summary = {"cost": parts, "config": values}
    assert cost.of_summary(summary) == (pytest.approx(sum(passes)), complete)


def test_a_line_that_has_its_passes_is_left_alone() -> None:
    line = {**OLD, "passes": [1.0, 2.0]}
    assert cost.completed({"monte_carlo": 7}, [line]) == [line]
