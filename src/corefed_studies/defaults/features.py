"""Images as features of a frozen network, in .npz files that need neither images nor network.

Features are kept in half precision, three digits each, so that 11,000 images of 1280 features take
less than 30 MB. Test images stay test points.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import cifar, embedding, fetch, images, networks
from corefed.data.pictures import ImageSet, Pictures, require_pillow
from corefed_studies.defaults.files import PreparedFile

NETWORK: Literal["efficientnet-lite0"] = "efficientnet-lite0"

TRAIN, TEST = 500, 200
"""Images per class of CIFAR-10. All 60000 would take 20 minutes on one core, and 150 MB."""


def pack(found: ImageSet) -> bytes:
    """The features of training and test images, and the names of their classes."""
    embedded = embedding.embed(found, NETWORK)
    if embedded.held_out is None:
        raise UserError(f"{found.pictures.where} has no folders train and test; it needs both.")
    x = embedded.x.numpy().astype(np.float16)
    y = np.array(found.labels)[embedded.y.numpy()]
    test = embedded.held_out.numpy()
    content = io.BytesIO()
    np.savez_compressed(content, X_train=x[~test], y_train=y[~test], X_test=x[test], y_test=y[test])
    return content.getvalue()


def chest_xrays(data_dir: Path | None) -> ImageSet:
    return images.find(fetch.find_path("chest-xray", data_dir))


def cifar10(data_dir: Path | None) -> ImageSet:
    """The first images of each class in the official order, which is random."""
    pixels, labels, held_out = cifar.load(data_dir, download=True)
    rows = torch.cat([first(labels, ~held_out, TRAIN), first(labels, held_out, TEST)])
    return as_images("CIFAR-10", pixels[rows], labels[rows], held_out[rows])


def first(labels: Tensor, among: Tensor, count: int) -> Tensor:
    """The rows of the first `count` points of each class."""
    classes = range(len(cifar.LABELS))
    return torch.cat([(among & (labels == c)).nonzero().flatten()[:count] for c in classes])


def as_images(where: str, pixels: Tensor, labels: Tensor, held_out: Tensor) -> ImageSet:
    """Pixels [N, 3, height, width] in bytes as images that a network can embed."""
    require_pillow()
    from PIL import Image  # an extra

    content = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    pictures = Pictures(
        where,
        [str(row) for row in range(len(content))],
        lambda: hashlib.blake2b(content.data, digest_size=32).hexdigest(),
        lambda row: Image.fromarray(content[row]),
    )
    return ImageSet(pictures, labels.numpy(), held_out.numpy(), cifar.LABELS)


def _features(name: str, what: str, find: Callable[[Path | None], ImageSet]) -> PreparedFile:
    weights = networks.EMBEDDERS[NETWORK].checksum[:8]
    source = f"{what} by {NETWORK} (weights {weights}, preparation {embedding.PREPARATION})"
    return PreparedFile(name, source, partial(_make, find))


def _make(find: Callable[[Path | None], ImageSet], data_dir: Path | None) -> bytes:
    return pack(find(data_dir))


FEATURES = (
    _features(
        "cifar10-features.npz",
        f"the first {TRAIN} training and {TEST} test images of each class of CIFAR-10",
        cifar10,
    ),
    _features("chest-xray-features.npz", "the images of chest-xray", chest_xrays),
)
