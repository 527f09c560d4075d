"""resident=coreset: the same run with the coresets alone in memory; files that change meanwhile."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Result, corefed
from PIL import Image

from corefed.base.errors import UserError
from corefed.data import file_rows, profile, scaling, streaming
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


@pytest.mark.parametrize("make", [npz, table, images])
@pytest.mark.parametrize("scale", ["features", "client", "standard"])
def test_many_small_blocks_give_the_same_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], list[str]], scale: str
) -> None:
    """Scales are summed in the same blocks from a file and from memory, and near those of one."""
    words = [*make(tmp_path), f"--set=scale={scale}", "--rounds=1"]
    assert run(tmp_path / "whole", words).code == 0
    monkeypatch.setattr(scaling, "ROWS", 40)
    monkeypatch.setattr("corefed.training.evaluate.AT_ONCE", 3)
    for name, more in (("all", ()), ("coreset", (STREAM,))):
        assert run(tmp_path / name, words, *more).code == 0
    every = [json.loads((tmp_path / name / "data.json").read_text())["preparations"][0]
             for name in ("whole", "all", "coreset")]  # fmt: skip
    assert every[1] == every[2]
    for key in ("mean", "std"):
        np.testing.assert_allclose(every[1][key], every[0][key], rtol=1e-12, atol=1e-14)
    for one in every[0]["clients"]:
        both = [every[at]["clients"][one]["std"] for at in (0, 1)]
        np.testing.assert_allclose(*both, rtol=1e-12)
    held_out = [
        (tmp_path / name / "fitted.safetensors").read_bytes() for name in ("all", "coreset")
    ]
    assert held_out[0] == held_out[1]


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


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    npz(tmp_path)
    path = tmp_path / "a.npz"
    found = load(f"npz:{path}", reading=Settings(client_column="client", streamed=True))
    streaming.values(found.x[:2])
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="changed while it was streamed"):
        streaming.values(found.x)


def test_a_full_scratch_folder_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_rows.os, "pwrite", full)
    result = run(tmp_path / "run", table(tmp_path), STREAM)
    assert result.code == 2
    assert "No space left on device; make room, or set TMPDIR" in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()


def test_a_table_that_grows_between_its_two_passes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, path = table(tmp_path), tmp_path / "a.csv"
    scan = profile.scan

    def scan_and_grow(*given: Any) -> Any:
        found = scan(*given)
        path.write_text(path.read_text() + "1.0,2.0,u,s0,1\n", encoding="utf-8")
        return found

    monkeypatch.setattr(profile, "scan", scan_and_grow)
    result = run(tmp_path / "run", words, STREAM)
    assert result.code == 2
    assert "changed while it was read; try again" in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()


def test_a_category_of_the_last_row_alone_is_one(tmp_path: Path) -> None:
    words, path = table(tmp_path), tmp_path / "a.csv"
    path.write_text(path.read_text() + "1.0,2.0,new,s0,1\n", encoding="utf-8")
    for name, more in (("all", ()), ("coreset", (STREAM,))):
        assert run(tmp_path / name, words, *more).code == 0
    one, two = ((tmp_path / name / "data.json").read_bytes() for name in ("all", "coreset"))
    assert one == two
    assert '"new"' in one.decode()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory: you"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("unable to mmap 9 bytes from file <a>: Cannot allocate memory (12)"),
    ],
)
def test_a_lack_of_memory_is_one_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("corefed.training.rounds.prepare", fail)
    result = run(tmp_path / "run", npz(tmp_path))
    assert result.code == 2
    assert "--set resident=coreset" in result.err
    assert not (tmp_path / "run").exists()
