"""A client that took no part gets a model of its own: what is trained, kept, shown and refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import corefed

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Work
from corefed.commands import personalize
from corefed.data.clients import FederatedData
from corefed.methods.registry import METHODS
from corefed.settings.config import resolve
from corefed.training import client_side, fitted, newcomers, record, rounds, saving
from corefed.use.newcomer import read

CLIENTS = 3
SETTINGS = [f"clients={CLIENTS}", "rounds=2", "local_steps=4", "hidden=8", "evaluate_draws=3",
            "seeds=0,4"]  # fmt: skip


def points(number: int, classes: tuple[int, ...] = (0, 1, 2)) -> dict[str, np.ndarray]:
    """Some of the digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = np.flatnonzero(np.isin(y, classes))[:number]
    return {"X": (x[chosen] / 16).astype(np.float32), "y": y[chosen]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small run of every method."""
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        rounds.train(resolve(None, {"method": method, "device": "cpu"}, SETTINGS), folder / method)
    return {method: folder / method for method in METHODS}


@pytest.fixture
def run(runs: dict[str, Path]) -> Path:
    return runs["coreset-pfedbayes"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.savez(tmp_path / "south.npz", **points(50))
    return tmp_path / "south.npz"


def newcomer(number: int) -> FederatedData:
    """Points as `use.newcomer.read` hands them on, all of them for training and for testing."""
    values = points(number)
    x, y = (torch.from_numpy(values[name]).unsqueeze(0) for name in ("X", "y"))
    data = ClientData(x, y.long(), torch.ones(1, number))
    return FederatedData(data, data, 10, 0, ["south"], tuple(map(str, range(10))))


# Training


@pytest.mark.parametrize("method", [name for name in METHODS if name != "independent"])
def test_every_method_that_shares_something_gives_a_model(
    runs: dict[str, Path], method: str
) -> None:
    """It starts at the server's state, which stays as it is, and is no longer the shared model."""
    model = fitted.load(runs[method])
    before = {k: v.clone() for k, v in model.models.items()}
    joined = newcomers.join(model, newcomer(30), steps=8, seed=4)
    assert all(torch.equal(model.models[k], v) for k, v in before.items())
    metrics = joined.summary["metrics"]
    for kind in ("personal", "global", "alone"):
        assert 0 <= metrics[f"{kind}_accuracy"]["mean"] <= 1, kind
    assert metrics["personal_nll"]["mean"] != metrics["global_nll"]["mean"]
    assert metrics["personal_nll"]["mean"] != metrics["alone_nll"]["mean"]
    assert [line["bytes_up"] for line in joined.lines] == [[0]] * len(joined.lines)
    server = {
        k.removeprefix("server."): v[0] for k, v in model.models.items() if k.startswith("server.")
    }
    fetched = client_side.sent(model.method, server).values()
    assert sum(line["bytes_down"][0] for line in joined.lines) == sum(
        value.numel() * 4 for value in fetched
    )


def test_a_personal_posterior_is_trained_by_the_methods_own_rounds(runs: dict[str, Path]) -> None:
    """By hand: the start, then rounds of the run's four steps, the last one shorter."""
    model = fitted.load(runs["pfedbayes"])
    data = newcomer(30)
    joined = newcomers.join(model, data, steps=10, seed=4, device="cpu", own_classes=False)
    broadcast = {"v": model.models["server.v"][1:2]}
    private = client_side.start(model.method, broadcast, data.train)
    for t, steps in enumerate((4, 4, 2)):
        streams = Streams([Who(4, CLIENTS)], t)  # as the client after the last
        work = Work(steps, 100)
        trained = client_side.train(model.method, broadcast, private, data.train, streams, work)
        private = trained.private
    assert torch.equal(joined.setup.clients.private["q"].cpu(), private["q"])
    assert [line["round"] for line in joined.lines] == [1, 2, 3]


def test_fine_tuning_makes_all_its_steps_from_the_shared_model(runs: dict[str, Path]) -> None:
    """Eight steps in one round: a second round would begin at the server's weights again."""
    model = fitted.load(runs["fedavg"])
    data = newcomer(30)
    joined = newcomers.join(model, data, steps=8, device="cpu", share=1, own_classes=False)
    assert len(joined.lines) == 1
    broadcast = {"theta": model.models["server.theta"][:1]}
    start = client_side.start(model.method, broadcast, data.train)
    streams = Streams([Who(0, CLIENTS)], 0)
    trained = client_side.train(model.method, broadcast, start, data.train, streams, Work(8, 100))
    kept = saving.models_of(joined.setup.trees([joined.server]))
    assert torch.equal(kept["personal.theta"], trained.private["theta"])
    assert torch.equal(kept["global.theta"], model.models["server.theta"][:1])


def test_steps_of_per_fedavg_are_those_that_adapt(runs: dict[str, Path]) -> None:
    model = fitted.load(runs["per-fedavg"])
    assert newcomers.join(model, newcomer(30)).summary["personalized"]["steps"] == 1  # the run's
    joined = newcomers.join(model, newcomer(30), steps=3)
    assert joined.setup.experiment.settings.adapt_steps == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("points", "asked", "fraction"),
    [(1000, None, 0.1), (400, None, 0.25), (30, None, 1.0), (1000, 0.02, 0.02)],
)
def test_a_coreset_has_at_least_a_minibatch_unless_asked(
    runs: dict[str, Path], points: int, asked: float | None, fraction: float
) -> None:
    experiment = fitted.load(runs["coreset-pfedbayes"]).experiment
    found, steps = newcomers.settings_for(experiment, points, None, asked)
    assert found.settings.fraction == fraction  # type: ignore[attr-defined]
    assert steps == newcomers.STEPS


