"""AUROC, sensitivity and the others on points whose answers are known, and where they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, corefed

from corefed.training import fitted
from corefed.use import classification
from corefed.use.classification import Predicted
from corefed.use.export import package


def two(p: list[float], y: list[int], client: list[int] | None = None) -> Predicted:
    positive = np.array(p)
    whose = np.zeros(len(y), dtype=int) if client is None else np.array(client)
    return Predicted(np.array(y), np.stack([1 - positive, positive], 1), whose)


def test_by_hand() -> None:
    """Of four pairs of ill and well, three are in order; at 0.5 one ill is missed."""
    found = two([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0])
    told = classification.measure(found, ("well", "ill"), None)
    ill = told["classes"]["ill"]
    assert ill["auroc"]["value"] == 0.75
    assert ill["auprc"]["value"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert ill["sensitivity"]["value"] == ill["specificity"]["value"] == 0.5
    assert ill["f1"]["value"] == 0.5
    assert ill["threshold"] == 0.5
    assert told["confusion"] == [[1, 1], [1, 1]]
    low, high = ill["sensitivity"]["interval"]
    assert low == pytest.approx(0.0945, abs=1e-3) and high == pytest.approx(0.9055, abs=1e-3)


def test_a_threshold_is_chosen_on_validation_points() -> None:
    """Rare and never above 0.5: at 0.5 nobody is found, at the chosen one everybody."""
    validation = two([0.3, 0.25, 0.1, 0.05], [1, 1, 0, 0])
    at = classification.thresholds(validation, 2)
    assert at is not None and at[1] == 0.25
    found = two([0.35, 0.28, 0.2, 0.01], [1, 1, 0, 0])
    blind = classification.measure(found, ("well", "ill"), None)["classes"]["ill"]
    seeing = classification.measure(found, ("well", "ill"), at)["classes"]["ill"]
    assert (blind["sensitivity"]["value"], seeing["sensitivity"]["value"]) == (0, 1)
    assert seeing["specificity"]["value"] == 1
    assert classification.thresholds(None, 2) is None


def test_classes_that_are_absent_or_alone() -> None:
    told = classification.measure(two([0.9, 0.2], [1, 1]), ("well", "ill"), None)
    assert told["classes"]["ill"]["auroc"] == {"value": None, "interval": None}
    assert told["classes"]["ill"]["specificity"] == {"value": None, "interval": None}
    assert told["classes"]["well"]["f1"]["value"] is None
    assert told["auroc"] is None


def test_several_classes_go_by_the_most_probable() -> None:
    p = np.array([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.45, 0.1, 0.45]])
    found = Predicted(np.array([0, 1, 2]), p, np.zeros(3, dtype=int))
    told = classification.measure(found, ("a", "b", "c"), None, intervals=False)
    assert told["classes"]["a"]["sensitivity"]["value"] == 1
    assert told["classes"]["c"]["sensitivity"]["value"] == 0
    assert told["classes"]["a"]["threshold"] is None
    assert told["confusion"] == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_intervals_draw_whole_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six clients, each all right or all wrong: points drawn one by one would seem too sure."""
    monkeypatch.setattr(classification, "DRAWS", 100)
    y = np.tile([0, 1], 120).tolist()
    client = np.repeat(np.arange(6), 40)
    right = client % 2 == 0
    p = np.where(right, np.where(np.array(y) == 1, 0.8, 0.2), np.where(np.array(y) == 1, 0.3, 0.7))
    clustered, single = (
        classification.measure(two(p.tolist(), y, list(whose)), ("well", "ill"), None)
        for whose in (client, np.zeros(240, dtype=int))
    )
    wide, narrow = (
        np.diff(each["classes"]["ill"]["auroc"]["interval"])[0] for each in (clustered, single)
    )
    assert wide > 2 * narrow


def test_the_command_the_card_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "DRAWS", 20)
    run = tmp_path / "run"
    made = corefed("run", *SMALL, "--set=validation=0.2", "--out", run, "--quiet")
    assert made.code == 0, made.err
    assert (run / fitted.VALIDATION).exists()
    held = fitted.read_tensors(run, fitted.VALIDATION)
    assert len(held["y"]) == len(held["personal.mean"]) > 0
    told = corefed("measures", run, "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert found["chosen_on"] == "validation points"
    assert list(found["by_client"]) == [f"client {i}" for i in range(4)]
    assert sum(map(sum, found["confusion"])) == found["points"]
    shown = corefed("measures", run, "--client", "client 1")
    assert shown.code == 0 and "AUROC" in shown.out and "confusion matrix" in shown.out
    assert "chosen on validation points" in shown.out
    out = tmp_path / "card"
    exported = corefed("export", run, "--client=client 1", "--out", out, "--no-program")
    assert exported.code == 0, exported.err
    card = (out / package.CARD).read_text(encoding="utf-8")
    assert "AUROC" in card and "Confusion matrix" in card
    page = tmp_path / "page.html"
    assert corefed("report", run, "--out", page).code == 0
    assert "Which classes are told apart?" in page.read_text(encoding="utf-8")


def test_a_regression_has_other_measures(tmp_path: Path) -> None:
    flags = ["--method=pfedbayes", "--rounds=1", "--local-steps=2", "--set=hidden=4"]
    run = ["run", "--data=synthetic-regression", *flags, "--device=cpu", "--quiet"]
    assert corefed(*run, "--out", tmp_path / "run").code == 0
    told = corefed("measures", tmp_path / "run")
    assert told.code == 2 and "predicts numbers" in told.err
