"""Folders of images: what is found, how each kind of image is read, what is refused."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import corefed
from hypothesis import given, settings
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.data import load
from corefed.data.dataset import select
from corefed.data.images import find
from corefed.data.pictures import UnreadableError, read, square, stretch

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

needs_real_data = pytest.mark.skipif(
    "COREFED_DATA" not in os.environ, reason="COREFED_DATA does not point at the real images"
)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or fill the cache of whoever runs it."""
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))


def save(path: Path, level: int = 0, size: tuple[int, int] = (4, 4), mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 0)).save(path)
    return path


def folder(root: Path, names: tuple[str, ...] = ("a", "b"), count: int = 10) -> Path:
    """Grey squares, brighter by class and number."""
    for place, name in enumerate(names):
        for number in range(count):
            save(root / name / f"{number}.png", 100 * place + number)
    return root


def divided(
    root: Path, names: tuple[str, ...] = ("a", "b"), counts: tuple[int, int] = (6, 3)
) -> Path:
    for part, count in zip(("train", "test"), counts, strict=True):
        folder(root / part, names, count)
    return root


def raw(root: Path, **settings: object) -> object:
    return load(f"image-folder:{root}", embedding="none", **settings)  # type: ignore[arg-type]


# Finding


def test_classes_in_one_folder(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/deep/deeper/1.JPG", "B/x.tiff", "b/.hidden.png", "a/1.png"):
        save(tmp_path / name)
    save(tmp_path / ".thumbnails" / "x" / "1.png")
    save(tmp_path / "__MACOSX" / "1.png")
    (tmp_path / "a" / "report.csv").write_text("no image")
    found = find(tmp_path)
    assert found.labels == ("B", "a", "b")
    assert found.pictures.names == ["B/x.tiff", "a/1.png", "b/2.png", "b/deep/deeper/1.JPG"]
    assert found.y.tolist() == [0, 1, 2, 2]
    assert found.held_out is None
    assert found.notes == (
        "Classes: B (1), a (1), b (2).",
        f"1 files in {tmp_path} are no images by their ending, such as a/report.csv.",
    )


def test_train_validation_and_test(tmp_path: Path) -> None:
    divided(tmp_path, ("sick", "normal"), (3, 2))
    (tmp_path / "train").rename(tmp_path / "Train")
    save(tmp_path / "val" / "sick" / "9.png")
    (tmp_path / "val" / "normal").mkdir()
    found = find(tmp_path)
    assert found.labels == ("normal", "sick")
    assert found.held_out is not None
    assert found.held_out.tolist() == [False] * 7 + [True] * 4
    assert found.y.tolist() == [0] * 3 + [1] * 3 + [1] + [0, 0, 1, 1]
    dataset = load(f"image-folder:{tmp_path}", embedding="none")
    assert dataset.keep_split
    assert dataset.labels == ("normal", "sick")


def spoil(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        change(divided(root))
        return root

    return make


def remove(path: Path) -> None:
    for child in path.iterdir():
        remove(child) if child.is_dir() else child.unlink()
    path.rmdir()


MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda root: save(root / "x.png"), "x.png is a file; image-folder needs a folder"),
    "nothing": (lambda root: root, "has no class folders"),
    "loose images": (lambda root: save(root / "1.png").parent, "has no class folders"),
    "one class": (lambda root: folder(root, ("a",)), "one class only, 'a'"),
    "empty class": (
        lambda root: (folder(root) / "c").mkdir() or root,
        "c has no images; known endings are .jpg",
    ),
    "no test": (spoil(lambda root: remove(root / "test")), "a folder train but no test"),
    "no train": (spoil(lambda root: remove(root / "train")), "a folder test but no train"),
    "beside": (spoil(lambda root: save(root / "c" / "1.png")), "'c' beside train and test"),
    "only tested": (
        spoil(lambda root: save(root / "test" / "c" / "1.png")),
        "class 'c' in test but not in train",
    ),
    "only trained": (
        spoil(lambda root: save(root / "train" / "c" / "1.png")),
        "class 'c' in train but not in test",
    ),
    "empty part": (
        spoil(lambda root: [path.unlink() for path in (root / "test" / "b").iterdir()]),
        "test/b has no images",
    ),
    "loop": (
        spoil(lambda root: (root / "train" / "a" / "up").symlink_to(root / "train")),
        "up is a link to a folder that it lies in",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(tmp_path: Path, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        find(make(tmp_path / "x"))
    assert str(caught.value).count(". ") == 0, "one sentence"


def test_other_files_in_a_class_are_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "c").mkdir()
    for number in range(2):
        (tmp_path / "c" / f"{number}.dcm").touch()
    with pytest.raises(UserError, match=r"c has no images \(it has files: 2 of \.dcm\)"):
        find(tmp_path)


def test_links(tmp_path: Path) -> None:
    """To a folder elsewhere: followed. To nothing, to itself, to a pipe: unreadable images."""
    save(tmp_path / "elsewhere" / "1.png")
    root = folder(tmp_path / "root", count=1)
    (root / "c").symlink_to(tmp_path / "elsewhere")
    assert find(root).pictures.names == ["a/0.png", "b/0.png", "c/1.png"]
    (root / "a" / "1.png").symlink_to(tmp_path / "nothing.png")
    (root / "a" / "2.png").symlink_to(root / "a" / "2.png")
    os.mkfifo(root / "a" / "3.png")
    found = find(root)
    for row, reason in ((1, "No such file"), (2, "symbolic links"), (3, "it is no file")):
        with pytest.raises(UnreadableError, match=reason):
            found.pictures.read(row)
    with pytest.raises(UserError, match=r"3 of 6 images .* a/1.png \(No such file"):
        raw(root)


# Reading


def pixels(path: Path) -> list[list[tuple[int, ...]]]:
    image = read(path)
    assert image.mode == "RGB"
    return [[image.getpixel((x, y)) for x in range(image.width)] for y in range(image.height)]


def test_kinds_of_8_bit_images(tmp_path: Path) -> None:
    """Values by hand; on black, 200 at alpha 128 is 200 x 128 / 255 = 100.4."""
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    cases = {
        "grey": (Image.new("L", (1, 1), 77), {}, [(77, 77, 77)]),
        "bit": (Image.new("1", (1, 1), 1), {}, [(255, 255, 255)]),
        "colour": (Image.new("RGB", (1, 1), (1, 2, 3)), {}, [(1, 2, 3)]),
        "palette": (palette, {}, [(10, 20, 30), (40, 50, 60)]),
        "hole": (palette, {"transparency": 0}, [(0, 0, 0), (40, 50, 60)]),
        "alpha": (Image.new("RGBA", (1, 1), (200, 0, 255, 128)), {}, [(100, 0, 128)]),
        "hidden": (Image.new("RGBA", (1, 1), (200, 90, 80, 0)), {}, [(0, 0, 0)]),
        "grey alpha": (Image.new("LA", (1, 1), (200, 128)), {}, [(100, 100, 100)]),
    }
    for name, (image, options, expected) in cases.items():
        path = tmp_path / f"{name}.png"
        image.save(path, **options)
        assert pixels(path) == [expected], name


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_levels_of_16_bits_are_stretched(tmp_path: Path, ending: str) -> None:
    """A 12-bit scan: 2048 of 0..4095 is 127.53 of 255."""
    levels = np.array([[0, 2048, 4095]], dtype=np.uint16)
    path = tmp_path / f"scan.{ending}"
    Image.fromarray(levels).save(path)
    assert pixels(path) == [[(0, 0, 0), (128, 128, 128), (255, 255, 255)]]
    big = tmp_path / "big.tif"
    big.write_bytes(big_endian_tiff(levels))
    assert pixels(big) == pixels(path)


def big_endian_tiff(levels: np.ndarray) -> bytes:
    """The smallest file: a header, one directory, one strip of big-endian 16-bit levels."""
    height, width = levels.shape
    strip = levels.astype(">u2").tobytes()
    short, long = 3, 4
    entries = [
        (256, short, width), (257, short, height), (258, short, 16), (259, short, 1),
        (262, short, 1), (273, long, 8), (277, short, 1), (278, short, height),
        (279, long, len(strip)),
    ]  # fmt: skip
    directory = struct.pack(">H", len(entries))
    for tag, kind, value in entries:
        shifted = value << 16 if kind == short else value
        directory += struct.pack(">HHII", tag, kind, 1, shifted)
    return b"MM\0*" + struct.pack(">I", 8 + len(strip)) + strip + directory + bytes(4)


def test_stretching() -> None:
    assert stretch(np.array([-5.0, 0.0, 5.0])).tolist() == [0, 128, 255]
    assert stretch(np.full(3, 700)).tolist() == [0, 0, 0]
    with pytest.raises(UnreadableError, match="NaN"):
        stretch(np.array([0, np.nan]))


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    """Orientation 6: the camera was turned, so that the first row is the right column."""
    image = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.png", exif=exif)
    assert pixels(tmp_path / "x.png") == [[(0, 0, 0)], [(255, 255, 255)]]


def test_square_keeps_the_whole_image() -> None:
    image = Image.fromarray(np.repeat([[0, 255]], 8, axis=0).astype(np.uint8).repeat(32, axis=1))
    values = square(image.convert("RGB"), 16)
    assert values.shape == (3, 16, 16)
    assert (values[:, :, :6] == 0).all()
    assert (values[:, :, 10:] == 255).all()


def claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims any size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(100))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def animated() -> bytes:
    stream = io.BytesIO()
    first, second = Image.new("L", (2, 2), 0), Image.new("L", (2, 2), 255)
    first.save(stream, "GIF", save_all=True, append_images=[second])
    return stream.getvalue()


def jpeg(size: int = 64) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (size, size), dtype=np.uint8)
    Image.fromarray(noise).save(stream, "JPEG")
    return stream.getvalue()