def test_it_is_better_than_the_shared_model_and_than_alone(tmp_path: Path) -> None:
    """On 40 digits of three classes; each of the run's four clients has five of the ten.

    Accuracies of 200 others have a standard error of 0.02; this seed's gaps are 0.13 and 0.59, and
    0.12 and 0.34 with another.
    """
    settings = ["clients=4", "rounds=20", "hidden=50", "evaluate_every=20"]
    rounds.train(resolve(None, {"method": "pfedbayes", "device": "cpu"}, settings), tmp_path)
    everything = newcomer(240)
    data = everything._replace(
        train=ClientData(*(field[:, 200:] for field in everything.train)),
        test=ClientData(*(field[:, :200] for field in everything.test)),
    )
    metrics = newcomers.join(fitted.load(tmp_path), data).summary["metrics"]
    personal, shared, alone = (
        metrics[f"{kind}_accuracy"]["mean"] for kind in ("personal", "global", "alone")
    )
    assert personal > shared + 0.05
    assert personal > alone + 0.2


# Temperatures


@pytest.mark.parametrize("method", ["coreset-pfedbayes", "fedavg"])
def test_a_newcomer_has_the_temperature_of_the_runs_clients(
    method: str, file: Path, tmp_path: Path
) -> None:
    """Or its own, around that, where it has validation points. A fine-tuned model has that of the
    run's fine-tuned ones."""
    run = tmp_path / "run"
    experiment = resolve(None, {"method": method}, [*SETTINGS, "validation=0.2"])
    trained = rounds.train(experiment, run).summary["calibration"]
    kind = "personal" if method == "coreset-pfedbayes" else "localized"
    pooled = trained[kind]["temperature"]["all_clients"]["per_seed"]
    options = ("--data", file, "--steps=4", "--seed=4", "--json", "--share=1")
    done = corefed("personalize", run, *options)
    assert done.code == 0, done.err
    model = fitted.load(run, client="south")
    assert model.models["temperature.personal"].tolist() == pooled[1:]
    assert model.models["temperature.newcomer"].tolist() == pooled[1:]
    assert model.experiment.run.validation == 0 and model.clients[0][0]["train"] == 40
    shared = corefed("personalize", run, *options[:-1], "--share=0", "--name=near")
    assert shared.code == 0, shared.err
    near = fitted.load(run, client="near")
    (T,) = near.models["temperature.personal"].tolist()
    assert pytest.approx(float(near.models["temperature.global"])) == T
    told = json.loads(done.out)
    assert (
        told["metrics"]["personal_nll"] == told["calibration"]["personal"]["test"]["after"]["nll"]
    )
    more = ("--name=own", "--validation=0.25", "--test-fraction=0.2")
    done = corefed("personalize", run, *options, *more)
    assert done.code == 0, done.err
    own = fitted.load(run, client="own")
    (T,) = own.models["temperature.personal"].tolist()
    assert pooled[1] != T and abs(T - pooled[1]) < 0.2
    assert own.clients[0][0]["train"] == 30
    assert own.experiment.run.validation == 0.25
    assert "validation" in json.loads(done.out)["calibration"]["personal"]


