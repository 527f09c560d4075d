"""Features of images by a frozen network, computed once and kept in the user's cache.

The key of a cache file is a hash of all file names and contents, the network, its weights and the
preparation of pixels, so that features of other images are never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.progress import bars
from corefed.base.shown import say
from corefed.data import fetch, networks
from corefed.data.file_rows import ImageRows
from corefed.data.networks import EMBEDDERS, Embedder
from corefed.data.pictures import ImageSet, Pictures, UnreadableError, square, workers
from corefed.data.streaming import of_rows

if TYPE_CHECKING:
    from corefed.settings.run import Embedding

PREPARATION = 1
"""Increase it when the preparation of pixels changes, so that older features are not used."""

BATCH = 8
"""Images per batch; 32 are slower than 8, because they exceed the processor's caches."""

LISTED = 3
"""Names of unreadable images in a message."""


class Features(NamedTuple):
    x: Tensor  # [N, *shape]
    readable: Tensor  # [N] bool; the other rows of x are zero


class Embedded(NamedTuple):
    """N points to learn from, one per readable image."""

    x: Tensor  # [N, d] float32, or pixels [N, 1 or 3, 32, 32] uint8
    y: Tensor  # [N] int64
    held_out: Tensor | None  # [N] bool
    notes: tuple[str, ...]
    groups: Tensor | None = None  # [N] int64


def embed(
    images: ImageSet, embedding: Embedding, bad_images: str = "refuse", *, streamed: bool = False
) -> Embedded:
    """Features of all images; unreadable ones are refused, or left out and counted.

    Pixels that are `streamed` are decoded whenever they are asked for.
    """
    name = networks.choose(embedding)
    refuse = bad_images == "refuse"
    found = (
        _streamed(images.pictures, EMBEDDERS[name], refuse)
        if streamed and name == "none"
        else features(images.pictures, name, refuse=refuse)
    )
    kept = found.readable
    y = torch.from_numpy(images.y)[kept]
    held_out = None if images.held_out is None else torch.from_numpy(images.held_out)[kept]
    notes = images.notes
    if not bool(kept.all()):
        _check_left(images, y, held_out)
        notes = (*notes, _unreadable(images.pictures, kept) + "; they are left out.")
    x = found.x[kept]
    if name == "none" and not streamed and bool((x == x[:, :1]).all()):  # grey
        x = x[:, :1]
    groups = None if images.groups is None else torch.from_numpy(images.groups)[kept]
    return Embedded(x, y, held_out, notes, groups)


def _check_left(images: ImageSet, y: Tensor, held_out: Tensor | None) -> None:
    parts = {"": y} if held_out is None else {" in test": y[held_out], " in train": y[~held_out]}
    for part, own in parts.items():
        for label, left in enumerate(own.bincount(minlength=len(images.labels)).tolist()):
            if not left:
                raise UserError(
                    f"No image of class {images.labels[label]!r}{part} of {images.pictures.where} "
                    "can be read; mend them."
                )


def features(pictures: Pictures, name: str, *, refuse: bool) -> Features:
    """Features of all pictures, from the cache or computed."""
    embedder = EMBEDDERS[name]
    path = _cache_path(pictures, name, embedder)
    found = _cached(path, len(pictures.names), embedder) if path is not None else None
    if found is None:
        found = _computed(pictures, name, embedder, refuse)
        if path is not None and (not refuse or bool(found.readable.all())):
            _keep(path, found)
    _refuse_unreadable(pictures, found.readable, refuse)
    return found


def _refuse_unreadable(pictures: Pictures, readable: Tensor, refuse: bool) -> None:
    if refuse and not bool(readable.all()):
        raise UserError(
            f"{_unreadable(pictures, readable)}. Mend or remove them, or leave them out by "
            "--set bad_images=skip."
        )


def _streamed(pictures: Pictures, embedder: Embedder, refuse: bool) -> Features:
    """Pixels that stay in their files, after a look at every image: which can be read, and whether
    all of them are grey."""

    def pixels(number: int) -> Tensor:
        return torch.from_numpy(square(pictures.read(number), embedder.size))

    count = len(pictures.names)
    rows = ImageRows(
        [Path(pictures.where) / name for name in pictures.names], pixels, embedder.size
    )
    readable, grey = torch.ones(count, dtype=torch.bool), True
    with _quiet_decoders(), bars() as shown:
        for number in range(count):
            try:
                found = pixels(number)
                grey = grey and bool((found == found[:1]).all())
            except UnreadableError:
                readable[number] = False
            shown.show("reading images", number + 1, count)
    _refuse_unreadable(pictures, readable, refuse)
    rows.channels = 1 if grey else 3
    return Features(of_rows(rows, count), readable)


