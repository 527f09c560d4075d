"""Cross-validation: folds share out all rows, a left-out site is never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import corefed

from corefed import resolve
from corefed.base.errors import UserError
from corefed.data import Dataset, split
from corefed.settings.run import Experiment
from corefed.training import crossval

SMALL = {
    "method": "fedavg", "client_column": "site", "rounds": 2, "local_steps": 3, "hidden": "",
    "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_share_out_all_points(folds: int) -> None:
    y = torch.arange(60) % 4
    dataset = Dataset("made", torch.zeros(60, 1), y, 4)
    tested: list[int] = []
    for fold in range(folds):
        for one in split("iid", dataset, 3, 7, 1 / folds, fold):
            assert not set(one.train.tolist()) & set(one.test.tolist())
            assert len(one.train) + len(one.test) == 20
            held, kept = (torch.bincount(y[part], minlength=4) for part in (one.test, one.train))
            assert ((held - (held + kept) / folds).abs() < 1).all()  # every class in its share
            tested += one.test.tolist()
    assert sorted(tested) == list(range(60))


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Three sites; in `odd` the label is the other way round, so that the others misjudge it."""
    g = np.random.default_rng(0)
    x, site = g.normal(size=(120, 2)), np.repeat(["east", "odd", "west"], 40)
    y = (x[:, 0] > 0) ^ (site == "odd")
    np.savez(tmp_path / "sites.npz", X=x, y=y.astype(int), site=site)
    return tmp_path / "sites.npz"


def experiment(path: Path, **more: object) -> Experiment:
    return resolve(flags={**SMALL, "data": f"npz:{path}", "learning_rate": 0.5, **more})


def test_a_site_is_tested_by_those_who_did_not_see_it(sites: Path) -> None:
    found = {each.name: each for each in crossval.over_sites(experiment(sites, rounds=20))}
    assert {name: each.points for name, each in found.items()} == dict.fromkeys(found, 40)
    assert found["odd"].metrics["accuracy"] < 0.2  # a model that had seen it would do better
    assert set(found["odd"].metrics) == {"accuracy", "nll", "ece", "brier"}


def test_every_row_is_tested_once(sites: Path) -> None:
    found = list(crossval.over_rows(experiment(sites, method="independent", rounds=10), 4))
    assert [each.points for each in found] == [30, 30, 30, 30]
    mean, half = crossval.interval(found, "accuracy", sites=False)
    assert mean > 0.8 and 0 <= half < 0.3


def folds(*values: float, repeats: int = 1) -> list[crossval.Fold]:
    n = len(values) // repeats
    return [crossval.Fold("", 1, {"nll": v}, i // n + 1) for i, v in enumerate(values)]


def test_the_interval_over_sites_is_students() -> None:
    mean, half = crossval.interval(folds(1.0, 2.0, 3.0, 4.0), "nll", sites=True)
    assert mean == 2.5
    assert half == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert np.isnan(crossval.interval(folds(1.0, 2.0), "nll", sites=True).half)


def test_repeats_make_no_new_sites() -> None:
    """Site by site the repeats have a mean, and these are what there is of evidence."""
    twice = folds(0.0, 3.0, 2.0, 5.0, 2.0, 1.0, 4.0, 3.0, repeats=2)
    assert crossval.interval(twice, "nll", sites=True) == pytest.approx(
        crossval.interval(folds(1.0, 2.0, 3.0, 4.0), "nll", sites=True)
    )


def test_the_interval_over_folds_allows_for_what_trainings_share() -> None:
    """t_5 s sqrt(1/6 + 1/2) of two repeats of three folds, by hand."""
    mean, half = crossval.interval(
        folds(1.0, 2.0, 3.0, 1.0, 2.0, 3.0, repeats=2), "nll", sites=False
    )
    assert mean == 2.0
    assert half == pytest.approx(2.570582 * np.sqrt(0.8) * np.sqrt(1 / 6 + 1 / 2), rel=1e-6)


def test_the_interval_over_repeated_folds_holds_where_students_does_not() -> None:
    """Means of test folds of 60 normal points: of 300 data sets the interval misses 0 in few.

    The learner is the training mean, the score its error on a fold. An interval of 95 % may miss
    in 5 % +- 3 x 1.3 %; Student's over the 20 scores misses far more often.
    """
    g, missed, plain = np.random.default_rng(0), 0, 0
    for _ in range(300):
        x = g.normal(size=60)
        scores = []
        for _ in range(5):
            parts = np.array_split(g.permutation(60), 4)
            scores += [float(np.mean((x[part] - np.delete(x, part).mean()) ** 2)) for part in parts]
        truth = 1 + 1 / 45  # E (x - mean of 45)^2
        mean, half = crossval.interval(folds(*scores, repeats=5), "nll", sites=False)
        missed += abs(mean - truth) > half
        plain += abs(mean - truth) > 2.093024 * np.std(scores, ddof=1) / np.sqrt(20)
    assert missed / 300 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert plain / 300 > 0.2


def test_repeats_have_other_folds(sites: Path) -> None:
    found = list(crossval.over_rows(experiment(sites, method="independent"), 2, repeats=2))
    assert [each.repeat for each in found] == [1, 1, 2, 2]
    assert found[2].name == "repeat 2, fold 1"
    assert found[0].metrics != found[2].metrics
    again = next(crossval.over_rows(experiment(sites, method="independent", seeds=1), 2))
    assert again.metrics == found[2].metrics  # the repeat of the next seed


def test_folds_may_stop_early(sites: Path) -> None:
    flags = {"rounds": 6, "validation": 0.3, "patience": 1, "evaluate_every": 1}
    found = list(crossval.over_rows(experiment(sites, method="independent", **flags), 2))
    assert all(1 <= each.best_round <= 6 for each in found)


def test_what_cannot_be_left_out(sites: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="independent has no shared model to test on a site"):
        next(iter(crossval.over_sites(experiment(sites, method="independent"))))
    g = np.random.default_rng(0)
    np.savez(tmp_path / "two.npz", X=g.normal(size=(40, 2)), y=np.arange(40) % 2,
             site=np.arange(40) // 20)  # fmt: skip
    with pytest.raises(UserError, match="takes at least 3 sites; there are 2"):
        next(iter(crossval.over_sites(experiment(tmp_path / "two.npz"))))


def test_the_command(sites: Path) -> None:
    options = ("--data", f"npz:{sites}", "--client=site", "--method=fedavg", "--rounds=1",
               "--set=hidden=", "--device=cpu")  # fmt: skip
    done = corefed("crossval", *options, "--folds=2", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [each["points"] for each in told["folds"]] == [60, 60]
    assert set(told["mean"]) == {"accuracy", "nll", "ece", "brier"}
    done = corefed("crossval", *options, "--sites")
    assert done.code == 0 and "took no part" in done.out and "odd" in done.out
    done = corefed("crossval", *options, "--folds=2", "--repeats=2")
    assert (
        done.code == 0
        and "2 folds, 2 times" in " ".join(done.out.split())
        and "repeat 2, fold 1" in done.out
    )
    done = corefed("crossval", *options, "--seed=0,1")
    assert done.code == 2 and "one seed" in done.err
