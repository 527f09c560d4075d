"""`reproduce figure2` at its quick scale, on a made-up town; and the shared bookkeeping."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from corefed.base.errors import UserError
from corefed.bayes.regression import kl, linear_posterior
from corefed.coreset import solvers
from corefed.coreset.problem import problem
from corefed_studies.data import positions
from corefed_studies.reproduce import curves, figure2

QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 houses: dear in the middle of two quarters, cheap outside."""
    draws = np.random.default_rng(0)
    where = np.concatenate([draws.normal(m, 0.8, (200, 2)) for m in ((50, 1), (53, -2))])
    centre = np.minimum(abs(where - (50, 1)).sum(1), abs(where - (53, -2)).sum(1))
    price = 10 ** (5.5 - 0.2 * centre + 0.1 * draws.normal(size=400))
    path = tmp_path_factory.mktemp("town") / "town.npy"
    np.save(path, np.column_stack([where, price]))
    return path


@pytest.fixture(scope="module")
def small(town: Path) -> tuple[figure2.Trial, figure2.SpatialSetting]:
    setting = figure2.SETTINGS["quick"]._replace(points=80, bases=3)
    return figure2.trial(positions.load(town), setting, 0), setting


def test_bases_are_bells_around_their_centres() -> None:
    where = torch.tensor([[0.0, 0.0], [3.0, 4.0]]).double()
    scales = torch.tensor([5.0, 100.0]).double()
    x = figure2.bases(where, torch.zeros(2, 2).double(), scales)
    expected = [[1, 1], [math.exp(-25 / 50), math.exp(-25 / 20000)]]
    torch.testing.assert_close(x, torch.tensor(expected).double())


def test_trial_is_the_model_it_says(
    small: tuple[figure2.Trial, figure2.SpatialSetting], town: Path
) -> None:
    this, setting = small
    prices = positions.load(town).log_price
    assert this.x.shape == (80, 19)
    assert this.scales.unique(return_counts=True)[1].tolist() == [3] * 6 + [1]
    assert this.noise == pytest.approx(float(prices.std(correction=0)))
    torch.testing.assert_close(this.prior.mean, torch.full((19,), float(prices.mean())).double())
    second = float(prices.square().mean())
    torch.testing.assert_close(this.prior.covariance, second * torch.eye(19).double())
    again = figure2.trial(positions.load(town), setting, 0)
    other = figure2.trial(positions.load(town), setting, 1)
    assert torch.equal(this.x, again.x)
    assert not torch.equal(this.where, other.where)
    g = this.potentials
    assert g[figure2.EXACT].dtype == torch.float64
    assert g[figure2.DRAWN].shape == (80, setting.draws)


def test_all_points_are_their_own_coreset(
    small: tuple[figure2.Trial, figure2.SpatialSetting],
) -> None:
    """w = 1 has objective 0 and KL 0, to the square of rounding, under both kinds of potentials."""
    this, _ = small
    w = torch.ones_like(this.y)
    for g in this.potentials.values():
        assert curves.relative_objective(problem(g.unsqueeze(0), 80), w.unsqueeze(0)) < 1e-20
    assert float(kl(this.posterior(w), this.truth)) < 1e-20


def test_measurements_are_of_the_weights_found(
    small: tuple[figure2.Trial, figure2.SpatialSetting],
) -> None:
    this, setting = small
    contender = curves.Contender("omp", "omp")
    w, line = figure2.measure(this, setting, figure2.DRAWN, contender, 30)
    assert line["points"] == int((w > 0).sum()) <= 30
    coreset = linear_posterior(this.x, this.y, w, this.prior, this.noise)
    assert line["reverse_kl"] == pytest.approx(float(kl(coreset, this.truth)))
    assert line["forward_kl"] == pytest.approx(float(kl(this.truth, coreset)))
    for metric, kind in (("objective", figure2.DRAWN), ("held_out", figure2.EXACT)):
        g = this.potentials[kind]
        fit = (g.sum(0) - w @ g).square().sum() / g.sum(0).square().sum()
        assert line[metric] == pytest.approx(float(fit))
    assert line["objective"] < line["held_out"]  # what was fitted flatters itself


