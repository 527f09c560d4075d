"""Read images of any size and kind as opaque 8-bit RGB, turned upright by their EXIF tag.

Grey becomes RGB and transparency black. Levels of more than 8 bits are stretched to the range of
the image, because a 12-bit scan in a 16-bit file would be black.
"""

from __future__ import annotations

import hashlib
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from corefed.base.errors import UserError, install

if TYPE_CHECKING:
    from PIL import Image

FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "PPM": (".pgm", ".ppm", ".pnm"),
}
"""Pillow's decoders that are allowed (none starts another program), and their endings."""

ENDINGS = tuple(ending for endings in FORMATS.values() for ending in endings)


class UnreadableError(Exception):
    """An image cannot be used; the message says why."""


class Pictures(NamedTuple):
    """N images, read one by one; threads may read in parallel."""

    where: str  # for messages
    names: Sequence[str]  # [N]
    digest: Callable[[], str]  # of all names and contents
    read: Callable[[int], Image.Image]  # 8-bit RGB of any size; raises UnreadableError


class ImageSet(NamedTuple):
    """Pictures with labels."""

    pictures: Pictures
    y: npt.NDArray[np.int64]  # [N]
    held_out: npt.NDArray[np.bool_] | None  # [N]; None: no test images are marked
    labels: tuple[str, ...]  # names of the classes
    notes: tuple[str, ...] = ()
    groups: npt.NDArray[np.int64] | None = None  # [N] the client of each image
    group_names: tuple[str, ...] = ()


def require_pillow() -> None:
    if find_spec("PIL") is None:
        raise UserError(f"Reading images needs pillow: {install('vision')}.")


@contextmanager
def workers(
    threads: int | None = None, begin: Callable[[], None] | None = None
) -> Iterator[Executor]:
    """Threads that finish their current call after Ctrl-C.

    A thread that is still in a tensor operation when Python ends would abort the process.
    """
    pool = ThreadPoolExecutor(threads, initializer=begin)
    try:
        yield pool
    finally:
        with _ignoring_interrupts():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A second Ctrl-C is ignored: it would end the wait for threads, not the threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def digest(files: Sequence[Path], names: Sequence[str]) -> str:
    """BLAKE2 of all names and contents. Dates and sizes would miss some edits."""
    whole = hashlib.blake2b(digest_size=32)
    with workers() as pool:
        for name, content in zip(names, pool.map(_content_digest, files), strict=True):
            encoded = name.encode("utf-8", "surrogateescape")
            whole.update(len(encoded).to_bytes(8, "little") + encoded + content)
    return whole.hexdigest()


def _content_digest(path: Path) -> bytes:
    """32 bytes; zeros for an unreadable file, which `read` reports later."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            return bytes(32)
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest()
    except OSError:
        return bytes(32)


def read(path: Path) -> Image.Image:
    """The image as opaque 8-bit RGB, upright."""
    # Here and below, pillow is an extra.
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableError("it is no file")
        if path.stat().st_size == 0:
            raise UnreadableError("it is empty")
        with Image.open(path, formats=_formats()) as image:
            _check_size(image)
            # A camera's JPEG may contain a preview (MPO), which is not another image.
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise UnreadableError("it holds several images")
            image.load()
            return rgb(ImageOps.exif_transpose(image))
    except UnreadableError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableError("it has too many pixels") from error
    except UnidentifiedImageError as error:
        raise UnreadableError("it is no image that pillow knows") from error
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except Exception as error:  # a damaged file can raise anything in a decoder
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


@cache
def _formats() -> tuple[str, ...]:
    """Those that this build of pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _check_size(image: Image.Image) -> None:
    """Checked before decoding: a small file can claim more pixels than fit into memory."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise UnreadableError(f"{image.width} x {image.height} is more than {limit} pixels")


def rgb(image: Image.Image) -> Image.Image:
    """Any mode of pillow as opaque 8-bit RGB."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # more than 8 bits
        image = Image.fromarray(stretch(np.asarray(image)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return image.convert("RGB")


def stretch(levels: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Levels of any type from 0 (darkest) to 255 (brightest); 0 where all are equal."""
    values: npt.NDArray[np.float64] = levels.astype(np.float64)
    if not np.isfinite(values).all():
        raise UnreadableError("it has NaN or infinite levels")
    low, high = values.min(), values.max()
    scale = 255 / (high - low) if high > low else 0.0
    whole: npt.NDArray[np.float64] = np.round((values - low) * scale)
    return whole.astype(np.uint8)


def square(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """[3, size, size]: the whole image, distorted to a square rather than cropped."""
    from PIL import Image

    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    pixels: npt.NDArray[np.uint8] = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    return pixels
