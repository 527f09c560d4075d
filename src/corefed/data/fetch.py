"""Find the official files of a data set, or download and check them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from corefed.base.errors import UserError
from corefed.base.progress import Bars, bars

DATA_VARIABLE = "COREFED_DATA"
CACHE_VARIABLE = "COREFED_CACHE"


def roots(data_dir: Path | None) -> Iterator[Path]:
    """The user's data folders: data_dir, then $COREFED_DATA; each must exist."""
    variable = os.environ.get(DATA_VARIABLE)
    named = [data_dir] if data_dir is not None else []
    named += [Path(variable)] if variable else []
    for root in named:
        if not root.is_dir():
            # A mistyped folder must not cause a silent download.
            raise UserError(f"The data folder {root} does not exist; create it, or correct it.")
        yield root


def cache() -> Path:
    """The folder of downloads and computed features: $COREFED_CACHE, or the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    import pooch  # only where there is no variable

    return Path(pooch.os_cache("corefed"))


def find_path(path: str, data_dir: Path | None) -> Path:
    """The path as written, or else under data_dir or $COREFED_DATA."""
    given = Path(os.path.expanduser(path))
    places = [given]
    if not given.is_absolute() and not given.exists():
        places += [root / given for root in roots(data_dir)]
    for place in places:
        if place.exists():
            return place
    raise UserError(
        f"There is no {' nor '.join(map(str, places))}; correct the path, or put it under "
        f"--data-dir or ${DATA_VARIABLE}."
    )


def locate(name: str, file: str, url: str, md5: str, data_dir: Path | None, download: bool) -> Path:
    """Look in data_dir, $COREFED_DATA and the user's cache, in this order; else download."""
    for root in roots(data_dir):
        if (root / name / file).exists():
            return root / name / file
    place = f"Put {file} into {name}/ under --data-dir or ${DATA_VARIABLE}"
    try:
        folder = cache() / name
    except ImportError as error:
        raise UserError(
            f"{name} is not at hand, and pooch, which would download it, is not installed. {place}."
        ) from error
    if (folder / file).exists():
        return folder / file
    place += f", or into {folder}."
    if not download:
        raise UserError(f"{name} is not at hand and downloading is off. {place}")
    return _download(url, folder / file, md5, place)


def check_md5(content: bytes, md5: str, where: str) -> None:
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise UserError(
            f"{where} is corrupt or not the official file: its MD5 is {actual}, expected {md5}. "
            "Delete it, or fetch it again."
        )


def _download(url: str, target: Path, md5: str, place: str) -> Path:
    import pooch  # only for downloads

    try:
        with bars(keep=True) as shown:
            downloader = pooch.HTTPDownloader(progressbar=_Bar(shown, target.name), timeout=30)
            pooch.retrieve(url, f"md5:{md5}", target.name, target.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: wrong MD5
        raise UserError(f"Could not download {url}: {error}. {place}") from error
    return target


class _Bar:
    """The progress bar that pooch calls. It sets `total`, in bytes."""

    def __init__(self, shown: Bars, title: str) -> None:
        self._shown, self._title = shown, title
        self._done = self.total = 0

    def update(self, amount: int) -> None:
        self._done += amount
        text = f"{self._done / 1e6:.1f} MB"
        self._shown.show(self._title, self._done, self.total or None, text)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        """`bars` closes, because pooch does not call this when a download fails."""
