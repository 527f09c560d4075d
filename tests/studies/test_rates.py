"""`corefed reproduce rates`: its plan, what it measures, its slopes, its page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import corefed
from scipy.stats import norm

from corefed.data import hoelder
from corefed.models.likelihood import Gaussian
from corefed.models.network import mlp
from corefed_studies import pages
from corefed_studies.reproduce import results
from corefed_studies.reproduce.rates import posterior_errors, slopes, study, yardstick
from corefed_studies.reproduce.rates.slopes import CORESET, FULL, ONCE, PROCESS, REDRAWN
from corefed_studies.theory.quantities import network_parameters, rate_exponent

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "rates.json"


# --- slopes ---------------------------------------------------------------------------------------


def test_a_power_law_has_its_slope() -> None:
    sizes = (100, 200, 400, 800)
    errors = [[c * n**-0.7 for c in (1.0, 2.0, 5.0)] for n in sizes]  # one constant a seed
    found = slopes.slope(sizes, errors)
    assert found.value == pytest.approx(-0.7, abs=1e-12)
    assert found.half == pytest.approx(0, abs=1e-12)
    assert math.isnan(slopes.slope(sizes, [row[:1] for row in errors]).half)


def test_the_interval_of_a_slope_covers_as_often_as_it_says() -> None:
    """Errors with seeds' own slopes and noise: 95 % of 400 studies, within 4 standard errors."""
    rng = np.random.default_rng(0)
    sizes = np.array([250, 500, 1000, 2000, 4000])
    inside = 0
    for _ in range(400):
        own = rng.normal(-0.5, 0.05, 10)
        logs = own * np.log(sizes)[:, None] + rng.normal(0, 0.1, (5, 10))
        found = slopes.slope(sizes.tolist(), np.exp(logs).tolist())
        inside += abs(found.value + 0.5) <= found.half
    assert abs(inside / 400 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)


def test_a_ratio_of_errors_is_geometric_and_paired() -> None:
    mine = {"metrics": {"error": {"per_seed": [2.0, 8.0]}}}
    other = {"metrics": {"error": {"per_seed": [1.0, 2.0]}}}  # logarithms apart by log 2 and log 4
    found = slopes.ratio(mine, other)
    assert found is not None
    assert found.value == pytest.approx(8**0.5)
    assert found.p == pytest.approx(2 / math.pi * math.atan(1 / 3))  # t = 3, 1 degree of freedom
    assert slopes.ratio(mine, {}) is None


# --- the plan -------------------------------------------------------------------------------------


def test_networks_have_the_parameters_of_the_proof() -> None:
    """T = C_1 n^(Lambda / (2 beta + Lambda)), to half of what a wider layer adds."""
    for beta, dimension in study.SCALES["paper"].problems:
        for n in study.SCALES["paper"].sizes:
            width = study.width_of(hoelder.HoelderSetting(beta=beta, dimension=dimension, points=n))
            wanted = 600 * (n / 1000) ** (1 - rate_exponent(beta, dimension))
            sizes = [network_parameters(10, 2, M) for M in (width - 1, width, width + 1)]
            assert abs(sizes[1] - wanted) <= (sizes[2] - sizes[0]) / 2


def test_every_row_is_there_and_differs_in_its_method_alone() -> None:
    scale = study.SCALES["quick"]
    planned = {(cell.row, cell.column): cell.flags for cell in study.plan(scale)}
    for cell in study.plan(scale):
        assert study.column_of(*study._about(cell).values()) == cell.column
    per_problem = len(scale.sizes) + 3 * (len(scale.sizes) + len(scale.fractions))
    assert len(planned) == per_problem * len(scale.problems)
    column = study.column_of(1.0, 2, 1000, 200)
    own = {"method", "preset", "fraction", "redraw_every", "refresh_every", "check_every"}
    shared = [
        {key: value for key, value in planned[row, column].items() if key not in own}
        for row in (CORESET, ONCE, REDRAWN)
    ]
    full = planned[FULL, study.column_of(1.0, 2, 1000, 1000)]
    assert shared[0] == shared[1] == shared[2] == {k: v for k, v in full.items() if k != "method"}


# --- what is measured -----------------------------------------------------------------------------


