"""What a client reads on its own machine, what it says of it, and what all clients agree on."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.data import class_names, datasets, held_out
from corefed.data.dataset import Dataset
from corefed.federation.protocol import Agreement
from corefed.federation.reading import description, local_data
from corefed.federation.reading.agreement import agree
from corefed.federation.reading.fitting import fit
from corefed.federation.reading.local_data import LocalData, describe, fingerprint

X = np.arange(24.0).reshape(8, 3)
Y = np.array([2, 10, 2, 10, 10, 2, 7, 7])


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def read(spec: object, **more: Any) -> LocalData:
    return local_data.read(str(spec), **{"test_fraction": 0.0, "seed": 0, **more})


# --- .npz -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrays",
    [
        {"X": X, "y": Y},
        {"x": X.astype(np.float32), "y": Y.astype(np.uint8)},
        {"X_train": X.astype(np.int16), "y_train": Y.reshape(-1, 1)},
        {"x_train": X.astype(np.float16), "Y_train": Y.astype(str)},
        {"X": X, "y": Y, "x_test": np.zeros((0, 3)), "y_test": np.zeros(0, int)},
        {"X": np.asfortranarray(X), "y": Y, "ids": np.arange(3)},
    ],
)
@pytest.mark.parametrize("form", ["npz:{}", "{}"])
def test_arrays(tmp_path: Path, arrays: dict[str, Any], form: str) -> None:
    data = read(form.format(save(tmp_path / "a.npz", **arrays)))
    assert data.x_train.dtype == torch.float32 and data.x_train.tolist() == X.tolist()
    assert data.labels == ("2", "7", "10")  # as numbers, not as text
    assert data.y_train.dtype == torch.int64
    assert [data.labels[k] for k in data.y_train] == list(map(str, Y))
    assert data.shape == (3,) and data.x_test.shape == (0, 3) and data.y_test.shape == (0,)
    assert ("ids" in arrays) == any("also holds ids" in note for note in data.notes)


def test_a_folder_with_data_npz(tmp_path: Path) -> None:
    save(tmp_path / "data.npz", X=X, y=Y)
    assert len(read(tmp_path).y_train) == 8


def test_test_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    spec = save(
        tmp_path / "a.npz",
        X_train=X, y_train=Y.astype(np.uint64), X_test=-X[:3], y_test=np.array([5, 2, 2]),
    )  # fmt: skip
    data = read(spec, test_fraction=0.9)
    assert torch.equal(data.x_train, torch.from_numpy(X).float())
    assert torch.equal(data.x_test, -torch.from_numpy(X[:3]).float())
    assert data.labels == ("2", "5", "7", "10")  # also those that are only tested
    assert data.y_test.tolist() == [1, 0, 0]


def test_whole_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    """Bytes of an image are not divided by 255, and the operator is told."""
    images = np.arange(2 * 16, dtype=np.uint8).reshape(2, 1, 4, 4) * 8
    data = read(save(tmp_path / "a.npz", X=images, y=np.array([False, True])))
    assert torch.equal(data.x_train, torch.from_numpy(images).float()) and data.shape == (1, 4, 4)
    assert data.labels == ("0", "1")
    assert "whole numbers up to 248, which are taken as they are" in data.notes[0]


@pytest.mark.parametrize(("y", "width"), [(X[:, 0], 1), (X[:, :1], 1), (X[:, :2], 2)])
def test_floating_point_targets_are_a_regression(tmp_path: Path, y: Any, width: int) -> None:
    data = read(save(tmp_path / "a.npz", X=X, y=y), test_fraction=0.25)
    assert data.labels == () and data.y_train.shape == (len(data.x_train), width)
    assert data.y_train.dtype == torch.float32
    assert torch.equal(data.y_train[:, 0], data.x_train[:, 0])  # rows still belong together
    assert torch.equal(data.y_test[:, 0], data.x_test[:, 0])


def test_one_point_one_class_one_feature(tmp_path: Path) -> None:
    data = read(save(tmp_path / "a.npz", X=np.array([1.5]), y=np.array(["x"])), test_fraction=0.9)
    assert data.x_train.tolist() == [[1.5]] and data.labels == ("x",) and len(data.y_test) == 0


NAN = np.where(np.arange(24).reshape(8, 3) == 13, np.nan, X)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "it holds nothing"),
        ({"X": X}, r"must hold arrays X and y, .*; it holds X\."),
        ({"a": X, "b": Y}, "it holds a, b"),
        ({"X": X, "x": X, "y": Y}, "both X and x; leave one"),
        ({"X": X, "y": Y, "X_train": X, "y_train": Y}, "X beside X_train; leave one"),
        ({"X": X, "y": Y, "X_test": X}, "X_test alone; X_test and y_test go together"),
        ({"X": X, "y": Y[:5]}, "8 points in X but 5 in y"),
        ({"X": X[:0], "y": Y[:0]}, "X in .* is empty; a client needs at least one point"),
        ({"X": X[:, :0], "y": Y}, r"shape \(8, 0\): no numbers in a point"),
        ({"X": np.float64(3), "y": Y}, "X in .* is a single value"),
        ({"X": X, "y": np.int64(3)}, "y in .* is a single value"),
        ({"X": X.astype(str), "y": Y}, "X in .* is <U32, not numbers"),
        ({"X": X + 1j, "y": Y}, "complex128, not numbers"),
        ({"X": X, "y": np.array([b"a"] * 8)}, "y in .*, not numbers"),
        ({"X": X, "y": Y.astype("datetime64[s]")}, "datetime64"),
        ({"X": np.zeros(8, [("a", float), ("b", int)]), "y": Y}, "not numbers|no plain array"),
        ({"X": NAN, "y": Y}, "1 NaN or infinite features in 1 rows, the first in row 4"),
        ({"X": X * 1e300, "y": Y}, "23 NaN or infinite features in 8 rows, the first in row 0"),
        ({"X": X, "y": NAN[:, 1]}, "1 NaN or infinite regression targets .* row 4"),
        ({"X": X, "y": Y - 3}, "class number -1; class numbers are 0 to 9999"),
        ({"X": X, "y": Y * 1000}, r"class number 10000; .* Is it an identifier\?"),
        ({"X": X, "y": Y.astype(np.uint64) << 60}, "class number"),
        ({"X": X, "y": np.eye(8, dtype=int)}, r"shape \(8, 8\); it must be one class per point"),
        ({"X": X, "y": np.array(["a"] * 7 + [" "])}, "an empty name among its classes"),
        ({"X": X, "y": np.array(["a"] * 7 + ["b" * 201])}, "one of 201 characters"),
        ({"X": X, "y": Y, "X_test": X[:, :2], "y_test": Y}, "test points must be like training"),
        ({"X": X, "y": Y, "X_test": X, "y_test": X[:, 0]}, "test points must be like training"),
        ({"X": X, "y": X, "X_test": X, "y_test": X[:, 0]}, "test points must be like training"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(save(tmp_path / "a.npz", **arrays))


def test_too_many_names(tmp_path: Path) -> None:
    names = np.array([f"patient {i}" for i in range(10_001)])
    with pytest.raises(UserError, match="10001 different names of classes"):
        read(save(tmp_path / "a.npz", X=np.zeros((10_001, 1)), y=names))


class Trap:
    """Pickled, it would make a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["X", "y"])