def _unreadable(pictures: Pictures, readable: Tensor) -> str:
    """A sentence: how many, which, and why the first one."""
    bad = (~readable).nonzero().flatten().tolist()
    try:
        with _quiet_decoders():
            pictures.read(bad[0])
        reason = "it changed meanwhile"
    except UnreadableError as error:
        reason = str(error)
    others = "".join(f", {pictures.names[row]}" for row in bad[1:LISTED])
    more = f" and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
    return (
        f"{len(bad)} of {len(readable)} images in {pictures.where} cannot be read: "
        f"{pictures.names[bad[0]]} ({reason}){others}{more}"
    )


# --- computing ------------------------------------------------------------------------------------


def _computed(pictures: Pictures, name: str, embedder: Embedder, refuse: bool) -> Features:
    """Batches in parallel, one thread each: faster than one batch on all threads.

    After an unreadable picture that is refused, the others are only read, not embedded.
    """
    count, threads = len(pictures.names), torch.get_num_threads()
    apply = embedder.build()
    x = torch.zeros(count, *embedder.shape, dtype=embedder.dtype)
    readable = torch.ones(count, dtype=torch.bool)
    refused = False

    def work(start: int) -> None:
        nonlocal refused
        rows, pixels = [], []
        for row in range(start, min(start + BATCH, count)):
            try:
                pixels.append(torch.from_numpy(square(pictures.read(row), embedder.size)))
                rows.append(row)
            except UnreadableError:
                readable[row] = False
                refused = refuse
        if rows and not refused:
            with torch.inference_mode():
                x[rows] = apply(torch.stack(pixels))

    title = "reading images" if name == "none" else f"embedding images by {name}"
    starts = range(0, count, BATCH)
    began = time.perf_counter()
    try:
        with (
            _quiet_decoders(),
            bars() as shown,
            workers(threads, lambda: torch.set_num_threads(1)) as pool,
        ):
            for start, _ in zip(starts, pool.map(work, starts), strict=True):
                shown.show(title, min(start + BATCH, count), count)
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - began
    if seconds > 1:
        _say(f"{title} took {seconds:.0f} s for {count}")
    return Features(x, readable)


@contextmanager
def _quiet_decoders() -> Iterator[None]:
    """Pillow warns about odd metadata, which do not matter here; real problems are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _say(sentence: str) -> None:
    say(sentence, file=sys.stderr)


# --- the cache ------------------------------------------------------------------------------------


def _cache_path(pictures: Pictures, name: str, embedder: Embedder) -> Path | None:
    """None where features cannot be kept."""
    if any(find_spec(name) is None for name in ("safetensors", "safetensors.torch", "pooch")):
        return None
    folder = fetch.cache() / "embeddings"
    about = [PREPARATION, name, embedder.checksum, embedder.size, pictures.digest()]
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=20).hexdigest()
    return folder / f"{key}.safetensors"


def _cached(path: Path, count: int, embedder: Embedder) -> Features | None:
    """The features in the file, if shapes, types and checksum are right."""
    from safetensors import SafetensorError, safe_open  # only for a cache

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found = Features(file.get_tensor("x"), file.get_tensor("readable"))
            checksum = (file.metadata() or {}).get("checksum")
    except (SafetensorError, OSError) as error:
        _say(f"{path} is damaged ({error}); computing its features again.")
        return None
    shape = (count, *embedder.shape)
    fits = found.x.shape == shape and found.x.dtype == embedder.dtype
    fits = fits and found.readable.shape == (count,) and found.readable.dtype == torch.bool
    if not fits or checksum != _checksum(found):
        _say(f"{path} is damaged; computing its features again.")
        return None
    return found


def _checksum(found: Features) -> str:
    content = hashlib.blake2b(digest_size=32)
    for tensor in found:
        content.update(tensor.numpy().data)
    return content.hexdigest()


def _keep(path: Path, found: Features) -> None:
    """Write the file whole or not at all. Without a cache the run goes on."""
    from safetensors.torch import save  # only for a cache

    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        temporary = Path(written)
        with os.fdopen(handle, "wb") as file:
            file.write(save(found._asdict(), metadata={"checksum": _checksum(found)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _say(
            f"Cannot keep the features in {path.parent}: {error.strerror}; they will be computed "
            f"again next time. ${fetch.CACHE_VARIABLE} names another folder."
        )
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
