"""Every mistake the issue lists: exit code 2, one sentence, nothing written."""

from __future__ import annotations

import errno
import gzip
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL, Result, corefed

from corefed.base import locks
from corefed.data import digits
from corefed.training import record, segments


def assert_refused(result: Result, out: Path, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err
    assert not out.parent.exists()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "run"


def run(out: Path, *more: object) -> Result:
    return corefed("run", *SMALL, *more, "--out", out)


def test_unknown_key_in_toml(out: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("learning_rat = 3\nzeta = 1\n")
    assert_refused(run(out, "--config", file), out, "'learning_rat'", "e.toml")
    file.write_text("zta = 3\n")
    assert_refused(run(out, "--config", file), out, "'zta'", "did you mean 'zeta'")


def test_unknown_key_on_the_command_line(out: Path) -> None:
    assert_refused(run(out, "--set", "monte_carl=1"), out, "did you mean 'monte_carlo'")


@pytest.mark.parametrize("fraction", ["0", "-0.1", "1.0001", "nan", "inf"])
@pytest.mark.parametrize("method", ["random-subset", "coreset-pfedbayes"])
def test_fraction_outside_its_range(out: Path, fraction: str, method: str) -> None:
    result = run(out, f"--method={method}", f"--fraction={fraction}")
    assert_refused(result, out, "fraction is ", "it must be")


def test_fraction_for_a_method_on_all_data(out: Path) -> None:
    result = run(out, "--fraction=0.5")
    assert_refused(result, out, "pfedbayes trains on all data", "random-subset")


def test_more_labels_than_there_are(out: Path) -> None:
    assert_refused(run(out, "--partition=labels:11"), out, "labels", "10")


@pytest.mark.parametrize("partition", ["shards-medium", "iid", "labels:2"])
def test_more_clients_than_the_data_allow(out: Path, partition: str) -> None:
    result = run(out, "--clients=5000", f"--partition={partition}")
    assert_refused(result, out, "clients")


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "empty"])
def test_damaged_data_files(out: Path, tmp_path: Path, damage: str) -> None:
    """The first file read is refused by its checksum, so the other three need not exist."""
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    whole = gzip.compress(bytes([0, 0, 8, 3]) + bytes(12) + bytes(1000))
    content = {"truncated": whole[:-9], "corrupt": whole[:20] + b"x" + whole[21:], "empty": b""}
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(content[damage])
    before = sorted(p.read_bytes() for p in folder.iterdir())
    result = run(out, "--data=mnist", "--data-dir", tmp_path / "data")
    assert_refused(result, out, "train-images-idx3-ubyte.gz", "corrupt")
    assert sorted(p.read_bytes() for p in folder.iterdir()) == before


def test_a_data_folder_that_is_not_there(out: Path, tmp_path: Path) -> None:
    result = run(out, "--data=mnist", "--data-dir", tmp_path / "nowhere")
    assert_refused(result, out, "nowhere does not exist")


def digits_with(monkeypatch: pytest.MonkeyPatch, value: float | None, label: int | None) -> None:
    x, y = digits.read()
    if value is not None:
        x[3, 5] = value
    if label is not None:
        y[7] = label
    monkeypatch.setattr(digits, "read", lambda: (x, y))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_features_that_are_not_numbers(
    out: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    digits_with(monkeypatch, value, None)
    assert_refused(run(out), out, "NaN or infinite", "row 3")


@pytest.mark.parametrize("label", [-1, 10])
def test_labels_out_of_range(out: Path, monkeypatch: pytest.MonkeyPatch, label: int) -> None:
    digits_with(monkeypatch, None, label)
    assert_refused(run(out), out, "labels outside 0..9", "row 7")


def test_cuda_without_cuda(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run(out, "--device=cuda"), out, "this machine has no CUDA")


@pytest.mark.parametrize("device", ["gpu", "mps", "meta"])
def test_devices_that_do_not_exist(out: Path, device: str) -> None:
    assert_refused(run(out, f"--device={device}"), out, "There is no device", device)


def test_an_output_folder_that_holds_a_run(out: Path) -> None:
    assert run(out).code == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    result = run(out)
    assert result.code == 2
    assert "is not empty, it has experiment.toml; choose another --out, or go on" in result.err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "No space left")]
)
def test_a_disk_that_cannot_be_written_at_all(
    out: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", fail)
    assert_refused(run(out), out, "Cannot write into", words, "Nothing was written")


def test_a_disk_that_fills_up_keeps_the_run_so_far(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the second checkpoint on; freed, the run goes on to the same end."""
    encode, written = segments.encode, []

    def fill(tensors: Any) -> Any:
        written.append(tensors)
        if len(written) > 2:  # a checkpoint is the server's file and the clients'
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return encode(tensors)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "encode", fill)
        result = run(out, "--rounds=3")
    errors = [text for text in result.err.splitlines() if text.startswith("error: ")]
    assert result.code == 2
    assert len(errors) == 1
    assert "Traceback" not in result.err
    assert "No space left on device" in errors[0]
    assert "is kept" in errors[0]
    assert corefed("compare", out).code == 0
    assert corefed("run", "--resume", out, "-q").code == 0
    assert run(tmp_path / "whole", "--rounds=3").code == 0
    resumed, whole = record.read(out)[0], record.read(tmp_path / "whole")[0]
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds=many",),
        ("--rounds=0",),
        ("--seed=x",),
        ("--seed=-1",),
        ("--method=fedbays",),
        ("--data=digit",),
        ("--partition=labels",),
        ("--partition=shard",),
        ("--set=runtime=fast",),
        ("--set=cohort=5",),
        ("--set=scale=3",),
        ("--set=checkpoint_every=-2",),
        ("--set=checkpoint_share=0",),
        ("--set=checkpoint_minutes=0",),
        ("--config=/nowhere/e.toml",),
        ("--resume=/nowhere",),
        ("--nonsense",),
    ],
)
def test_other_slips(out: Path, arguments: tuple[str, ...]) -> None:
    assert_refused(run(out, *arguments), out)


def test_out_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    result = run(file)
    assert result.code == 2
    assert "is a file" in result.err
    assert file.read_text() == "mine"


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file-size limit of the kernel is the nearest thing to a full disk without a mount."""
    resource = pytest.importorskip("resource")
    out = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        result = run(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 2
    assert "Cannot write into" in result.err
    assert not list((out / "checkpoint").iterdir())
    assert corefed("run", "--resume", out, "-q").code == 0
    shutil.rmtree(out)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Neither a run that begins beside another, nor one that is resumed while it goes on."""
    out = tmp_path / "run"
    assert run(out).code == 0
    before = (out / record.ROUNDS).read_bytes()
    with locks.exclusively(out):
        again = corefed("run", "--resume", out, "--rounds", 9)
    assert again.code == 2
    assert f"Another process is at work in {out}; choose another --out" in again.err
    assert (out / record.ROUNDS).read_bytes() == before
    begun = tmp_path / "begun"
    begun.mkdir()
    with locks.exclusively(begun):
        beside = run(begun)
    assert beside.code == 2
    assert "Another process is at work" in beside.err
    assert not record.begun(begun)