def test_nothing_pickled_is_loaded(tmp_path: Path, name: str) -> None:
    trap = np.array([Trap(tmp_path / "sprung")] * 8, dtype=object)
    with pytest.raises(UserError, match=f"{name} in .* holds Python objects, which are never"):
        read(save(tmp_path / "a.npz", **{"X": X, "y": Y, name: trap}))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"X,y\n1,2\n", b"PK\x05\x06" + bytes(18)])
def test_files_that_are_no_npz(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"not a whole \.npz file|it holds nothing"):
        read(tmp_path / "a.npz")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    content = Path(save(tmp_path / "a.npz", X=X, y=Y)).read_bytes()
    for length in range(0, len(content), 17):
        (tmp_path / "b.npz").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"not a whole \.npz file"):
            read(tmp_path / "b.npz")


def test_damaged_numbers_are_noticed(tmp_path: Path) -> None:
    content = bytearray(Path(save(tmp_path / "a.npz", X=X, y=Y)).read_bytes())
    content[content.index(X[1].tobytes())] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"not a whole \.npz file: Bad CRC"):
        read(tmp_path / "a.npz")


def npy(shape: str, kind: str = "<f8") -> bytes:
    """The header of an array that claims a shape, and nothing behind it."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("shape", ["(1000000000000, 3)", "(8, 3)", "(-1, 3)", "('a',)"])
def test_arrays_that_claim_more_than_they_have(tmp_path: Path, shape: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", npy(shape))
        content = io.BytesIO()
        np.save(content, Y)
        archive.writestr("y.npy", content.getvalue())
    with pytest.raises(UserError, match=r"more than it has|not a whole \.npz|but 8 in y"):
        read(tmp_path / "a.npz")


def test_memory_is_checked_before_it_is_taken(tmp_path: Path) -> None:
    """80 MB of zeros in 80 kB of file."""
    np.savez_compressed(tmp_path / "a.npz", X=np.zeros((10_000, 1000)), y=np.zeros(10_000, int))
    assert (tmp_path / "a.npz").stat().st_size < 200_000
    tracemalloc.start()
    try:
        # 80 MB as stored and twice 40 MB in float32, in units of 2^20 bytes.
        with pytest.raises(UserError, match="needs 153 MB of memory, more than the 100 MB allowed"):
            read(tmp_path / "a.npz", memory_mb=100)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.npz", r"There is no nowhere\.npz; give an \.npz file, a table \(\.csv"),
        ("npz:", "There is no path in 'npz:'"),
        ("", "There is no path in ''"),
        ("digits", "There is no digits"),
        ("{}/a.txt", r"a\.txt is none of what a client can read"),
        ("npz:{}", "is none of what a client can read"),
        ("table:{}", "is none of what a client can read"),
        ("{}/pipe.csv", "is none of what a client can read"),  # reading it would wait for ever
        ("image-folder:{}/a.txt", "is a file; image-folder needs a folder"),
        ("{}", "has no class folders"),
    ],
)
def test_paths(tmp_path: Path, spec: str, words: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UserError, match=words):
        read(spec.format(tmp_path))


# --- images ---------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    for label, level in (("10", 200), ("9", 100)):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for number in range(5):
            image.new("L", (32, 32), level + number).save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("form", ["{}", "image-folder:{}"])
def test_a_folder_of_images(pictures: Path, form: str) -> None:
    data = read(form.format(pictures), embedding="none", test_fraction=0.2)
    assert data.shape == (1, 32, 32) and data.labels == ("9", "10")
    assert len(data.y_train) == 8 and data.y_test.sort().values.tolist() == [0, 1]
    levels = data.x_train[:, 0, 0, 0] * 255
    assert torch.equal(data.y_train, (levels > 150).long())  # 9 is dark, 10 is bright


def test_images_without_a_network(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "9" / "bad.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"9/bad\.png"):
        read(pictures, embedding="none")
    data = read(pictures, embedding="none", bad_images="skip")
    assert len(data.y_train) == 10 and "left out" in data.notes[-1]


# --- test points ----------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(0, 0.999),
    st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_a_part_of_each_class_is_for_testing(counts: list[int], fraction: float, seed: int) -> None:
    """A stretch of n evenly spaced marks, a part f of all places, has f n of them, give or take
    one; a class that would have no training point gives one back."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    dataset = Dataset("any", torch.zeros(len(y), 1), y, len(counts))
    test = held_out.draw(dataset, fraction, seed)
    for label, count in enumerate(counts):
        drawn = int(test[y == label].sum())
        assert drawn < count
        assert abs(drawn - fraction * count) < 1 + 1e-6 or (
            drawn == count - 1 and fraction * count > count - 1
        )
    assert torch.equal(test, held_out.draw(dataset, fraction, seed))


