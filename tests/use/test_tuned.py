"""`Federation(tune=...)`: settings are searched first, then all training points are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import corefed as command
from sklearn.base import clone

from corefed import Federation, UserError
from corefed.base import digests

QUICK: dict[str, Any] = {
    "method": "pfedbayes", "rounds": 3, "local_steps": 3, "hidden": (6,), "evaluate_draws": 2,
    "device": "cpu",
}  # fmt: skip
TUNE = {"candidates": 4, "space": {"eta_1": (0.001, 0.1), "zeta": [0.1, 1.0]}, "validation": 0.3}


def clients(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found = {}
    for name in ("north", "south"):
        y = rng.integers(3, size=60)
        found[name] = (3 * np.eye(3, 4)[y] + rng.normal(size=(60, 4)), y)
    return found


@pytest.fixture(scope="module")
def tuned() -> Federation:
    return Federation(tune=TUNE, **QUICK).fit(clients())


def test_the_found_settings_are_trained_with_on_all_points(tuned: Federation) -> None:
    report, config = tuned.tuning_, tuned.summary_["config"]
    assert report["finished"] and len(report["candidates"]) == 4
    chosen = report["chosen"]["settings"]
    assert chosen.keys() == {"eta_1", "eta_2", "zeta"}
    assert {name: config[name] for name in chosen} == chosen
    assert config["validation"] == 0
    plain = Federation(**QUICK, **chosen).fit(clients())
    assert plain.evaluate() == tuned.evaluate()
    assert not hasattr(plain, "tuning_")
    # 96 of 120 points train, of which 30 % validate, class by class and client by client
    assert 27 <= report["validation_points"] <= 31


def test_test_points_do_not_matter(tuned: Federation) -> None:
    """Other test points, which `fit` is given here, lead to the same search."""
    given = clients()
    rng = np.random.default_rng(5)
    reports = []
    for scale in (1.0, 1000.0):
        x = scale * rng.normal(size=(20, 4))
        test = {name: (x, rng.integers(3, size=20)) for name in given}
        found = Federation(tune=TUNE, **QUICK).fit(given, test)
        reports.append(json.loads(json.dumps(found.tuning_)))
        del reports[-1]["cost"]["seconds"]
    assert reports[0] == reports[1]


def test_saved_and_loaded(tuned: Federation, tmp_path: Path) -> None:
    folder = tuned.save(tmp_path / "run")
    assert digests.read_json(folder / "tune.json") == json.loads(json.dumps(tuned.tuning_))
    again = Federation.load(folder)
    assert again.tuning_["chosen"] == tuned.tuning_["chosen"]
    assert again.tune is False  # to repeat the run, its settings are enough
    assert again.evaluate() == tuned.evaluate()
    copied = again.save(tmp_path / "copy")
    assert (copied / "tune.json").exists()
    assert command("compare", folder).code == 0


def test_parameters(tuned: Federation) -> None:
    assert tuned.get_params()["tune"] is TUNE
    assert clone(tuned).get_params() == tuned.get_params()
    found = Federation(**QUICK).set_params(tune=True, eta_1=0.01)
    assert found.tune is True
    with pytest.raises(UserError, match="no setting 'eta'"):
        found.set_params(tune={"space": {"eta": (0.1, 1)}})
    assert found.tune is True
    refitted = clone(tuned).set_params(tune=False).fit(clients())
    assert not hasattr(refitted, "tuning_")


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    Federation(tune={"candidates": 2}, **{**QUICK, "rounds": 1}).fit(clients(), progress=True)
    err = capsys.readouterr().err
    assert "rung 1 of 1, round 1: best NLL" in err and "round 1/1" in err


WRONG: list[tuple[Any, str]] = [
    ("yes", "tune is 'yes'; it must be True, False or a dictionary"),
    ({"candidate": 3}, "tune has 'candidate'; did you mean 'candidates'"),
    ({"candidates": 1}, "candidates is 1; it must be at least 2"),
    ({"validation": 0}, "validation is 0: a search needs"),
    ({"validation": 2}, "validation is 2; it must be 0 or more and below 1"),
    ({"space": {"eta_1": (0.1, 0.01)}}, r"space\['eta_1'\] is an empty range"),
    ({"space": {"eta_1": 3}}, r"space\['eta_1'\] has no values"),
    ({"space": {"rounds": [1, 2]}}, "rounds .* cannot be searched"),
]


@pytest.mark.parametrize(("tune", "words"), WRONG)
def test_mistakes_are_told_at_once(tune: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Federation(tune=tune, **QUICK)
