"""What a `Coreset` knows and does after it was built."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from corefed.base import files
from corefed.base.errors import UserError
from corefed.coreset import Coreset, WeightedSubset, build

N, D, K = 200, 3, 12


def log_p(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(y * (x @ theta))


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=g), torch.randn(N, generator=g).sign()


@pytest.fixture(scope="module")
def coreset(data: tuple[Tensor, Tensor]) -> Coreset:
    return build(log_p, (torch.zeros(D), torch.full((D,), 0.5)), data, K)


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys, corefed.coreset\n"
        "assert 'exchange' in corefed.coreset.SOLVERS\n"
        "assert 'torch' not in sys.modules\n"
        "from corefed.coreset import build, Coreset, WeightedSubset, MeanField, refit, aiht\n"
        "import corefed.coreset.engine\n"
        "assert callable(corefed.coreset.build) and callable(refit.refit)\n"
        "try: corefed.coreset.nonsense\n"
        "except AttributeError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_weighted_log_likelihood(coreset: Coreset, data: tuple[Tensor, Tensor]) -> None:
    x, y = (part[coreset.indices] for part in data)
    thetas = torch.randn(5, D)
    expected = torch.stack([coreset.weights @ log_p(theta, x, y) for theta in thetas])
    torch.testing.assert_close(coreset.log_likelihood(thetas[0]), expected[0])
    torch.testing.assert_close(coreset.log_likelihood(thetas, stacked=True), expected)
    theta = thetas[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(coreset.log_likelihood(theta), theta)
    reference = torch.autograd.grad(coreset.weights @ log_p(theta, x, y), theta)[0]
    torch.testing.assert_close(slope, reference)


def test_it_prints_itself(coreset: Coreset) -> None:
    d = coreset.diagnostics
    text = str(coreset)
    assert text.startswith(f"Coreset of {len(coreset)} of 200 points (")
    assert "by exchange on 400 draws, seed 0" in text
    assert f"{d.held_out_error:.3g}; a uniform subset of 12 expects {d.uniform_error:.3g}" in text
    assert "n/k is" in text
    assert max(map(len, text.splitlines())) <= 120
    assert (
        repr(coreset)
        == f"Coreset({len(coreset)} of 200 points, held-out error {d.held_out_error:.3g})"
    )


def test_save_and_load(coreset: Coreset, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    coreset.save(folder)
    names = ["coreset.csv", "coreset.json", "coreset.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == names
    loaded = Coreset.load(folder)
    for name in ("indices", "weights", "full", "approximate"):
        assert torch.equal(getattr(loaded, name), getattr(coreset, name))
    assert loaded.diagnostics == coreset.diagnostics
    assert str(loaded) == str(coreset)
    rows = [line.split(",") for line in (folder / "coreset.csv").read_text().splitlines()]
    assert rows[0] == ["index", "weight"]
    assert [int(j) for j, _ in rows[1:]] == coreset.indices.tolist()
    torch.testing.assert_close(torch.tensor([float(w) for _, w in rows[1:]]), coreset.weights)
    theta = torch.ones(D)
    with pytest.raises(UserError, match="attach"):
        loaded.log_likelihood(theta)
    again = loaded.attach(log_p, data)
    assert torch.equal(again.log_likelihood(theta), coreset.log_likelihood(theta))
    with pytest.raises(UserError, match="have 5 points"):
        loaded.attach(log_p, (data[0][:5], data[1][:5]))


def test_no_data_point_is_written(tmp_path: Path) -> None:
    """A saved coreset does not grow with the data's width: only indices and weights are in it."""
    x, y = torch.randn(50, 5000), torch.randn(50).sign()
    build(log_p, (torch.zeros(5000), torch.full((5000,), 0.1)), (x, y), 5, samples=30).save(
        tmp_path
    )
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 5000


