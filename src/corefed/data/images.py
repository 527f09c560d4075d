"""Find and check the images in a folder.

    PATH/train/CLASS/*, PATH/test/CLASS/*    test images stay test images; val/ joins train/
    PATH/CLASS/*                             the partition holds a fifth out
    PATH/SITE/CLASS/*                        each site is a client, if the user says so

A class folder may have subfolders. Hidden files and folders are ignored. `image_sites.py` reads a
file that says whose image is which.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corefed.base.errors import UserError
from corefed.data import image_sites
from corefed.data.cells import shorten
from corefed.data.pictures import ENDINGS, ImageSet, Pictures, digest, read, require_pillow

HIDDEN = (".", "__MACOSX")  # macOS adds the second to archives
TRAIN, VALIDATION, TEST = "train", ("val", "valid", "validation"), "test"
PARTS = (TRAIN, *VALIDATION, TEST)

FOLDER = "folder"
"""What `--client` says where the first folders are sites."""


class ClassFolder(NamedTuple):
    part: str  # train, test, ...; empty: the images are not divided
    site: str  # empty: the folders name no sites
    label: str
    path: Path


class Found(NamedTuple):
    """An image by its place in the folder."""

    path: Path
    label: str
    site: str
    test: bool


def find(
    root: Path, *, partial: bool = False, clients: str = "", classes: Sequence[str] = ()
) -> ImageSet:
    """The images under `root`; every class must have some.

    `clients` is empty, FOLDER where the first folders are sites, or a file that names the site of
    each image. Named `classes` say that the first folders are classes.
    """
    require_pillow()
    if not root.is_dir():
        raise UserError(f"{root} is a file; image-folder needs a folder with one folder per class.")
    parts = _parts(root)
    if clients not in ("", FOLDER):
        found, notes = _listed(root, parts, clients)
    else:
        found, notes = _walk_classes(root, parts, partial, clients == FOLDER)
        if not clients and not classes:
            notes = [*notes, *_sites_for_classes(root, parts, partial)]
    labels = tuple(sorted({each.label for each in found}))
    sites = tuple(sorted({each.site for each in found} - {""}))
    counts = Counter(each.label for each in found)
    said = [f"Classes: {shorten([f'{label} ({counts[label]})' for label in labels], 20)}."]
    if sites:
        sizes = Counter(each.site for each in found)
        said += [f"Clients: {shorten([f'{site} ({sizes[site]})' for site in sites], 20)}."]
    return ImageSet(
        pictures(root, [each.path for each in found]),
        np.array([labels.index(each.label) for each in found]),
        np.array([each.test for each in found]) if len(parts) > 1 else None,
        labels,
        (*said, *notes),
        np.array([sites.index(each.site) for each in found]) if sites else None,
        sites,
    )


def _listed(root: Path, parts: dict[str, Path], file: str) -> tuple[list[Found], list[str]]:
    """The images that a table names; without classes there, they are in class folders."""
    listed = image_sites.read(root, file)
    labels = {each.path: each.label for each in listed}
    if not listed[0].label:
        known = {each.path: each.label for each in _walk_classes(root, parts, True, False)[0]}
        outside = next((path for path in labels if path not in known), None)
        if outside is not None:
            raise UserError(
                f"{file} names {outside.relative_to(root)}, which is no image in a class folder; "
                "move it there, or add a column 'class'."
            )
        labels = {path: known[path] for path in labels}
    if len(set(labels.values())) < 2:
        raise UserError(f"The images in {file} have one class only; there must be two or more.")
    test = parts.get(next((part for part in parts if part.lower() == TEST), ""))
    found = [
        Found(path, labels[path], site, test is not None and path.is_relative_to(test))
        for path, site, _ in listed
    ]
    left = len(set(_images(root)[0]) - labels.keys())
    return found, [f"{left} images in {root} are not in {file}; they are left out."] if left else []


def _walk_classes(
    root: Path, parts: dict[str, Path], partial: bool, by_site: bool
) -> tuple[list[Found], list[str]]:
    """The images of all class folders, and notes."""
    folders = list(_class_folders(parts, by_site))
    _check_classes(root, folders, list(parts), partial)
    found: list[Found] = []
    ignored: list[Path] = []
    for part, site, label, path in folders:
        images, others = _images(path)
        if not images and part.lower() not in VALIDATION:
            raise UserError(_empty(path, others))
        found += [Found(each, label, site, part.lower() == TEST) for each in images]
        ignored += others
    if not ignored:
        return found, []
    first = ignored[0].relative_to(root).as_posix()
    return found, [
        f"{len(ignored)} files in {root} are no images by their ending, such as {first}."
    ]


def _class_folders(parts: dict[str, Path], by_site: bool) -> Iterator[ClassFolder]:
    for part, folder in parts.items():
        sites = sorted(_subfolders(folder).items()) if by_site else [("", folder)]
        for site, inside in sites:
            below, plain = list_folder(inside)
            if by_site and (plain or not below):
                what = "images outside of class folders" if plain else "no class folders"
                raise UserError(
                    f"The site {inside} has {what}; put the images of each class into a folder of "
                    "its name."
                )
            yield from (ClassFolder(part, site, label, inside / label) for label in below)


def _sites_for_classes(root: Path, parts: dict[str, Path], partial: bool) -> list[str]:
    """Refuse first folders that look like sites, since the folders in them repeat.

    A client of a federation has no sites in its folder, so for a `partial` one it is a note.
    """
    tops = {path for folder in parts.values() for path in _subfolders(folder).values()}
    inside = {path: list_folder(path) for path in tops}
    repeated = Counter(name for below, _ in inside.values() for name in set(below))
    shared = sorted(name for name, times in repeated.items() if times > len(parts))
    if len(shared) < 2 or not all(below and not plain for below, plain in inside.values()):
        return []
    names = sorted({path.name for path in tops})
    looks = (
        f"{root} has folders {shorten(names, 5)} with the same folders {shorten(shared, 5)} in them"
    )
    if partial:
        return [f"{looks}; if the first are sites, give the folder of one site."]
    raise UserError(
        f"{looks}. If the first are sites and the second classes, add --client {FOLDER}; if the "
        f"first are classes, say so by --set classes={','.join(names[:5])}"
        f"{',...' if len(names) > 5 else ''}."
    )


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


def _check_classes(
    root: Path, folders: Sequence[ClassFolder], parts: Sequence[str], partial: bool
) -> None:
    """At least two classes, the same for training and test; a `partial` folder may have fewer."""
    names: dict[str, set[str]] = {TRAIN: set(), TEST: set()}
    for each in folders:
        names[TEST if each.part.lower() == TEST else TRAIN].add(each.label)
    if len(parts) > 1 and names[TRAIN] != names[TEST] and not partial:
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
