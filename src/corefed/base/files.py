"""Files that are always whole: the old one or the new one.

A file is written beside its target, flushed to the disk, and renamed to the target in one step.
Then the folder is flushed too, since a name is an entry of the folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from corefed.base.digests import Hashed, Stream
from corefed.base.errors import UserError

Content = bytes | Iterable[bytes | memoryview] | Stream
"""Of a file, whole or in parts that are written one after the other, with or without a digest."""

TEMPORARY = ".tmp"  # suffix of a file being written; left behind by kill -9, then overwritten


def replace(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Write one file. After an OSError the old file is unchanged."""
    replace_all(target.parent, [(target.name, content)], mode)


def replace_all(folder: Path, contents: Iterable[tuple[str, Content]], mode: int = 0o666) -> None:
    """Write files, given as pairs of name and content, which may come from a generator.

    All temporary files are on the disk before the first is renamed, so a full disk changes nothing.
    """
    temporary: dict[str, Path] = {}
    try:
        for name, content in contents:
            temporary[name] = folder / f".{name}{TEMPORARY}"
            handle = os.open(temporary[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                write(handle, content)
            finally:
                os.close(handle)
        for name, path in temporary.items():
            os.replace(path, folder / name)
    except BaseException:  # Ctrl-C as well
        for path in temporary.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    flush(folder)


def write(handle: int, content: Content, *, flush: bool = True) -> None:
    """Write all of `content`, then fsync, unless told not to `flush`."""
    if isinstance(content, Stream):
        hashed = Hashed(content.parts)
        for part in hashed:
            _write_part(handle, part)
        os.lseek(handle, content.at, os.SEEK_SET)
        _write_part(handle, hashed.hexdigest().encode())
    else:
        for part in [content] if isinstance(content, bytes) else content:
            _write_part(handle, part)
    if flush:
        os.fsync(handle)


def _write_part(handle: int, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(handle, view) :]


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_existing(folder: Path, hint: str, *, among: Collection[str] = ()) -> None:
    """Refuse a folder that is not empty, so that nothing is overwritten or mixed by mistake.

    With `among`, only these files count. `hint` says what to do.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; {hint}.")
    try:
        # Temporary files of an interrupted attempt will be overwritten.
        names = [name for name in os.listdir(folder) if not name.endswith(TEMPORARY)]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; {hint}.") from error
    found = [name for name in among if (folder / name).exists()] if among else sorted(names)
    if found:
        raise UserError(f"{folder} is not empty, it has {found[0]}; {hint}.")


def refuse_file(path: Path, *, force: bool) -> None:
    """Refuse to overwrite a file that a user named, unless by `force`."""
    if path.is_file() and not force:
        raise UserError(f"{path} exists already; name another file, or overwrite it by --force.")


def write_folder(folder: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """`replace_all` for a user's folder, which is created if it is missing."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_all(folder, contents)
    except OSError as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise UserError(
            f"Cannot write into {folder}: {error.strerror}. What was there before is as it was."
        ) from error