def test_a_failing_save_leaves_what_was_there(
    coreset: Coreset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coreset.save(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        coreset.save(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(UserError, match="No space left on device"):
        coreset.save(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


def test_saving_into_a_file(coreset: Coreset, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="Cannot write into"):
        coreset.save(file)
    assert file.read_text() == "mine"


def test_damaged_files(coreset: Coreset, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(UserError, match=r"it has no coreset.json"):
        Coreset.load(tmp_path)
    coreset.save(tmp_path)
    about = json.loads((tmp_path / "coreset.json").read_text())
    tensors = load_file(tmp_path / "coreset.safetensors")

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            Coreset.load(tmp_path)

    for key, value, words in (
        ("schema", 7, "schema 7"), ("n", 5, "outside its 5 points"), ("kept", 3, "do not agree"),
    ):  # fmt: skip
        (tmp_path / "coreset.json").write_text(json.dumps({**about, key: value}))
        refused(words)
    for text in ("{", "[]", json.dumps({**about, "more": 1}), '{"schema": 1}'):
        (tmp_path / "coreset.json").write_text(text)
        refused("damaged")
    (tmp_path / "coreset.json").write_text(json.dumps(about))
    for name, tensor, words in (
        ("indices", tensors["indices"].flip(0), "ascending"),
        ("indices", tensors["indices"].float(), "whole numbers"),
        ("weights", -tensors["weights"], "not a positive number"),
        ("weights", tensors["weights"][1:], "do not agree"),
    ):
        save_file({**tensors, name: tensor.contiguous()}, tmp_path / "coreset.safetensors")
        refused(words)
    (tmp_path / "coreset.safetensors").write_bytes(b"short")
    refused("damaged")


def test_a_weighted_subset_in_a_loader(coreset: Coreset, data: tuple[Tensor, Tensor]) -> None:
    subset = coreset.subset(TensorDataset(*data))
    assert isinstance(subset, WeightedSubset)
    assert len(subset) == len(coreset)
    for workers in (0, 1):
        batches = list(DataLoader(subset, batch_size=5, num_workers=workers))
        x, y, w = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(x, data[0][coreset.indices])
        assert torch.equal(y, data[1][coreset.indices])
        assert torch.equal(w, coreset.weights) and w.dtype == torch.float32
    assert len(coreset.subset(data)) == len(coreset)
    with pytest.raises(UserError, match="has 5 items"):
        coreset.subset(TensorDataset(data[0][:5], data[1][:5]))
    with pytest.raises(UserError, match="length and an index"):
        coreset.subset(iter(()))
    with pytest.raises(UserError, match="2 indices but 3 weights"):
        WeightedSubset(TensorDataset(*data), [0, 1], torch.ones(3))


def test_training_on_the_subset_is_training_on_its_weighted_likelihood(
    coreset: Coreset, data: tuple[Tensor, Tensor]
) -> None:
    model = nn.Linear(D, 1, bias=False)
    x, y, w = next(iter(DataLoader(coreset.subset(data), batch_size=K)))
    loss = -(w * torch.nn.functional.logsigmoid(y * model(x)[:, 0])).sum()
    expected = -coreset.log_likelihood(model.weight[0])
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("suffix", [".png", ".svg", ""])
def test_plot(coreset: Coreset, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    coreset.plot(path)
    start = b"<?xml" if suffix == ".svg" else b"\x89PNG"
    assert path.read_bytes().startswith(start)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_plots_that_cannot_be_drawn(coreset: Coreset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"as \.nonsense"):
        coreset.plot(tmp_path / "picture.nonsense")
    assert list(tmp_path.iterdir()) == []


def test_a_coreset_with_an_error_of_zero_can_be_drawn(
    data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """All points: errors of 0 on a log scale, all weights alike."""
    whole = build(log_p, (torch.zeros(D), torch.ones(D)), data, N)
    whole.plot(tmp_path / "all.png")
    assert "Coreset of 200 of 200 points (100 %)" in str(whole)