def test_the_split_is_the_same_at_every_call_and_random(tmp_path: Path) -> None:
    x = np.arange(1000.0)
    spec = save(tmp_path / "a.npz", X=x, y=np.arange(1000) % 3)
    one, again = (read(spec, test_fraction=0.2, seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one[:4], again[:4], strict=True))
    assert fingerprint(one) == fingerprint(again)
    assert sorted([*one.x_train.flatten().tolist(), *one.x_test.flatten().tolist()]) == x.tolist()
    assert one.x_train.flatten().tolist() == sorted(one.x_train.flatten().tolist())
    assert len(one.x_test) in (199, 200)
    other = read(spec, test_fraction=0.2, seed=6)
    shared = set(one.x_test.flatten().tolist()) & set(other.x_test.flatten().tolist())
    assert len(shared) < 80  # 40 +- 6 if the two are independent
    assert fingerprint(one) != fingerprint(other)


def test_every_point_is_tested_in_some_split() -> None:
    """No point of a class is more likely to test than another: 0.25 of 400 splits, +- 0.1."""
    dataset = Dataset("any", torch.zeros(7, 1), torch.tensor([0, 1, 0, 1, 1, 0, 1]), 2)
    often = sum(held_out.draw(dataset, 0.25, seed).double() for seed in range(400)) / 400
    assert isinstance(often, torch.Tensor)
    assert bool(((often - 0.25).abs() < 0.1).all()), often  # 4.6 standard deviations of 0.0217


