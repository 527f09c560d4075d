"""Find the official files of a data set where the user has them; else fetch and check them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from corefed.base.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

DATA_VARIABLE = "COREFED_DATA"
CACHE_VARIABLE = "COREFED_CACHE"


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


def cache() -> Path:
    """Where downloads and computed features are kept: $COREFED_CACHE, or the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    import pooch

    return Path(pooch.os_cache("corefed"))


def find_path(path: str, data_dir: Path | None) -> Path:
    """What the user named, as it is written or else under data_dir or $COREFED_DATA."""
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
    """Look in data_dir, $COREFED_DATA and the user's cache, in this order; else fetch the file."""
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
