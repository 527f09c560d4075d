"""`corefed predict`: the table, the flag and what it promises, and every mistake of the brief."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, corefed

from corefed.bayes.uncertainty import Prediction
from corefed.settings.config import resolve
from corefed.training import fitted, rounds
from corefed.training.setup import concrete, load
from corefed.use import predictions, review
from corefed_studies.bench import review as bench_review

SETTINGS: dict[str, object] = {
    "data": "digits", "partition": "iid", "clients": 3, "rounds": 25, "method": "pfedbayes",
    "seeds": "0,5", "evaluate_every": 25, "device": "cpu", "eta_1": 0.001, "eta_2": 0.001,
    "initial_rho": -3.0, "anneal": 0.0,
}  # fmt: skip


class Case:
    """A run and the test points of its second client in a file."""

    def __init__(self, folder: Path, settings: dict[str, object], more: list[str]) -> None:
        self.run, self.points = folder / "run", folder / "points.npz"
        experiment = concrete(resolve(None, settings, more))
        rounds.train(experiment, self.run)
        data = load(experiment.run)
        real = data.test.weight[1] > 0
        self.x, self.y = data.test.x[1][real].numpy(), data.test.y[1][real].numpy()
        np.savez(self.points, X=self.x, y=self.y)

    def predict(self, *more: object, client: str = "client 1", file: Path | None = None) -> Result:
        points = file or self.points
        return corefed("predict", self.run, "--client", client, "--input", points, *more)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("digits"), SETTINGS, ["hidden=30", "evaluate_draws=4"])


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Case:
    settings = {**SETTINGS, "data": "synthetic-linear", "rounds": 20, "seeds": "0"}
    del settings["partition"]
    return Case(tmp_path_factory.mktemp("linear"), settings, ["hidden=8", "eta_1=0.02"])


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def numbers(rows: list[dict[str, str]], column: str) -> np.ndarray[Any, Any]:
    return np.array([float(row[column]) for row in rows])


# --- the table ------------------------------------------------------------------------------------


def test_classes(digits: Case, tmp_path: Path) -> None:
    """What the file says is what the run kept of the same points, to seven digits."""
    out = tmp_path / "p.csv"
    result = digits.predict("--target-error", 0.1, "--out", out)  # its own points can promise it
    assert result.code == 0, result.err
    rows = table(out.read_text())
    assert [row["id"] for row in rows] == [str(i) for i in range(len(digits.y))]
    held = fitted.read_tensors(digits.run, fitted.HELD_OUT)
    mine = held["row"] == 1
    mean = np.stack([numbers(rows, f"p({c})") for c in range(10)], 1)
    np.testing.assert_allclose(mean, held["personal.mean"][mine], rtol=5.1e-7)
    far = np.array([row["outside"] != "no" for row in rows])
    assert far.mean() < 0.01  # their uncertainty is raised
    for name in ("total", "aleatoric", "epistemic"):
        kept = held[f"personal.{name}"][mine].numpy()[~far]
        np.testing.assert_allclose(numbers(rows, name)[~far], kept, rtol=1e-6)
    np.testing.assert_allclose(numbers(rows, "total")[far], np.log(10), rtol=1e-6)
    assert [int(row["predicted"]) for row in rows] == mean.argmax(1).tolist()
    np.testing.assert_array_equal(numbers(rows, "probability"), mean.max(1))
    assert list(rows[0])[-1] == "review"
    assert f"accuracy {100 * (mean.argmax(1) == digits.y).mean():.2f} %" in result.out
    assert result.err.count("note: ") == 1, result.err
    assert f"{far.sum()} of 120 points are outside" in result.err


def test_the_same_to_the_bit_and_on_stdout(digits: Case, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    digits.predict("--out", out)
    shown = digits.predict()
    assert shown.out == out.read_text()
    assert "points by the personal model of client 1" in shown.err


def test_seeds_models_and_clients_differ(digits: Case) -> None:
    ways = ([], ["--seed", 5], ["--model", "global"])
    said = {digits.predict(*way).out for way in ways} | {digits.predict(client="client 2").out}
    assert len(said) == 4
    assert digits.predict("--seed", 0, "--model", "personal").out in said


def test_blocks_do_not_show(digits: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of other shapes round otherwise, in the last digits of float32."""
    whole = table(digits.predict().out)
    monkeypatch.setattr(predictions, "BLOCK", 7)
    result = digits.predict()
    parts = table(result.out)
    for name in ("probability", "total", "epistemic"):
        np.testing.assert_allclose(numbers(parts, name), numbers(whole, name), atol=1e-5)
    assert f"{len(digits.y)} of {len(digits.y)} points" in result.err  # progress