@pytest.mark.parametrize("fraction", [-0.1, 1.0, math.nan])
def test_parts_that_are_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UserError, match=r"test_fraction is .*; it must be at least 0 and below 1"):
        read(save(tmp_path / "a.npz", X=X, y=Y), test_fraction=fraction)


# --- classes that the experiment names ------------------------------------------------------------


def test_only_the_classes_that_are_named_are_read(tmp_path: Path) -> None:
    y = np.array(["Normal", "cnv", "dme", "cnv", "junk", "Normal", "cnv", "dme"])
    spec = save(tmp_path / "a.npz", X=X, y=y, X_test=X, y_test=y)
    data = read(spec, classes=("normal", "drusen", "CNV"))
    assert data.labels == ("CNV", "normal")  # the experiment's spelling; it has no drusen
    assert [data.labels[k] for k in data.y_train] == ["normal", "CNV", "CNV", "normal", "CNV"]
    assert data.x_train[:, 0].tolist() == [0, 3, 9, 15, 18] == data.x_test[:, 0].tolist()
    assert data.notes == ("6 points of other classes are left out: dme, junk.",)
    with pytest.raises(UserError, match="none of the classes x, y; it has Normal, cnv, dme, junk"):
        read(spec, classes=("x", "y"))
    with pytest.raises(UserError, match="is a regression; it has no classes to choose from"):
        read(save(tmp_path / "b.npz", X=X, y=X), classes=("x", "y"))
    only_tested = save(tmp_path / "c.npz", X=X[:1], y=["a"], X_test=X[:1], y_test=["b"])
    with pytest.raises(UserError, match="has no points to train on"):
        read(only_tested, classes=("b",))


def test_the_order_of_classes() -> None:
    assert class_names.sort_names(["10", "2", "9", "2"]) == ("2", "9", "10")
    assert class_names.sort_names(["10", "2", "b"]) == ("10", "2", "b")
    assert class_names.sort_names(["01", "1"]) == ("01", "1")  # text: two names
    assert class_names.unite(["3", "1"]) == ("0", "1", "2", "3")
    assert class_names.unite(["b", "a"]) == ("a", "b")


# --- fingerprint, fit -----------------------------------------------------------------------------


def some(**changed: Any) -> LocalData:
    data = LocalData(
        x_train=torch.tensor([[1.0, 2], [3, 4], [5, 6]]),
        y_train=torch.tensor([0, 1, 0]),
        x_test=torch.tensor([[7.0, 8]]),
        y_test=torch.tensor([1]),
        labels=("b", "d"),
    )
    return data._replace(**changed)


def test_fingerprints_tell_training_points_apart() -> None:
    data = some()
    changed = [
        some(x_train=data.x_train + 1e-6),
        some(x_train=data.x_train.flip(0)),
        some(x_train=data.x_train.reshape(3, 1, 2)),
        some(x_train=data.x_train[:2], y_train=data.y_train[:2]),
        some(y_train=torch.tensor([0, 1, 1])),
        some(labels=("b", "e")),
    ]
    assert len({fingerprint(each) for each in (data, *changed)}) == 1 + len(changed)
    assert fingerprint(some(x_test=data.x_test + 1, notes=("x",))) == fingerprint(data)


def test_fit() -> None:
    train, test, _ = fit(some(), Agreement((2,), ("a", "b", "c", "d"), 0, mean=(3.0,), std=(2.0,)))
    assert train.x.tolist() == [[[-1, -0.5], [0, 0.5], [1, 1.5]]]
    assert train.y.tolist() == [[1, 3, 1]] and test.y.tolist() == [[3]]
    assert train.weight.tolist() == [[1, 1, 1]] and test.weight.tolist() == [[1]]
    assert train.x.dtype == test.x.dtype == train.weight.dtype == torch.float32
    data = some()
    fit(data, Agreement((2,), ("b", "d"), 0, mean=(1.0,)))
    assert data.x_train[0].tolist() == [1, 2]  # as it was
    empty = some(x_test=torch.zeros(0, 2), y_test=torch.zeros(0, dtype=torch.int64))
    assert fit(empty, Agreement((2,), ("b", "d"), 0))[1].x.shape == (1, 0, 2)


REGRESSION = some(labels=(), y_train=torch.zeros(3, 2), y_test=torch.zeros(1, 2))


