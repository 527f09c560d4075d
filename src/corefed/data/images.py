"""Find and check the images in a folder.

    PATH/train/CLASS/*, PATH/test/CLASS/*    test images stay test images; val/ joins train/
    PATH/CLASS/*                             the partition holds a fifth out

A class folder may have subfolders. Hidden files and folders are ignored.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from corefed.base.errors import UserError
from corefed.data.pictures import ENDINGS, ImageSet, Pictures, digest, read, require_pillow

HIDDEN = (".", "__MACOSX")  # macOS adds the second to archives
TRAIN, VALIDATION, TEST = "train", ("val", "valid", "validation"), "test"
PARTS = (TRAIN, *VALIDATION, TEST)


def find(root: Path, *, partial: bool = False) -> ImageSet:
    """The images under `root`; every class must have some."""
    require_pillow()
    if not root.is_dir():
        raise UserError(f"{root} is a file; image-folder needs a folder with one folder per class.")
    parts = _parts(root)
    classes = {name: _subfolders(folder) for name, folder in parts.items()}
    _check_classes(root, classes, partial)
    labels = tuple(sorted({label for own in classes.values() for label in own}))
    files: list[Path] = []
    y: list[int] = []
    held_out: list[bool] = []
    ignored: list[Path] = []
    for part, own in classes.items():
        for label in sorted(own):
            images, others = _images(own[label])
            if not images and part.lower() not in VALIDATION:
                raise UserError(_empty(own[label], others))
            files += images
            ignored += others
            y += [labels.index(label)] * len(images)
            held_out += [part.lower() == TEST] * len(images)
    notes: tuple[str, ...] = ()
    if ignored:
        first = ignored[0].relative_to(root).as_posix()
        notes = (f"{len(ignored)} files in {root} are no images by their ending, such as {first}.",)
    divided = np.array(held_out) if len(parts) > 1 else None
    return ImageSet(pictures(root, files), np.array(y), divided, labels, notes)


def list_folder(folder: Path) -> tuple[list[str], list[Path]]:
    """Names of the subfolders, and the images, directly in a folder."""
    entries = _entries(folder)
    files = sorted(Path(entry.path) for entry in entries if not _is_folder(entry))
    below = sorted(entry.name for entry in entries if _is_folder(entry))
    return below, [path for path in files if path.suffix.lower() in ENDINGS]


def pictures(root: Path, files: list[Path]) -> Pictures:
    require_pillow()
    names = [path.relative_to(root).as_posix() for path in files]
    whole = cache(lambda: digest(files, names))  # takes a second for 4000 images
    return Pictures(str(root), names, whole, lambda i: read(files[i]))


def _parts(root: Path) -> dict[str, Path]:
    """The folders that hold class folders: train, (val,) test in this order, or the root."""
    below = _subfolders(root)
    found = {name.lower(): name for name in below if name.lower() in PARTS}
    if TRAIN not in found and TEST not in found:
        return {"": root}
    if TRAIN not in found or TEST not in found:
        there, missing = (TRAIN, TEST) if TRAIN in found else (TEST, TRAIN)
        raise UserError(f"{root} has a folder {there} but no {missing}; it needs both or neither.")
    others = sorted(set(below) - set(found.values()))
    if others:
        raise UserError(
            f"{root} has {others[0]!r} beside train and test; put class folders into those two."
        )
    return {found[kind]: below[found[kind]] for kind in PARTS if kind in found}


def _check_classes(root: Path, classes: dict[str, dict[str, Path]], partial: bool) -> None:
    """At least two classes, the same for training and test; a `partial` folder may have fewer."""
    names: dict[str, set[str]] = {TRAIN: set(), TEST: set()}
    for part, own in classes.items():
        names[TEST if part.lower() == TEST else TRAIN] |= own.keys()
    if len(classes) > 1 and names[TRAIN] != names[TEST] and not partial:
        there, missing = (TRAIN, TEST) if names[TRAIN] - names[TEST] else (TEST, TRAIN)
        label = sorted(names[there] - names[missing])[0]
        raise UserError(
            f"{root} has class {label!r} in {there} but not in {missing}; both need the same "
            "class folders."
        )
    known = sorted(names[TRAIN])
    if not known:
        raise UserError(
            f"{root} has no class folders; put the images of each class into a folder of its name."
        )
    if len(known) == 1 and not partial:
        raise UserError(f"{root} has one class only, {known[0]!r}; there must be two or more.")


def _subfolders(folder: Path) -> dict[str, Path]:
    return {entry.name: Path(entry.path) for entry in _entries(folder) if _is_folder(entry)}


def _images(folder: Path) -> tuple[list[Path], list[Path]]:
    """Images at any depth, and the other files, sorted by path."""
    images: list[Path] = []
    others: list[Path] = []
    ancestors = {_identity(path) for path in (folder, *folder.absolute().parents)}
    for path in sorted(_walk(folder, ancestors), key=lambda path: path.as_posix()):
        (images if path.suffix.lower() in ENDINGS else others).append(path)
    return images, others


def _walk(folder: Path, ancestors: set[tuple[int, int]]) -> Iterator[Path]:
    for entry in _entries(folder):
        path = Path(entry.path)
        if not _is_folder(entry):
            yield path
            continue
        identity = _identity(path)
        if identity in ancestors:
            raise UserError(f"{path} is a link to a folder that it lies in; remove the link.")
        yield from _walk(path, ancestors | {identity})


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(HIDDEN)]
    except OSError as error:
        raise UserError(f"Cannot read the folder {folder}: {error.strerror}.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _empty(folder: Path, others: list[Path]) -> str:
    endings = Counter(path.suffix.lower() or "no ending" for path in others)
    there = ", ".join(f"{count} of {ending}" for ending, count in endings.most_common(3))
    return (
        f"The class folder {folder} has no images{f' (it has files: {there})' if there else ''}; "
        f"known endings are {' '.join(ENDINGS)}."
    )