def test_without_the_truth(digits: Case, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=digits.x)
    result = digits.predict(file=tmp_path / "x.npz")
    assert result.code == 0
    assert "truth" not in result.err
    assert result.out == digits.predict().out


def test_the_summary(digits: Case, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    result = digits.predict("--json", "--target-error", 0.1, "--out", out)
    about = json.loads(result.out)
    rows = table(out.read_text())
    flagged = np.array([row["review"] == "yes" for row in rows])
    wrong = np.array([int(row["predicted"]) for row in rows]) != digits.y
    review, truth = about["review"], about["truth"]
    assert (review["kept"], review["flagged"]) == ((~flagged).sum(), flagged.sum())
    assert review["chosen_on"] in ("client", "run")
    assert 0 < flagged.sum() < len(flagged)
    assert (numbers(rows, "total")[~flagged] < review["threshold"]).all()
    assert (numbers(rows, "total")[flagged] >= review["threshold"] * (1 - 1e-6)).all()
    assert truth["error_kept"] == pytest.approx(wrong[~flagged].mean())
    assert truth["error_flagged"] == pytest.approx(wrong[flagged].mean())
    assert truth["error_kept"] < truth["error_flagged"]


@pytest.mark.parametrize("by", review.BY)
def test_what_review_goes_by(digits: Case, by: str) -> None:
    rows = table(digits.predict("--by", by, "--target-error", 0.1).out)
    column = {"confidence": "probability"}.get(by, by)
    u = numbers(rows, column) * (-1 if by == "confidence" else 1)
    flagged = np.array([row["review"] == "yes" for row in rows])
    far = np.array([row["outside"] != "no" for row in rows])
    assert flagged[far].all()
    u, flagged = u[~far], flagged[~far]
    assert 0 < flagged.sum() < len(rows)
    assert u[~flagged].max() <= u[flagged].min() * (1 - 1e-6 * np.sign(u[flagged].min()))


# --- where the threshold comes from ---------------------------------------------------------------


def test_no_threshold_flags_everything(digits: Case) -> None:
    """An error of 0.1 % takes ln 0.1 / ln 0.999 = 2302 points; the three clients have 359."""
    none = digits.predict("--target-error", 0.001)
    assert "Everything is flagged" in none.err
    assert "too few held-out points (359)" in none.err
    assert {row["review"] for row in table(none.out)} == {"yes"}


def flag(digits: Case, tmp_path: Path, wrong: torch.Tensor, target: float) -> review.Flag:
    """The flag of client 1 if these of all held-out points (seed 0) were wrong."""
    from safetensors.torch import save_file

    shutil.copytree(digits.run, tmp_path / "run")
    held = fitted.read_tensors(digits.run, fitted.HELD_OUT)
    first = held["row"] < 3
    right = held["personal.mean"].argmax(-1)
    held["y"][first] = torch.where(wrong, (right[first] + 1) % 10, right[first])
    save_file(held, tmp_path / "run" / fitted.HELD_OUT)
    model = fitted.load(tmp_path / "run")
    return review.flag_for(model, "client 1", review.PredictionSettings(target_error=target))


def test_own_points_all_points_or_none(digits: Case, tmp_path: Path) -> None:
    row = fitted.read_tensors(digits.run, fitted.HELD_OUT)["row"]
    row = row[row < 3]
    none = torch.zeros(len(row), dtype=torch.bool)
    own = flag(digits, tmp_path / "a", none, 0.05)
    assert (own.source, own.threshold.points, own.notes) == ("client", int((row == 1).sum()), ())
    everyone = flag(digits, tmp_path / "b", none, 0.01)
    assert (everyone.source, everyone.threshold.points) == ("run", len(row))
    assert "promise is about their average" in everyone.notes[0]
    nobody = flag(digits, tmp_path / "c", none, 0.001)
    assert nobody.source == "none"
    assert "about 2996 held-out points" in nobody.notes[0]  # ln 0.05 / ln 0.999, and one
    hopeless = flag(digits, tmp_path / "d", ~none, 0.05)
    assert "too many errors" in hopeless.notes[0]
    assert "raise --target-error" in hopeless.notes[0]


# --- regression -----------------------------------------------------------------------------------


def test_targets(linear: Case) -> None:
    """Mean, interval and standard deviations fit together; about 95 % are in their interval."""
    result = linear.predict("--json")
    truth = json.loads(result.out)["truth"]
    assert "give --tolerance" in result.err
    rows = table(linear.predict().out)
    uncertainties = ["std", "aleatoric", "epistemic"]
    assert list(rows[0]) == ["id", "mean", "lower", "upper", *uncertainties, "outside"]
    mean, std = numbers(rows, "mean"), numbers(rows, "std")
    np.testing.assert_allclose(numbers(rows, "upper") - mean, 1.959964 * std, rtol=1e-4)
    parts = np.hypot(numbers(rows, "aleatoric"), numbers(rows, "epistemic"))
    np.testing.assert_allclose(parts, std, rtol=1e-5)
    off = np.abs(mean - linear.y[:, 0])
    assert truth["rmse"] == pytest.approx(np.sqrt((off**2).mean()), rel=1e-5)
    assert truth["interval_coverage"] == pytest.approx((off <= 1.959964 * std).mean())


def test_the_gaussian_interval_beside_quantiles_of_the_mixture() -> None:
    """Ten draws of means three times as wide as the noise, from the targets' own distribution.

    The quantiles of ten Gaussians end where their means end. 4000 points: an error of 0.5 %.
    """
    g = torch.Generator().manual_seed(0)
    means = 3 * torch.randn(4000, 10, generator=g, dtype=torch.float64)
    y = 10**0.5 * torch.randn(4000, generator=g, dtype=torch.float64)
    variance = means.var(1, unbiased=False) + 1
    said = Prediction(means.mean(1), variance, torch.ones_like(variance))
    inside = ((y - said.mean).abs() <= predictions.half_width(said, 0.95)).double().mean()
    place = torch.special.ndtr(y.unsqueeze(1) - means).mean(1)  # the mixture's distribution at y
    mixture = ((place >= 0.025) & (place <= 0.975)).double().mean()
    assert 0.885 < inside < 0.915
    assert mixture < inside


def test_a_tolerance_makes_a_flag(linear: Case) -> None:
    result = linear.predict("--tolerance", 100, "--level", 0.5, "--json")
    about = json.loads(result.out)
    assert about["review"]["tolerance"] == 100
    rows = table(linear.predict("--tolerance", 1000, "--target-error", 0.5).out)
    assert {row["review"] for row in rows} == {"no"}
    rows = table(linear.predict("--tolerance", 1e-9).out)
    assert {row["review"] for row in rows} == {"yes"}


# --- the promise ----------------------------------------------------------------------------------


def test_the_promise_on_digits(tmp_path: Path) -> None:
    """As docs/uncertainty.md shows it: broken for at most a tenth of the halvings."""
    result = corefed("bench", "review", "--scale=quick", "--device=cpu", "--out", tmp_path)
    assert result.code == 0, result.err
    rows = json.loads((tmp_path / "bench-review-cpu.json").read_text())
    assert [row["target %"] for row in rows] == [1, 2, 5, 10]
    for row in rows:
        assert row["broken %"] <= 10
    assert rows[-1]["coverage %"] > 50
    assert rows[-1]["error %"] <= 10


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_promise_on_images(name: str, tmp_path: Path) -> None:
    """Two clients and few rounds; halvings of 4000 points a client, chosen on one half."""
    if not (Path(os.environ.get("COREFED_DATA", "nowhere")) / name).is_dir():
        pytest.skip(f"COREFED_DATA has no {name}")
    settings = {**bench_review.RUNS["paper"][name], "method": "pfedbayes", "clients": 2}
    del settings["fraction"]
    settings |= {"rounds": 12, "evaluate_every": 12, "device": "cpu"}
    rounds.train(resolve(None, settings, ["hidden=50", "evaluate_draws=4"]), tmp_path / "run")
    model = fitted.load(tmp_path / "run")
    for target in (0.05, 0.10):
        found = bench_review.tried(model, target, halvings=40)
        assert found["error %"] <= 100 * target, (target, found)
        assert found["broken %"] <= 10, (target, found)
        assert found["coverage %"] > 40, (target, found)


# --- mistakes -------------------------------------------------------------------------------------


def refused(result: Result, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target-error", 0], ["--target-error is 0", "above 0 and below 1"]),
        (["--target-error", 1.5], ["--target-error is 1.5"]),
        (["--target-error", "nan"], ["--target-error is nan"]),
        (["--confidence", 1], ["--confidence is 1"]),
        (["--confidence", 0.9999999999999999], ["--confidence is 1"]),
        (["--level", 95], ["--level is 95"]),
        (["--by", "luck"], ["'luck'", "total, epistemic or confidence"]),
        (["--model", "best"], ["'best'", "personal or global"]),
        (["--tolerance", 1], ["--tolerance is for regressions"]),
        (["--seed", 3], ["no seed 3", "0, 5"]),
    ],
)
def test_flags_out_of_range(
    digits: Case, tmp_path: Path, flags: list[object], words: list[str]
) -> None:
    refused(digits.predict(*flags, "--out", tmp_path / "p.csv"), *words)
    assert not list(tmp_path.iterdir())


