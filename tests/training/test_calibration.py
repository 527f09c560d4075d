"""Temperatures of whole runs: what is fitted, kept, recorded, and by which points."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from corefed.base.types import ClientData
from corefed.bayes.temperature import ALL, GRID
from corefed.settings.config import resolve
from corefed.show import report
from corefed.training import calibration, evaluate, fitted, record, rounds, scoring, setup
from corefed.use import review
from corefed.use.review import PredictionSettings

SETTINGS = ["clients=3", "rounds=2", "local_steps=4", "hidden=8", "evaluate_draws=3", "seeds=0,4",
            "validation=0.2", "device=cpu"]  # fmt: skip
REGRESSION = ["data=synthetic-regression", "partition=natural"]


def train(folder: Path, *more: str, **options: Any) -> rounds.Result:
    return rounds.train(
        resolve(None, {"method": "pfedbayes"}, [*SETTINGS, *more]), folder, **options
    )


@pytest.fixture(scope="module", params=[(), tuple(REGRESSION)], ids=["classes", "regression"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration") / "run"
    train(folder, *request.param)
    return folder


def test_chance_alone_has_an_ece() -> None:
    """100 points of confidence 0.8 in one bin: the mean of |Binomial(100, 0.8) - 80| / 100."""
    n, p = 100, 0.8
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    off = [abs(k - n * p) / n for k in range(n + 1)]
    mean = sum(c * each for c, each in zip(chances, off, strict=True))
    std = math.sqrt(sum(c * (each - mean) ** 2 for c, each in zip(chances, off, strict=True)))
    found = calibration.chance_ece(torch.full((n,), p))
    assert found == calibration.chance_ece(torch.full((n,), p))  # seeded
    assert abs(found - mean) < 4 * std / math.sqrt(calibration.DRAWS)
    assert math.isnan(calibration.chance_ece(torch.empty(0)))
    assert calibration.chance_ece(torch.ones(50)) == 0  # who is always sure is always right


def test_chance_falls_with_the_number_of_points() -> None:
    few, many = (calibration.chance_ece(torch.linspace(0.1, 1, n)) for n in (100, 10_000))
    assert many < few / 5


def test_a_client_without_points_has_the_temperature_of_all() -> None:
    slope = torch.zeros(2, 3, len(GRID), dtype=torch.float64)
    slope[:, 0] = 40 * (GRID - 2)  # points of the first client that say T = 2
    found = calibration.fit({"personal": slope.flatten(0, 1), "global": slope.flatten(0, 1)}, 2)
    pooled, own = found.pooled["personal"], found.clients["personal"].view(2, 3)
    nu = ALL**-2
    assert pooled[0] == pytest.approx((2 * 40 + 1 * nu) / (40 + nu))  # S + nu (T - 1) = 0
    torch.testing.assert_close(own[:, 1:], pooled.unsqueeze(-1).expand(2, 2))
    assert bool((own[:, 0] > pooled).all()) and bool((own[:, 0] < 2).all())
    assert torch.equal(found.clients["global"], found.pooled["global"].repeat_interleave(3))


def test_what_is_recorded(run: Path) -> None:
    summary, lines = record.read(run)
    assert ["calibration" in line for line in lines] == [False, True]
    about = lines[-1]["calibration"]
    for kind in ("personal", "global", "localized"):
        section = summary["calibration"][kind]
        assert section["temperature"]["all_clients"]["per_seed"] == about["pooled"][kind]
        for part, raw in (("test", lines[-1]["metrics"]), ("validation", lines[-1]["validation"])):
            before, after = section[part]["before"], section[part]["after"]
            assert before["nll"]["per_seed"] == raw[f"{kind}_nll"]
            if part == "validation":  # where it was fitted it cannot be worse
                for a, b in zip(after["nll"]["per_seed"], before["nll"]["per_seed"], strict=True):
                    assert a <= b + 1e-6
        assert summary["metrics"][f"{kind}_nll"] == section["test"]["after"]["nll"]
    own = [T for seed in about["temperature"]["personal"] for T in seed]
    shown = summary["calibration"]["personal"]["temperature"]
    assert (shown["min"], shown["max"]) == (min(own), max(own))
    for name in ("personal_accuracy", "global_rmse"):  # no temperature changes these
        if name in summary["metrics"]:
            assert summary["metrics"][name]["per_seed"] == lines[-1]["metrics"][name]
    assert (
        summary["validation"]["personal_nll"]["per_seed"] == lines[-1]["validation"]["personal_nll"]
    )
    if "personal_ece" in summary["metrics"]:
        for each in summary["calibration"]["personal"]["test"].values():
            assert 0 < each["chance_ece"]["mean"] < 0.1


def test_what_is_kept_is_what_is_predicted(run: Path) -> None:
    """Predictions, held-out predictions and a folder without temperatures."""
    model = fitted.load(run)
    held = fitted.read_tensors(run, fitted.HELD_OUT)
    data = setup.load(model.experiment.run)
    T = model.models["temperature.personal"]
    assert T.shape == (6,) and bool((T != 1).all())
    assert model.models["temperature.global"].shape == (2,)
    raw = model._replace(models={k: v for k, v in model.models.items() if "temperature" not in k})
    for seed, client, row in ((0, 1, 1), (4, 2, 5)):
        mine = held["row"] == row
        x = data.test.x[row][data.test.weight[row] > 0]
        name = model.names[client]
        for kind, place in (("personal", row), ("global", row // 3)):
            said = model.predict(name, x, seed=seed, kind=kind)
            before = raw.predict(name, x, seed=seed, kind=kind)
            factor = model.models[f"temperature.{kind}"][place].item()
            if data.classes:
                power = before.mean.pow(1 / factor)
                torch.testing.assert_close(said.mean, power / power.sum(-1, keepdim=True))
            else:
                torch.testing.assert_close(said.total, factor**2 * before.total)
                assert torch.equal(said.mean, before.mean)
            assert bool((said.epistemic >= 0).all())
            for part in ("mean", "total", "aleatoric", "epistemic"):
                torch.testing.assert_close(
                    held[f"{kind}.{part}"][mine], getattr(said, part).float(), rtol=1e-4, atol=1e-5
                )


def test_a_folder_without_temperatures_predicts_as_before(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for file in run.iterdir():
        if file.is_file():
            (old / file.name).write_bytes(file.read_bytes())
    models = {k: v for k, v in load_file(run / fitted.MODELS).items() if "temperature" not in k}
    save_file(models, old / fitted.MODELS)
    model = fitted.load(old)
    assert calibration.temperature_of(model.models, "personal", 0) == 1
    model.predict(model.names[0], torch.zeros(2, *model.preparations[0].shape))


def test_off_changes_nothing_but_the_temperatures(run: Path, tmp_path: Path) -> None:
    """Training is the same to the bit; metrics are those of the last line."""
    data = resolve(run / record.EXPERIMENT).run.data
    more = REGRESSION if data != "digits" else []
    train(tmp_path / "off", *more, "calibrate=off")
    models, kept = (load_file(folder / fitted.MODELS) for folder in (tmp_path / "off", run))
    assert models.keys() == {k for k in kept if "temperature" not in k}
    assert all(torch.equal(value, kept[name]) for name, value in models.items())
    summary, lines = record.read(tmp_path / "off")
    assert "calibration" not in summary and "calibration" not in lines[-1]
    assert summary["validation"] == record.read(run)[0]["validation"]
    for name, each in summary["metrics"].items():
        assert each["per_seed"] == lines[-1]["metrics"][name]


def test_no_validation_points_no_temperatures(tmp_path: Path) -> None:
    train(tmp_path / "run", "validation=0")
    assert not [k for k in load_file(tmp_path / "run" / fitted.MODELS) if "temperature" in k]
    assert "calibration" not in record.read(tmp_path / "run")[0]


def test_a_resumed_run_has_the_same_temperatures(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "parts", stop=lambda: True)
    train(tmp_path / "parts", resume=True)
    whole, parts = (record.read(tmp_path / name) for name in ("whole", "parts"))
    assert whole[0]["calibration"] == parts[0]["calibration"]
    assert whole[0]["metrics"] == parts[0]["metrics"]


def test_the_papers_preset_is_not_calibrated() -> None:
    paper = resolve(flags={"preset": "paper"})
    assert paper.run.calibrate == "off" and resolve().run.calibrate == "auto"
    assert resolve(flags={"preset": "paper", "calibrate": "auto"}).run.calibrate == "auto"


def test_models_on_others_points_have_their_own_temperature(tmp_path: Path) -> None:
    trained = train(tmp_path / "run", "method=independent", "learning_rate=0.1")
    metrics = trained.summary["metrics"]
    last = record.read(tmp_path / "run")[1][-1]
    assert metrics["others_accuracy"]["per_seed"] == last["metrics"]["others_accuracy"]
    assert metrics["others_nll"]["per_seed"] != last["metrics"]["others_nll"]


# --- which points ---------------------------------------------------------------------------------


def test_test_points_take_no_part_in_temperatures(tmp_path: Path) -> None:
    """Other test labels give the same temperatures, and another threshold for review.

    So the threshold is chosen on points that the temperatures have not seen, and its guarantee
    holds.
    """
    settings = [*SETTINGS, "local_steps=200", "eta_1=0.01", "eta_2=0.01", "anneal=0"]
    experiment = setup.concrete(resolve(None, {"method": "pfedbayes"}, settings))
    data = setup.load(experiment.run)
    assert data.validation is not None
    wrong = data.test._replace(y=(data.test.y + 1) % 10)
    made = []
    for name, test in (("right", data.test), ("wrong", wrong)):
        rounds.train(experiment, tmp_path / name, data=data._replace(test=test))
        made.append(fitted.load(tmp_path / name))
    T = [model.models["temperature.personal"] for model in made]
    assert torch.equal(*T)
    wanted = PredictionSettings(target_error=0.4)
    flags = [review.flag_for(model, model.names[0], wanted) for model in made]
    assert flags[0].threshold.kept > 0 and flags[1].threshold.kept == 0
    held = fitted.read_tensors(tmp_path / "right", fitted.HELD_OUT)
    assert len(held["y"]) == int(data.test.weight.sum())  # all test points, and no others


def test_validation_and_test_points_are_different_points() -> None:
    """No digit is in two parts. Pictures of digits are all different."""
    data = setup.load(setup.concrete(resolve(None, {"method": "pfedbayes"}, SETTINGS)).run)
    assert data.validation is not None
    parts: list[ClientData] = [data.train, data.test, data.validation]
    for row in range(len(data.names)):
        sets = [set(map(bytes, part.x[row][part.weight[row] > 0].numpy())) for part in parts]
        assert sum(map(len, sets)) == len(set().union(*sets))


def test_metrics_at_temperatures_are_those_of_tempered_predictions() -> None:
    """`evaluate` at given temperatures, against its own scores of probabilities made by hand."""
    p = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.4, 0.6]]], dtype=torch.float64)
    y = torch.tensor([[0, 1, 1]])
    T = 0.5
    power = p.square() / p.square().sum(-1, keepdim=True)
    by_hand = scoring.score_classes(power, y)
    found = evaluate.score(p, y, 2, temperature=torch.tensor([T]))
    for name, value in by_hand.items():
        torch.testing.assert_close(found[name], value)


def test_tables_say_which_numbers_are_calibrated(tmp_path: Path) -> None:
    train(tmp_path / "with")
    train(tmp_path / "without", "validation=0")
    both = report.load([tmp_path / "with", tmp_path / "without"])
    assert report.comparison_table(both).caption == (
        "NLL and ECE of runs with validation points are after calibration."
    )
    assert report.comparison_table(both[:1]).caption == "NLL and ECE are after calibration."
    assert report.comparison_table(both[1:]).caption is None
    assert "calibrated at temperature" in str(report.metrics_table(both[0].summary).caption)
