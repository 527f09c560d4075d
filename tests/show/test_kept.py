"""Differences between runs: of the predictions that both keep, by one rule for every metric."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, corefed
from scipy.stats import ttest_rel
from sklearn.metrics import roc_auc_score

from corefed.show import kept, report, verdict
from corefed.show.contrast import ACCURACY, AUROC, NLL, contrast, values
from corefed.training import fitted

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds of six clients, by one method with other learning rates."""
    here = tmp_path_factory.mktemp("kept")
    folders = [here / name for name in ("slow", "quick")]
    for folder, rate in zip(folders, ("0.01", "0.3"), strict=True):
        done = corefed("run", *SMALL, "--clients=6", "--seed=0,1,2", f"--set=eta_1={rate}",
                       "--out", folder, "--quiet")  # fmt: skip
        assert done.code == 0, done.err
    return folders


def test_the_scores_shown_are_of_the_predictions_kept(runs: list[Path]) -> None:
    for result in report.load(runs):
        held = fitted.read_tensors(result.path, fitted.HELD_OUT)
        p, y, g = held["personal.mean"].double(), held["y"], held["row"] // 6
        for seed in SEEDS:
            mine = g == seed
            right = float((p[mine].argmax(-1) == y[mine]).double().mean())
            assert values(result.summary, ACCURACY)[seed] == pytest.approx(right, abs=1e-12)
            loss = float(-p[mine, y[mine]].log().mean())
            assert values(result.summary, NLL)[seed] == pytest.approx(loss)
            areas = [roc_auc_score(y[mine] == c, p[mine, c]) for c in range(10)]
            assert values(result.summary, AUROC)[seed] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize("metric", [ACCURACY, NLL, AUROC], ids=lambda each: each.key)
def test_an_interval_is_never_narrower_than_over_seeds(runs: list[Path], metric: object) -> None:
    """Student's over seeds is the part of the rule that knows seeds; clients may add to it."""
    one, two = report.load(runs)
    found = contrast(one, two, metric, SEEDS)  # type: ignore[arg-type]
    a, b = (list(values(each.summary, metric).values()) for each in (one, two))  # type: ignore[arg-type]
    assert found.difference == pytest.approx(np.mean(a) - np.mean(b))
    assert found.over == "clients and seeds"
    test = ttest_rel(a, b)
    low, high = test.confidence_interval(0.95)
    assert found.low <= low + 1e-9 and found.high >= high - 1e-9
    assert found.p >= test.pvalue - 1e-9
    assert found.low + found.high == pytest.approx(2 * found.difference)


def test_without_predictions_seeds_are_what_there_is(runs: list[Path], tmp_path: Path) -> None:
    one, two = report.load(runs)
    found = contrast(one._replace(path=tmp_path), two, NLL, SEEDS)
    a, b = (list(values(each.summary, NLL).values()) for each in (one, two))
    assert found.over == "seeds" and found.p == pytest.approx(ttest_rel(a, b).pvalue)


def test_other_points_are_not_paired(runs: list[Path]) -> None:
    one, two = ((each.path, each.summary) for each in report.load(runs))
    moved = (two[0], {**two[1], "seeds": [2, 1, 0]})
    assert kept.spread(one, moved, "nll", SEEDS) == "the test points are not the same"


def test_one_seed_is_left_open(runs: list[Path]) -> None:
    one, two = report.load(runs)
    found = contrast(one, two, NLL, [0])
    assert found.outcome == "open" and math.isnan(found.p) and math.isnan(found.low)
    assert found.why_open.endswith("run three")


def test_sentences_are_about_auroc_too(runs: list[Path]) -> None:
    said = verdict.sentences(report.load(runs))
    assert any(sentence.startswith("Highest AUROC: ") for sentence in said)
    done = corefed("compare", *runs)
    assert done.code == 0 and "Highest AUROC" in done.out