@pytest.mark.parametrize(("share", "words"), [(1.0, "in [0, 1)"), (0.999, "validate on")])
def test_too_large_a_part_for_validation(
    run: Path, file: Path, tmp_path: Path, share: float, words: str
) -> None:
    done = corefed(
        "personalize", run, "--data", file, f"--validation={share}", "--out", tmp_path / "x"
    )
    assert done.code == 2 and words in done.err and not (tmp_path / "x").exists()


# The folder


def test_the_folder_is_a_runs_and_predicts(run: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "place"
    done = corefed("personalize", run, "--data", file, "--steps=8", "--out", out, "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert told["folder"] == str(out)
    assert 0 <= told["personalized"].pop("share") <= 1
    assert told["personalized"] == {
        "name": "south", "data": "digits", "clients": 3, "steps": 8, "own_classes": True,
    }  # fmt: skip
    summary, lines = record.read(out)
    assert summary["metrics"] == told["metrics"]
    assert len(lines) == 2  # of four steps
    model = fitted.load(out)
    assert model.names == ["south"]
    about = model.clients[0][0]
    assert (about["train"], about["test"]) == (40, 10)  # a fifth is held out
    held_out = fitted.read_tensors(out, fitted.HELD_OUT)
    assert len(held_out["y"]) == 10
    predicted = corefed("predict", out, "--client=south", "--input", file, "--json")
    assert predicted.code == 0, predicted.err


def test_a_newcomer_is_found_by_name_beside_the_runs_own_clients(run: Path, file: Path) -> None:
    assert corefed("personalize", run, "--data", file, "--name", "Süd 1", "--steps=4").code == 0
    assert fitted.newcomers(run) == ["Süd 1"]
    assert fitted.load(run, client="Süd 1").folder == run / "personalized" / "Süd 1"
    assert fitted.load(run, client="client 0").folder == run
    done = corefed("predict", run, "--client", "Süd 1", "--input", file, "--json")
    assert done.code == 0, done.err
    near = corefed("predict", run, "--client", "Sud 1", "--input", file)
    assert near.code == 2 and "did you mean 'Süd 1'" in near.err
    again = corefed("personalize", run, "--data", file, "--name", "Süd 1")
    assert again.code == 2 and "is not empty" in again.err


def test_the_table_has_three_models_and_the_seconds(run: Path, file: Path, tmp_path: Path) -> None:
    done = corefed("personalize", run, "--data", file, "--steps=4", "--out", tmp_path / "x")
    assert done.code == 0
    for words in (*personalize.ROWS.values(), "10 held-out points", "4 steps on 40 of 40", " s"):
        assert words in done.out


def test_a_files_own_test_part_is_used(run: Path, tmp_path: Path) -> None:
    train, test = points(20), points(33, (2, 3))
    arrays = {
        "X_train": train["X"],
        "y_train": train["y"],
        "X_test": test["X"],
        "y_test": test["y"],
    }
    np.savez(tmp_path / "both.npz", **arrays)
    model = fitted.load(run)
    data = read(tmp_path / "both.npz", model, 0, "both", None, 4096)
    assert data.train.y[0].tolist() == train["y"].tolist()
    assert data.test.y[0].tolist() == test["y"].tolist()
    split = read(tmp_path / "both.npz", model, 0, "both", 0.25, 4096)
    assert (split.train.y.shape[1], split.test.y.shape[1]) == (15, 5)


def test_without_test_points_there_are_no_metrics(run: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "untested"
    options = ("--test-fraction=0", "--steps=4", "--out", out)
    done = corefed("personalize", run, "--data", file, *options)
    assert done.code == 0
    summary, _ = record.read(out)
    assert summary["metrics"] == {}
    assert fitted.load(out).clients[0][0]["train"] == 50


def test_a_table_with_a_scale_of_its_own(tmp_path: Path) -> None:
    """A regression: targets are learnt in the run's unit and compared in their own."""

    def table(name: str, sites: dict[str, int]) -> Path:
        rows = [
            f"{site},{'' if i % 9 == 0 else shift + i},{'ab'[i % 2]},{1000.5 + 3.1 * i:.1f}"
            for site, shift in sites.items()
            for i in range(20)
        ]
        (tmp_path / name).write_text("site,age,ward,cost\n" + "\n".join(rows) + "\n")
        return tmp_path / name

    run, sites = tmp_path / "run", table("sites.csv", {"north": 0, "south": 40})
    options = ("--set=target=cost", "--set=client_column=site", "--set=scale=client")
    small = ("--method=pfedbayes", "--rounds=1", "--local-steps=2", "--set=hidden=4")
    assert corefed("run", f"--data=table:{sites}", *options, *small, "--out", run).code == 0
    east = table("east.csv", {"east": 1000})
    done = corefed("personalize", run, "--data", east, "--steps=2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["metrics"]["personal_rmse"]["mean"] > 1  # not in standard units
    (kept,) = fitted.load(run, client="east").preparations
    assert list(kept.clients) == ["east"]
    age = [1000 + i for i in range(20) if i % 9]
    assert kept.clients["east"].mean[0] == pytest.approx(np.mean(age))
    assert kept.target_mean == fitted.load(run).preparations[0].target_mean
    east.write_text(east.read_text().replace("age", "weight"))
    done = corefed("personalize", run, "--data", east, "--name=other")
    assert done.code == 2 and "age" in done.err


def test_one_class_is_allowed_and_said(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **points(12, (7,)))
    options = ("--steps=4", "--out", tmp_path / "x")
    done = corefed("personalize", run, "--data", tmp_path / "one.npz", *options)
    assert done.code == 0
    assert "all training points of one are of class '7'" in done.err


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps=0"], "--steps is 0; it must be at least 1"),
        (["--fraction=2"], "fraction"),
        (["--test-fraction=1"], "--test-fraction is 1; it must be in [0, 1)"),
        (["--seed=1"], "has no seed 1, only 0, 4"),
        (["--name=client 0"], "has a client 'client 0' already"),
        (["--name=../up"], "is no good name for a folder"),
        (["--name=dot."], "is no good name for a folder"),
    ],
)
def test_bad_options(run: Path, file: Path, options: list[str], words: str) -> None:
    done = corefed("personalize", run, "--data", file, *options)
    assert done.code == 2 and words in done.err
    assert not (run / "personalized" / "south").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"X": np.zeros((5, 9)), "y": np.zeros(5, int)}, "training had points of shape (64,)"),
        ({"X": np.zeros((5, 64)), "y": np.full(5, 12)}, "has class '12' in row 0"),
        ({"X": np.zeros((2, 64)), "y": np.zeros(2, int)}, "too few to train on 2 and test on 1"),
        ({"X": np.zeros((5, 64))}, "has no y"),
    ],
)
def test_bad_data(run: Path, tmp_path: Path, values: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "bad.npz", **values)
    done = corefed("personalize", run, "--data", tmp_path / "bad.npz")
    assert done.code == 2 and words in done.err


def test_a_run_that_shares_nothing_or_has_no_models(
    runs: dict[str, Path], file: Path, tmp_path: Path
) -> None:
    done = corefed("personalize", runs["independent"], "--data", file)
    assert done.code == 2 and "share nothing" in done.err
    done = corefed("personalize", runs["fedavg"], "--data", file, "--fraction=0.5")
    assert done.code == 2 and "fedavg trains on all data" in done.err
    out = tmp_path / "bare"
    bare = ("--clients=2", "--rounds=1", "--local-steps=1", "--set=checkpoint_every=0")
    assert corefed("run", "--method=fedavg", *bare, "--out", out).code == 0
    done = corefed("personalize", out, "--data", file)
    assert done.code == 2 and "fitted.safetensors" in done.err


def test_too_few_training_points(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **points(1))
    with pytest.raises(UserError, match="has 1 training points; it takes at least 2"):
        read(tmp_path / "one.npz", fitted.load(run), 0, "one", 0.0, 4096)
