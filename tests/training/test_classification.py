"""AUROC, sensitivity and the others on points whose answers are known, and where they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, corefed

from corefed import Federation
from corefed.show import kept
from corefed.training import classification, fitted, measured
from corefed.training.classification import Predicted
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


def test_intervals_allow_for_clients() -> None:
    """Six clients, each all right or all wrong: points one by one would seem too sure."""
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


def test_the_command_the_card_and_the_page(tmp_path: Path) -> None:
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


def test_several_seeds_have_means_and_one_interval() -> None:
    g = np.random.default_rng(0)
    seeds = []
    for _ in range(3):
        y = g.integers(2, size=60)
        seeds.append(two((0.5 + 0.3 * (y - 0.5) + 0.15 * g.normal(size=60)).clip(0, 1).tolist(), y,
                         (np.arange(60) % 6).tolist()))  # fmt: skip
    told = classification.measure_seeds(seeds, ("well", "ill"), [None] * 3)
    single = [classification.measure(one, ("well", "ill"), None) for one in seeds]
    for name in ("auroc", "auprc", "sensitivity", "f1"):
        each = [one["classes"]["ill"][name]["value"] for one in single]
        found = told["classes"]["ill"][name]
        assert found["value"] == pytest.approx(np.mean(each))
        assert found["interval"][0] < found["value"] < found["interval"][1]
    assert told["intervals_over"] == "clients and seeds" and told["seeds"] == 3
    assert told["confusion"] == np.sum([one["confusion"] for one in single], 0).tolist()
    assert told["points"] == 180


@pytest.mark.parametrize("seeds", ["0", "0,1,2"])
def test_the_record_has_them(tmp_path: Path, seeds: str) -> None:
    run = tmp_path / "run"
    made = corefed("run", *SMALL, "--seed", seeds, "--out", run, "--quiet")
    assert made.code == 0, made.err
    told = json.loads((run / "summary.json").read_text())["measures"]
    held = fitted.read_tensors(run, fitted.HELD_OUT)
    right = (held["personal.mean"].argmax(-1) == held["y"]).double().view(len(seeds.split(",")), -1)
    assert told["metrics"]["personal_accuracy"]["per_seed"] == right.mean(1).tolist()
    assert set(told["metrics"]) == {
        f"{kind}_{name}"
        for kind in ("personal", "global")
        for name in ("accuracy", "nll", "ece", "brier")
    }
    assert told["points"] == len(held["y"]) == sum(map(sum, told["confusion"]))
    assert len(told["auroc"]["per_seed"]) == len(seeds.split(","))
    assert told["auroc"]["value"] == pytest.approx(np.mean(told["auroc"]["per_seed"]))
    assert list(told["clients"]) == [f"client {i}" for i in range(4)]
    one = told["classes"]["3"]
    assert set(one) == {"points", "threshold", *measured.BINARY}
    if seeds == "0":
        seen = json.loads(corefed("measures", run, "--json").out)
        assert seen["classes"] == told["classes"], "the command says what the record says"


def test_a_regression_has_its_metrics_in_the_record(tmp_path: Path) -> None:
    flags = ["--method=pfedbayes", "--rounds=1", "--local-steps=2", "--set=hidden=4"]
    run = ["run", "--data=synthetic-regression", *flags, "--device=cpu", "--quiet"]
    assert corefed(*run, "--out", tmp_path / "run").code == 0
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["measures"]
    assert set(told) == {"metrics"}
    assert set(told["metrics"]) == {"personal_rmse", "personal_nll", "global_rmse", "global_nll"}


@pytest.mark.parametrize("given", [True, False])
def test_a_run_knows_whether_its_seeds_test_the_same_points(given: bool, tmp_path: Path) -> None:
    """Two clients and three seeds: points are a sample beside seeds only where they are given."""
    g = np.random.default_rng(0)

    def points(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = g.normal(size=(n, 3))
        return x, (x[:, 0] + g.normal(size=n) > 0).astype(int)

    data, test = ({name: points(n) for name in "ab"} for n in (60, 40))
    federation = Federation(method="fedavg", rounds=2, hidden=(4,), seed=(0, 1, 2))
    run = federation.fit(data, test=test if given else None).save(tmp_path / "run")
    held = fitted.read_tensors(run, fitted.HELD_OUT)
    each = [held[fitted.SOURCE][held["row"] // 2 == seed].sort().values.tolist() for seed in (0, 1)]
    assert (each[0] == each[1]) == given
    over = federation.summary_["measures"]["intervals_over"]
    assert over == ("points and seeds" if given else "seeds")
    found = kept.spread(*[(run, federation.summary_)] * 2, "accuracy", (0, 1, 2))
    assert not isinstance(found, str) and found.over == over
