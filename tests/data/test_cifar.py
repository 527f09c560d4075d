"""CIFAR-10 in its official binary form, on made-up batches of a few points."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed.data import Dataset, Split, cifar, datasets, federate, load

POINTS = 4
Arrays = tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], list[list[int]]]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few points; no test may see the data or the cache of whoever runs it."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.delenv("COREFED_DATA", raising=False)
    monkeypatch.setattr(cifar, "POINTS", POINTS)


def made_up(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (6, POINTS, 3072), dtype=np.uint8)
    return pixels, rng.integers(0, 10, (6, POINTS)).tolist()


def as_binary(pixels: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(
        bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)
    )


def contents(arrays: Arrays) -> list[bytes]:
    return [as_binary(*batch) for batch in zip(*arrays, strict=True)]


def admit(batches: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make these the official files."""
    md5 = tuple(hashlib.md5(content).hexdigest() for content in batches)
    monkeypatch.setattr(cifar, "MD5", md5)


def write(root: Path, monkeypatch: pytest.MonkeyPatch, arrays: Arrays | None = None) -> list[Path]:
    batches = contents(arrays or made_up())
    admit(batches, monkeypatch)
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    paths = [folder / f"{batch}.bin" for batch in cifar.BATCHES]
    for path, content in zip(paths, batches, strict=True):
        path.write_bytes(content)
    return paths


def archive(
    path: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes] | None = None
) -> Path:
    batches = contents(made_up())
    admit(batches, monkeypatch)
    names = [f"cifar-10-batches-bin/{batch}.bin" for batch in cifar.BATCHES]
    files = {"cifar-10-batches-bin/readme.html": b"hello", **dict(zip(names, batches, strict=True))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in reversed({**files, **(members or {})}.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(cifar, "ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


def assert_made_up(dataset: Dataset, seed: int = 0) -> None:
    pixels, labels = made_up(seed)
    assert dataset.x.shape == (24, 3, 32, 32)
    assert np.array_equal(dataset.x.flatten(1).numpy(), pixels.reshape(24, 3072))
    assert dataset.y.tolist() == np.array(labels).flatten().tolist()


# What is read


@pytest.mark.parametrize("below", ["", "cifar10"])
def test_a_folder_of_batches(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / below, monkeypatch)
    dataset = load("cifar10", tmp_path, download=False)
    assert_made_up(dataset)
    assert dataset.y.dtype == torch.int64
    assert dataset.held_out is not None
    assert dataset.held_out.tolist() == [False] * 20 + [True] * 4
    assert dataset.classes == len(dataset.labels) == 10
    assert (dataset.labels[0], dataset.labels[6], dataset.labels[9]) == (
        "airplane",
        "frog",
        "truck",
    )


def test_planes_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is red, green, blue; each plane goes row by row."""
    pixels, labels = made_up()
    load_one = write(tmp_path, monkeypatch, (pixels, labels))
    record = load_one[0].read_bytes()[3073 : 2 * 3073]
    x = load("cifar10", tmp_path).x
    for plane, row, column in ((0, 0, 1), (1, 0, 0), (2, 31, 5)):
        assert int(x[1, plane, row, column]) == record[1 + 1024 * plane + 32 * row + column]


def test_bytes_become_numbers_from_0_to_1_when_dealt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, labels = made_up()
    pixels[0, 0, :2] = 0, 255
    write(tmp_path, monkeypatch, (pixels, labels))
    dataset = load("cifar10", tmp_path)
    splits = [
        Split(torch.tensor([0, 2, 3]), torch.tensor([20])),
        Split(torch.tensor([7]), torch.tensor([21])),
    ]
    data = federate(dataset, splits)
    assert data.train.x.dtype == torch.float32
    assert data.train.x[0, 0, 0, 0, :2].tolist() == [0, 1]
    expected = torch.from_numpy(pixels[1, 3]).view(3, 32, 32) / 255
    torch.testing.assert_close(data.train.x[1, 0], expected)
    assert data.labels == cifar.LABELS
    mean, std = (f(pixels.reshape(24, -1)[[0, 2, 3, 7]] / 255) for f in (np.mean, np.std))
    scaled = federate(dataset, splits, scale="standard").test.x[0, 0]
    torch.testing.assert_close(scaled, (dataset.x[20] / 255 - mean) / std)
    assert dataset.x.dtype == torch.uint8  # the pool is untouched


def test_memory_is_counted_in_floats() -> None:
    """100 points of 3072 values are 0.3 MB of bytes, and 1.2 MB when dealt."""
    x, y = torch.zeros(100, 3, 32, 32, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    splits = [Split(torch.arange(90), torch.arange(90, 100))]
    with pytest.raises(UserError, match="need 1 MB, more than the 1 MB"):
        federate(Dataset("bytes", x, y, 1), splits, memory_mb=1)


def test_which_sets_have_images() -> None:
    assert [name for name in datasets.names() if datasets.has_images(name)] == ["cifar10"]


# Where it is looked for


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "cache" / "corefed"]
    monkeypatch.setenv("COREFED_DATA", str(roots[1]))
    for seed in (2, 1, 0):
        write(roots[seed], monkeypatch, made_up(seed))
        roots[1].mkdir(exist_ok=True)
        roots[0].mkdir(exist_ok=True)
        assert_made_up(load("cifar10", roots[0], download=False), seed)


def test_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, monkeypatch)[0].parent
    assert_made_up(load("cifar10", folder, download=False))


def test_python_batches_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither read nor taken for a wish to download; the binary version beside them is read."""
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for batch in cifar.BATCHES:
        (folder / batch).write_bytes(b"\x80\x02cos\nsystem\nU\x04true\x85R.")
    words = f"{folder} holds Python pickles, .*https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar"
    for named in (tmp_path, folder):
        with pytest.raises(UserError, match=words) as error:
            load("cifar10", named)
        place = Path(str(error.value).split(" into ")[1].removesuffix(" as it is."))
        path = archive(place / cifar.ARCHIVE, monkeypatch)  # as the sentence says
        assert_made_up(load("cifar10", named, download=False))
        path.unlink()
    write(tmp_path, monkeypatch, made_up(1))
    assert_made_up(load("cifar10", tmp_path), 1)


def test_missing_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, monkeypatch)
    paths[2].unlink()
    with pytest.raises(UserError, match=f"lacks {paths[2].name};"):
        load("cifar10", tmp_path)


def test_nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"downloading is off\. Put cifar-10-binary\.tar\.gz into"):
        load("cifar10", tmp_path, download=False)
    with pytest.raises(UserError, match="does not exist"):
        load("cifar10", tmp_path / "mistyped")
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match="pooch"):
        load("cifar10", tmp_path)
    write(tmp_path, monkeypatch)
    assert_made_up(load("cifar10", tmp_path))


