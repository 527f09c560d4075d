"""CIFAR-10: the official binary batches, in a folder or in their archive.

A batch is 10000 records of one label byte and 3072 pixel bytes, three planes of 32 x 32 (red,
green, blue). An archive is read in memory and not unpacked. The Python batches are pickles and are
refused.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import fetch

Bytes = npt.NDArray[np.uint8]

LABELS = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

NAME = "cifar10"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
POINTS = 10_000
"""Points per batch."""

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

FOLDER, SUFFIX = "cifar-10-batches-bin", ".bin"
PICKLED = "cifar-10-batches-py"
MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
"""Of the files in the official archive, in the order of BATCHES."""


def load(data_dir: Path | None, download: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [60000, 3, 32, 32] in bytes, y [60000], and which points are the official test points."""
    points = POINTS * len(BATCHES)
    x, y = np.empty((points, PIXELS), np.uint8), np.empty(points, np.uint8)
    for place, (pixels, labels) in enumerate(_batches(data_dir, download)):
        mine = slice(place * POINTS, (place + 1) * POINTS)
        x[mine], y[mine] = pixels, labels
    held_out = torch.arange(points) >= points - POINTS
    return torch.from_numpy(x).unflatten(1, SHAPE), torch.from_numpy(y).long(), held_out


def _batches(data_dir: Path | None, download: bool) -> Iterator[tuple[Bytes, Bytes]]:
    """Pixels [10000, 3072] and labels [10000] of every batch."""
    folder = _folder(data_dir)
    if folder is None:
        archives = (base / ARCHIVE for base in _places(data_dir))
        archive = next((path for path in archives if path.is_file()), None)
        if archive is None:
            _refuse_pickles(data_dir)
            archive = fetch.locate(NAME, ARCHIVE, URL + ARCHIVE, ARCHIVE_MD5, data_dir, download)
        yield from _from_archive(archive)
        return
    for batch, md5 in zip(BATCHES, MD5, strict=True):
        path = folder / (batch + SUFFIX)
        content = _read(path)
        fetch.check_md5(content, md5, str(path))
        yield parse(content, str(path))


def _folder(data_dir: Path | None) -> Path | None:
    """The first folder with all six batches."""
    lacking = ""
    for _, folder in _folders(data_dir, FOLDER):
        files = [batch + SUFFIX for batch in BATCHES]
        missing = [file for file in files if not (folder / file).is_file()]
        if not missing:
            return folder
        lacking = lacking or f"{folder} lacks {', '.join(missing)}"
    if lacking:  # an incomplete folder must not cause a silent download
        raise UserError(f"{lacking}; add what is missing, or remove the folder.")
    return None


def _refuse_pickles(data_dir: Path | None) -> None:
    """A folder of Python batches must not cause a silent download either."""
    for base, folder in _folders(data_dir, PICKLED):
        raise UserError(
            f"{folder} holds Python pickles, which are never read; put the binary version, "
            f"{URL}{ARCHIVE}, into {base} as it is."
        )


def _folders(data_dir: Path | None, name: str) -> Iterator[tuple[Path, Path]]:
    """Places to look in, each with the folder of that name."""
    for base in _places(data_dir):
        folder = base if base.name == name else base / name
        if folder.is_dir():
            yield base, folder


def _places(data_dir: Path | None) -> Iterator[Path]:
    """Each of data_dir, $COREFED_DATA and the user's cache, and cifar10/ below it."""
    for root in fetch.roots(data_dir):
        yield from (root, root / NAME)
    try:
        kept = fetch.cache()
    except ImportError:  # without pooch there are no downloads either
        return
    yield from (kept, kept / NAME)


def _read(path: Path) -> bytes:
    """The content of a batch; its size is checked first."""
    expected = POINTS * (PIXELS + 1)
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size == expected else b""
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    if size != expected:
        raise UserError(f"{path} has {size} bytes, expected {expected}. Fetch it again.")
    return content


def _from_archive(path: Path) -> Iterator[tuple[Bytes, Bytes]]:
    """The six batches of an archive, in the order of BATCHES."""
    size = POINTS * (PIXELS + 1)
    wanted = {f"{FOLDER}/{batch}{SUFFIX}": batch for batch in BATCHES}
    parsed: dict[str, tuple[Bytes, Bytes]] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                batch = wanted.get(member.name)
                if batch is None or not member.isreg() or member.size != size:
                    continue
                source = archive.extractfile(member)
                content = source.read() if source is not None else b""
                where = f"{member.name} in {path}"
                fetch.check_md5(content, MD5[BATCHES.index(batch)], where)
                parsed[batch] = parse(content, where)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole archive: {error}. Fetch it again.") from error
    missing = [name for name, batch in wanted.items() if batch not in parsed]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)} of {size} bytes. Fetch it again.")
    yield from (parsed[batch] for batch in BATCHES)


def parse(content: bytes, where: str) -> tuple[Bytes, Bytes]:
    """Records of a label and its pixels."""
    records = np.frombuffer(content, np.uint8).reshape(-1, PIXELS + 1)
    labels = records[:, 0]
    wrong = labels >= len(LABELS)
    if wrong.any():
        row = int(wrong.argmax())
        raise UserError(
            f"{where} has a label {int(labels[row])} in record {row}; labels are "
            f"0..{len(LABELS) - 1}. Fetch it again."
        )
    return records[:, 1:], labels