def test_fit_of_a_regression() -> None:
    train, test, _ = fit(REGRESSION, Agreement((2,), (), 2, std=(2.0,)))
    assert train.y.shape == (1, 3, 2) and test.y.shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("data", "agreement", "words"),
    [
        (some(), Agreement((3,), ("b", "d"), 0), r"shape \[2\] here, but \[3\] in this run"),
        (some(), Agreement((2, 1), ("b", "d"), 0), r"shape \[2\] here, but \[2, 1\]"),
        (some(), Agreement((2,), ("a", "b"), 0), "Class 'd' of this client is none .* a, b"),
        (some(), Agreement((2,), (), 1), "classes here, but numbers in this run"),
        (REGRESSION, Agreement((2,), ("a", "b"), 0), "numbers here, but classes in this run"),
        (REGRESSION, Agreement((2,), (), 1), "2 targets here, but 1 in this run"),
        (some(), Agreement((2,), ("b", "d"), 0, std=(0.0,)), "standard deviation .* is 0"),
        (some(), Agreement((2,), ("b", "d"), 0, std=(math.nan,)), "standard deviation .* is nan"),
    ],
)
def test_what_does_not_fit(data: LocalData, agreement: Agreement, words: str) -> None:
    with pytest.raises(UserError, match=words):
        fit(data, agreement)


def test_a_class_that_is_only_tested_must_be_known() -> None:
    data = some(y_train=torch.tensor([0, 0, 0]))
    with pytest.raises(UserError, match="Class 'd' of this client"):
        fit(data, Agreement((2,), ("a", "b"), 0))


# --- descriptions and agreements ------------------------------------------------------------------


def test_nothing_but_this_is_said() -> None:
    said = describe(some())
    assert said == {
        "train": 3, "test": 1, "shape": [2], "classes": ["b", "d"], "targets": 0, "count": 6,
        "mean": 3.5, "m2": 17.5,
    }  # fmt: skip
    assert json.loads(json.dumps(said)) == said
    assert describe(REGRESSION)["targets"] == 2 and describe(REGRESSION)["classes"] == []


def described(values: Any, **more: Any) -> dict[str, Any]:
    x = torch.as_tensor(values, dtype=torch.float32)
    data = some(x_train=x, y_train=torch.zeros(len(x), dtype=torch.int64))
    return {**describe(data), **more}


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.floats(-1e4, 1e4),
    st.floats(1e-3, 1e3),
    st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_the_scale_of_all_is_that_of_the_pooled_values(
    counts: list[int], mean: float, std: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [mean + std * torch.randn(n, 3, generator=generator) for n in counts]
    pooled = torch.cat(parts).double()
    found = agree([described(part) for part in parts], (), "standard")
    (found_mean,), (found_std,) = found.mean, found.std
    # float64 throughout, then one rounding to float32: half a unit in the last place, 2^-24.
    assert found_mean == pytest.approx(pooled.mean().item(), rel=2**-23, abs=1e-10 * std)
    # Values that float32 has made equal are centred only.
    spread = pooled.std(correction=0).item() or 1.0
    assert found_std == pytest.approx(spread, rel=2**-23)


def test_sums_of_squares_would_have_lost_this() -> None:
    """Values near 1e7 that differ by 1: their squares agree in 14 digits, float64 has 16."""
    parts = [torch.tensor([[1e7], [1e7 + 1]]), torch.tensor([[1e7 + 2], [1e7 + 3]])]
    found = agree([described(part) for part in parts], (), "standard")
    assert found.std == pytest.approx((math.sqrt(1.25),), rel=1e-7)


def test_the_scale_is_in_the_precision_of_the_features() -> None:
    found = agree([described([[0.1], [0.2], [0.4]])], (), "standard")
    for value in (*found.mean, *found.std):
        assert np.float32(value) == value


def test_moments_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)) + 100
    whole = description.moments(x)
    monkeypatch.setattr(description, "BLOCK", 64)
    parts = description.moments(x)
    assert parts.n == whole.n == 7000
    assert parts.mean == pytest.approx(x.double().mean().item(), rel=1e-14)
    assert parts.m2 == pytest.approx(7000 * x.double().var(correction=0).item(), rel=1e-12)


def test_constant_values_are_centred_only() -> None:
    x = torch.full((7, 3), 0.1)
    found = agree([described(x), described(x[:2])], (), "standard")
    assert (found.mean, found.std) == ((x[0, 0].item(),), (1.0,))