def test_intervals_cover_what_they_should() -> None:
    """Draws and truth from one distribution: levels within 4 standard errors of points."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(2, 1, 1000, generator=generator)
    draws = centre + torch.randn(2, 800, 1000, generator=generator)
    truth = (centre + torch.randn(2, 1, 1000, generator=generator)).squeeze(1)
    narrow = centre + 0.5 * torch.randn(2, 800, 1000, generator=generator)
    for level in posterior_errors.LEVELS:
        p = level / 100
        error = 4 * math.sqrt(p * (1 - p) / 2000) + 0.003  # and of quantiles of 800 draws
        assert abs(posterior_errors.covered(draws, truth, level) - p) < error
        half = norm.ppf(0.5 + p / 2) / 2
        expected = norm.cdf(half) - norm.cdf(-half)
        assert abs(posterior_errors.covered(narrow, truth, level) - expected) < error


def test_errors_of_a_linear_posterior_are_closed_forms() -> None:
    """f_theta(x) = x . a + b with independent Gaussian weights, f linear too."""
    model = mlp((3, 1), Gaussian(1, 0.3))
    generator = torch.Generator().manual_seed(1)
    mu = torch.tensor([0.5, -1.0, 0.2, 0.1])  # three weights and a bias
    std = torch.tensor([0.1, 0.05, 0.2, 0.02])
    truth = torch.tensor([0.45, -1.1, 0.3, 0.1])
    theta = mu + std * torch.randn(1, 2000, 4, generator=generator)
    x = torch.randn(1, 500, 3, generator=generator)

    def at(weights: torch.Tensor) -> torch.Tensor:
        return x @ weights[:3] + weights[3]

    signal = at(truth)
    y = signal + 0.3 * torch.randn(signal.shape, generator=generator)
    points = posterior_errors.KnownPoints(x, y, signal)
    kl = torch.tensor([5.0])
    found = posterior_errors._measure_seed(model, theta, kl, points, points, 0.3)
    outputs = posterior_errors.outputs_of(model, theta, x)
    torch.testing.assert_close(outputs[0, 7], at(theta[0, 7])[0], rtol=1e-5, atol=1e-5)
    bias = at(mu) - signal
    spread = (x.square() @ std[:3].square()) + std[3] ** 2
    # The Monte-Carlo error of 2000 draws is below 4 % of each of these figures.
    assert found["mean"] == pytest.approx(float(bias.square().mean()), rel=0.05)
    assert found["error"] == pytest.approx(float((bias.square() + spread).mean()), rel=0.05)
    # E [1 - exp(-d^2 / (8 s^2))] of d ~ N(bias, spread).
    c = 1 / (8 * 0.09)
    shrink = 1 + 2 * c * spread
    hellinger = 1 - (-c * bias.square() / shrink).exp() / shrink.sqrt()
    assert found["hellinger"] == pytest.approx(float(hellinger.mean()), rel=0.05)
    ratio = ((y - at(mu)).square() + spread - (y - signal).square()).sum() / (2 * 0.09)
    extra = math.log(len(posterior_errors.PRIORS) / 0.05)
    assert found["bound"] == pytest.approx((float(ratio) / 2 + 5 + extra) / 500, rel=0.05)
    assert found["hellinger"] < found["bound"]


def test_a_gaussian_process_learns_more_from_more() -> None:
    settings = [
        hoelder.HoelderSetting(beta=1.0, dimension=1, points=n, test=200) for n in (40, 400)
    ]
    found = yardstick.of_seed(settings, seed=0)
    assert found[400] < found[40] / 2 < 0.25  # the variance of f is 1


# --- as a command ---------------------------------------------------------------------------------


def test_a_small_study_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = study.RateScale(((1.0, 1),), (40, 60), (0.5,), (0, 1), 1, 20, 1)
    monkeypatch.setitem(study.SCALES, "quick", small)
    monkeypatch.setattr(study, "LOCAL_STEPS", 2)
    monkeypatch.setattr(posterior_errors, "DRAWS", 20)
    call = ("reproduce", "rates", "--jobs", "1", "--out", tmp_path)
    assert corefed(*call).code == 0
    first = results.read(tmp_path / "rates.json", "rates")
    assert len(first) == 2 + 3 * 3 + 2
    cell = first[CORESET, study.column_of(1.0, 1, 60, 12)]
    assert {len(spread["per_seed"]) for spread in cell["metrics"].values()} == {2}
    assert 0 < cell["metrics"]["hellinger"]["mean"] < 1
    assert (tmp_path / "rates.png").stat().st_size > 10_000
    assert "| 1, 1 | -0.67 |" in (tmp_path / "rates.md").read_text()

    place = tmp_path / "pfedbayes-all-points-beta-1-dimension-1-n-60-k-60"
    kept = json.loads((place / study.ERRORS).read_text())
    (place / study.ERRORS).unlink()
    known = json.loads((tmp_path / "yardstick-1-1.json").read_text())
    (tmp_path / "yardstick-1-1.json").write_text(json.dumps({"0": known["0"]}))
    asked: list[int] = []
    of_seed = yardstick.of_seed
    monkeypatch.setattr(
        yardstick, "of_seed", lambda s, seed: (asked.append(seed), of_seed(s, seed))[1]
    )
    assert corefed(*call).code == 0
    assert asked == [1]
    assert json.loads((place / study.ERRORS).read_text()) == kept  # the draws are the run's own
    again = results.read(tmp_path / "rates.json", "rates")
    assert {k: r["metrics"] for k, r in again.items()} == {
        k: r["metrics"] for k, r in first.items()
    }


def test_a_run_that_failed_is_named(tmp_path: Path) -> None:
    metrics = {
        name: {"mean": 0.5, "std": 0.1, "per_seed": [0.4, 0.6]}
        for name in (
            "error",
            "mean",
            "hellinger",
            "bound",
            "f 50",
            "f 80",
            "f 95",
            "y 50",
            "y 80",
            "y 95",
        )
    }
    about = {"beta": 1.0, "dimension": 1, "n": 60, "k": 60, "metrics": metrics}
    found = {(FULL, "a"): about, (CORESET, "b"): {"failure": "Training diverged."}}
    results.write(tmp_path / "rates.json", "rates", "quick", found)
    done = corefed(
        "reproduce", "rates", "--from", tmp_path / "rates.json", "--out", tmp_path / "out"
    )
    assert done.code == 0, done.err
    assert "Training diverged." in (tmp_path / "out" / "rates.md").read_text()


def test_a_wrong_result_file_leaves_nothing_behind(tmp_path: Path) -> None:
    wrong = ROOT / "results" / "table1.json"
    done = corefed("reproduce", "rates", "--from", wrong, "--out", tmp_path / "out")
    assert done.code == 2 and "not rates" in done.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    assert corefed("reproduce", "rates", "--from", wrong, "--out", tmp_path / "mine").code == 2
    assert (tmp_path / "mine").exists()


def test_the_page_shows_the_result_file() -> None:
    found = results.read(RESULT, "rates")
    part = pages.Marked(ROOT / "docs" / "theory-study.md", "rates").part
    assert part == "\n" + pages.markdown(slopes.make_tables(found))
    assert (PROCESS, study.column_of(2.0, 4, 4000, 4000)) in found