def test_paper_scale_measures_everything() -> None:
    setting = figure2.SETTINGS["paper"]
    keys = [key for key, _ in figure2.jobs(setting)]
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    assert {key["solver"] for key in keys} == {*solvers.SOLVERS, curves.LONG.label}
    assert {key["trial"] for key in keys} == set(range(10))
    assert len(figure2.SCALES) * setting.bases + 1 == 301
    assert setting.draws >= 2 * max(setting.sizes)
    for kind in (figure2.EXACT, figure2.DRAWN):
        for k in (220, 260, 300):
            for solver in ("exchange", "aiht-2", curves.LONG.label):
                assert {"trial": 9, "kind": kind, "solver": solver, "k": k} in keys


def test_quick_writes_everything_and_goes_on_where_it_was(
    town: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure2.reproduce("figure2", "quick", tmp_path, QUIET, town)
    text = (tmp_path / "figure2.md").read_text()
    assert "town: 400 rows (0 dropped), 1 trials of 200 points, 61 bases" in text
    assert "greatest forward KL" in text
    for name in ("figure2.png", "figure2-map.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "figure2.json").read_text())
    by_key = {(each["kind"], each["solver"], each["k"]): each for each in figures["summary"]}
    best, plain = (by_key["exact", name, 60] for name in (solvers.DEFAULT, "uniform"))
    assert best["reverse_kl"]["mean"] < plain["reverse_kl"]["mean"]
    assert best["objective"]["mean"] < by_key["exact", solvers.DEFAULT, 20]["objective"]["mean"]

    record = tmp_path / "figure2.jsonl"
    whole = record.read_bytes()
    record.write_bytes(whole[:-20])  # killed while it wrote the last line
    added = []
    monkeypatch.setattr(figure2, "_map", lambda *arguments: None)  # drawn already
    monkeypatch.setattr(
        curves.Kept,
        "add",
        lambda kept, line, add=curves.Kept.add: (added.append(line), add(kept, line)),
    )
    figure2.reproduce("figure2", "quick", tmp_path, QUIET, town)
    assert len(added) == 1
    assert len(record.read_bytes().splitlines()) == len(whole.splitlines())


def test_other_settings_and_too_few_rows_are_refused(town: Path, tmp_path: Path) -> None:
    curves.Kept(tmp_path / "figure2.jsonl", {"data": "elsewhere"}, ("k",))
    with pytest.raises(UserError, match="holds results of other settings"):
        figure2.reproduce("figure2", "quick", tmp_path, QUIET, town)
    with pytest.raises(UserError, match=r"has 400 rows .* draws 1000 of them"):
        figure2.reproduce("figure2", "paper", tmp_path, QUIET, town)
    (tmp_path / "figure2.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match="is damaged"):
        figure2.reproduce("figure2", "quick", tmp_path, QUIET, town)


def test_kept_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    kept = curves.Kept(path, {"sizes": (1, 2)}, ("trial", "k"))
    kept.add({"trial": 0, "k": 5, "objective": 0.25})
    again = curves.Kept(path, {"sizes": (1, 2)}, ("trial", "k"))
    assert again.lines == kept.lines
    assert {"trial": 0, "k": 5} in again
    assert {"trial": 1, "k": 5} not in again


def test_tables_say_mean_and_spread() -> None:
    lines = [{"solver": "omp", "k": 5, "loss": value} for value in (1.0, 3.0)]
    columns = {"five": ("loss", {"k": 5}), "six": ("loss", {"k": 6})}
    assert curves.table(lines, ["omp"], columns)[2] == "| omp | 2 ± 1.4 | - |"
    (summary,) = curves.summary(lines, ("solver", "k"), ["loss"])
    assert summary["loss"] == {"mean": 2.0, "std": pytest.approx(2**0.5), "per_seed": [1.0, 3.0]}


def test_ticks_do_not_run_into_each_other() -> None:
    sizes = figure2.SETTINGS["paper"].sizes
    assert curves._apart(sizes) == [300, 220, 140, 100, 60, 20]
