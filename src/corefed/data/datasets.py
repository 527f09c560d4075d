"""Named data sets: find or fetch the official files, read them strictly, check them once.

A set is one pool of points. The official test points are marked in `held_out`, not set apart,
because the split protocols of this line of work pool both files before dealing points to clients.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.data import synthetic
from corefed.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

DATA_VARIABLE = "COREFED_DATA"


class Dataset(NamedTuple):
    """One pool of points, before any client exists."""

    name: str
    x: Tensor  # [N, ...] float32
    y: Tensor  # [N] int64 class indices, or [N, d] float32 regression targets
    classes: int  # 0 for regression
    groups: Tensor | None = None  # [N] int64 natural client of each point
    held_out: Tensor | None = None  # [N] bool, the official test points


class Source(NamedTuple):
    """Where a set of four IDX files comes from, and the MD5 of each file, in `IDX_FILES` order."""

    mirror: str
    md5: tuple[str, str, str, str]


IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

# The official MD5s; the mirrors serve the same bytes as the original pages.
IDX_SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
}

_DESCRIPTIONS = {
    "digits": "1797 handwritten digits of 8x8 pixels, 10 classes; built in, from scikit-learn",
    "mnist": "70000 handwritten digits of 28x28 pixels, 10 classes",
    "fashion-mnist": "70000 articles of clothing of 28x28 pixels, 10 classes",
    "synthetic-linear": "linear regression, coefficients differ by client; exact posterior known",
    "synthetic-regression": "smooth non-linear regression, one function a client",
}


def names() -> dict[str, str]:
    """Every name `load` knows, with one line about it."""
    return dict(_DESCRIPTIONS)


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    download: bool = True,
    seed: int = 0,
    clients: int = 10,
) -> Dataset:
    """The named set, checked. `seed` and `clients` matter to synthetic sets only."""
    if name not in _DESCRIPTIONS:
        nearest = get_close_matches(name, _DESCRIPTIONS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UserError(f"There is no data set {name!r}.{hint} Known: {', '.join(_DESCRIPTIONS)}.")
    if name == "digits":
        dataset = _load_digits()
    elif name in IDX_SOURCES:
        dataset = _load_idx(name, data_dir, download)
    elif name == "synthetic-linear":
        linear = synthetic.linear_gaussian(clients, seed=seed)
        dataset = Dataset(name, linear.x, linear.y, 0, linear.groups)
    else:
        smooth = synthetic.smooth_regression(clients, seed=seed)
        dataset = Dataset(name, smooth.x, smooth.y, 0, smooth.groups)
    check(dataset)
    return dataset


def check(dataset: Dataset) -> None:
    """Refuse data that would poison training silently: emptiness, NaN, labels out of range."""
    name, x, y, classes = dataset.name, dataset.x, dataset.y, dataset.classes
    if len(x) == 0:
        raise UserError(f"Data set {name!r} is empty: it needs at least one point.")
    if len(x) != len(y):
        raise UserError(f"Data set {name!r} has {len(x)} points but {len(y)} labels or targets.")
    _check_finite(name, "features", x)
    if classes == 0:
        _check_finite(name, "regression targets", y)
        return
    wrong = (y < 0) | (y >= classes)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"Data set {name!r} has {int(wrong.sum())} labels outside 0..{classes - 1}; the first "
            f"is {int(y[row])} in row {row}. Renumber the labels from 0, or remove those rows."
        )


def _check_finite(name: str, what: str, values: Tensor) -> None:
    bad = ~torch.isfinite(values)
    if bad.any():
        rows = bad.reshape(len(values), -1).any(-1).nonzero()
        raise UserError(
            f"Data set {name!r} has {int(bad.sum())} NaN or infinite {what} in {len(rows)} rows, "
            f"the first in row {int(rows[0])}. Impute or remove those rows."
        )


def _load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).to(torch.float32) / 16  # grey levels are 0..16
    return Dataset("digits", x, torch.from_numpy(labels).to(torch.int64), classes=10)


def _load_idx(name: str, data_dir: Path | None, download: bool) -> Dataset:
    source = IDX_SOURCES[name]
    found = [
        (_locate(name, file, md5, data_dir, download), md5)
        for file, md5 in zip(IDX_FILES, source.md5, strict=True)
    ]
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, md5, dimensions)
        for (path, md5), dimensions in zip(found, (3, 1, 3, 1), strict=True)
    )
    for images, own, (path, _) in (
        (train_images, train_labels, found[1]),
        (test_images, test_labels, found[3]),
    ):
        if len(images) != len(own):
            raise UserError(f"{path} has {len(own)} labels for {len(images)} images.")
    pixels = torch.from_numpy(np.concatenate([train_images, test_images])).flatten(1)
    labels = torch.from_numpy(np.concatenate([train_labels, test_labels]))
    return Dataset(
        name,
        pixels.to(torch.float32).div_(255),
        labels.to(torch.int64),
        classes=10,
        held_out=torch.arange(len(labels)) >= len(train_labels),
    )


def read_idx(path: Path, md5: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """One gzipped IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the bytes.

    Nothing is repaired: a file that is not exactly what its header says is an error, and it is
    left as it is, because it may be the user's only copy.
    """
    try:
        compressed = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    actual = hashlib.md5(compressed, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise UserError(
            f"{path} is corrupt or not the official file: its MD5 is {actual}, expected {md5}. "
            "Delete it, or fetch it again."
        )
    try:
        content = gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file: {error}. Fetch it again.") from error
    magic = bytes([0, 0, 8, dimensions])  # 8: unsigned byte
    if content[:4] != magic:
        raise UserError(
            f"{path} is not an IDX file of {dimensions}-dimensional bytes: it starts with "
            f"{content[:4].hex()!r}, expected {magic.hex()!r}. Fetch it again."
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise UserError(f"{path} ends inside its IDX header. Fetch it again.")
    shape = [int(size) for size in np.frombuffer(content[4:start], dtype=">u4")]
    expected = start + int(np.prod(shape, dtype=object))  # object: sizes multiply past 64 bits
    if len(content) != expected:
        raise UserError(
            f"{path} holds {len(content)} bytes, but its header {shape} says {expected}. "
            "Fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def roots(data_dir: Path | None) -> Iterator[Path]:
    """Folders that a user named for data: data_dir, then $COREFED_DATA; each must exist."""
    variable = os.environ.get(DATA_VARIABLE)
    named = [data_dir] if data_dir is not None else []
    named += [Path(variable)] if variable else []
    for root in named:
        if not root.is_dir():
            # A mistyped folder must not turn into a silent download.
            raise UserError(f"The data folder {root} does not exist; create it, or correct it.")
        yield root


def _locate(name: str, file: str, md5: str, data_dir: Path | None, download: bool) -> Path:
    """Look in data_dir, $COREFED_DATA and the user's cache, in this order; else fetch the file."""
    for root in roots(data_dir):
        if (root / name / file).exists():
            return root / name / file
    place = f"Put {file} into {name}/ under --data-dir or ${DATA_VARIABLE}"
    try:
        import pooch
    except ImportError as error:
        raise UserError(
            f"{name} is not at hand, and pooch, which would download it, is not installed. {place}."
        ) from error
    cache = Path(pooch.os_cache("corefed")) / name
    if (cache / file).exists():
        return cache / file
    place += f", or into {cache}."
    if not download:
        raise UserError(f"{name} is not at hand and downloading is off. {place}")
    return _download(IDX_SOURCES[name].mirror + file, cache / file, md5, place)


def _download(url: str, target: Path, md5: str, place: str) -> Path:
    import pooch

    try:
        with _DownloadBar(target.name) as bar:
            downloader = pooch.HTTPDownloader(progressbar=bar, timeout=30)
            pooch.retrieve(url, f"md5:{md5}", target.name, target.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: wrong MD5
        raise UserError(f"Could not download {url}: {error}. {place}") from error
    return target


class _DownloadBar:
    """The four calls pooch makes on a progress bar, drawn by rich where it is installed."""

    def __init__(self, label: str) -> None:
        self.total = 0
        self._progress: Progress | None = None
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            return
        self._progress = Progress(console=Console(stderr=True))
        self._task = self._progress.add_task(label, total=None)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, amount: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, total=self.total or None, advance=amount)

    def reset(self) -> None:
        if self._progress is not None:
            self._progress.reset(self._task)

    def close(self) -> None:
        """`__exit__` closes, because pooch does not call this when a download fails."""