def test_a_regression_has_other_flags(linear: Case) -> None:
    refused(linear.predict("--by", "confidence"), "--by confidence is for classes")
    refused(linear.predict("--tolerance", -1), "--tolerance is -1")
    refused(linear.predict("--tolerance", "inf"), "--tolerance is inf")


def test_an_unknown_client(digits: Case) -> None:
    refused(digits.predict(client="cliemt 1"), "no client 'cliemt 1'", "client 1")


def test_points_that_do_not_fit(digits: Case, tmp_path: Path) -> None:
    def given(**arrays: np.ndarray[Any, Any]) -> Result:
        np.savez(tmp_path / "bad.npz", **arrays)
        return digits.predict("--out", tmp_path / "p.csv", file=tmp_path / "bad.npz")

    broken = digits.x.copy()
    broken[3].flat[2] = np.nan
    refused(given(X=digits.x[:, :5]), "shape", str(digits.x.shape[1]))
    refused(given(X=digits.x[:0]), "no points")
    refused(given(X=broken), "NaN", "row 3")
    refused(given(X=digits.x, y=digits.y[:-1]), str(len(digits.y)), str(len(digits.y) - 1))
    refused(given(Z=digits.x), "X")
    refused(digits.predict(file=tmp_path / "no.npz"), "no.npz")
    assert not (tmp_path / "p.csv").exists()


def test_places_that_cannot_be_written(digits: Case, tmp_path: Path) -> None:
    refused(digits.predict("--out", tmp_path / "no" / "p.csv"), "no folder", "make it first")
    refused(digits.predict("--out", tmp_path), "is a folder")
    refused(digits.predict("--out", digits.points), "the input itself")
    assert not list(tmp_path.iterdir())


def test_runs_without_what_it_takes(digits: Case, tmp_path: Path) -> None:
    shutil.copytree(digits.run, tmp_path / "run")
    (tmp_path / "run" / fitted.HELD_OUT).unlink()
    asked = ["--client", "client 1", "--input", digits.points, "--out", tmp_path / "p.csv"]
    refused(corefed("predict", tmp_path / "run", *asked), fitted.HELD_OUT, "run it again")
    (tmp_path / "run" / fitted.MODELS).unlink()
    refused(corefed("predict", tmp_path / "run", *asked), fitted.MODELS)
    refused(corefed("predict", tmp_path / "none", *asked), "holds no run")
    assert not (tmp_path / "p.csv").exists()
