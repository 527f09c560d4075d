"""`corefed coreset` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Result, corefed

from corefed.base.errors import UserError
from corefed.commands.coreset import parse_size
from corefed.coreset import SOLVERS, Coreset
from corefed.coreset.shared import SharedBodies
from corefed.models import network
from corefed.models.likelihood import Categorical

FAST = ("--steps=20", "--hidden=8", "--draws=40", "--device=cpu")
FILES = ["coreset.csv", "coreset.json", "coreset.png", "coreset.safetensors"]


def save(path: Path, y: object, x: object = None, n: int = 120) -> str:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)) if x is None else x
    np.savez(path, X=x, y=np.asarray(y))
    return f"npz:{path}"


@pytest.fixture
def two_labels(tmp_path: Path) -> str:
    return save(tmp_path / "two.npz", np.arange(120) % 2)


def test_digits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = corefed("coreset", "--data=digits", "--size=1%", *FAST, "--out", out)
    assert result.code == 0, result.err
    assert sorted(p.name for p in out.iterdir()) == FILES
    assert (out / "coreset.png").read_bytes().startswith(b"\x89PNG")
    coreset = Coreset.load(out)
    assert (coreset.diagnostics.n, coreset.diagnostics.size) == (1797, 18)
    lines = result.out.splitlines()
    assert lines[0].startswith("digits: 64-8-10 network, mean-field posterior after 20 steps")
    assert lines[1].startswith(f"Coreset of {len(coreset)} of 1,797 points")
    assert lines[-1] == f"written to {out}"
    assert result.err.splitlines() == ["posterior 20/20", "potentials 1797/1797", "solving 1/1"]
    note = json.loads((out / "coreset.json").read_text())["note"]
    assert note["data"] == "digits"
    again = corefed("coreset", "--data=digits", "--size=18", *FAST, "-q", "--out", tmp_path / "b")
    assert (again.out, again.err) == (f"{tmp_path / 'b'}\n", "")
    assert torch.equal(Coreset.load(tmp_path / "b").weights, coreset.weights)


def test_draws_that_share_bodies_are_draws_of_the_network() -> None:
    """Log-likelihoods of shared draws are those of the whole parameter vectors they stand for."""
    model = network.mlp((3, 5, 2), Categorical(2))
    v = torch.stack([torch.randn(model.size), torch.zeros(model.size)])
    shared = SharedBodies(model, v)
    thetas = shared.sample(torch.Size((120,)))
    assert len(shared.bodies) == 50
    x, y = torch.randn(7, 3), torch.tensor([0, 1, 0, 1, 0, 1, 0])
    whole = shared.bodies[thetas["body"].long()].clone()
    whole[:, shared.span] = thetas["head"]
    expected = model.log_likelihood(whole[None], x[None], y[None])[0]
    torch.testing.assert_close(shared.stacked(thetas, x, y), expected)
    one = {name: t[70] for name, t in thetas.items()}
    torch.testing.assert_close(shared(one, x, y), expected[70])
    fresh = shared.sample(torch.Size((10,)))
    assert not set(fresh["body"].tolist()) & set(thetas["body"].tolist())


def test_json_and_the_usual_folder(
    two_labels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = corefed("coreset", "--data", two_labels, "--size=10", "--json")
    assert result.code == 0, result.err
    about = json.loads(result.out)
    assert result.err == ""
    assert about["folder"].startswith("runs/coreset-two-")
    assert about["model"] == "logistic regression, Laplace posterior of 4 coefficients"
    assert about["ratio"] < 0.1
    assert Coreset.load(about["folder"]).diagnostics.held_out_error == about["held_out_error"]


@pytest.mark.parametrize(
    ("model", "y", "words"),
    [
        ("auto", np.arange(120) % 2, "logistic regression"),
        ("auto", np.where(np.arange(120) % 2, 1.0, -1.0), "logistic regression"),
        ("auto", np.arange(120) % 3, "3-8-3 network"),
        ("auto", np.linspace(0, 1, 120), "linear regression, exact"),
        ("auto", np.zeros((120, 1)) + 0.5, "linear regression, exact"),
        ("poisson", np.arange(120) % 5, "poisson regression"),
        ("linear", np.arange(120) % 2, "linear regression"),
        ("mlp", np.linspace(0, 1, 120), "3-8-1 network"),
        ("mlp", np.ones((120, 2)), "3-8-2 network"),
    ],
)
def test_models_for_files(model: str, y: object, words: str, tmp_path: Path) -> None:
    data = save(tmp_path / "d.npz", y)
    result = corefed(
        "coreset", "--data", data, "--size=0.1", "--model", model, *FAST, "--out", tmp_path / "o"
    )
    assert result.code == 0, result.err
    assert words in result.out


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_named_regression(model: str, tmp_path: Path) -> None:
    data = "--data=synthetic-linear"
    result = corefed("coreset", data, "--size=20", *FAST, "--model", model, "--out", tmp_path / "o")
    assert result.code == 0, result.err


@pytest.mark.parametrize("solver", ["aiht-2", "uniform", "sparse-vi"])
def test_solvers(solver: str, two_labels: str, tmp_path: Path) -> None:
    out = tmp_path / "o"
    result = corefed("coreset", "--data", two_labels, "--size=10", "--solver", solver, "--out", out)
    assert result.code == 0, result.err
    assert f"by {solver} on" in result.out


def test_help_has_examples_and_solvers() -> None:
    text = corefed("coreset", "--help").out
    assert "corefed coreset --data digits --size 100" in text
    for name in SOLVERS:
        assert name in text


@pytest.mark.parametrize(
    ("text", "size"), [("500", 500), ("0.05", 0.05), ("5%", 0.05), (" 12.5 % ", 0.125)]
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size
    assert type(parse_size(text)) is type(size)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "0.0", "100%", "-5%", "many", "", "%", "nan%"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--size is"):
        parse_size(text)


# --- bad input: exit code 2, one sentence, nothing written ----------------------------------------


def refused(result: Result, out: Path, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size=0",), "at least one point"),
        (("--size=-5",), "at least one point"),
        (("--size=1798",), "only 1797 points"),
        (("--size=some",), "--size is 'some'"),
        (("--size=9", "--solver=magic"), "There is no solver"),
        (("--size=9", "--solver=sparse-vi"), "sparse-vi needs"),
        (("--size=9", "--model=svm"), "There is no model"),
        (("--size=9", "--model=logistic"), "10 classes"),
        (("--size=9", "--model=linear"), "10 classes"),
        (("--size=9", "--hidden=-1"), "--hidden is -1"),
        (("--size=9", "--steps=0"), "--steps is 0"),
        (("--size=9", "--draws=-1"), "--draws is -1"),
        (("--size=9", "--draws=1", "--steps=1"), "samples is 1"),
        (("--size=9", "--seed=-1"), "--seed is -1"),
        (("--size=9", "--seed=x"), "--seed"),
        (("--size=9", "--device=tpu"), "There is no device"),
        (("--size=9", "--data=digit"), "Did you mean 'digits'"),
        (("--size=9", "--data=npz:/nowhere/a.npz"), "No such file"),
        ((), "--size"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    out = tmp_path / "parent" / "out"
    refused(corefed("coreset", "--data=digits", "-q", *arguments, "--out", out), out, words)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": np.ones((4, 2))}, "must hold arrays X (or x) and y; it holds X"),
        ({"X": np.ones((4, 2)), "y": np.ones(3)}, "4 points but 3 labels"),
        ({"X": np.full((4, 2), np.nan), "y": np.arange(4.0)}, "NaN or infinite features"),
        ({"X": np.ones((4, 2)), "y": np.full(4, np.inf)}, "NaN or infinite regression targets"),
        ({"X": np.array([["a"]] * 4), "y": np.ones(4)}, "not an array of numbers"),
        ({"X": np.ones((0, 2)), "y": np.ones(0)}, "is empty"),
        ({"X": np.array([{}, {}], dtype=object), "y": np.ones(2)}, "holds Python objects"),
        ({"X": np.ones(()), "y": np.ones(4)}, "not an array of numbers"),
    ],
)
def test_bad_files(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    out = tmp_path / "parent" / "out"
    data = f"npz:{tmp_path / 'bad.npz'}"
    refused(corefed("coreset", "--data", data, "--size=2", "--out", out), out, words)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    out = tmp_path / "parent" / "out"
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "one.npy", np.ones(3))
    for name, words in (("text.npz", "not a whole .npz"), ("one.npy", "it holds X")):
        result = corefed("coreset", f"--data=npz:{tmp_path / name}", "--size=2", "--out", out)
        refused(result, out, words)


def test_counts_that_are_none(tmp_path: Path) -> None:
    data = save(tmp_path / "d.npz", np.linspace(-1, 1, 120))
    out = tmp_path / "parent" / "out"
    result = corefed("coreset", "--data", data, "--size=2", "--model=poisson", "--out", out)
    refused(result, out, "poisson needs counts")


def test_a_folder_that_holds_something(two_labels: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    result = corefed("coreset", "--data", two_labels, "--size=5", "--out", out)
    assert result.code == 2
    assert "is not empty" in result.err
    assert [p.read_text() for p in out.iterdir()] == ["kept"]
    result = corefed("coreset", "--data", two_labels, "--size=5", "--out", out / "mine")
    assert result.code == 2
    assert "is a file" in result.err


def test_a_disk_that_cannot_be_written(two_labels: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    out = tmp_path / "parent" / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        result = corefed("coreset", "--data", two_labels, "--size=5", "-q", "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    refused(result, out, "Cannot write into")
