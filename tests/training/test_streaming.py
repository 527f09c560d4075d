"""resident=coreset: the same run with the coresets alone in memory; files that change meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, corefed
from PIL import Image

from corefed.base.errors import UserError
from corefed.data import streaming
from corefed.data.datasets import load
from corefed.data.table import Settings

QUICK = (
    "--device=cpu", "--rounds=2", "--local-steps=4", "--set=hidden=8", "--set=runtime=loop",
    "--set=evaluate_draws=2", "--set=batch_size=10", "--quiet",
)  # fmt: skip
STREAM = "--set=resident=coreset"
N = 90


def points() -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64), np.arange(N) % 3


def npz(folder: Path) -> list[str]:
    x, y, site = points()
    np.savez(folder / "a.npz", X=x, y=y, client=site)
    return [f"--data=npz:{folder / 'a.npz'}"]


def table(folder: Path) -> list[str]:
    x, y, site = points()
    lines = ["a,b,kind,site,y"]
    for i in range(N):  # a category, and a number that some rows lack
        lines.append(f"{x[i, 0]:.5f},{x[i, 1] if i % 7 else ''},{'uvw'[i % 3]},s{site[i]},{y[i]}")
    (folder / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [f"--data=table:{folder / 'a.csv'}", "--target=y", "--client=site"]


def images(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for i in range(24):
        path = folder / "images" / f"site{i % 2}" / "ab"[i // 2 % 2]
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 7), dtype=np.uint8)).save(path / f"{i}.png")
    data = f"--data=image-folder:{folder / 'images'}"
    return [data, "--client=folder", "--set=embedding=none", "--set=channels=2"]


def run(folder: Path, words: list[str], *more: str) -> Result:
    return corefed("run", *words, *QUICK, f"--out={folder}", *more)


@pytest.mark.parametrize("make", [npz, table, images])
def test_results_are_those_of_points_in_memory(
    tmp_path: Path, make: Callable[[Path], list[str]]
) -> None:
    words = make(tmp_path)
    for name, more in (("all", ()), ("coreset", (STREAM,))):
        assert run(tmp_path / name, words, *more).code == 0
    for file in ("fitted.safetensors", "held_out.safetensors", "data.json"):
        one, two = ((tmp_path / name / file).read_bytes() for name in ("all", "coreset"))
        assert one == two, file
    summary = json.loads((tmp_path / "coreset" / "summary.json").read_text())
    described = json.loads((tmp_path / "coreset" / "data.json").read_text())
    sizes = [client["train"] for client in described["clients"][0]]
    assert summary["streaming"]["resident_points"] == sum(-(-size // 10) for size in sizes)
    assert summary["streaming"]["read_points"] > sum(sizes)


def test_a_method_on_all_points_reads_minibatches(tmp_path: Path) -> None:
    words = [*npz(tmp_path), "--method=fedavg"]
    for name, more in (("all", ()), ("coreset", (STREAM,))):
        assert run(tmp_path / name, words, *more).code == 0
    one, two = ((tmp_path / n / "fitted.safetensors").read_bytes() for n in ("all", "coreset"))
    assert one == two
    summary = json.loads((tmp_path / "coreset" / "summary.json").read_text())
    assert summary["streaming"]["resident_points"] == 0


def test_a_file_that_changes_ends_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*npz(tmp_path), STREAM, "--set=checkpoint_every=1", "--set=refresh_every=1"]
    changed = tmp_path / "a.npz"
    before, rounds = changed.read_bytes(), 0
    hold = streaming.hold

    def hold_and_change(x: torch.Tensor, weight: torch.Tensor) -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 2 * 4 * 3:  # in the third round, after two were saved
            changed.write_bytes(before + b"more")
        hold(x, weight)

    monkeypatch.setattr("corefed.training.client_side.streaming.hold", hold_and_change)
    failed = run(tmp_path / "run", words, "--rounds=4")
    assert failed.code == 2
    assert failed.err.count("changed while it was streamed") == 1
    assert "Traceback" not in failed.err
    monkeypatch.undo()
    changed.write_bytes(before)
    resumed = corefed("run", f"--resume={tmp_path / 'run'}")
    assert resumed.code == 0, resumed.err
    assert run(tmp_path / "whole", words, "--rounds=4").code == 0
    one, two = ((tmp_path / n / "fitted.safetensors").read_bytes() for n in ("run", "whole"))
    assert one == two


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--set=runtime=vmap"], "runtime must be loop"),
        (["--set=seeds=0,1"], "one seed"),
        (["--set=compile=on"], "not compiled"),
        (["--data=digits"], "in memory as a whole"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path: Path, more: list[str], sentence: str) -> None:
    result = run(tmp_path / "run", npz(tmp_path), STREAM, *more)
    assert result.code == 2
    assert sentence in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()


def test_an_image_that_changes_is_refused(tmp_path: Path) -> None:
    images(tmp_path)
    reading = Settings(client_column="folder", streamed=True)
    found = load(f"image-folder:{tmp_path / 'images'}", embedding="none", reading=reading)
    assert found.x.shape == (24, 1, 32, 32)  # grey
    streaming.values(found.x[:2])
    path = sorted((tmp_path / "images").rglob("*.png"))[0]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UserError, match="changed while it was streamed"):
        streaming.values(found.x)


def test_a_compressed_array_is_refused_with_the_way_to_save_it(tmp_path: Path) -> None:
    x, y, _ = points()
    np.savez_compressed(tmp_path / "c.npz", X=x, y=y)
    result = run(tmp_path / "run", [f"--data=npz:{tmp_path / 'c.npz'}"], STREAM)
    assert result.code == 2
    assert "numpy.savez" in result.err


def test_arrays_of_training_and_test_are_read_as_one(tmp_path: Path) -> None:
    x, y, _ = points()
    path = tmp_path / "two.npz"
    np.savez(path, X_train=x[:60].astype(np.float64), y_train=y[:60], X_test=x[60:], y_test=y[60:])
    whole = load(f"npz:{path}")
    parts = load(f"npz:{path}", reading=Settings(streamed=True))
    rows = torch.tensor([80, 3, 59, 60, 3])
    assert torch.equal(streaming.values(parts.x[rows]), whole.x[rows])
    assert torch.equal(parts.y, whole.y)
