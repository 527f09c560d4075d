"""A table that says whose image is which: columns file and site, and class where it is given.

Files are named relative to the folder of images.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from corefed.base.errors import UserError
from corefed.data import sources, values
from corefed.data.cells import shorten

FILE, SITE, CLASS = "file", "site", "class"


class Listed(NamedTuple):
    path: Path
    site: str
    label: str  # empty: the table has no classes


def read(root: Path, written: str) -> list[Listed]:
    """The rows of the table, which is looked for as it is written, then in the folder of images."""
    path = _find(root, written)
    source = sources.find(path, memory_mb=1024)
    missing = [name for name in (FILE, SITE) if name not in source.columns]
    if missing:
        raise UserError(
            f"{path} has no column {missing[0]!r}; it needs {FILE!r} and {SITE!r}, and may have "
            f"{CLASS!r}. It has {shorten(source.columns, 5)}."
        )
    wanted = [name for name in (FILE, SITE, CLASS) if name in source.columns]
    found: list[Listed] = []
    for block in source.blocks(wanted):
        cells = [values.names(block.cells[name]) for name in wanted]
        for place, row in zip(block.places, zip(*cells, strict=True), strict=True):
            if not all(row):
                lacking = wanted[list(map(bool, row)).index(False)]
                raise UserError(f"{source.at(place)} has no {lacking}; fill it in.")
            file, site, label = (*row, "")[:3]
            image = root / file
            if not image.is_file():
                raise UserError(
                    f"{source.at(place)} names {file!r}, which is not in {root}; name files "
                    "relative to that folder."
                )
            found.append(Listed(image, site, label))
    if not found:
        raise UserError(f"{path} names no images.")
    (twice, times), *_ = Counter(each.path for each in found).most_common(1)
    if times > 1:
        raise UserError(f"{path} names {twice.relative_to(root)} {times} times; name it once.")
    return found


def _find(root: Path, written: str) -> Path:
    path = Path(os.path.expanduser(written))
    for place in (path, root / path):
        if place.is_file():
            return place
    raise UserError(
        f"There is no file {written}, nor one in {root}. For images, --client is 'folder' where "
        "the first folders are sites, or a CSV file with the columns file and site."
    )