def test_unit_scale() -> None:
    found = agree([described([[5.0, 6]])], (), "unit")
    assert (found.mean, found.std) == ((0.0,), (1.0,)) and found.shape == (2,)
    with pytest.raises(UserError, match="There is no scale 'auto'"):
        agree([described([[5.0, 6]])], (), "auto")


@pytest.mark.parametrize(
    ("own", "named", "wanted"),
    [
        ([["2"], ["10", "0"]], (), tuple(map(str, range(11)))),
        ([["b"], ["a", "c"]], (), ("a", "b", "c")),
        ([["10"], ["b"]], (), ("10", "b")),
        ([["b"], ["a"]], ("c", "b", "a"), ("c", "b", "a")),
        ([["0"]], (), ("0",)),
    ],
)
def test_the_classes_of_all(
    own: list[list[str]], named: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    said = [described([[0.0, 1]], classes=names) for names in own]
    assert agree(said, named, "unit").classes == wanted
    assert agree(dict(zip("ns", said, strict=False)), named, "unit").classes == wanted
    text = agree(said, named, "unit").to_json()
    assert Agreement.from_json(text) == agree(said, named, "unit")


FLAT, WIDE = described([[0.0, 1]]), described([[0.0, 1, 2]])


@pytest.mark.parametrize(
    ("said", "named", "words"),
    [
        ({}, (), "No client has described its data"),
        ({"n": FLAT, "s": WIDE}, (), r"n has points of shape \[2\] but s has \[3\]; all clients"),
        ([FLAT, WIDE], (), r"client 0 has points of shape \[2\] but client 1 has \[3\]"),
        ({"n": FLAT, "s": {**FLAT, "classes": [], "targets": 1}}, (),
         "n has as target classes but s has a number"),
        ({"n": {**FLAT, "classes": [], "targets": 3}, "s": {**FLAT, "classes": [], "targets": 1}},
         (), "n has as target 3 numbers but s has a number"),
        ({"n": FLAT}, ("b", "x"), "n has class 'd', which is none of the experiment's: b, x"),
        ({"n": {**FLAT, "classes": [], "targets": 1}}, ("b", "x"), "but the clients have regress"),
        ({"n": {**FLAT, "classes": ["10000"]}}, (), "has class numbers above 9999"),
    ],
)  # fmt: skip
def test_clients_that_do_not_agree(said: Any, named: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        agree(said, named, "unit")


@pytest.mark.parametrize(
    "changed",
    [
        {"train": 0}, {"train": -5}, {"train": 1.5}, {"train": True}, {"train": "3"},
        {"train": 10**400, "count": 2 * 10**400}, {"test": -1}, {"test": None},
        {"shape": []}, {"shape": [0, 2]}, {"shape": [2.0]}, {"shape": "2"}, {"shape": [2, "x"]},
        {"shape": [2] + [1] * 8}, {"shape": [10**30]},
        {"classes": []}, {"classes": "ab"}, {"classes": ["a", 3]}, {"classes": [""]},
        {"classes": ["a" * 201]}, {"classes": ["a", "a"]},
        {"classes": list(map(str, range(10_001)))},
        {"targets": 1}, {"targets": -1}, {"count": 3}, {"count": 2.0},
        {"mean": math.nan}, {"mean": math.inf}, {"mean": 10**400}, {"mean": "0"}, {"mean": 1e39},
        {"m2": -1.0}, {"m2": math.nan}, {"m2": math.inf}, {"m2": 10**400}, {"m2": 1e300},
    ],
)  # fmt: skip
def test_descriptions_that_nobody_honest_sends(changed: dict[str, Any]) -> None:
    """They come from another machine: each is refused by name, none does harm."""
    for scale in ("unit", "standard"):
        with pytest.raises(UserError, match="The description of bad's data has"):
            agree({"good": FLAT, "bad": {**FLAT, **changed}}, (), scale)
    short = {key: value for key, value in FLAT.items() if key not in changed}
    with pytest.raises(UserError, match="The description of bad's data lacks"):
        agree({"bad": short}, (), "unit")


def test_a_client_with_images_of_one_class(pictures: Path) -> None:
    """In a simulation that is a mistake; at a site that sees one kind of case it is not."""
    (first, *others) = sorted(pictures.iterdir())
    for folder in others:
        shutil.rmtree(folder)
    data = read(f"image-folder:{pictures}", embedding="none")
    assert data.labels == (first.name,)
    with pytest.raises(UserError, match="one class only"):
        datasets.load(f"image-folder:{pictures}", embedding="none")
