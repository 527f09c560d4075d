"""MNIST and Fashion-MNIST: four gzipped IDX files each, read strictly."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.fetch import check_md5, locate


class Mirror(NamedTuple):
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
    "mnist": Mirror(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": Mirror(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
}


def load(name: str, data_dir: Path | None, download: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, pixels] in 0..1, y [N], and which points are the official test points."""
    source = IDX_SOURCES[name]
    found = [
        (locate(name, file, source.mirror + file, md5, data_dir, download), md5)
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
    held_out = torch.arange(len(labels)) >= len(train_labels)
    return pixels.to(torch.float32).div_(255), labels.to(torch.int64), held_out


def read_idx(path: Path, md5: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """One gzipped IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the bytes.

    A file that differs from its header is an error. It is left as it is, because it may be the
    user's only copy.
    """
    try:
        compressed = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    check_md5(compressed, md5, str(path))
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
