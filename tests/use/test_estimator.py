"""`corefed.Federation`: the habits of scikit-learn, and the numbers of `corefed run`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corefed as command
from sklearn.base import clone
from torch import nn

import corefed
from corefed import Federation, UserError
from corefed.data import datasets, held_out, partition
from corefed.settings import config
from corefed.training import fitted, rounds, saving, setup
from corefed.use.predictor import Uncertainty

QUICK: dict[str, Any] = {
    "rounds": 2, "local_steps": 3, "hidden": (8,), "evaluate_draws": 3, "device": "cpu",
}  # fmt: skip
LABELS = np.array(["calm", "high", "low"])


def points(n: int, seed: int, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Points around three centres, far enough apart to be told from each other."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    centres = np.random.default_rng(99).normal(size=(3, features)) * 4
    return centres[y] + rng.normal(size=(n, features)), y


def sites(**sizes: int) -> dict[str, Any]:
    each = {name: points(n, seed) for seed, (name, n) in enumerate(sizes.items())}
    return {name: (x, LABELS[y]) for name, (x, y) in each.items()}


@pytest.fixture(scope="module")
def federation() -> Federation:
    given = {**QUICK, "rounds": 6, "local_steps": 20}
    return Federation(fraction=0.5, seed=3, **given).fit(sites(north=60, south=40, east=30))


@pytest.fixture(scope="module")
def regression() -> Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 80, 2)) * 100
    y = x @ [3.0, -2.0] + 5000 + rng.normal(size=(3, 80)) * 20
    clients = {place: (x[place], y[place]) for place in range(3)}
    given = {**QUICK, "rounds": 10, "local_steps": 40, "eta_1": 0.01, "eta_2": 0.01}
    return Federation(method="pfedbayes", **given).fit(clients)


# --- fitting and predicting -----------------------------------------------------------------------


def test_what_a_fitted_federation_has(federation: Federation) -> None:
    assert federation.classes_.tolist() == LABELS.tolist()
    assert federation.n_features_in_ == 4
    assert [line["round"] for line in federation.history_] == list(range(1, 7))
    assert federation.summary_["clients"] == 3 and federation.summary_["data"] == "memory"
    notes = federation.summary_["environment"]["notes"]
    assert notes == ["20% of each client's points are held out for testing"]
    assert [client["test"] for client in fitted_of(federation).clients[0]] == [12, 8, 6]


def fitted_of(federation: Federation) -> fitted.Fitted:
    assert federation._fitted is not None
    return federation._fitted


def test_predictions(federation: Federation) -> None:
    x, y = points(50, 7)
    model = federation.personal["south"]
    p = model.predict_proba(x)
    assert p.shape == (50, 3)
    np.testing.assert_allclose(p.sum(1), 1)
    assert (model.predict(x) == LABELS[p.argmax(1)]).all()
    assert model.score(x, LABELS[y]) == (model.predict(x) == LABELS[y]).mean() > 0.9
    said = model.uncertainty(x)
    assert isinstance(said, Uncertainty)
    np.testing.assert_allclose(said.total, -(p * np.log(p)).sum(1))
    np.testing.assert_allclose(said.total, said.aleatoric + said.epistemic)
    assert (said.epistemic >= 0).all() and said.epistemic.max() > 0
    shared = federation.global_.predict_proba(x)
    assert shared.shape == (50, 3) and not np.array_equal(shared, p)
    np.testing.assert_array_equal(model.predict_proba(torch.from_numpy(x)), p)
    np.testing.assert_array_equal(model.predict_proba(x.tolist()), p)


def test_many_points_are_predicted_in_blocks(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = points(50, 7)
    whole = federation.personal["south"].predict_proba(x)
    monkeypatch.setattr("corefed.use.predictor.BLOCK", 7)
    np.testing.assert_allclose(federation.personal["south"].predict_proba(x), whole, rtol=1e-6)


def test_the_mapping_of_clients(federation: Federation) -> None:
    assert list(federation.personal) == ["north", "south", "east"]
    assert len(federation.personal) == 3 and "north" in federation.personal
    assert {name: repr(model) for name, model in federation.personal.items()} == {
        name: f"<personal model of {name!r}>" for name in ("north", "south", "east")
    }
    with pytest.raises(UserError, match=r"no client 'nort'; did you mean 'north'\?"):
        federation.personal["nort"]
    with pytest.raises(UserError, match=r"no client 7; there are north, south, east\."):
        federation.personal[7]


def test_evaluate_is_the_record(federation: Federation) -> None:
    found = federation.evaluate()
    metrics = federation.summary_["metrics"]
    assert found["metrics"] == {name: value["mean"] for name, value in metrics.items()}
    assert list(found["clients"]) == ["north", "south", "east"]
    right = sum(
        found["clients"][name] * n for name, n in zip(found["clients"], (12, 8, 6), strict=True)
    )
    assert found["metrics"]["personal_accuracy"] == pytest.approx(right / 26)


def test_regression(regression: Federation) -> None:
    """A line with noise of 20: R^2 near 1, and intervals that hold their share of the targets."""
    assert regression.classes_.size == 0
    rng = np.random.default_rng(5)
    x = rng.normal(size=(400, 2)) * 100
    y = x @ [3.0, -2.0] + 5000 + rng.normal(size=400) * 20
    model = regression.personal[1]
    mean = model.predict(x)
    assert mean.shape == (400,)
    assert model.score(x, y) > 0.9
    low, high = model.interval(x, 0.9)
    said = model.uncertainty(x)
    half = 1.6448536 * np.sqrt(said.total)  # the 95 % quantile of a standard normal
    np.testing.assert_allclose(high - mean, half, rtol=1e-6)
    np.testing.assert_allclose(mean - low, half, rtol=1e-6)
    assert ((low < y) & (y < high)).mean() > 0.8
    assert set(regression.evaluate()["metrics"]) >= {"personal_rmse", "personal_nll"}
    with pytest.raises(UserError, match="predict_proba is for classes"):
        model.predict_proba(x)
    with pytest.raises(UserError, match=r"level is 1\.5"):
        model.interval(x, 1.5)


def test_several_targets() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    model = Federation(**QUICK).fit({"a": (x, x[:, :2])}).personal["a"]
    assert model.predict(x).shape == (40, 2)
    assert model.interval(x)[0].shape == model.uncertainty(x).total.shape == (40, 2)


def test_classes_are_no_regression(federation: Federation) -> None:
    with pytest.raises(
        UserError, match="interval is for regressions; this model has predict_proba"
    ):
        federation.personal["north"].interval(np.zeros((1, 4)))


@pytest.mark.parametrize(
    ("y", "kind"),
    [([0, 1, 5], int), ([True, False, True], bool), (["x", "y", "z"], str),
     (np.array(["x", "y", "x"], dtype=object), str)],
)  # fmt: skip
def test_labels_of_any_type(y: Any, kind: type, tmp_path: Path) -> None:
    x, _ = points(30, 0)
    y = np.tile(np.asarray(y), 10)
    found = Federation(method="pfedbayes", **QUICK).fit({"a": (x, y)})
    assert found.classes_.tolist() == sorted(set(y.tolist()))
    found.save(tmp_path / "run")
    again = Federation.load(tmp_path / "run")
    for each in (found, again):
        said = each.personal["a"].predict(x)
        assert said.shape == (30,) and isinstance(said.tolist()[0], kind)
    assert again.classes_.dtype == found.classes_.dtype


def test_one_client_and_clients_of_one_class_or_one_point() -> None:
    x, y = points(40, 0)
    alone = {"only": (x, y), 7: (x[y == 1], y[y == 1]), "point": (x[:1], y[:1])}
    found = Federation(**QUICK).fit(alone)
    assert found.personal[7].predict_proba(x).shape == (40, 3)
    assert found.evaluate()["clients"]["point"] is None  # its one point is trained on
    assert Federation(**QUICK).fit({"only": (x, y)}).personal["only"].score(x, y) > 0.3


def test_whole_numbers_can_be_regressed_on() -> None:
    x, y = points(40, 0)
    found = Federation(task="regression", **QUICK).fit({"a": (x, y)})
    assert found.classes_.size == 0 and found.personal["a"].predict(x).dtype == np.float64


def test_points_held_out_are_those_of_a_real_client() -> None:
    """Training and test points are the ones that a client of a federation would choose itself."""
    x, y = points(60, 0)
    found = Federation(**QUICK, seed=0).fit({"a": (x, y)})
    dataset = datasets.Dataset("x", torch.from_numpy(x), torch.from_numpy(y), 3)
    test = held_out.draw(dataset, 0.2, 0)
    trained = found._trained
    assert trained is not None
    mine = trained.setup.data.test
    assert torch.equal(mine.y[0], torch.from_numpy(y)[test])
    counts = np.bincount(y[test.numpy()], minlength=3)
    assert np.abs(counts - np.bincount(y, minlength=3) / 5).max() < 1  # of each class a fifth


def test_test_points_of_ones_own() -> None:
    (x, y), (tx, ty) = points(40, 0), points(10, 1)
    one = Federation(**QUICK).fit({"a": (x, y, tx, ty)})
    other = Federation(**QUICK).fit({"a": (x, y)}, test={"a": (tx, ty)})
    assert one.evaluate() == other.evaluate()
    assert one.summary_["environment"]["notes"] == []
    assert fitted_of(one).clients[0][0]["train"] == 40


def test_images_take_a_convolutional_network() -> None:
    x = np.random.default_rng(0).normal(size=(30, 1, 8, 8))
    y = np.arange(30) % 2
    found = Federation(channels=(2,), **QUICK).fit({"a": (x, y)})
    assert found.summary_["config"]["model"] == "cnn"
    assert found.personal["a"].predict(x.reshape(30, -1)).shape == (30,)


# --- the numbers of `corefed run` -----------------------------------------------------------------


def test_the_bits_of_a_run() -> None:
    flags = {"clients": 3, "keep": 0.3, "fraction": 0.3, "seeds": "1,2", **QUICK}
    wanted = config.resolve(flags=flags)
    run = setup.concrete(wanted).run
    trained = rounds.train(wanted)
    pool = datasets.load("digits")
    first = partition.thin(partition.split(run.partition, pool, 3, 1), 0.3, 1)
    clients = {
        f"client {i}": (pool.x[s.train], pool.y[s.train], pool.x[s.test], pool.y[s.test])
        for i, s in enumerate(first)
    }
    given = {**QUICK, "fraction": 0.3, "scale": "unit"}
    found = Federation(seed=1, **given).fit(clients)
    models, ours = saving.models_of(trained.setup.trees(trained.servers)), fitted_of(found).models
    assert ours.keys() == models.keys()
    for name, value in ours.items():
        assert torch.equal(value, models[name][: len(value)])
    for name, value in found.summary_["metrics"].items():
        assert value["mean"] == trained.summary["metrics"][name]["per_seed"][0]


def test_a_calibrated_federation(tmp_path: Path) -> None:
    """The same temperatures in memory, in the folder, and in what is loaded from it."""
    clients = sites(a=60, b=50)
    found = Federation(seed=1, validation=0.3, **QUICK).fit(clients)
    raw = Federation(seed=1, validation=0.3, calibrate="off", **QUICK).fit(clients)
    x, _ = points(20, 5)
    T = fitted_of(found).models["temperature.personal"][1].item()
    power = raw.personal["b"].predict_proba(x) ** (1 / T)
    said = found.personal["b"].predict_proba(x)
    np.testing.assert_allclose(said, power / power.sum(-1, keepdims=True), rtol=1e-6)
    parts = found.personal["b"].uncertainty(x)
    np.testing.assert_allclose(parts.total, parts.aleatoric + parts.epistemic)
    assert found.evaluate()["metrics"]["personal_nll"] != raw.evaluate()["metrics"]["personal_nll"]
    again = Federation.load(found.save(tmp_path / "kept"))
    np.testing.assert_array_equal(again.personal["b"].predict_proba(x), said)
    np.testing.assert_array_equal(again.global_.predict_proba(x), found.global_.predict_proba(x))


def test_several_seeds() -> None:
    clients = sites(a=40, b=30)
    both = Federation(seed=(1, 2), **QUICK).fit(clients)
    alone = Federation(seed=1, **QUICK).fit(clients)
    x, _ = points(20, 5)
    np.testing.assert_array_equal(
        both.personal["b"].predict_proba(x), alone.personal["b"].predict_proba(x)
    )
    per_seed = both.summary_["metrics"]["personal_accuracy"]["per_seed"]
    assert per_seed[0] == alone.summary_["metrics"]["personal_accuracy"]["mean"]
    means = both.evaluate()["clients"]
    last = both.history_[-1]["clients"]
    assert means["a"] == pytest.approx((last[0][0] + last[1][0]) / 2)


def test_methods_without_one_of_the_models() -> None:
    clients = sites(a=30, b=30)
    shared = Federation(method="fedavg", **QUICK).fit(clients)
    assert shared.global_.predict(clients["a"][0]).shape == (30,)
    with pytest.raises(UserError, match="fedavg has no personal model, only global"):
        _ = shared.personal
    alone = Federation(method="independent", **QUICK).fit(clients)
    with pytest.raises(UserError, match="independent has no global model, only personal"):
        _ = alone.global_


# --- kept and read again --------------------------------------------------------------------------


def test_saved_and_loaded_to_the_bit(federation: Federation, tmp_path: Path) -> None:
    folder = federation.save(tmp_path / "run")
    again = Federation.load(folder)
    x, _ = points(30, 9)
    for name in federation.personal:
        one, other = (each.personal[name].predict_proba(x) for each in (federation, again))
        assert np.array_equal(one, other)
    assert np.array_equal(federation.global_.predict_proba(x), again.global_.predict_proba(x))
    assert again.evaluate() == federation.evaluate()
    assert (again.history_, again.summary_) == (federation.history_, federation.summary_)
    assert (again.seed, again.test_fraction, again.get_params()["fraction"]) == (3, 0.2, 0.5)
    refitted = clone(again).fit(sites(north=60, south=40, east=30))
    assert refitted.evaluate() == federation.evaluate()
    copied = Federation.load(again.save(tmp_path / "copy"))
    assert np.array_equal(copied.personal["east"].predict(x), again.personal["east"].predict(x))
    with pytest.raises(UserError, match=r"is not empty, it has .*; save into another folder"):
        federation.save(folder)


def test_a_saved_folder_is_the_folder_of_a_run(federation: Federation, tmp_path: Path) -> None:
    folder = federation.save(tmp_path / "run")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"experiment.toml", "data.json", "rounds.jsonl", "fitted.safetensors",
                     "held_out.safetensors", "checkpoint", "summary.json"}  # fmt: skip
    result = command("compare", folder)
    assert result.code == 0 and "coreset-pfedbayes" in result.out
    np.savez(tmp_path / "new.npz", X=points(5, 3)[0])
    out = tmp_path / "p.csv"
    result = command(
        "predict", folder, "--client", "east", "--input", tmp_path / "new.npz", "--out", out
    )
    assert result.code == 0, result.err
    assert len(out.read_text().splitlines()) == 6
    for arguments in (["--resume", folder, "--rounds", "9"], ["--data", "memory"]):
        result = command("run", *arguments)
        assert result.code == 2 and "Data in memory are what corefed.Federation" in result.err


def test_runs_of_the_command_line_are_loaded(tmp_path: Path) -> None:
    given = ("--clients=2", "--rounds=1", "--local-steps=2", "--hidden=8", "--method=pfedbayes")
    assert command("run", *given, "--out", tmp_path / "run", "-q").code == 0
    found = Federation.load(tmp_path / "run")
    assert found.classes_.tolist() == list(range(10))
    assert list(found.personal) == ["client 0", "client 1"]
    pool = datasets.load("digits")
    held = fitted.read_tensors(tmp_path / "run", fitted.HELD_OUT)
    spec = config.resolve(tmp_path / "run" / "experiment.toml").run.partition
    x = pool.x[partition.split(spec, pool, 2, 0)[1].test]
    mine = held["personal.mean"][held["row"] == 1]
    torch.testing.assert_close(
        torch.from_numpy(found.personal["client 1"].predict_proba(x)).float(), mine
    )
    assert found.get_params()["hidden"] == [8] and "data" not in found.get_params()


# --- networks of one's own ------------------------------------------------------------------------


def test_a_factory(tmp_path: Path) -> None:
    def make(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))

    found = Federation(model=make, **QUICK).fit(sites(a=40, b=30))
    assert found.summary_["config"]["model"] == "memory"
    x, _ = points(20, 5)
    folder = found.save(tmp_path / "run")
    again = Federation.load(folder, model=make)
    said = found.personal["a"].predict_proba(x)
    assert np.array_equal(again.personal["a"].predict_proba(x), said)
    with pytest.raises(UserError, match=r"load it with Federation.load\(folder, model=factory\)"):
        Federation.load(folder)


def test_a_factory_that_can_be_imported_is_recorded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "estimator_nets.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n"
        "    def __init__(self, inputs, outputs):\n        super().__init__(inputs, outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import estimator_nets  # type: ignore[import-not-found]

    clients = sites(a=40)
    one = Federation(model=estimator_nets.Net, **QUICK).fit(clients)
    other = Federation(model="estimator_nets:Net", **QUICK).fit(clients)
    assert one.summary_["config"] == other.summary_["config"]
    assert one.summary_["config"]["model"] == "estimator_nets:Net"
    assert one.evaluate() == other.evaluate()
    folder = one.save(tmp_path / "run")
    assert Federation.load(folder, model="estimator_nets:Net").evaluate() == one.evaluate()
    with pytest.raises(UserError, match="which a file names"):
        Federation.load(folder)


# --- settings -------------------------------------------------------------------------------------


def test_parameters() -> None:
    found = Federation(fraction=0.2, rounds=20, seed=0)
    assert found.get_params() == {
        "method": "coreset-pfedbayes", "model": None, "seed": 0, "test_fraction": 0.2,
        "tune": False, "groups": None, "fraction": 0.2, "rounds": 20,
    }  # fmt: skip
    assert repr(found) == (
        "Federation(method='coreset-pfedbayes', model=None, seed=0, test_fraction=0.2, "
        "tune=False, fraction=0.2, rounds=20)"
    )
    assert found.set_params(rounds=3, hidden=(8, 8)) is found
    assert clone(found).get_params() == found.get_params()
    found.set_params(method="fedavg", fraction=None)
    assert found.method == "fedavg"
    with pytest.raises(UserError, match="fedavg trains on all data and takes no fraction"):
        found.set_params(fraction=0.1)
    assert found.get_params()["fraction"] is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"fractoin": 0.2}, r"'fractoin' \(Federation\).*did you mean 'fraction'"),
    ({"method": "fedavgg"}, "fedavg"),
    ({"rounds": 0}, "rounds is 0; it must be at least 1"),
    ({"rounds": "many"}, r"rounds \(Federation\) must be a whole number"),
    ({"data": "mnist"}, "takes no data; it follows from what fit is given"),
    ({"seeds": (0, 1)}, "takes no seeds; write seed"),
    ({"test_fraction": 1}, "test_fraction is 1; it must be at least 0 and below 1"),
    ({"model": nn.Linear(2, 2)}, "model is of type Linear; give a function that makes"),
    ({"model": 3}, "model is of type int"),
    ({"model": "mpl"}, "Did you mean 'mlp'"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Federation(**settings)


def test_a_cohort_is_held_to_the_clients_that_fit_is_given() -> None:
    found = Federation(cohort=12, **QUICK)
    with pytest.raises(UserError, match="cohort is 12; it must be at most the 1 clients"):
        found.fit({"a": points(20, 0)})


def test_a_damaged_folder(federation: Federation, tmp_path: Path) -> None:
    folder = federation.save(tmp_path / "run")
    with pytest.raises(UserError, match="has 15 parameters now and had"):
        Federation.load(folder, model=lambda: nn.Linear(4, 3))
    (folder / "estimator.json").write_text('{"clients": []}')
    with pytest.raises(UserError, match=r"estimator\.json cannot be read: KeyError"):
        Federation.load(folder)


def test_not_fitted(tmp_path: Path) -> None:
    found = Federation()
    for use in (lambda: found.personal, lambda: found.global_, found.evaluate,
                lambda: found.save(tmp_path / "run")):  # fmt: skip
        with pytest.raises(UserError, match=r"not fitted yet: call fit\(clients\) first"):
            use()
    with pytest.raises(UserError, match="holds no run"):
        Federation.load(tmp_path / "nowhere")


# --- arrays that cannot be used -------------------------------------------------------------------

X, Y = points(20, 0)
HOLED = np.where(np.eye(20, 4) > 0, math.nan, X)

BAD: list[tuple[Any, str]] = [
    ({}, "Give clients as a mapping"),
    ([(X, Y)], "Give clients as a mapping"),
    ({"a": X}, r"Client 'a' must have a tuple \(X, y\)"),
    ({"a": (X,)}, r"Client 'a' must have a tuple \(X, y\)"),
    ({1.5: (X, Y)}, "1.5 is no name for a client"),
    ({1: (X, Y), "1": (X, Y)}, "the same name"),
    ({"a": (X, Y[:-1])}, "y of client 'a' has 19 targets for 20 points"),
    ({"a": (X[:, 0], Y)}, r"X of client 'a' has shape \(20,\); it must have one row per point"),
    ({"a": (X[:0], Y[:0])}, "X of client 'a' has no points"),
    ({"a": (X, Y), "b": (X[:, :3], Y)}, r"X of client 'b' has points of shape \(3,\), not \(4,\)"),
    (
        {"a": (HOLED, Y)},
        "X of client 'a' has NaN or infinite numbers in 4 points, the first in row 0",
    ),
    ({"a": (X * 1e300, Y)}, "NaN or infinite"),
    ({"a": (np.full((20, 4), "x"), Y)}, "X of client 'a' is <U1, not numbers"),
    ({"a": ([[1, 2], [3]], [0, 1])}, "X of client 'a' is no array"),
    ({"a": (X, np.zeros(20, int))}, "All points are of class '0'"),
    ({"a": (X, np.full(20, math.nan))}, "y has NaN or infinite targets"),
    ({"a": (X, [None, *Y[1:].tolist()])}, "all text or all numbers|without a class"),
    ({"a": (X, Y), "b": (X, Y.astype(str))}, "y has text at some clients and numbers at others"),
    ({"a": (X, Y), "b": (X, Y / 2)}, "whole numbers at some clients and floating-point"),
    ({"a": (X, np.stack([Y, Y], 1))}, "y must have one class per point"),
    ({"a": (X, Y / 2), "b": (X, np.stack([Y, Y], 1) / 2)}, "another number of targets"),
    ({"a": (X, Y, X, Y), "b": (X, Y)}, "Client 'b' has no test points, but others have"),
    ({"a": (X[:1], Y[:1]), "b": (X[1:2], 1 - Y[:1])}, "No client has points enough to test on"),
]


@pytest.mark.parametrize(("clients", "words"), BAD)
def test_clients_that_cannot_be_used(clients: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        Federation(**QUICK).fit(clients)
    assert "\n" not in str(refused.value)


def test_test_points_of_nobody() -> None:
    with pytest.raises(UserError, match="test points for 'b', but clients has no such name"):
        Federation(**QUICK).fit({"a": (X, Y)}, test={"b": (X, Y)})
    with pytest.raises(UserError, match="Give the test points of client 'a' once"):
        Federation(**QUICK).fit({"a": (X, Y, X, Y)}, test={"a": (X, Y)})


def test_an_empty_name_is_not_the_working_folder(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="save is given an empty name"):
        federation.save("")
    assert not list(tmp_path.iterdir())


def test_text_cannot_be_regressed_on() -> None:
    with pytest.raises(UserError, match="y has text; a regression needs numbers"):
        Federation(task="regression", **QUICK).fit({"a": (X, Y.astype(str).astype("U5") + "x")})


@pytest.mark.parametrize(
    ("x", "words"),
    [(X[:, :3], r"X has points of shape \(3,\), not \(4,\)"), (X[0], "X.reshape"),
     (X[:0], "X has no points"), (HOLED, "X has NaN"), ("nowhere.npz", "There is no nowhere.npz")],
)  # fmt: skip
def test_points_that_cannot_be_predicted(federation: Federation, x: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        federation.personal["north"].predict(x)


def test_a_file_of_points_is_predicted(federation: Federation, tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", X)
    model = federation.personal["north"]
    assert np.array_equal(model.predict_proba(tmp_path / "new.npy"), model.predict_proba(X))


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Federation(**QUICK).fit({"a": (X, Y)})
    assert capsys.readouterr() == ("", "")
    Federation(**QUICK).fit({"a": (X, Y)}, progress=True)
    err = capsys.readouterr().err
    assert "note: 20% of each client's points are held out" in err and "round 2/2" in err


def test_it_is_exported() -> None:
    assert corefed.Federation is Federation
