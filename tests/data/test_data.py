"""Loading, checking and stacking data."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import Dataset, FederatedData, Split, federate, load, stack
from corefed.data import datasets as module
from corefed.data import idx as official

needs_real_data = pytest.mark.skipif(
    "COREFED_DATA" not in os.environ, reason="COREFED_DATA does not point at the official files"
)


def idx(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


def write(folder: Path, contents: list[bytes], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Small stand-ins for the four MNIST files, with the MD5 table made to match them."""
    folder.mkdir(parents=True)
    paths = [folder / name for name in official.IDX_FILES]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    first, second, third, fourth = (hashlib.md5(content).hexdigest() for content in contents)
    source = official.Mirror("http://localhost:9/", (first, second, third, fourth))
    monkeypatch.setitem(official.IDX_SOURCES, "mnist", source)
    return paths


@pytest.fixture
def small_files() -> list[bytes]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (n, 3, 2), dtype=np.uint8) for n in (5, 4)]
    labels = [np.arange(n, dtype=np.uint8) for n in (5, 4)]
    parts = images[0], labels[0], images[1], labels[1]
    return [gzip.compress(idx(part)) for part in parts]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or fill the cache of whoever runs it."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.delenv("COREFED_CACHE", raising=False)


# Files


def test_idx_files_are_pooled_flattened_and_scaled(
    tmp_path: Path, small_files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mnist", small_files, monkeypatch)
    dataset = load("mnist", tmp_path)
    assert dataset.x.shape == (9, 6)
    assert dataset.x.dtype == torch.float32
    first = np.frombuffer(gzip.decompress(small_files[0])[16:22], dtype=np.uint8)
    np.testing.assert_allclose(dataset.x[0], first / 255, rtol=1e-6)
    assert dataset.y.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert dataset.y.dtype == torch.int64
    assert dataset.held_out is not None
    assert dataset.held_out.tolist() == [False] * 5 + [True] * 4


def test_search_order(
    tmp_path: Path, small_files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a" / "mnist", small_files, monkeypatch)
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("COREFED_DATA", str(tmp_path / "a"))
    assert len(load("mnist").x) == 9
    assert len(load("mnist", tmp_path / "b").x) == 9
    (tmp_path / "b" / "mnist").mkdir()
    first = tmp_path / "b" / "mnist" / official.IDX_FILES[0]
    first.write_bytes(b"the argument is looked at first")
    with pytest.raises(UserError, match="MD5"):
        load("mnist", tmp_path / "b")
    monkeypatch.delenv("COREFED_DATA")
    write(tmp_path / "cache" / "corefed" / "mnist", small_files, monkeypatch)
    assert len(load("mnist", download=False).x) == 9


def test_wrong_md5_names_the_file_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "mnist" / official.IDX_FILES[0]
    path.parent.mkdir()
    path.write_bytes(b"not MNIST")
    for name in official.IDX_FILES[1:]:
        (path.parent / name).touch()
    actual, expected = hashlib.md5(b"not MNIST").hexdigest(), official.IDX_SOURCES["mnist"].md5[0]
    with pytest.raises(UserError) as caught:
        load("mnist", tmp_path)
    for part in (str(path), actual, expected, "Delete it, or fetch it again"):
        assert part in str(caught.value)
    assert path.read_bytes() == b"not MNIST"


def corruptions(whole: bytes) -> dict[str, tuple[bytes, str]]:
    plain = gzip.decompress(whole)
    return {
        "truncated gzip": (whole[:-9], "not a whole gzip"),
        "no gzip": (plain, "not a whole gzip"),
        "damaged gzip": (whole[:20] + b"\xff\xff" + whole[22:], "not a whole gzip"),
        "empty": (gzip.compress(b""), "not an IDX file"),
        "wrong type": (gzip.compress(b"\0\0\x0d\x03" + plain[4:]), "not an IDX file"),
        "wrong dimensions": (gzip.compress(b"\0\0\x08\x01" + plain[4:]), "not an IDX file"),
        "cut header": (gzip.compress(plain[:10]), "inside its IDX header"),
        "cut data": (gzip.compress(plain[:-1]), "holds 45 bytes"),
        "trailing byte": (gzip.compress(plain + b"\0"), "says 46"),
        "huge sizes": (gzip.compress(plain[:4] + b"\xff" * 12 + plain[16:]), "holds 46 bytes"),
    }


@pytest.mark.parametrize("case", corruptions(gzip.compress(bytes(46))))
def test_corrupt_file_with_the_right_md5(
    case: str, tmp_path: Path, small_files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = corruptions(small_files[0])[case]
    path = write(tmp_path / "mnist", [content, *small_files[1:]], monkeypatch)[0]
    with pytest.raises(UserError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_images_without_labels(
    tmp_path: Path, small_files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mnist", [*small_files[:3], small_files[1]], monkeypatch)
    with pytest.raises(UserError, match="5 labels for 4 images"):
        load("mnist", tmp_path)


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "mirror").mkdir()
    handler = partial(Silent, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("rich", [True, False])
def test_download_fills_the_cache_only(
    rich: bool,
    mirror: str,
    tmp_path: Path,
    small_files: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COREFED_DATA", raising=False)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    write(tmp_path / "mirror" / "m", small_files, monkeypatch)
    source = official.IDX_SOURCES["mnist"]
    monkeypatch.setitem(official.IDX_SOURCES, "mnist", source._replace(mirror=mirror + "m/"))
    (tmp_path / "mine").mkdir()
    assert len(load("mnist", tmp_path / "mine").x) == 9
    assert list((tmp_path / "mine").iterdir()) == []
    cached = tmp_path / "cache" / "corefed" / "mnist"
    assert sorted(path.name for path in cached.iterdir()) == sorted(official.IDX_FILES)
    monkeypatch.setitem(official.IDX_SOURCES, "mnist", source._replace(mirror="http://nowhere/"))
    assert len(load("mnist").x) == 9


def test_failed_download_says_where_to_put_the_files(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COREFED_DATA", raising=False)
    source = official.IDX_SOURCES["mnist"]
    monkeypatch.setitem(official.IDX_SOURCES, "mnist", source._replace(mirror=mirror))
    with pytest.raises(UserError, match="404") as missing:
        load("mnist")
    for part in (official.IDX_FILES[0], "mnist/", "COREFED_DATA", str(tmp_path / "cache")):
        assert part in str(missing.value)
    (tmp_path / "mirror" / official.IDX_FILES[0]).write_bytes(b"something else")
    with pytest.raises(UserError, match="hash"):
        load("mnist")
    assert not (tmp_path / "cache" / "corefed" / "mnist" / official.IDX_FILES[0]).exists()
    with pytest.raises(UserError, match="downloading is off"):
        load("mnist", download=False)


def test_without_pooch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COREFED_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match=r"pooch.*Put train-images"):
        load("mnist")


def test_missing_data_folder_is_not_a_download(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load("mnist", tmp_path / "mistyped")


@needs_real_data
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_official_files(name: str) -> None:
    dataset = load(name, download=False)
    assert dataset.x.shape == (70000, 784)
    assert [float(end) for end in dataset.x.aminmax()] == [0, 1]
    assert dataset.held_out is not None
    assert int(dataset.held_out.sum()) == 10000
    assert int(dataset.held_out[60000:].sum()) == 10000
    counts = dataset.y.bincount()
    assert len(counts) == 10
    assert counts.min() >= 6000  # shards-large needs 5 clients x 1200 of every label


# Names and checks


def test_digits() -> None:
    dataset = load("digits")
    assert dataset.x.shape == (1797, 64)
    assert [float(end) for end in dataset.x.aminmax()] == [0, 1]
    assert dataset.y.bincount().min() == 174


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'fashion-mnist'") as caught:
        load("fashion_mnist")
    assert all(name in str(caught.value) for name in module.names())


@pytest.mark.parametrize("name", ["digits", "synthetic-linear", "synthetic-regression"])
def test_built_in_sets_have_the_promised_types(name: str) -> None:
    dataset = load(name, clients=3)
    assert dataset.name == name
    assert dataset.x.dtype == torch.float32
    assert dataset.y.dtype == (torch.int64 if dataset.classes else torch.float32)
    assert (dataset.groups is None) == bool(dataset.classes)
    if dataset.groups is not None:
        assert set(dataset.groups.tolist()) == {0, 1, 2}


def simple(x: Tensor, y: Tensor, classes: int) -> Dataset:
    return Dataset("simple", x, y, classes)


def spoilt(row: int, value: float) -> Tensor:
    x = torch.zeros(4, 2)
    x[row, 1] = value
    return x


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (simple(torch.zeros(0, 2), torch.zeros(0).long(), 2), "empty"),
        (simple(torch.zeros(4, 2), torch.zeros(3).long(), 2), "4 points but 3"),
        (simple(spoilt(2, torch.nan), torch.zeros(4).long(), 2), "1 NaN.*features.*row 2"),
        (simple(spoilt(3, torch.inf), torch.zeros(4).long(), 2), "1 NaN or infinite.*row 3"),
        (simple(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), 2), "outside 0..1.*is 2 in row 2"),
        (simple(torch.zeros(4, 2), torch.tensor([0, -1, 1, 0]), 2), "is -1 in row 1"),
        (simple(torch.zeros(4, 2), spoilt(1, torch.nan), 0), "targets.*row 1"),
    ],
)
def test_check(dataset: Dataset, message: str) -> None:
    with pytest.raises(UserError, match=message):
        module.check(dataset)


# Stacking


def uneven() -> tuple[Dataset, list[Split]]:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
    rows = torch.arange(20)
    splits = [Split(rows[:7], rows[7:9]), Split(rows[9:12], rows[12:13])]
    return simple(x, rows % 2 + 1, 3), splits


def test_padding_has_weight_zero() -> None:
    dataset, splits = uneven()
    for scale in ("unit", "standard"):
        data = federate(dataset, splits, scale=scale)
        assert data.train.x.shape == (2, 7, 3)
        assert data.test.y.shape == (2, 2)
        assert data.train.size.tolist() == [7, 3]
        assert data.test.size.tolist() == [2, 1]
        for part in (data.train, data.test):
            assert set(part.weight.flatten().tolist()) <= {0.0, 1.0}
            assert (part.x[part.weight == 0] == 0).all()
            assert (part.y[part.weight == 0] == 0).all()
            assert (part.y[part.weight == 1] > 0).all()
    assert data.names == ["client 0", "client 1"]
    assert (data.classes, data.targets) == (3, 0)


def test_points_arrive_unchanged() -> None:
    dataset, splits = uneven()
    data = federate(dataset, splits)
    for client, one in enumerate(splits):
        assert torch.equal(data.train.x[client, : len(one.train)], dataset.x[one.train])
        assert torch.equal(data.test.y[client, : len(one.test)], dataset.y[one.test])


def test_scaling_uses_training_points_only() -> None:
    dataset, splits = uneven()
    data = federate(dataset, splits, scale="standard")
    values = data.train.x[data.train.weight > 0]
    assert abs(float(values.mean())) < 1e-6
    assert abs(float(values.std(correction=0)) - 1) < 1e-6
    wild = dataset.x.clone()
    for one in splits:
        wild[one.test] *= 1e6
    other = federate(dataset._replace(x=wild), splits, scale="standard")
    assert torch.equal(other.train.x, data.train.x)
    assert not torch.equal(other.test.x, data.test.x)


def test_constant_features_do_not_divide_by_zero() -> None:
    dataset, splits = uneven()
    flat = dataset._replace(x=torch.full((20, 3), 2.0))
    assert (federate(flat, splits, scale="standard").train.x == 0).all()


def test_regression_targets_keep_their_unit() -> None:
    dataset, splits = uneven()
    targets = torch.arange(40.0).reshape(20, 2)
    data = federate(dataset._replace(y=targets, classes=0), splits, scale="standard")
    assert (data.classes, data.targets) == (0, 2)
    assert torch.equal(data.train.y[0], targets[:7])
    assert data.train.y.shape == (2, 7, 2)


def test_federate_refuses() -> None:
    dataset, splits = uneven()
    with pytest.raises(UserError, match="unit or standard"):
        federate(dataset, splits, scale="minmax")
    with pytest.raises(UserError, match="Client 0 has no training"):
        federate(dataset, [Split(splits[0].train[:0], splits[0].test), splits[1]])
    with pytest.raises(UserError, match="Client 0 is the largest, with 9 points"):
        federate(dataset, splits, memory_mb=0)


def test_stack_pads_to_the_longest() -> None:
    dataset, splits = uneven()
    first = federate(dataset, splits)
    second = federate(dataset, [Split(torch.arange(10), torch.arange(10, 15))])
    both = stack([first, second])
    assert both.train.x.shape == (3, 10, 3)
    assert both.test.x.shape == (3, 5, 3)
    assert both.train.size.tolist() == [7, 3, 10]
    assert both.names == ["client 0", "client 1", "client 0"]
    assert torch.equal(both.train.x[:2, :7], first.train.x)
    assert (both.train.x[:2, 7:] == 0).all()


def test_stack_refuses_different_tasks() -> None:
    dataset, splits = uneven()
    first: FederatedData = federate(dataset, splits)
    with pytest.raises(ValueError, match="different classes"):
        stack([first, first._replace(classes=4)])


def test_a_file_or_a_folder_without_its_kind(tmp_path: Path) -> None:
    """The sentence says what to type."""
    for name, words in (
        ("ok.csv", "for that file write --data table:ok.csv --target COLUMN"),
        ("some/ok.parquet", "write --data table:some/ok.parquet --target COLUMN"),
        ("ok.npz", "write --data npz:ok.npz."),
        ("ok.xlsx", "ok.xlsx is an Excel file; save it in Excel as CSV, and write table:FILE.csv"),
        (str(tmp_path), f"for a folder of images write image-folder:{tmp_path}"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            load(name)