# Files that are not what they should be


@pytest.mark.parametrize("change", ["shorter", "longer", "other bytes"])
def test_files_that_were_changed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, monkeypatch)[1]
    content = path.read_bytes()
    wrong = {
        "shorter": content[: len(content) // 2],
        "longer": content * 2,
        "other bytes": content[:-1] + b"?",
    }[change]
    path.write_bytes(wrong)
    words = "MD5" if change == "other bytes" else f"has {len(wrong)} bytes, expected"
    with pytest.raises(UserError, match=words) as error:
        load("cifar10", tmp_path)
    assert str(path) in str(error.value)
    assert path.exists()  # it may be the user's only copy


def test_label_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = made_up()
    labels[4][2] = 10
    write(tmp_path, monkeypatch, (pixels, labels))
    with pytest.raises(UserError, match=r"data_batch_5.* label 10 in record 2"):
        load("cifar10", tmp_path)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, monkeypatch)[0]

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=f"Cannot read {path}: Permission denied"):
        load("cifar10", tmp_path)


# The archive


@pytest.mark.parametrize("below", ["", "cifar10"])
def test_archive_is_read_where_it_lies(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive(tmp_path / below / cifar.ARCHIVE, monkeypatch)
    assert_made_up(load("cifar10", tmp_path, download=False))
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]


def test_archive_without_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "cifar-10-batches-bin/test_batch.bin"
    path = archive(tmp_path / cifar.ARCHIVE, monkeypatch, {name: b"short"})
    with pytest.raises(UserError, match=f"lacks {name} of 12292 bytes"):
        load("cifar10", tmp_path)
    archive(path, monkeypatch, {name: bytes(12292)})
    with pytest.raises(UserError, match="MD5"):
        load("cifar10", tmp_path)


def test_archive_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / cifar.ARCHIVE, monkeypatch)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"not an archive", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a whole archive"):
            load("cifar10", tmp_path)


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served as the official page."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = partial(Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(cifar, "URL", f"http://127.0.0.1:{server.server_port}/")
        yield folder
        server.shutdown()
        thread.join()


def test_download(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(mirror / cifar.ARCHIVE, monkeypatch)
    mine = tmp_path / "mine"
    mine.mkdir()
    assert_made_up(load("cifar10", mine))
    assert list(mine.iterdir()) == []
    cached = tmp_path / "cache" / "corefed" / "cifar10"
    assert [path.name for path in cached.iterdir()] == [cifar.ARCHIVE]
    monkeypatch.setattr(cifar, "URL", "http://nowhere.invalid/")
    assert_made_up(load("cifar10", download=False))


def test_failed_download(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="404") as missing:
        load("cifar10")
    for part in (cifar.ARCHIVE, "cifar10/", "COREFED_DATA", str(tmp_path / "cache")):
        assert part in str(missing.value)
    archive(mirror / cifar.ARCHIVE, monkeypatch)
    (mirror / cifar.ARCHIVE).write_bytes(b"something else")
    with pytest.raises(UserError, match="hash"):
        load("cifar10")
    assert not (tmp_path / "cache" / "corefed" / "cifar10" / cifar.ARCHIVE).exists()
