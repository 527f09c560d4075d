"""Federations of tables and arrays, from `corefed run` to predictions for rows of a new file."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from commands import corefed
from PIL import Image

from corefed.base.errors import UserError
from corefed.data import inputs, partition
from corefed.data.preparation import Preparation, Scale
from corefed.settings.config import resolve
from corefed.training import fitted, record, setup

QUICK = (
    "--device=cpu",
    "--rounds=2",
    "--local-steps=5",
    "--set=hidden=8",
    "--set=evaluate_draws=2",
)


class Ran(NamedTuple):
    path: Path  # the table
    folder: Path
    target: str
    err: str


def table(path: Path, regression: bool) -> Path:
    """120 rows of three sites; a category, a number that some rows lack, an identifier."""
    rng = np.random.default_rng(3)
    lines = [["patient", "site", "dose", "grade", "weight", "outcome"]]
    for i in range(120):
        dose, grade = rng.normal(50, 9), "abc"[rng.integers(3)]
        weight = "" if i % 11 == 0 else f"{rng.normal(70, 5):.3f}"
        value = 1000 + 30 * dose + 200 * (grade == "a") + rng.normal(0, 5)
        said = f"{value:.4f}" if regression else ("high" if value > 2550 else "low")
        lines.append([f"p{i}", ("x", "y", "z")[i % 3], f"{dose:.6f}", grade, weight, said])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return path


@pytest.fixture(
    scope="module",
    params=[(True, "features"), (True, "client"), (False, "features"), (False, "standard")],
    ids=["regression", "regression-client", "classes", "classes-standard"],
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    regression, scale = request.param
    here = tmp_path_factory.mktemp("own")
    path = table(here / "own.csv", regression)
    result = corefed(
        "run", f"--data=table:{path}", "--target=outcome", "--client=site", "--method=pfedbayes",
        "--set=ignore=patient", f"--set=scale={scale}", "--seed=0,1", *QUICK, f"--out={here / 'r'}",
    )  # fmt: skip
    assert result.code == 0, result.err
    return Ran(path, here / "r", "outcome", result.err)


def test_what_is_recorded(ran: Ran) -> None:
    about = json.loads((ran.folder / fitted.DATA).read_text())
    assert [each["name"] for each in about["clients"][0]] == ["x", "y", "z"]
    run = resolve(ran.folder / record.EXPERIMENT).run
    assert (run.partition, run.client_column, run.clients) == ("natural", "site", 3)
    summary = json.loads((ran.folder / "summary.json").read_text())
    assert any("Missing values: 11 in 'weight'" in note for note in summary["environment"]["notes"])
    assert "note: Missing values" in ran.err and "Clients with fewer than 50" in ran.err


def test_predictions_for_training_rows_are_those_held_out(ran: Ran) -> None:
    """A row of the file says the same whether it was dealt as a test point or is read anew."""
    found = fitted.load(ran.folder)
    held_out = fitted.read_tensors(ran.folder, fitted.HELD_OUT)
    run = found.experiment.run
    pool = setup.pool(run, run.partition, 0)
    for g, seed in enumerate(run.seeds):
        splits = partition.split("natural", pool, 3, seed)
        for client, name in enumerate(found.names):
            read = inputs.read(ran.path, found.preparations[g], name)
            assert read.ids[:2] == ("p0", "p1")
            rows = splits[client].test
            mine = held_out["row"] == g * 3 + client
            said = found.predict(name, read.x[rows], seed=seed)
            assert torch.equal(said.mean.float(), held_out["personal.mean"][mine])
            assert torch.equal(said.total.float(), held_out["personal.total"][mine])
            assert read.y is not None
            assert torch.equal(read.y[rows], held_out["y"][mine])


def test_errors_are_in_the_targets_own_unit(ran: Ran) -> None:
    """By hand from predictions; evaluation has other draws, so this is a method without any."""
    found = fitted.load(ran.folder)
    if found.preparations[0].labels:
        return
    result = corefed(
        "run", f"--data=table:{ran.path}", "--target=outcome", "--client=site", "--method=fedavg",
        "--set=ignore=patient", "--seed=0,1", *QUICK, f"--out={ran.folder.parent / 'point'}",
    )  # fmt: skip
    assert result.code == 0, result.err
    held_out = fitted.read_tensors(ran.folder.parent / "point", fitted.HELD_OUT)
    metrics = record.read(ran.folder.parent / "point")[0]["metrics"]
    error = (held_out["global.mean"].double() - held_out["y"].double()).square()
    variance = held_out["global.total"].double()
    nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi))
    for g in range(2):
        mine = held_out["row"] // 3 == g
        rmse = error[mine].mean().sqrt().item()
        # Predictions are kept in float32: seven digits of numbers near 2500.
        assert metrics["global_rmse"]["per_seed"][g] == pytest.approx(rmse, rel=1e-4)
        assert metrics["global_nll"]["per_seed"][g] == pytest.approx(
            nll[mine].mean().item(), rel=1e-4
        )
    assert held_out["y"].min() > 1000 and held_out["global.mean"].mean() > 1000


def test_a_resumed_run_is_the_same(ran: Ran, tmp_path: Path) -> None:
    settings = resolve(ran.folder / record.EXPERIMENT)
    again = corefed("run", f"--config={ran.folder / record.EXPERIMENT}", f"--out={tmp_path / 'r'}")
    assert again.code == 0, again.err
    assert resolve(tmp_path / "r" / record.EXPERIMENT) == settings
    for name in (fitted.MODELS, fitted.HELD_OUT):
        assert (tmp_path / "r" / name).read_bytes() == (ran.folder / name).read_bytes()


def test_more_clients_asked_for_than_there_are(ran: Ran, tmp_path: Path) -> None:
    result = corefed(
        "run",
        f"--config={ran.folder / record.EXPERIMENT}",
        "--clients=5",
        f"--out={tmp_path / 'r'}",
    )
    assert result.code == 0 and "clients is 5, but the data have 3: all take part." in result.err


# --- new files ------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def known(tmp_path: Path) -> Preparation:
    path = table(tmp_path / "own.csv", regression=False)
    flags = {"data": f"table:{path}", "target": "outcome", "client_column": "site"}
    run = setup.concrete(resolve(None, flags, ["ignore=patient"])).run
    return setup.load(run).preparations[0]


def test_columns_in_another_order_without_target(known: Preparation, tmp_path: Path) -> None:
    one = inputs.read(write(tmp_path / "a.csv", "weight,grade,dose\n70,b,50\n,c,51\n"), known, "x")
    two = inputs.read(write(tmp_path / "b.csv", "dose;weight;grade\n50;70;b\n51;;c\n"), known, "x")
    assert torch.equal(one.x, two.x) and one.y is None and one.ids == ("0", "1")
    assert one.preparation is known
    dose, a, b, c, weight, lacking = one.x.T
    assert (a.tolist(), b.tolist(), c.tolist()) == ([0, 0], [1, 0], [0, 1])
    assert weight[1] == 0 and lacking.tolist() == [0, 1]  # missing: the mean
    assert dose[0].item() == pytest.approx((50 - known.mean[0]) / known.std[0], abs=1e-6)


def test_notes_of_an_input(known: Preparation, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "id,weight,grade,dose,outcome\nu,70,d,50,low\nv,71,d,50,\nw,1,a,2,high\n",
    )
    found = inputs.read(path, known, "x")
    said = " ".join(found.notes)
    assert found.ids == ("u", "v", "w") and found.y is None
    assert "also has id, not among training's columns" in said
    assert "Categories that training did not have count as none of them: grade 'd' (2)" in said
    assert "The targets are not read." in said and "not filled in everywhere" in said
    assert (found.x[0, 1:4] == 0).all()
    wanted = inputs.read(path, known, "x", target_wanted=True)
    assert wanted.ids == ("u", "w") and wanted.y is not None and wanted.y.tolist() == [1, 0]
    assert "1 of 3 rows have no target; they are left out." in wanted.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weight,dos,grade\n1,2,a\n", "has no column dose, which training had; it has dos instead"),
        ("weight,x\n1,2\n", "has no columns dose, grade, which training had; it has x instead"),
        ("weight,dose,grade\n1,two,a\n", "Line 2 of .* has 'two' in column 'dose', which is text"),
        ("weight,dose,grade\n1,inf,a\n", "has 'inf' in column 'dose', which is infinite"),
        ("weight,dose,grade\n", "has a header but no rows"),
        ("weight,dose,grade\n1,2\n", "Line 2 of .* has 2 cells, the header 3"),
        ("", "is empty"),
    ],
)
def test_inputs_that_are_refused(known: Preparation, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        inputs.read(write(tmp_path / "a.csv", text), known, "x")


def test_targets_that_are_wanted(known: Preparation, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "weight,dose,grade\n1,2,a\n")
    with pytest.raises(UserError, match="has no column outcome, which training had"):
        inputs.read(path, known, "x", target_wanted=True)
    path = write(tmp_path / "b.csv", "weight,dose,grade,outcome\n1,2,a,middling\n")
    with pytest.raises(UserError, match="class 'middling' in row 0, which training did not have"):
        inputs.read(path, known, "x", target_wanted=True)
    assert inputs.read(path, known, "x").y is None
    with pytest.raises(UserError, match=r"There is no .*nowhere"):
        inputs.read(tmp_path / "nowhere.csv", known, "x")
    with pytest.raises(UserError, match="is no table by its ending"):
        inputs.read(write(tmp_path / "a.xlsx", "x"), known, "x")


def test_arrays(tmp_path: Path) -> None:
    ready = Preparation((2,), ("a", "b"), mean=(1.0,), std=(2.0,))
    x = np.array([[1.0, 3.0], [5.0, 7.0]])
    np.savez(tmp_path / "a.npz", X=x, y=["b", "a"])
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", X_train=x[:1], y_train=["a"], X_test=x[1:], y_test=["b"])
    found = inputs.read(tmp_path / "a.npz", ready, "any")
    assert found.x.tolist() == [[0, 1], [2, 3]] and found.ids == ("0", "1")
    assert found.y is not None and found.y.tolist() == [1, 0]
    assert torch.equal(inputs.read(tmp_path / "a.npy", ready, "any").x, found.x)
    assert inputs.read(tmp_path / "b.npz", ready, "any").x.tolist() == [[2, 3]]
    trained = inputs.read(tmp_path / "b.npz", ready, "any", target_wanted=True)
    assert trained.x.tolist() == [[0, 1]] and "X_train of" in trained.notes[0]
    with pytest.raises(UserError, match="has no y"):
        inputs.read(tmp_path / "a.npy", ready, "any", target_wanted=True)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((3, 4)), r"has shape \(3, 4\); training had points of shape \(2,\)"),
        (np.zeros(()), r"has shape \(\)"),
        (np.zeros((0, 2)), "has no points"),
        (np.array([[0, np.nan]]), "NaN or infinite numbers in 1 points, the first in row 0"),
        (np.array([["a", "b"]]), "not numbers"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, x: np.ndarray, words: str) -> None:
    np.save(tmp_path / "a.npy", x)
    with pytest.raises(UserError, match=words):
        inputs.read(tmp_path / "a.npy", Preparation((2,)), "any")
    with pytest.raises(UserError, match=r"needs 0 MB of memory|no \.npz or \.npy file"):
        inputs.read(tmp_path, Preparation((2,)), "any")


def test_bytes_are_levels_where_training_had_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 255]], dtype=np.uint8))
    assert inputs.read(tmp_path / "a.npy", Preparation((2,), levels=True), "").x.tolist() == [
        [0, 1]
    ]
    assert inputs.read(tmp_path / "a.npy", Preparation((2,)), "").x.tolist() == [[0, 255]]


def test_a_new_client_brings_its_scale(tmp_path: Path) -> None:
    own = {"p": Scale((0.0, 0.0), (1.0, 1.0))}
    ready = Preparation((2,), ("a", "b"), mean=(0.0, 0.0), std=(1.0, 1.0), clients=own)
    np.save(tmp_path / "a.npy", np.array([[1.0, 5.0], [3.0, 5.0]]))
    assert inputs.read(tmp_path / "a.npy", ready, "p").x.tolist() == [[1, 5], [3, 5]]
    found = inputs.read(tmp_path / "a.npy", ready, "new")
    assert found.x.tolist() == [[-1, 0], [1, 0]]
    assert found.preparation.clients["new"] == Scale((2.0, 5.0), (1.0, 1.0))


def test_images(tmp_path: Path) -> None:
    """By classes or plain: the same pixels as training saw."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for i in range(6):
            (tmp_path / "all" / label).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (40, 40), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "all" / label / f"{i}.png")
    flags = {"data": f"image-folder:{tmp_path / 'all'}", "embedding": "none", "clients": 2}
    run = setup.concrete(resolve(None, flags)).run
    data = setup.load(run)
    (ready,) = data.preparations
    assert (ready.kind, ready.embedding, ready.shape) == ("images", "none", (1, 32, 32))
    found = inputs.read(tmp_path / "all", ready, "client 0")
    assert found.y is not None and found.y.tolist() == [0] * 6 + [1] * 6
    assert found.ids[0] == "cat/0.png"
    plain = inputs.read(tmp_path / "all" / "dog", ready, "client 0")
    assert plain.y is None and torch.equal(plain.x, found.x[6:])
    splits = partition.split("iid", setup.pool(run, "iid", 0), 2, 0)
    assert torch.equal(found.x[splits[1].test], data.test.x[1, : len(splits[1].test)])
    with pytest.raises(UserError, match="needs their classes"):
        inputs.read(tmp_path / "all" / "dog", ready, "client 0", target_wanted=True)


def test_a_table_is_dealt_to_real_clients(tmp_path: Path) -> None:
    """`--write` has features with missing numbers filled in, which the strict reader takes."""
    path = table(tmp_path / "own.csv", regression=True)
    result = corefed(
        "datasets", f"--show=table:{path}", "--target=outcome", "--client=site",
        "--set=ignore=patient", f"--write={tmp_path / 'dealt'}",
    )  # fmt: skip
    assert result.code == 0, result.err
    with np.load(tmp_path / "dealt" / "client-0.npz") as file:
        assert file["X_train"].shape[1] == 6 and np.isfinite(file["X_train"]).all()
        assert file["y_train"].min() > 1000
    assert "weight" in result.out and "patient" in result.out and "ignored" in result.out
    assert "target: a number" in result.out and "11 (9 %)" in result.out