UNREADABLE = {
    "empty": (b"", "it is empty"),
    "text": (b"not an image at all", "no image that pillow knows"),
    "truncated": (jpeg()[:-500], "truncated"),
    "cut header": (jpeg()[:30], "Truncated"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "no image that"),
    "bomb": (claims(100_000, 100_000), "too many pixels"),
    "smaller bomb": (claims(10_000, 10_000), "10000 x 10000 is more than"),
    "animated": (animated(), "several images"),
}


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_unreadable(tmp_path: Path, case: str) -> None:
    content, reason = UNREADABLE[case]
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=reason):
        read(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the bytes: an RGB image or an UnreadableError, nothing else."""
    whole = data.draw(st.sampled_from([jpeg(8), claims(10, 9), animated(), big_endian_tiff(
        np.arange(6, dtype=np.uint16).reshape(2, 3))]))  # fmt: skip
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.jpg"
    path.write_bytes(content)
    with suppress(UnreadableError):
        assert read(path).mode == "RGB"


# Loading


def test_raw_pixels_are_grey_or_in_colour(tmp_path: Path) -> None:
    grey = load(f"image-folder:{folder(tmp_path / 'grey')}", embedding="none")
    assert grey.x.shape == (20, 1, 32, 32)
    assert grey.x.dtype == torch.uint8
    assert grey.x[:, 0, 0, 0].tolist() == [*range(10), *range(100, 110)]
    root = folder(tmp_path / "colour")
    save(root / "a" / "red.jpg", 200, (50, 20), "RGB")
    colour = load(f"image-folder:{root}", embedding="none")
    assert colour.x.shape == (21, 3, 32, 32)


def test_bad_images_are_refused_or_skipped(tmp_path: Path) -> None:
    root = divided(tmp_path / "x")
    for name in ("train/a/1.png", "train/a/2.png", "train/b/0.png", "test/b/2.png"):
        (root / name).write_bytes(b"")
    message = (
        rf"4 of 18 images in {root} cannot be read: train/a/1.png \(it is empty\), train/a/2.png, "
        r"train/b/0.png and 1 more\. Mend .* --set bad_images=skip"
    )
    with pytest.raises(UserError, match=message):
        raw(root)
    dataset = load(f"image-folder:{root}", embedding="none", bad_images="skip")
    assert len(dataset.x) == len(dataset.y) == 14
    assert dataset.y.tolist() == [0] * 4 + [1] * 5 + [0] * 3 + [1] * 2
    assert dataset.x[0, 0, 0, 0] == 0
    assert dataset.x[1, 0, 0, 0] == 3
    assert dataset.held_out is not None
    assert int(dataset.held_out.sum()) == 5
    assert dataset.notes[0] == "Classes: a (9), b (9)." and "4 of 18 images" in dataset.notes[1]
    with pytest.raises(UserError, match="4 of 18 images"):  # though the cache has the others
        raw(root)
    for number in range(2):
        (root / "test" / "b" / f"{number}.png").write_bytes(b"")
    with pytest.raises(UserError, match="No image of class 'b' in test"):
        raw(root, bad_images="skip")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "data" / "scans")
    folder(tmp_path / "here" / "scans", count=3)
    monkeypatch.delenv("COREFED_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert len(load("image-folder:scans", tmp_path / "data", embedding="none").x) == 20
    monkeypatch.setenv("COREFED_DATA", str(tmp_path / "data"))
    assert len(load("image-folder:scans", embedding="none").x) == 20
    monkeypatch.chdir(tmp_path / "here")
    assert len(load("image-folder:scans", embedding="none").x) == 6  # as written comes first
    with pytest.raises(UserError, match=r"There is no nothing nor .*data/nothing; correct"):
        load("image-folder:nothing")
    with pytest.raises(UserError, match="There is no /nothing; correct"):
        load("image-folder:/nothing")
    for name in ("image-folder:", "image-folder:PATH"):
        with pytest.raises(UserError, match="write image-folder:PATH with yours"):
            load(name)
    with pytest.raises(UserError, match="write image-folder:PATH"):
        load("image-folder")
    with pytest.raises(UserError, match="Did you mean 'image-folder:PATH'"):
        load("imagefolder:scans")


def test_choice_of_classes(tmp_path: Path) -> None:
    root = folder(tmp_path, ("Alpha", "beta", "gamma"), 2)
    dataset = load(f"image-folder:{root}", embedding="none", classes=["gamma", "alpha"])
    assert dataset.labels == ("gamma", "Alpha")
    assert dataset.y.tolist() == [1, 1, 0, 0]
    assert dataset.x[:, 0, 0, 0].tolist() == [0, 1, 200, 201]
    numbers = load("digits", classes=["7", "1"])
    assert (numbers.classes, numbers.labels) == (2, ("7", "1"))
    for classes, message in (
        (["alpha", "delta"], "no class 'delta'; it has gamma, Alpha"),
        (["alpha"], "two or more different"),
        (["alpha", "Alpha"], "two or more different"),
    ):
        with pytest.raises(UserError, match=message):
            select(dataset, classes)
    with pytest.raises(UserError, match="is a regression"):
        load("synthetic-linear", classes=["0", "1"])


def test_labels_alone_need_no_network(tmp_path: Path) -> None:
    root = divided(tmp_path)
    (root / "train" / "a" / "0.png").write_bytes(b"")
    dataset = load(f"image-folder:{root}", labels_only=True)
    assert dataset.x.shape == (18, 0)
    assert dataset.y.tolist() == [0] * 6 + [1] * 6 + [0] * 3 + [1] * 3


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[vision\]'"):
        find(tmp_path)


# The command line

RUN = (
    "--method=pfedbayes", "--rounds=2", "--local-steps=2", "--device=cpu", "--set=embedding=none",
    "--set=evaluate_draws=2", "--set=hidden=8", "--set=model=mlp", "--clients=2",
)  # fmt: skip


def test_run(tmp_path: Path) -> None:
    root = divided(tmp_path / "x", ("bacteria", "NORMAL", "virus"))
    (root / "train" / "virus" / "1.png").write_bytes(b"")
    data = (f"--data=image-folder:{root}", "--partition=shared-normal")
    out = tmp_path / "out"
    refused = corefed("run", *RUN, *data, "--out", out)
    assert refused.code == 2
    assert "1 of 27 images" in refused.err
    assert not out.exists()
    result = corefed("run", *RUN, *data, "--set=bad_images=skip", "--out", out)
    assert result.code == 0, result.err
    found, left, *_ = result.err.splitlines()
    assert found == "note: Classes: NORMAL (9), bacteria (9), virus (9)."
    assert left.startswith("note: 1 of 27 images")
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["classes"]["global"]) == {"bacteria", "NORMAL", "virus"}
    assert summary["config"]["embedding"] == "none"
    assert "left out" in summary["environment"]["notes"][1]


def test_show(tmp_path: Path) -> None:
    root = divided(tmp_path / "x", ("bacteria", "NORMAL", "virus"))
    show = ("datasets", "--show", f"image-folder:{root}", "--partition", "shared-normal")
    result = corefed(*show, "--clients", "2")
    assert result.code == 0, result.err
    lines = [line.replace("│", " ").split() for line in result.out.splitlines()]
    assert ["0", "3", "6", "0", "9", "5"] in lines or ["0", "3", "6", "0", "9", "4"] in lines
    assert any("NORMAL bacteria virus" in " ".join(line) for line in
               (text.replace("┃", " ").split() for text in result.out.splitlines()))  # fmt: skip
    assert corefed(*show).code == 2
    assert "--clients 2" in corefed(*show).err


@needs_real_data
def test_real_x_rays() -> None:
    dataset = load("image-folder:chest-xray", labels_only=True)
    assert dataset.labels == ("bacteria", "normal", "virus")
    assert dataset.held_out is not None
    assert dataset.y[~dataset.held_out].bincount().tolist() == [1200, 1200, 1200]
    assert dataset.y[dataset.held_out].bincount().tolist() == [240, 234, 148]
    found = find(Path(os.environ["COREFED_DATA"]) / "chest-xray")
    for row in (0, 2000, 4221):
        values = square(found.pictures.read(row), 32)
        assert (values == values[:1]).all(), "grey"
        assert values.std() > 20, "not one level"
