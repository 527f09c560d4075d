"""A file that is made once, and checked where it is found again.

The digest of a table is known beforehand. Features of a network differ in their last bits from
machine to machine, so their digest is written into a note beside them, `NAME.json`. A folder of
such files works on another machine without what they were made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from corefed.base import files
from corefed.base.errors import UserError


class PreparedFile(NamedTuple):
    name: str
    source: str  # what it is made of, for messages and notes
    make: Callable[[Path | None], bytes]  # its content; looks for data in that folder first
    sha256: str = ""  # of the content; empty: a note beside the file has it


def ensure(file: PreparedFile, folder: Path) -> bool:
    """Make the file, or check the one that is there; whether it was made."""
    if (folder / file.name).exists():
        _check(file, folder)
        return False
    content = file.make(folder if folder.is_dir() else None)
    found = hashlib.sha256(content).hexdigest()
    if file.sha256 and found != file.sha256:
        raise UserError(
            f"{file.source} on this machine is another version than that of the study: {file.name} "
            f"has SHA-256 {found}, expected {file.sha256}. Bring {folder / file.name} from a "
            "machine that has it."
        )
    contents = [(file.name, content)]
    if not file.sha256:  # first, so that a file is never without its note
        note = {"source": file.source, "sha256": found}
        contents.insert(0, (_note(file), json.dumps(note, indent=1).encode() + b"\n"))
    files.write_folder(folder, contents)
    return True


def _check(file: PreparedFile, folder: Path) -> None:
    path = folder / file.name
    expected = file.sha256 or _noted(file, folder)
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    if found != expected:
        raise UserError(
            f"{path} is damaged or another file: its SHA-256 is {found}, expected {expected}. "
            "Remove it, and it is made again."
        )


def _noted(file: PreparedFile, folder: Path) -> str:
    """The digest in the note, which must be about the same source."""
    path = folder / _note(file)
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        source, sha256 = note["source"], str(note["sha256"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}, which says what {file.name} was made of, is missing or damaged. Remove "
            f"{file.name}, and both are made again."
        ) from error
    if source != file.source:
        raise UserError(
            f"{folder / file.name} was made of {source}, not of {file.source}. Remove it, and it "
            "is made again."
        )
    return sha256


def _note(file: PreparedFile) -> str:
    return f"{file.name}.json"
